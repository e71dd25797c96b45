"""Augmentations of PyTorch Geometric batches, and a module that computes the loss of a batch.

An augmentation returns a view of the whole batch and leaves the batch itself unchanged. Graph i of
the view is always made from graph i of the batch, because a graph that has nodes keeps at least one
of them. Attributes stay with their nodes and edges. PyG tells by the length of an attribute whether
it belongs to nodes or edges. Where the length fits several, the name decides: an attribute of edges
has "edge" in its name.

Examples:
    >>> import torch
    >>> from torch_geometric.data import Batch, Data
    >>> from pgcl_losses.adapters.pyg import NodeDrop
    >>> path = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    >>> batch = Batch.from_data_list([path, path])
    >>> batch.node_id = torch.arange(batch.num_nodes)  # a view then says which nodes it has kept
    >>> view = NodeDrop(p=0.9)(batch)
    >>> view.num_graphs, bool(torch.equal(batch.x[view.node_id], view.x))
    (2, True)

"""

from typing import Any

import torch
from torch import Tensor

try:
    from torch_geometric.transforms import BaseTransform
    from torch_geometric.utils import cumsum
except ImportError as error:
    raise ImportError(
        f"pgcl_losses.adapters.pyg needs torch_geometric ({error}): "
        "pip install torch-geometric, or in a checkout of pgcl-losses: pip install '.[pyg]'"
    ) from error

from . import _augmentations
from ._model import ContrastiveModel

__all__ = [
    "AttributeMask",
    "ContrastiveModel",
    "EdgePerturb",
    "NodeDrop",
    "RandomChoice",
    "Subgraph",
]


class _Transform(_augmentations.Augmentation, BaseTransform):
    # One plain Data counts as a batch of one graph. BaseTransform calls `forward` with a shallow
    # copy of the data, which may therefore be changed.

    def structure(self, data: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if getattr(data, "edge_index", None) is None:
            got = type(data).__name__
            raise TypeError(f"data must be a Batch or Data with an edge_index, but got {got}")
        if data.x is None:  # PyG may count the nodes by the edges, which are about to change
            data.num_nodes = data.num_nodes
        source, target = data.edge_index.long()
        graph = source.new_zeros(data.num_nodes) if data.batch is None else data.batch
        return graph.bincount(minlength=_num_graphs(data)), graph, source, target

    def keep_nodes(self, data: Any, mask: Tensor) -> Any:
        for key, value in data:
            if not isinstance(value, Tensor) or "batch" in key or key.endswith("_ptr"):
                continue
            # In a batch, PyG adds this to the attribute of the next graph: 0, or a number of nodes.
            expected = data.num_nodes if key == "edge_index" else 0
            if (torch.as_tensor(data.__inc__(key, value)) != expected).any():
                raise ValueError(f"{key} holds numbers of nodes, which {self} does not update")
        view = data.subgraph(mask)
        if data.batch is not None:
            _update_ptr(view, data)
        return view

    def replace_edges(self, data: Any, source: Tensor, target: Tensor) -> Any:
        data.edge_index = torch.stack([source, target])
        return data


class NodeDrop(_augmentations.NodeDrop, _Transform): ...


class Subgraph(_augmentations.Subgraph, _Transform): ...


class EdgePerturb(_augmentations.EdgePerturb, _Transform): ...


class AttributeMask(_augmentations.AttributeMask, _Transform):
    def forward(self, data: Any) -> Any:
        if getattr(data, "x", None) is None:
            got = type(data).__name__
            raise TypeError(f"data must be a Batch or Data with node features x, but got {got}")
        data.x = self.mask(data.x)
        return data


class RandomChoice(_augmentations.RandomChoice, _Transform): ...


def _num_graphs(data: Any) -> int:
    """Return the number of graphs of a Batch, and 1 for a plain Data."""
    return getattr(data, "num_graphs", 1)


def _update_ptr(view: Any, batch: Any) -> None:
    """Update where each graph begins in ``view``, which has a part of the nodes of ``batch``."""
    num_graphs = _num_graphs(batch)
    node_ptr = cumsum(view.batch.bincount(minlength=num_graphs))  # [G + 1]
    edge_ptr = cumsum(view.batch[view.edge_index[0]].bincount(minlength=num_graphs))  # [G + 1]
    edge_keys = batch.edge_attrs()
    if batch.num_edges == num_graphs:  # PyG has taken attributes of graphs for attributes of edges
        view.update({key: batch[key] for key in edge_keys if "edge" not in key})
        edge_keys = [key for key in edge_keys if "edge" in key]
    ptrs = dict.fromkeys(batch.node_attrs(), node_ptr) | dict.fromkeys(edge_keys, edge_ptr)
    for key, ptr in ptrs.items():
        if f"{key}_ptr" in batch:  # DataLoader(follow_batch=[key])
            view[f"{key}_ptr"] = ptr
    view.ptr = node_ptr
    # `view[i]` and `view.to_data_list()` read private dictionaries. PyG has no public way to update
    # them, except a new Batch of the single graphs, which takes a Python loop over all graphs.
    if hasattr(batch, "_slice_dict"):
        slices = {key: ptr.cpu() for key, ptr in ptrs.items() if key in batch._slice_dict}
        view._slice_dict = batch._slice_dict | slices
        view._inc_dict = batch._inc_dict | {"edge_index": node_ptr[:-1].cpu()}
    if hasattr(batch, "_num_nodes"):
        view._num_nodes = node_ptr.diff().tolist()
