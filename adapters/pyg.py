"""Augmentations of PyTorch Geometric batches, and a module that computes the loss of a batch.

An augmentation returns a view of the whole batch and leaves the batch itself unchanged. Graph i of
the view is always made from graph i of the batch, because a graph that has nodes keeps at least one
of them.

Attributes stay with their nodes and edges. PyG remembers how many entries of an attribute each
graph of a batch has, which tells attributes of nodes, edges and graphs apart. The length decides
for a single ``Data``, and for an attribute that was added to the batch itself. Where several are
possible, the name decides: an attribute of edges is ``e_id`` or has a word in its name that begins
with "edge", and ``y`` does not belong to edges. Give a graph T labels as a ``y`` of shape
``[1, T]``, because a ``y`` of shape ``[T]`` looks like labels of nodes if the graph has T nodes.

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

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from torch_geometric.transforms import BaseTransform
    from torch_geometric.utils import cumsum, select
except ImportError as error:
    raise ImportError(
        f"pgcl_losses.adapters.pyg needs torch_geometric ({error}): "
        "pip install torch-geometric, or in a checkout of pgcl-losses: pip install -e '.[pyg]'"
    ) from error

from . import _augmentations
from ._model import ContrastiveModel

__all__ = [
    "AttributeMask",
    "ContrastiveModel",
    "EdgeDrop",
    "EdgePerturb",
    "FeatureMask",
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
        if (graph[1:] < graph[:-1]).any():
            raise ValueError("batch must be sorted, graph by graph, but its numbers decrease")
        return graph.bincount(minlength=_num_graphs(data)), graph, source, target

    def keep_nodes(self, data: Any, mask: Tensor) -> Any:
        for key, value in data:
            if not isinstance(value, Tensor) or "batch" in key or key.endswith("_ptr"):
                continue
            # In a batch, PyG adds this to the attribute of the next graph: 0, or a number of nodes.
            expected = data.num_nodes if key == "edge_index" else 0
            if torch.as_tensor(data.__inc__(key, value) != expected).any():
                raise ValueError(f"{key} holds numbers of nodes, which {self} does not update")
        node_keys, edge_keys = _node_and_edge_keys(data)
        source, target = data.edge_index.long()
        _select(data, edge_keys, mask.index_select(0, source) & mask.index_select(0, target))
        number = mask.cumsum(0) - 1  # [V], the new number of each node that stays
        data.edge_index = torch.stack([number.index_select(0, end) for end in data.edge_index])
        _select(data, node_keys, mask)
        if "num_nodes" in data:
            data.num_nodes = int(mask.sum())
        _update_ptr(data, node_keys, edge_keys)
        return data

    def keep_edges(self, data: Any, mask: Tensor) -> Any:
        _, edge_keys = _node_and_edge_keys(data)
        _select(data, edge_keys, mask)
        _update_ptr(data, [], edge_keys)
        return data

    def replace_edges(self, data: Any, source: Tensor, target: Tensor) -> Any:
        data.edge_index = torch.stack([source, target])
        return data

    def replace_features(self, data: Any, function: Callable[[Tensor], Tensor]) -> Any:
        if getattr(data, "x", None) is None:
            got = type(data).__name__
            raise TypeError(f"data must be a Batch or Data with node features x, but got {got}")
        if not isinstance(data.x, Tensor) or data.x.layout != torch.strided:
            kind = data.x.layout if isinstance(data.x, Tensor) else type(data.x).__name__
            raise TypeError(f"x must be a dense Tensor, but got {kind}: use x.to_dense()")
        data.x = function(data.x)
        return data


class NodeDrop(_augmentations.NodeDrop, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> path = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> view = NodeDrop(p=1.0)(path)
        >>> view.num_nodes, view.num_edges
        (1, 0)

    """


class Subgraph(_augmentations.Subgraph, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> view = Subgraph(p=0.4)(Data(x=torch.eye(3), edge_index=edge_index))
        >>> view.num_nodes, view.num_edges
        (2, 2)

    """


class EdgeDrop(_augmentations.EdgeDrop, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> _ = torch.manual_seed(0)
        >>> EdgeDrop(p=0.5)(Data(x=torch.eye(3), edge_index=edge_index)).edge_index
        tensor([[1],
                [0]])

    """


class EdgePerturb(_augmentations.EdgePerturb, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> edge_index = torch.tensor([[0, 1], [1, 0]])
        >>> view = EdgePerturb(p=1.0)(Data(x=torch.eye(5), edge_index=edge_index))
        >>> view.is_undirected(), view.num_nodes, view.num_edges
        (True, 5, 2)

    """


class AttributeMask(_augmentations.AttributeMask, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> atoms = Data(x=torch.tensor([6, 6, 8]), edge_index=torch.tensor([[0, 1], [1, 2]]))
        >>> AttributeMask(p=1.0, fill_value=118)(atoms).x
        tensor([118, 118, 118])

    """


class FeatureMask(_augmentations.FeatureMask, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> _ = torch.manual_seed(0)
        >>> FeatureMask(p=0.5)(Data(x=torch.ones(2, 4))).x
        tensor([[0., 1., 0., 0.],
                [0., 1., 0., 0.]])

    """


class RandomChoice(_augmentations.RandomChoice, _Transform):
    """
    Examples:
        >>> from torch_geometric.data import Data
        >>> augment = RandomChoice([NodeDrop(p=1.0), AttributeMask(p=1.0)])
        >>> view = augment(Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1], [1, 2]])))
        >>> view.num_nodes in (1, 3)
        True

    """


def _num_graphs(data: Any) -> int:
    """Return the number of graphs of a Batch, and 1 for a plain Data."""
    return getattr(data, "num_graphs", 1)


def _node_and_edge_keys(data: Any) -> tuple[list[str], list[str]]:
    """Return the names of the attributes with an entry for each node, and for each edge."""
    counts = data.num_nodes, data.num_edges, _num_graphs(data)
    # Private: where the entries of each graph begin. By the length alone, several entries for each
    # graph may look like one entry for each node.
    slices = getattr(data, "_slice_dict", {})
    node_ptr = data.ptr.cpu() if "ptr" in data else None
    ptrs = node_ptr, slices.get("edge_index"), torch.arange(counts[2] + 1)
    node_keys, edge_keys = [], []
    for key, value in data:
        name = key.removesuffix("_batch")
        is_other_graph = "index" in name and name != "edge_index"  # such as a second edge_index
        if key.endswith("ptr") or "edge_label" in key or is_other_graph:  # labels: links to predict
            continue
        own = slices.get(name)  # of a list of tensors, a list of slices
        length = -1 if isinstance(own, list) else _length(data, key, value)
        if not isinstance(own, Tensor) or own[-1] != length:
            own = None  # there are no slices or they are outdated: the length alone decides
        is_node, is_edge, is_graph = (
            length == count and (own is None or ptr is None or torch.equal(own, ptr))
            for count, ptr in zip(counts, ptrs, strict=True)
        )
        # If several are possible, the name decides. By its name, `y` belongs to nodes or graphs.
        is_other = is_node or is_graph or (key == "y" and own is None)
        if is_edge and (re.search("(?<![a-z])edge|^e_id$", key) or not is_other):
            edge_keys.append(key)
        elif is_node:
            node_keys.append(key)
        elif isinstance(value, dict | list | tuple):
            parts = [*value.values()] if isinstance(value, dict) else value
            tensors = {_length(data, key, part) for part in parts if isinstance(part, Tensor)}
            lists = [len(part) for part in parts if isinstance(part, list | tuple)]
            sizes = [ptr.diff().tolist() for ptr in ptrs[:2] if ptr is not None]  # of each graph
            if not tensors.isdisjoint(counts[:2]) or lists in sizes:
                kind = type(value).__name__
                raise ValueError(f"{key} has entries of nodes or edges in a {kind}: use a tensor")
    return node_keys, edge_keys


def _length(data: Any, key: str, value: Any) -> int:
    """Return the number of entries of an attribute, or -1 if it has none."""
    if isinstance(value, Tensor):
        dim = data.__cat_dim__(key, value)
        return value.shape[dim] if value.dim() and isinstance(dim, int) else -1
    return -1 if isinstance(value, str | dict) or not hasattr(value, "__len__") else len(value)


def _select(data: Any, keys: list[str], mask: Tensor) -> None:
    """Keep the entries of ``mask`` in each of the attributes."""
    kept = mask.nonzero().squeeze(1)
    for key in keys:
        data[key] = select(data[key], kept, data.__cat_dim__(key, data[key]))


def _update_ptr(data: Any, node_keys: list[str], edge_keys: list[str]) -> None:
    """Update where each graph of the batch begins, after nodes or edges were dropped."""
    if data.batch is None:
        return
    num_graphs, owner = _num_graphs(data), data.batch.index_select(0, data.edge_index[0])  # [E]
    node_ptr = cumsum(data.batch.bincount(minlength=num_graphs))  # [G + 1]
    edge_ptr = cumsum(owner.bincount(minlength=num_graphs))  # [G + 1]
    ptrs = dict.fromkeys(node_keys, node_ptr) | dict.fromkeys(edge_keys, edge_ptr)
    for key, ptr in ptrs.items():
        if f"{key}_ptr" in data:  # DataLoader(follow_batch=[key])
            data[f"{key}_ptr"] = ptr
    data.ptr = node_ptr
    # `view[i]` and `view.to_data_list()` read private fields, and PyG has no public way to update
    # them, except a new Batch of the single graphs, which takes a Python loop over all graphs.
    if hasattr(data, "_slice_dict"):
        # Where the entries of each graph begin.
        slices = {key: ptr.cpu() for key, ptr in ptrs.items() if key in data._slice_dict}
        data._slice_dict = data._slice_dict | slices
        # The node numbers of each graph in edge_index count from its first node.
        data._inc_dict = data._inc_dict | {"edge_index": node_ptr[:-1].cpu()}
    if hasattr(data, "_num_nodes"):  # the number of nodes of each graph, where it has no features
        data._num_nodes = node_ptr.diff().tolist()
