"""PGCL in PyGCL's own contrast models is PGCLLoss, and InfoNCE is what their masks say: PyGCL's own
where each anchor has one positive.
"""

import copy
import functools
import pickle
import sys
from unittest import mock

import GCL.losses as L
import pytest
import torch
from GCL.models import (
    BootstrapContrast,
    DualBranchContrast,
    SingleBranchContrast,
    WithinEmbedContrast,
)
from helpers import pyg_cases
from helpers.batches import ring
from helpers.marks import assert_error
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pygcl import InfoNCEContrastLoss, PGCLContrastLoss

pytestmark = pytest.mark.pygcl
on_intraview = pytest.mark.parametrize("intraview", [True, False])


def views_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 4, generator=generator, requires_grad=True).unbind()


def leaves(*values, dtype=torch.float32):
    return [value.detach().to(dtype, copy=True).requires_grad_() for value in values]


def model_of(loss, intraview=False, mode="G2G"):
    """A contrast model as a function of both views."""
    model = DualBranchContrast(loss, mode=mode, intraview_negs=intraview)
    return lambda z1, z2, **masks: model(g1=z1, g2=z2, h1=z1, h2=z2, **masks)


def sample_of(anchor, other, intraview):
    return torch.cat([other, anchor]) if intraview else other


def negatives_of(intraview):
    return "all" if intraview else "cross"


@pytest.mark.filterwarnings("ignore:PGCLLoss. .* different embeddings:UserWarning")
@given(
    mode=st.sampled_from(["G2G", "L2L"]),
    intraview=st.booleans(),
    count=st.integers(1, 9),
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(
        {
            "num_prototypes": st.sampled_from([3, (3, 2)]),
            "weighting": st.sampled_from(["prototype", "sample", "uniform"]),
            "queue_size": st.sampled_from([0, 7]),
            "memory_size": st.sampled_from([0, 7]),
            "freeze_steps": st.integers(0, 1),
        }
    ),
)
def test_pgcl_is_pgcl_loss(mode, intraview, count, seed, options):
    loss = PGCLContrastLoss(4, **options)
    expected = PGCLLoss(4, negatives=negatives_of(intraview), **options)
    expected.load_state_dict(loss.pgcl.state_dict())
    for step in range(2):
        results = []
        for side, value_of in ((loss.pgcl, model_of(loss, intraview, mode)), (expected, expected)):
            views = leaves(*views_of(count, seed + step))
            value = value_of(*views)
            side.zero_grad()
            value.backward()
            gradients = [view.grad for view in views]
            results.append([value, *gradients, side.prototypes.weight.grad, *side.buffers()])
        torch.testing.assert_close(*results)


def test_masks_of_more_pairs_than_a_float_counts():
    with torch.no_grad():
        assert model_of(PGCLContrastLoss(4, 3), intraview=True)(*views_of(2899)).isfinite()


@pytest.mark.filterwarnings("ignore:PGCLLoss. the embeddings hold NaN")
@on_intraview
@pytest.mark.parametrize("kind", ["a NaN", "no_grad", "inference_mode", "one gradient"])
def test_the_loss_is_computed_once_for_a_pair(kind, intraview):
    """With several processes a second one on some of them would wait for ever."""
    loss = PGCLContrastLoss(4, 3, queue_size=20)
    assert isinstance(loss, L.Loss)
    z1, z2 = leaves(*views_of(6))
    if kind == "a NaN":
        z1.data[0, 0] = torch.nan
    z2.requires_grad_(kind != "one gradient")
    calls = []
    for module in (loss, loss.pgcl):
        module.register_forward_hook(lambda module, *_: calls.append(module))
    with getattr(torch, kind, torch.enable_grad)():
        value = model_of(loss, intraview)(2 * z1, 2 * z2)
    assert calls == [loss.pgcl, loss, loss]
    assert value.isnan() == (kind == "a NaN")
    assert loss.pgcl.prototypes.queue.num_stored == (6 if kind == "one gradient" else 0)


def test_copies_between_both_calls_compute_the_second():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(6)
    expected = loss(z1, z2)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        value = twin(z2, z1)
        torch.testing.assert_close(value, expected)
        assert torch.autograd.grad(value, twin.pgcl.prototypes.weight)[0].any()
    with torch.no_grad():
        assert not loss(z2, z1).requires_grad


@torch.no_grad()
def add(tensor):
    tensor += torch.rand(tensor.shape)


def failing_call(loss, first, *views):
    with pytest.raises(ValueError, match="z1 has dimension 3 but"):
        loss(*[view[:, :3] for view in views])


CHANGES = {
    "prototypes": lambda loss, *_: add(loss.pgcl.prototypes.weight),
    "view": lambda loss, first, z1, z2: add(z1),
    "copied views": lambda loss, first, *views: leaves(*views),
    "temperature": lambda loss, *_: add(loss.pgcl.temperature),
    "option": lambda loss, *_: setattr(loss.pgcl, "consistency_weight", 0.5),
    "evaluation": lambda loss, *_: loss.eval(),
    "frozen": lambda loss, *_: loss.pgcl.requires_grad_(False),
    "next batch": lambda loss, *_: loss.pgcl(*views_of(6, seed=5)),
    "half a pair": lambda loss, *_: loss(*views_of(6, seed=5)),
    "failure": failing_call,
    "backward": lambda loss, first, *_: first.backward(),
}


@on_intraview
@pytest.mark.parametrize("change", CHANGES)
def test_the_second_call_is_computed_if_anything_changed(change, intraview):
    loss = PGCLContrastLoss(4, 3, queue_size=5, temperature=torch.nn.Parameter(torch.tensor(0.2)))
    z1, z2 = leaves(*views_of(6))
    first = loss(z1, sample_of(z1, z2, intraview))
    changed = CHANGES[change](loss, first, z1, z2)
    z1, z2 = changed if change == "copied views" else (z1, z2)
    fresh = copy.deepcopy(loss.pgcl)
    fresh.contrast.negatives = negatives_of(intraview)
    results = []
    for module, value in (
        (loss.pgcl, loss(z2, sample_of(z2, z1, intraview))),
        (fresh, fresh(z2, z1)),
    ):
        wanted = [z1, z2, module.temperature, module.prototypes.weight]
        wanted = [tensor for tensor in wanted if tensor.requires_grad]
        results.append([value, *torch.autograd.grad(value, wanted)])
    torch.testing.assert_close(*results)


def test_a_first_loss_that_is_changed_leaves_the_second_one():
    for loss in (PGCLContrastLoss(4, 3), InfoNCEContrastLoss()):
        z1, z2 = views_of(6)
        expected = copy.deepcopy(loss)(z2, z1)
        first = loss(z1, z2)
        first += 1
        torch.testing.assert_close(loss(z2, z1), expected)


def by_masks(temperature):
    """InfoNCE of one call, with each positive in a denominator of its own."""

    def loss(anchor, sample, pos_mask=None, neg_mask=None):
        pos_mask = torch.eye(len(anchor)) if pos_mask is None else pos_mask
        neg_mask = 1 - pos_mask if neg_mask is None else neg_mask
        scores = torch.cosine_similarity(anchor[:, None], sample, dim=-1) / temperature
        others = (scores.exp() * neg_mask).sum(1, keepdim=True)
        losses = ((scores.exp() + others).log() - scores) * pos_mask
        counts = pos_mask.sum(1)
        return (losses.sum(1) / counts.clamp(min=1))[counts > 0].mean()

    return loss


def call(contrast, loss, g, h, batch, intraview=False, **masks):
    """The value of a contrast model; embeddings of graphs ``[2, G, D]``, nodes ``[4, V, D]``."""
    (g1, g2), (h1, h2, h3, h4) = g, h
    if contrast == "SingleBranch":
        return SingleBranchContrast(loss, mode="G2L")(h=h1, g=g1, batch=batch)
    if contrast == "SingleBranch, one graph":
        return SingleBranchContrast(loss, mode="G2L")(h=h1, g=g1[:1], hn=h3)
    if contrast == "WithinEmbed":
        return WithinEmbedContrast(loss)(h1, h2)
    if contrast == "Bootstrap":
        return BootstrapContrast(loss)(h1_pred=h1, h2_pred=h2, h1_target=h3, h2_target=h4)
    model = DualBranchContrast(loss, mode=contrast, intraview_negs=intraview)
    return model(h1=h1, h2=h2, g1=g1, g2=g2, batch=batch, h3=h3, h4=h4, **masks)


@pytest.mark.parametrize(
    "contrast",
    ["G2G", "L2L", "G2L", "SingleBranch", "SingleBranch, one graph", "WithinEmbed", "Bootstrap"],
)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5) | st.just([1, 1, 1, 1]),
    intraview=st.booleans(),
    more_positives=st.booleans(),
    negatives=st.sampled_from([None, 0.6, 1.0]),  # which fraction an extra mask keeps
    temperature=st.sampled_from([0.02, 0.1, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_info_nce_is_what_the_masks_say(
    contrast, sizes, intraview, more_positives, negatives, temperature, seed
):
    torch.manual_seed(seed)
    sizes[-1] += sizes[-1] == 0  # PyGCL counts graphs by their nodes
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    batch = batch[torch.randperm(len(batch))]
    embeddings = torch.randn(2, len(sizes), 4), torch.randn(4, len(batch), 4)
    one_each = len(batch) > 1 and set(sizes) == {1}
    intraview = intraview and (one_each or contrast != "G2L")  # else PyGCL's masks do not fit
    count, masks = {"G2G": len(sizes), "L2L": len(batch)}.get(contrast), {}
    extra = torch.zeros(count or 0, (count or 0) * (1 + intraview))
    if more_positives and count:
        extra[:, :count] = torch.rand(count, count) < 0.2
        masks["extra_pos_mask"] = extra
    if negatives and count:  # without, PyGCL makes each anchor a negative of itself
        masks["extra_neg_mask"] = (torch.rand(extra.shape) < negatives) * (1 - extra)

    losses = [InfoNCEContrastLoss(temperature=temperature), by_masks(temperature)]
    if count and not more_positives:
        losses.append(L.InfoNCE(tau=temperature))
    results = []
    for loss in losses:
        g, h = leaves(*embeddings, dtype=torch.float64)
        value = call(contrast, loss, g, h, batch, intraview, **masks)
        results.append([value, *torch.autograd.grad(value, [g, h], materialize_grads=True)])
    for result in results[1:]:
        torch.testing.assert_close(results[0], result)


@pytest.mark.parametrize(("contrast", "intraview"), [("G2L", False), ("L2L", False), ("L2L", True)])
def test_several_positives_as_supcon_are_pygcls(contrast, intraview):
    torch.manual_seed(0)
    batch, g, h = torch.tensor([0, 0, 0, 1, 1, 2]), torch.randn(2, 3, 4), torch.randn(4, 6, 4)
    extra = torch.rand(6, 6 * (1 + intraview)) < 0.3
    extra[:, 6:] = False
    masks = {} if contrast == "G2L" else {"extra_pos_mask": extra.float()}
    results = []
    for loss in (InfoNCEContrastLoss(over_positives="supcon"), L.InfoNCE(tau=0.2)):
        inputs = leaves(g, h, dtype=torch.float64)
        value = call(contrast, loss, *inputs, batch, intraview, **masks)
        results.append([value, *torch.autograd.grad(value, inputs, materialize_grads=True)])
    torch.testing.assert_close(*results)


def loss_by_loops(anchor, sample, pos_mask, neg_mask, temperature, over_positives):
    """Compute the mean loss over the anchors from the formulas, one pair after the other."""
    losses = []
    for i, query in enumerate(anchor):
        x = [torch.cosine_similarity(query, key, dim=0) / temperature for key in sample]
        w = {p: pos_mask[i, p] for p in range(len(sample)) if pos_mask[i, p]}
        a = {p: w[p] / sum(w.values()) for p in w}
        S = sum(x[j].exp() for j in range(len(sample)) if neg_mask[i, j])
        E = sum(w[p] * x[p].exp() for p in w)
        if over_positives == "mean":
            losses.append(sum(a[p] * (1 + S / x[p].exp()).log() for p in w))
        elif over_positives == "supcon":
            losses.append((S + E).log() - sum(a[p] * x[p] for p in w))
        else:
            losses.append((1 + S / E).log())
    return sum(losses) / len(losses)


WEIGHTED = {
    "one positive each": lambda: torch.tensor([0.5, 1.0, 2.0, 4.0, 3.0]).diag(),
    "one weight for all": lambda: 4.0 * torch.eye(5),
    "learned weights of 1": lambda: torch.eye(5).requires_grad_(),
    "several positives": lambda: torch.eye(5) + 0.5 * torch.eye(5).roll(1, 0),
}


@on_intraview
@pytest.mark.parametrize("over_positives", ["mean", "supcon", "sum"])
@pytest.mark.parametrize("kind", WEIGHTED)
def test_positives_count_by_their_weights(kind, over_positives, intraview):
    """The masks come from the caller: PyGCL's contrast models turn extra masks into 0 and 1."""
    pos_mask, eye = WEIGHTED[kind](), torch.eye(5)
    neg_masks = [(pos_mask == 0).float()]
    if intraview:  # without and with the anchor itself among its negatives
        neg_masks = [torch.cat([neg_masks[0], more], 1) for more in (1 - eye, 0 * eye + 1)]
    loss = InfoNCEContrastLoss(temperature=0.5, over_positives=over_positives)
    formula = functools.partial(loss_by_loops, temperature=0.5, over_positives=over_positives)
    views = leaves(*views_of(5), dtype=torch.float64)
    inputs = [*views, pos_mask] if pos_mask.requires_grad else views
    pos_mask = torch.nn.functional.pad(pos_mask, (0, 5 * intraview))
    for anchor, other in (views, views[::-1]):  # both calls of a contrast model
        sample = sample_of(anchor, other, intraview)
        for neg_mask in neg_masks:
            results = []
            for function in (loss, formula):
                value = function(anchor, sample, pos_mask=pos_mask, neg_mask=neg_mask)
                results.append([value, *torch.autograd.grad(value, inputs, retain_graph=True)])
            torch.testing.assert_close(*results)
        # Without neg_mask, all embeddings but the anchor and its positives are negatives.
        expected = formula(anchor, sample, pos_mask, neg_masks[0])
        torch.testing.assert_close(loss(anchor, sample, pos_mask), expected)


@on_intraview
def test_info_nce_of_a_pair_is_computed_once_each_call_has_its_anchors(intraview):
    loss = InfoNCEContrastLoss(memory_size=20, dim=4)
    expected = InfoNCE(negatives=negatives_of(intraview), memory_size=20, dim=4, reduction="none")
    for seed in range(3):
        z1, z2 = views_of(6, seed)
        both = expected(z1, z2)
        values = loss(z1, sample_of(z1, z2, intraview)), loss(z2, sample_of(z2, z1, intraview))
        torch.testing.assert_close(values, (both[:6].mean(), both[6:].mean()))
    assert loss.info_nce.memory.num_stored == 36


@pytest.mark.parametrize(
    "options",
    [{"hardness": 0.5}, {"debias": 0.1}, {"decoupled": True}, {"similarity": "dot"}],
)
def test_own_negatives_are_further_negatives(options):
    z1, z2 = (view.double() for view in views_of(5))
    items = torch.arange(15).split([5, 10])
    loss = InfoNCE(negatives="cross", queries="first", **options)
    pairs = torch.stack([torch.arange(5), torch.arange(5, 10)])
    expected = [
        loss(one, torch.cat([other, one]), items=items, positives=pairs)
        for one, other in ((z1, z2), (z2, z1))
    ]
    value = model_of(InfoNCEContrastLoss(**options), intraview=True)(z1, z2)
    torch.testing.assert_close(value, sum(expected) / 2)


def compare_processes(rank, num_ranks, contrast, intraview):
    """The temperature is learned; in L2L there are extra positives, and a rank without nodes."""
    graphs = [2, 4, 3] if contrast == "G2L" else [3, 0, 4]
    counts = [2 * count for count in graphs]  # of nodes
    torch.manual_seed(0)
    g, h = torch.randn(2, sum(graphs), 4), torch.randn(4, sum(counts), 4)

    def step(gather, g, h, labels):
        inputs = leaves(torch.tensor(0.3), g, h, dtype=torch.float64)
        inputs[0] = torch.nn.Parameter(inputs[0].detach())
        loss = InfoNCEContrastLoss(gather=gather, temperature=inputs[0])
        masks = {}
        if contrast == "L2L":
            same = (labels[:, None] == labels).float()
            masks["extra_pos_mask"] = torch.cat([same, 0 * same], 1) if intraview else same
        batch = torch.arange(g.shape[1]).repeat_interleave(2)
        value = call(contrast, loss, *inputs[1:], batch, intraview, **masks)
        return value.detach(), torch.autograd.grad(value, inputs, materialize_grads=True)

    mine = g.split(graphs, 1)[rank], h.split(counts, 1)[rank]
    labels = torch.arange(sum(counts)) // 3  # no label is on two ranks
    wrong = torch.ones(counts[rank], (1 + intraview) * counts[rank] + (rank == 0))
    with pytest.raises(ValueError, match=r"pos_mask has shape|masks of another rank are wrong"):
        InfoNCEContrastLoss()(mine[1][0], sample_of(mine[1][0], mine[1][1], intraview), wrong)
    value, gradients = step(True, *mine, labels.split(counts)[rank])
    expected, expected_gradients = step(False, g, h, labels)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients[0], expected_gradients[0])
    for ours, whole, sizes in zip(
        gradients[1:], expected_gradients[1:], (graphs, counts), strict=True
    ):
        # DistributedDataParallel takes the mean of the gradients over processes.
        torch.testing.assert_close(ours / num_ranks, whole.split(sizes, 1)[rank])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contrast", "intraview"), [("G2G", False), ("G2L", False), ("L2L", False), ("L2L", True)]
)
def test_info_nce_of_many_processes_is_that_of_one(contrast, intraview):
    on_ranks(compare_processes, 3, contrast, intraview)


def in_g2l(loss, num_graphs=2):
    h, g = views_of(5)
    batch = torch.tensor([0, 0, 1, 1, 1])
    return SingleBranchContrast(loss, mode="G2L")(h=h, g=g[:num_graphs], batch=batch)


MISTAKES = [
    (ValueError, "pgcl_model(z1, z2, **pos)", "without extra_pos_mask", "25 positives in pos_mask"),
    (ValueError, "pgcl_model(z1, z2, **no_neg)", "extra_neg_mask", " and 0 negatives in neg_mask"),
    (ValueError, "pgcl(z1, z2, 2 * torch.eye(5))", "only positive of anchor i, with weight 1"),
    (ValueError, "in_g2l(pgcl)", "'G2G' or 'L2L'", "got 2 anchors, 5 samples"),
    # Negatives of a sampler of the user.
    (ValueError, "pgcl(z1, both)", "got 5 anchors, 10 samples, no positives in pos_mask"),
    (TypeError, "PGCLContrastLoss(4, negatives='all')", "negatives is up to the contrast model"),
    (ValueError, "nce_model(z1, z2, **masks)", "pos_mask and neg_mask must not have a pair in co"),
    (ValueError, "nce(z1[:2], z2)", "anchor has 2 embeddings and sample 5: without pos_mask"),
    (ValueError, "nce(z1, both)", "without pos_mask, sample must be the other view"),
    # The last graph has no node.
    (ValueError, "in_g2l(nce, num_graphs=3)", "pos_mask has shape (2, 5), but anchor has 3 embedd"),
    (ValueError, "in_g2l(remembering)", "memory_size is 8, but ", " 0 for mode 'G2L'", "items"),
    (TypeError, "nce_of(reduction='sum')", "reduction is up to the contrast model, but got 'sum'"),
    (TypeError, "nce_of(0.2)", "options by name, such as temperature=, but got 0.2"),
    (TypeError, "nce_of(tau=0.2)", "InfoNCEContrastLoss has no argument tau: ", "temperature"),
    (TypeError, "model_of(InfoNCE())(z1, z2)", "take the losses of pgcl_losses.adapters.pygcl"),
    *(
        (TypeError, f"in_pyg(L.{loss})", "needs the masks of its contrast models: give pgcl_losses")
        for loss in ("InfoNCE(0.2)", "JSD()", "TripletMargin()")
    ),
]


@pytest.mark.parametrize(("error", "call", "words"), [(*row[:2], row[2:]) for row in MISTAKES])
def test_mistakes(error, call, words):
    (z1, z2), ones = views_of(5), torch.ones(5, 5)
    nce_of, nce, pgcl = InfoNCEContrastLoss, InfoNCEContrastLoss(), PGCLContrastLoss(4, 3)
    masks = {"extra_pos_mask": torch.eye(5).roll(1, 0), "extra_neg_mask": ones}
    names = {"z1": z1, "z2": z2, "both": torch.cat([z2, z2]), "masks": masks}
    names |= {"pos": {"extra_pos_mask": ones}, "no_neg": {"extra_neg_mask": 0 * ones}}
    names |= {"nce": nce, "pgcl": pgcl, "nce_model": model_of(nce), "pgcl_model": model_of(pgcl)}

    def in_pyg(loss):
        keep, batch = torch.nn.Identity(), pyg_cases.batch_of([ring(5)] * 3)
        return pyg_cases.model_of(keep, keep, loss=loss)(batch)

    names |= {"nce_of": nce_of, "remembering": nce_of(memory_size=8, dim=4), "in_pyg": in_pyg}
    assert_error(error, call, words, globals() | names)


def test_the_module_imports_without_frameworks():
    gone = {"GCL": None, "GCL.losses": None, "torch_geometric": None}
    with mock.patch.dict(sys.modules, gone):
        sys.modules.pop("pgcl_losses.adapters.pygcl")
        from pgcl_losses.adapters.pygcl import PGCLContrastLoss as Again

        with pytest.raises(ImportError, match=r"torch-sparse; pip install PyGCL==0\.1\.2 dgl=="):
            Again(4)


def test_a_second_call_with_another_mask_of_negatives_is_no_second_of_a_pair():
    """The first call makes each anchor a negative of itself, the second does not."""
    z1, z2 = torch.randn(2, 5, 4, requires_grad=True)
    positives = torch.cat([torch.eye(5), torch.zeros(5, 5)], 1)
    with_self, without = 1 - positives, 1 - torch.eye(5).repeat(1, 2)
    loss, fresh = InfoNCEContrastLoss(), InfoNCEContrastLoss()
    loss(z1, torch.cat([z2, z1]), positives, with_self)
    second = z2, torch.cat([z1, z2]), positives, without
    torch.testing.assert_close(loss(*second), fresh(*second))
