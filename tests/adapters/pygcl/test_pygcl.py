"""PGCL in PyGCL's own contrast models is PGCLLoss, whatever the mode; its augmentors feed PyG's
adapter.
"""

import copy
import gc
import pickle
import sys
import weakref
from unittest import mock

import GCL.augmentors as A
import pytest
import torch
from GCL.losses import Loss
from GCL.models import DualBranchContrast, SingleBranchContrast
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters import pyg
from pgcl_losses.adapters.pygcl import AsTransform, PGCLContrastLoss
from pgcl_losses.contrast import WEIGHTINGS

OPTIONS = {
    "weighting": st.sampled_from(WEIGHTINGS),
    "exclude_same_cluster": st.booleans(),
    "queue_size": st.sampled_from([0, 7]),
    "num_prototypes": st.sampled_from([3, (3, 2)]),
    "negative_ranks": st.sampled_from([None, (0, 2), (1, 2)]),
    "soft_clusters": st.booleans(),
    "consistency_weight": st.sampled_from([0.0, 6.0]),
}
# Prototypes that learn from the first step on, that rest at first, or that learn alone.
BEGINNINGS = st.sampled_from([{}, {"freeze_steps": 1}, {"lead_steps": 1}])
ROWS = {"G2G": ("g1", "g2"), "L2L": ("h1", "h2")}


def views_of(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_rows, 4, generator=generator, requires_grad=True).unbind()


@given(
    mode=st.sampled_from(list(ROWS)),
    intraview=st.booleans(),
    num_rows=st.integers(1, 9),
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(OPTIONS),
    beginning=BEGINNINGS,
)
def test_it_is_pgcl(mode, intraview, num_rows, seed, options, beginning):
    options = options | beginning
    loss = PGCLContrastLoss(4, **options)
    expected = PGCLLoss(4, negatives="all" if intraview else "cross", **options)
    expected.load_state_dict(loss.pgcl.state_dict())
    model = DualBranchContrast(loss, mode=mode, intraview_negs=intraview)
    for step in range(2):
        results = []
        for side in (model, expected):
            z1, z2 = (z.detach().requires_grad_() for z in views_of(num_rows, seed + step))
            first, second = ROWS[mode]
            value = side(z1, z2) if side is expected else side(**{first: z1, second: z2})
            side.zero_grad()
            value.backward()
            (weight,) = side.parameters()
            results.append([value, z1.grad, z2.grad, weight.grad, *side.buffers()])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("intraview", [True, False])
def test_without_weights_and_consistency_it_is_info_nce(intraview):
    plain = {"weighting": "uniform", "exclude_same_cluster": False, "consistency_weight": 0.0}
    model = DualBranchContrast(PGCLContrastLoss(4, **plain), mode="L2L", intraview_negs=intraview)
    z1, z2 = views_of(7)
    expected = InfoNCE(negatives="all" if intraview else "cross")(z1, z2)
    torch.testing.assert_close(model(h1=z1, h2=z2), expected)


@pytest.mark.parametrize(("num_rows", "intraview"), [(2899, True), (6003, False)])
def test_masks_of_more_pairs_than_a_float_counts(num_rows, intraview):
    model = DualBranchContrast(PGCLContrastLoss(4, 3), mode="L2L", intraview_negs=intraview)
    with torch.no_grad():
        assert model(h1=views_of(num_rows)[0], h2=views_of(num_rows)[1]).isfinite()


@pytest.mark.parametrize("intraview", [True, False])
def test_the_loss_is_computed_once_for_a_pair_even_of_nan(intraview):
    """With several processes a second one on some of them would wait for ever."""
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G", intraview_negs=intraview)
    z1, z2 = (z.detach().clone() for z in views_of(6))
    z1[0, 0] = torch.nan
    with mock.patch.object(loss.pgcl, "forward", wraps=loss.pgcl.forward) as computed:
        assert model(g1=z1, g2=z2).isnan()
    assert computed.call_count == 1


def test_it_is_a_loss_and_a_module():
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G")
    assert isinstance(loss, Loss)
    assert list(model.parameters()) == [loss.pgcl.prototypes.weight]
    seen = []
    loss.register_forward_hook(lambda *_: seen.append(1))
    model(g1=views_of(5)[0], g2=views_of(5)[1])
    assert len(seen) == 2


def test_the_recommended_setting_is_that_of_pgcl():
    options = {"batch_size": 30, "steps": 8, "temperature": 0.4, "queue_size": 5}
    loss = PGCLContrastLoss.recommended(4, **options)
    expected = PGCLLoss.recommended(4, **options)
    assert repr(loss.pgcl) == repr(expected)
    assert loss.pgcl.prototypes.temperature == 0.2
    with pytest.raises(TypeError, match="reduction is up to the contrast model"):
        PGCLContrastLoss.recommended(4, batch_size=30, steps=8, reduction="sum")


def test_half_a_pair_of_calls_changes_nothing_later():
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G")
    z1, z2 = views_of(6)
    expected = model(g1=z1, g2=z2)
    other = loss(*views_of(6, seed=1))
    torch.testing.assert_close(model(g1=z1, g2=z2), expected)
    alive = loss(z1, z2)
    with torch.no_grad():
        evaluated = model(g1=z2, g2=z1)
    assert not evaluated.requires_grad
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        alive = loss(z1, z2)
        twin = copied(model)
        value = twin.loss(z2, z1)
        torch.testing.assert_close(value, expected)
        assert torch.autograd.grad(value, twin.loss.pgcl.prototypes.weight)[0].any()
    assert alive.isfinite()
    assert other.isfinite()


def shifted_prototypes(loss, *views):
    with torch.no_grad():
        loss.pgcl.prototypes.weight += torch.randn(3, 4)


def shifted_data_of_prototypes(loss, *views):
    loss.pgcl.prototypes.weight.data += torch.randn(3, 4)


def shifted_rows(loss, z1, z2):
    z1.data[0] += 1


def other_option(loss, *views):
    loss.pgcl.temperature = 0.5


def evaluation(loss, *views):
    loss.eval()


def frozen(loss, *views):
    loss.pgcl.requires_grad_(False)


def next_batch(loss, *views):
    loss.pgcl(*views_of(6, seed=5))


def failure(loss, z1, z2):
    loss.pgcl.temperature = 0.5
    with pytest.raises(ValueError, match="z1 has width 3 but"):
        loss(z1[:, :3], z2[:, :3])


CHANGES = [
    shifted_prototypes,
    shifted_data_of_prototypes,
    shifted_rows,
    other_option,
    evaluation,
    frozen,
    next_batch,
    failure,
]


@pytest.mark.parametrize("intraview", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_the_second_call_is_computed_if_anything_changed(change, intraview):
    loss = PGCLContrastLoss(4, 3, queue_size=5)
    z1, z2 = views_of(6)
    one, two = (
        (torch.cat([other, z]) if intraview else other for z, other in ((z1, z2), (z2, z1)))
        if change is not shifted_rows
        else (z2, z1)
    )
    first = loss(z1, one)
    change(loss, z1, z2)
    fresh = copy.deepcopy(loss.pgcl)
    fresh.negatives = "all" if len(two) > len(z2) else "cross"
    second, expected = loss(z2, two), fresh(z2, z1)
    torch.testing.assert_close(second, expected)
    assert second is not first
    ours, theirs = (
        torch.autograd.grad(value, [z1, z2, *weights], retain_graph=True)
        for value, weights in (
            (second, [w for w in loss.parameters() if w.requires_grad]),
            (expected, [w for w in fresh.parameters() if w.requires_grad]),
        )
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("intraview", [True, False])
def test_the_second_call_of_copied_views_has_their_gradient(intraview):
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(6)
    first = loss(z1, torch.cat([z2, z1]) if intraview else z2)
    z1, z2 = views_of(6)
    second = loss(z2, torch.cat([z1, z2]) if intraview else z1)
    torch.testing.assert_close(first, second)
    assert all(gradient.any() for gradient in torch.autograd.grad(second, [z1, z2]))


def test_a_loss_that_is_used_up_or_changed_is_not_returned_again():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = (z.detach().requires_grad_() for z in views_of(6))
    first = loss(z1, z2)
    expected = first.detach().clone()
    first.backward()
    loss(z2, z1).backward()
    torch.testing.assert_close(z1.grad, 2 * torch.autograd.grad(loss(z1, z2), z1)[0])
    total = loss(z1, z2)
    total += 1
    torch.testing.assert_close(loss(z2, z1), expected)


def test_between_steps_it_keeps_no_graph():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(6)
    z1 = 2 * z1
    in_the_graph = set()
    kept = weakref.ref(in_the_graph)
    z1.grad_fn.register_hook(in_the_graph.add)
    del in_the_graph
    value = loss(z1, z2)
    del z1
    assert kept() is not None
    del value
    gc.collect()
    assert kept() is None


def test_an_own_extra_mask_may_say_what_the_sampler_meant():
    model = DualBranchContrast(PGCLContrastLoss(4, 3), mode="L2L", intraview_negs=True)
    z1, z2 = views_of(5)
    meant = 1 - torch.eye(5).repeat(1, 2)
    torch.testing.assert_close(model(h1=z1, h2=z2, extra_neg_mask=meant), model(h1=z1, h2=z2))


def test_errors():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(5)
    model = DualBranchContrast(loss, mode="L2L")
    with pytest.raises(ValueError, match=r"pos_mask must pair row i.*extra_pos_mask"):
        model(h1=z1, h2=z2, extra_pos_mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match=r"neg_mask must be that of the sampler.*extra_neg_mask"):
        model(h1=z1, h2=z2, extra_neg_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match=r"anchor has 2 rows and sample 5.*'G2G' or 'L2L'"):
        SingleBranchContrast(loss, mode="G2L")(h=z1, g=z2[:2], batch=torch.tensor([0, 0, 1, 1, 1]))
    with pytest.raises(TypeError, match="negatives is up to the contrast model"):
        PGCLContrastLoss(4, negatives="all")


def train(parameters_of, steps, accumulate=1, looks=0, freeze_steps=0, **options):
    torch.manual_seed(0)
    encoder = torch.nn.Linear(4, 4)
    model = DualBranchContrast(PGCLContrastLoss(4, 3, freeze_steps=freeze_steps), mode="G2G")
    optimizer = torch.optim.Adam(parameters_of(encoder, model), **options)
    for step in range(steps):
        z1, z2 = views_of(6, seed=step)
        model(g1=encoder(z1), g2=encoder(z2)).backward()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        if looks and step % looks == 0:
            with torch.no_grad():
                model(g1=z1, g2=z2)
                model.eval()(g1=z1, g2=z2)
            model.train()


def encoder_alone(encoder, model):
    return encoder.parameters()


def test_a_warning_points_to_the_users_line():
    model = DualBranchContrast(PGCLContrastLoss(4, 10), mode="G2G")
    g1, g2 = views_of(6)
    model(g1=g1, g2=g2)
    model(g1=g1, g2=g2)
    with pytest.warns(UserWarning, match="are balanced over 10") as caught:
        model(g1=g1, g2=g2)
    assert caught[0].filename == __file__


def both(encoder, model):
    return [*encoder.parameters(), *model.parameters()]


@pytest.mark.parametrize("given", [{}, {"looks": 7}, {"fused": True}])
def test_prototypes_that_no_optimizer_has_are_warned_of_once(given):
    with pytest.warns(UserWarning, match="prototypes have not moved in 16") as caught:
        train(encoder_alone, 120, **given)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "given", [{}, {"looks": 3}, {"fused": True}, {"accumulate": 16}, {"freeze_steps": 70}]
)
def test_no_warning_of_prototypes_that_move(given):
    train(both, 130, **given)


AUGMENTORS = {
    "Identity": A.Identity(),
    "NodeDropping": A.NodeDropping(pn=0.4),
    "EdgeRemoving": A.EdgeRemoving(pe=0.4),
    "RWSampling": A.RWSampling(num_seeds=10, walk_length=3),
    "PPRDiffusion": A.PPRDiffusion(use_cache=False),
    "MarkovDiffusion": A.MarkovDiffusion(use_cache=False),
    "FeatureMasking": A.FeatureMasking(pf=0.4),
    "FeatureDropout": A.FeatureDropout(pf=0.4),
    "Compose": A.Compose([A.EdgeRemoving(pe=0.2), A.FeatureMasking(pf=0.2)]),
    "RandomChoice": A.RandomChoice([A.NodeDropping(pn=0.2), A.Identity()], num_choices=1),
}


def graphs_with(edge_attributes=(), sizes=(5, 1, 8, 6, 3)):
    graphs = []
    for i, size in enumerate(sizes):
        edge_index = torch.stack([torch.arange(size), torch.arange(size).roll(-1)])
        edge_index = to_undirected(edge_index[:, : size - 1])
        weight = 100.0 * i + edge_index.sum(0)
        data = Data(x=torch.full((size, 4), i + 1.0), edge_index=edge_index, y=torch.tensor([i]))
        data.update(dict.fromkeys(edge_attributes, weight))
        graphs.append(data)
    return graphs


# PyGCL calls what is deprecated of PyG.
old_names = pytest.mark.filterwarnings("ignore:'dropout_adj' is deprecated")


@old_names
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("edge_attributes", [(), ("edge_weight",), ("bond_order",)])
@pytest.mark.parametrize("name", AUGMENTORS)
def test_augmentors_keep_row_i_graph_i(name, edge_attributes):
    graphs = graphs_with(edge_attributes)
    batch = Batch.from_data_list(graphs)
    before = copy.deepcopy(batch)
    torch.manual_seed(5)
    view = AsTransform(AUGMENTORS[name])(batch)
    assert torch.equal(view.batch, before.batch)
    assert torch.equal(view.ptr, before.ptr)
    assert torch.equal(view.y, before.y)
    for key, value in before:
        assert torch.equal(batch[key], value)

    # The same edges as the augmentor makes by itself, and what they carry.
    torch.manual_seed(5)
    weight = before.get(edge_attributes[0]) if edge_attributes else None
    x, edge_index, weight = AUGMENTORS[name](before.x, before.edge_index, weight)
    assert torch.equal(view.x, x)
    carried = view.get((*edge_attributes, "edge_weight")[0])
    assert (carried is None) == (weight is None)
    rows, expected = (
        sorted(map(tuple, torch.cat([ends, w[None]]).T.tolist()))
        for ends, w in (
            (view.edge_index, torch.zeros(view.num_edges) if carried is None else carried),
            (edge_index, torch.zeros(edge_index.shape[1]) if weight is None else weight),
        )
    )
    assert rows == expected

    apart = view.to_data_list()
    assert [data.num_nodes for data in apart] == [data.num_nodes for data in graphs]
    again = Batch.from_data_list(apart)
    assert torch.equal(again.edge_index, view.edge_index)
    for data in pyg.NodeDrop(0.5)(view).to_data_list():
        own = (data.x == data.y + 1) | (data.x == 0)  # of no other graph
        assert own.all() or name == "FeatureDropout"
        assert data.edge_index.numel() == 0 or data.edge_index.max() < data.num_nodes


def test_edges_are_grouped_by_graph_again():
    batch = Batch.from_data_list(graphs_with(["edge_weight"]))

    def shuffled(x, edge_index, edge_weight):
        order = torch.randperm(edge_index.shape[1])[3:]
        return x, edge_index[:, order], edge_weight[order]

    view = AsTransform(shuffled)(batch)
    assert view.num_edges == batch.num_edges - 3
    for i, data in enumerate(view.to_data_list()):
        assert torch.equal(data.edge_weight, 100.0 * i + data.edge_index.sum(0))


@old_names
def test_augmentors_take_one_plain_data_too():
    (data,) = graphs_with(["edge_weight"], sizes=[9])
    view = AsTransform(A.EdgeRemoving(pe=0.5))(data)
    assert type(view) is Data
    assert len(view.edge_weight) == view.num_edges < data.num_edges


@old_names
def test_augmentors_feed_the_model_of_pyg():
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GINConv(torch.nn.Linear(4, 8))

        def forward(self, x, edge_index, batch, num_graphs):
            return global_add_pool(self.conv(x, edge_index), batch, num_graphs)

    augment = pyg.RandomChoice([AsTransform(AUGMENTORS["Compose"]), pyg.NodeDrop(0.2)])
    model = pyg.ContrastiveModel(
        Encoder(), AsTransform(A.NodeDropping(pn=0.2)), augment, PGCLLoss(8, 3)
    )
    for _ in range(4):
        model(Batch.from_data_list(graphs_with(["edge_weight"]))).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert repr(augment) == "RandomChoice([AsTransform(Compose), NodeDrop(p=0.2)])"


@old_names
def test_augmentors_that_do_not_fit():
    batch = Batch.from_data_list(graphs_with(["edge_weight"]))
    for augmentor, message in [
        (lambda x, e, w: (x[1:], e, w), "augmentor made 22 nodes of 23: it must keep them all"),
        (lambda x, e, w: (x, e.new_tensor([[0], [7]]), w[:1]), "joined graphs .* EdgePerturb"),
        (lambda x, e, w: (x, e[:, 1:], w), r"made 35 edges but 36 values of edge_weight"),
        (lambda x, e, w: (x, e[:, 1:], None), "takes nothing along, but they have edge_weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            AsTransform(augmentor)(batch)
    batch = Batch.from_data_list(graphs_with(["edge_weight", "edge_kind"]))
    with pytest.raises(ValueError, match=r"takes edge_weight along, but they have edge_weight, ed"):
        AsTransform(A.EdgeRemoving(pe=0.5))(batch)
    assert torch.equal(AsTransform(A.FeatureMasking(pf=1.0))(batch).edge_kind, batch.edge_kind)
    for augmentor in (A.PPRDiffusion(), A.Compose([A.Identity(), A.MarkovDiffusion()])):
        with pytest.raises(ValueError, match=r"first batch for every other one.*use_cache=False"):
            AsTransform(augmentor)
    with pytest.raises(TypeError, match="must be an augmentor of PyGCL, but got 'drop'"):
        AsTransform("drop")
    with pytest.raises(TypeError, match=r"got None; for no augmentation .* torch.nn.Identity\(\)"):
        AsTransform(None)
    with pytest.raises(TypeError, match="data must be a Batch or Data, but got list"):
        AsTransform(A.Identity())([])


def test_the_module_imports_without_frameworks():
    gone = {"GCL": None, "GCL.losses": None, "torch_geometric": None}
    with mock.patch.dict(sys.modules, gone):
        sys.modules.pop("pgcl_losses.adapters.pygcl")
        from pgcl_losses.adapters.pygcl import PGCLContrastLoss as Again

        with pytest.raises(ImportError, match=r"torch-sparse; pip install PyGCL==0\.1\.2 dgl=="):
            Again(4)
