"""PyGCL's augmentors feed PyG's adapter."""

import copy

import GCL.augmentors as A
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters import pyg
from pgcl_losses.adapters.pygcl import AsTransform

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
