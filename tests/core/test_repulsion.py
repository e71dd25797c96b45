"""`repulsion`: the pushes of negatives are those of literal loops, added up by groups."""

import copy
import math
import re

import pytest
import torch
from helpers import oracle
from helpers.cases import any_pairs, for_oracle, in_chunks
from helpers.losses import DIM, LOSSES, model_of, of_seed, portions_of
from helpers.marks import assert_error, examples, few_graphs
from helpers.ranks import on_ranks
from hypothesis import assume, given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE, repulsion
from pgcl_losses.pairs.forms import Form
from pgcl_losses.pairs.rows import Inputs
from pgcl_losses.repulsion import _measure

pytestmark = few_graphs
close = {"rtol": 1e-7, "atol": 1e-9}


def literal(problem, tau, **changed):
    """The push of each negative ``[Q, M + B]``, and the pairs of queries and negatives."""
    given = for_oracle(problem, problem.z, problem.positive_weights) | changed
    num_keys = given["weights"].shape[1]
    shift = torch.zeros(len(problem.z), num_keys, dtype=torch.float64, requires_grad=True)
    negatives = []
    losses, _ = oracle.info_nce(**given, temperature=tau, shift=shift, seen=negatives)
    (push,) = torch.autograd.grad(losses.sum() + 0 * shift.sum(), shift)
    return push, negatives


def shares(push, negatives, classes):
    """Loops over negatives: how many have the query's class, and their share of the push."""
    total = within = unknown = pulled = 0.0
    for i, j in dict.fromkeys(negatives):
        total += float(push[i, j])
        pulled -= min(0.0, float(push[i, j]))
        if classes[i] < 0 or classes[j] < 0:
            unknown += float(push[i, j])
        elif classes[i] == classes[j]:
            within += float(push[i, j])
    same = [classes[i] == classes[j] >= 0 for i, j in negatives]
    counted = sum(same) / len(same) if same else math.nan
    # Rounding must decide neither about a push near 0 nor about one that nearly cancels out.
    net = total / (total + 2 * pulled) if total + 2 * pulled > 0 else 0.0
    assume(net == 0 or (total + 2 * pulled > 1e-9 and not 1e-7 < net < 1e-3))
    if not net > 1e-5:
        return counted, math.nan, math.nan
    return counted, within / total, unknown / total


def agree(ours, expected):
    torch.testing.assert_close(
        torch.tensor(ours).double(), torch.tensor(expected).double(), **close, equal_nan=True
    )


@examples(150)
@given(
    problem=any_pairs(),
    tau=st.sampled_from([0.05, 0.2, 1.0]),
    form=st.sampled_from(
        [
            {"over_positives": "mean"},
            {"over_positives": "mean", "decoupled": True},
            {"over_positives": "supcon"},
            {"over_positives": "sum"},
            {"over_positives": "mean", "debias": 0.1},
        ]
    ),
    chunk=st.sampled_from([1 << 19, 20]),
    seed=st.integers(0, 10**6),
)
def test_shares_are_those_of_literal_loops(problem, tau, form, chunk, seed):
    pairs = problem.pairs
    is_unit = problem.z.norm(dim=1).max() < 1.1
    if pairs.cluster_weights or pairs.cosine_weights or pairs.score_mod or not is_unit:
        form = {**form, "debias": 0.0}
    num_past = 0 if pairs.memory is None else len(pairs.memory)
    classes = torch.randint(-1, 3, (len(problem.z) + num_past,), generator=of_seed(seed))
    classes[0], classes[len(problem.z) :] = 0, -1
    keys = classes
    if pairs.filled is not None:
        keys = classes[pairs.filled]
    with in_chunks(chunk), torch.no_grad():
        inputs = Inputs(problem.z, tau, problem.positive_weights)
        found = _measure(InfoNCE(), pairs._replace(form=Form(**form)), inputs, classes, 5, is_unit)

    push, negatives = literal(problem, tau, **form)
    agree([found.of_negatives, found.within, found.unknown], shares(push, negatives, keys))
    for other, share in found.by_temperature.items():
        agree(share, shares(*literal(problem, other, **form), keys)[1])
    left = {"weights": torch.ones_like(push), "score_mod": None, "hardness": 0.0, "debias": 0.0}
    of_plain, all_negatives = literal(problem, tau, **{**form, **left})
    agree(found.plain_within, shares(of_plain, all_negatives, keys)[1])
    for share, is_within in ((found.left_out_within, True), (found.left_out_between, False)):
        group = [
            (i, j)
            for i, j in dict.fromkeys(all_negatives)
            if keys[i] >= 0 and keys[j] >= 0 and (keys[i] == keys[j]) == is_within
        ]
        whole = sum(float(of_plain[pair]) for pair in group)
        out = sum(float(of_plain[pair]) for pair in {*group} - {*negatives})
        if not group:
            assert math.isnan(share)
        elif whole > 1e-9:
            agree(share, out / whole)
    if pairs.negative_pairs is None and pairs.memory is None:
        hardest = sorted((float(push[pair]) for pair in negatives), reverse=True)[:5]
        ours = [float(push[tuple(pair)]) for pair in found.hardest.tolist()]
        agree([x for x in ours if x > 1e-9], [x for x in hardest if x > 1e-9])


def clusters_and_views(num=40):
    classes = torch.arange(num) % 4
    centres = torch.randn(4, DIM, dtype=torch.float64)[classes]
    return classes, [centres + 0.5 * torch.randn(num, DIM, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("make", [InfoNCE, lambda: PGCLLoss(DIM, 3, queue_size=5, memory_size=7)])
@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(make, training):
    """No state, no random number, no gradient; also within no_grad and inference_mode."""
    classes, views = clusters_and_views()
    loss = make().double().train(training)
    loss(*views)
    before, random = copy.deepcopy(loss.state_dict()), torch.get_rng_state()
    views = [view.requires_grad_() for view in views]
    found = repulsion(loss, *views, classes=classes)
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for x in found)
    with torch.no_grad():
        agree(repulsion(loss, *views, classes=classes).within, found.within)
    torch.testing.assert_close(loss.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(view.grad is None for view in views)
    assert all(x.grad is None for x in loss.parameters())


def test_classes_do_not_reach_the_loss():
    classes, views = clusters_and_views()
    loss = InfoNCE(temperature=0.2)
    of_labels = {"labels": torch.arange(40) // 2}
    with_labels = repulsion(loss, *views, classes=classes, **of_labels)
    both = repulsion(loss, *views, classes=(classes, classes), **of_labels)
    assert str(both) == str(with_labels)
    unknown = repulsion(loss, *views, **of_labels)
    assert math.isnan(unknown.within)
    torch.testing.assert_close(unknown.hardest, with_labels.hardest)
    torch.testing.assert_close(unknown.by_cosine, with_labels.by_cosine)
    torch.testing.assert_close(with_labels.by_cosine.sum(), torch.ones(()).double())
    cosines = torch.nn.functional.normalize(torch.cat(views))
    query, key = with_labels.hardest.T
    torch.testing.assert_close((cosines[query] * cosines[key]).sum(1), with_labels.scores)


def test_a_mask_of_all_false_negatives_leaves_no_push_within_classes():
    classes, views = clusters_and_views()

    def of_other_classes(scores, pair):
        return scores.masked_fill(pair.query == pair.key, -torch.inf)

    loss = InfoNCE(temperature=0.2, score_mod=of_other_classes)
    found = repulsion(loss, *views, classes=classes, metadata=classes)
    assert (found.of_negatives, found.within) == (0, 0)
    assert (found.left_out_within, found.left_out_between) == (1, 0)
    plain = repulsion(InfoNCE(temperature=0.2), *views, classes=classes)
    assert found.plain_within == pytest.approx(plain.within)
    assert "the loss leaves out\n100% within classes and 0% between classes." in str(found)
    assert found.numbers()["within at 0.5"] == 0


@pytest.mark.parametrize("make", [InfoNCE, lambda: InfoNCE(dim=DIM, memory_size=7)])
@pytest.mark.parametrize("known", [1.0, 0.5])
def test_between_classes_nothing_is_left_out_where_nothing_lies(make, known):
    """One class, and others of which nothing is known, in float32, which rounds."""
    loss, (_, views) = make(), clusters_and_views()
    views = [view.float() for view in views]
    loss(*views)
    classes = torch.zeros(40, dtype=torch.long).where(torch.arange(40) < 40 * known, -1)
    found = repulsion(loss, *views, classes=classes)
    assert math.isnan(found.left_out_between)
    assert found.left_out_within == 0
    assert "in 1 class\n" in str(found)

    masked = InfoNCE(score_mod=lambda s, pair: s.masked_fill(pair.query == pair.key, -torch.inf))
    text = str(repulsion(masked, *views, classes=classes, metadata=torch.arange(40) % 2))
    assert re.search(r"the loss leaves out\n\d+% within classes\.\n", text)


def test_without_classes_the_text_names_none():
    assert "in 0 classes" not in str(repulsion(InfoNCE(), *clusters_and_views()[1]))


def test_without_a_net_push_a_share_is_nan():
    classes, views = clusters_and_views()

    def centred(scores, pair):
        mean = (scores * pair.is_negative).sum(1, keepdim=True) / pair.is_negative.sum(1, True)
        return scores - mean

    found = repulsion(InfoNCE(score_mod=centred), *views, classes=classes)
    assert math.isnan(found.within)
    assert found.pulled == pytest.approx(1)
    assert "no net push" in str(found)
    hard = repulsion(InfoNCE(hardness=3.0, temperature=0.2), *views, classes=classes)
    assert 0 < hard.pulled < 1
    assert "are pulled" in str(hard)
    alone = repulsion(InfoNCE(), *(view[:1] for view in views), classes=classes[:1])
    assert math.isnan(alone.within)


WITH_NEGATIVES = [x for x in LOSSES if not x.startswith("modules") and x != "consistency alone"]


@pytest.mark.parametrize("name", WITH_NEGATIVES)
def test_every_loss(name):
    """With whatever it is called with; past embeddings are of no known class."""
    make, inputs = LOSSES[name]
    model = model_of(make)
    batch = portions_of([[9], [6 if "sets" in inputs else 9]], inputs)[0]
    sets = [model.encoder(x) for x in batch.sets]
    if getattr(model.loss, "memory", None) is not None:
        model.loss(*sets, **batch.given)
    classes = [torch.arange(len(x)) % 3 for x in sets]
    found = repulsion(model.loss, *sets, classes=classes, **batch.given)
    assert 0 <= found.of_negatives <= 1
    assert (found.unknown > 1e-3) == (getattr(model.loss, "memory", None) is not None)
    assert len(found.hardest) == len(found.scores) > 0


def test_a_contrast_by_itself():
    classes, views = clusters_and_views()
    contrast, prototypes = PrototypeReweightedNCE(), torch.randn(4, DIM, dtype=torch.float64)
    given = {"clusters": (classes, classes), "prototypes": prototypes}
    found = repulsion(contrast, *views, classes=classes, **given)
    assert (found.of_negatives, found.left_out_within, found.left_out_between) == (0, 1, 0)


Z = torch.randn(6, DIM)
ERRORS = [
    (TypeError, lambda: repulsion(torch.nn.Linear(2, 2), Z, Z), "loss must be", "Linear"),
    (TypeError, lambda: repulsion(InfoNCE(), Z, Z, label=Z), "no argument label", "labels"),
    (ValueError, lambda: repulsion(PGCLLoss(DIM, 3, contrast_weight=0), Z, Z), "contrast_weight"),
    (ValueError, lambda: repulsion(InfoNCE(), Z, Z, classes=torch.arange(5)), "classes", "5"),
    (TypeError, lambda: repulsion(InfoNCE(), Z, Z, classes=Z), "classes", "int64"),
    (ValueError, lambda: repulsion(InfoNCE(), Z, Z[:5]), "z2", "(5, 4)"),
]


@pytest.mark.parametrize(("error", "call", "words"), [(e, c, w) for e, c, *w in ERRORS])
def test_mistakes(error, call, words):
    assert_error(error, call, words)


def on_one_rank(rank, num_ranks):
    """The other rank calls nothing, so an exchange would wait for it."""
    classes, views = clusters_and_views()
    if rank == 0:
        pgcl = PGCLLoss(DIM, 3).double()
        assert repulsion(pgcl, *views, classes=classes).num_embeddings == 80
        assert repulsion(InfoNCE(), *views, classes=classes).within > 0


def test_one_of_several_processes_may_look_alone():
    on_ranks(on_one_rank, 2)
