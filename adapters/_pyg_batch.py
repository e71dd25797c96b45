"""Read the structure of a PyG batch, and keep the batch valid when nodes leave it.

A batch has G graphs, V nodes and E edges.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import cumsum, select, subgraph

# PyG treats attributes with these names as attributes of nodes, and counts the nodes by them.
_NODE_NAMES = {"x", "feat", "pos", "batch", "node_type", "n_id", "tf"}


def is_batch(data: Any, name: str = "data") -> bool:
    """Return whether ``data`` is a batch of graphs (True) or one plain ``Data`` (False).

    Raise for anything else, such as a batch without ``ptr``. The message calls it ``name``.
    """
    if not isinstance(data, Data):
        hint = "; to_homogeneous() may help" if isinstance(data, HeteroData) else ""
        raise TypeError(f"{name} must be a Batch or Data, but got {type(data).__name__}{hint}")
    missing = [key for key in ("batch", "ptr") if key not in data]
    if missing and (isinstance(data, Batch) or len(missing) == 1):
        raise ValueError(
            f"{name} has no {' and no '.join(missing)}: make it by a DataLoader or "
            "Batch.from_data_list"
        )
    return not missing


def structure(data: Any) -> tuple[Tensor, Tensor]:
    """Return where the nodes of each graph begin ``[G + 1]``, and the graph of each node ``[V]``.

    One plain ``Data`` counts as a batch of one graph. The function also prepares ``data`` for a
    change of its nodes and edges: ``edge_index`` becomes a plain int64 tensor, and ``data`` stores
    its number of nodes. Raise if the edges have a form that the augmentations cannot change, or if
    an earlier transform has removed nodes without updating ``ptr``.
    """
    batched = is_batch(data)
    if data.edge_index is None or "adj" in data or "adj_t" in data:
        raise ValueError(f"data must have its edges only in edge_index, but is {data}")
    if torch.as_tensor(data.__inc__("edge_index", data.edge_index)).numel() > 1:
        raise ValueError("data must have nodes of one kind, but its __inc__ says edges join two")
    if isinstance(data.edge_index, EdgeIndex):
        # An EdgeIndex promises that its edges are sorted or undirected, which will no longer hold.
        data.edge_index = data.edge_index.as_tensor()
    data.edge_index = data.edge_index.long()
    if "num_nodes" not in data and _NODE_NAMES.isdisjoint({*data.keys()} - {"batch"}):
        # Without node attributes PyG counts the nodes by the edges, which are about to change.
        data.num_nodes = data.num_nodes
        if batched:
            data._num_nodes = data.ptr.diff().tolist()
    if not batched:
        graph = data.edge_index.new_zeros(data.num_nodes)
        return graph.new_tensor([0, len(graph)]), graph
    if int(data.ptr[-1]) != data.num_nodes:
        raise ValueError(
            f"data has {data.num_nodes} nodes but ptr ends at {int(data.ptr[-1])}: an earlier "
            "transform changed the nodes without updating ptr"
        )
    return data.ptr, data.batch


def keep_nodes(data: Any, mask: Tensor, ptr: Tensor) -> Any:
    """Keep the nodes of ``mask`` ``[V]``, the edges between them, and the attributes of both.

    ``data`` itself changes and is returned. ``ptr`` ``[G + 1]`` comes from :func:`structure`.
    """
    levels, edge_ptr = _levels(data, ptr)
    edge_index, _, edge_mask = subgraph(
        mask, data.edge_index, relabel_nodes=True, return_edge_mask=True
    )
    kept = {"node": mask.nonzero().view(-1), "edge": edge_mask.nonzero().view(-1)}
    ptr = cumsum(mask.long())[ptr]
    ptrs = {"node": ptr, "edge": cumsum(edge_mask.long())[edge_ptr.to(mask.device)]}
    for key, level in levels.items():
        if level in kept:
            data[key] = select(data[key], kept[level], data.__cat_dim__(key, data[key]))
            if f"{key}_ptr" in data:
                data[f"{key}_ptr"] = ptrs[level]
    data.edge_index = edge_index
    if "ptr" in data:
        data.ptr = ptr
    if "num_nodes" in data:
        data.num_nodes = len(kept["node"])
    if hasattr(data, "_num_nodes"):
        data._num_nodes = ptr.diff().tolist()
    if hasattr(data, "_slice_dict"):
        # to_data_list() separates the graphs by two dictionaries, whose tensors are on the CPU.
        ptrs = {level: ptr.cpu() for level, ptr in ptrs.items()}
        data._slice_dict = {
            key: ptrs.get(levels.get(key, "graph"), old) for key, old in data._slice_dict.items()
        }
        data._inc_dict = {**data._inc_dict, "edge_index": ptrs["node"][:-1]}
    return data


def _levels(data: Any, ptr: Tensor) -> tuple[dict[str, str], Tensor]:
    """Return the level of each attribute, and where the edges of each graph begin ``[G + 1]``.

    The level is "node", "edge" or "graph". If it is not known which edges belong to which graph,
    the second result is ``[0, E]``, as if the batch were one graph.
    """
    slices = getattr(data, "_slice_dict", {})
    edge_ptr = slices.get("edge_index", torch.tensor([0, data.num_edges]))
    if int(edge_ptr[-1]) != data.num_edges:
        # An earlier transform has added or removed edges without updating these dictionaries. The
        # batch can no longer be separated into graphs; without the dictionaries to_data_list()
        # raises an error instead of returning wrong graphs.
        slices, edge_ptr = {}, torch.tensor([0, data.num_edges])
        del data._slice_dict, data._inc_dict
    ptrs = {"graph": torch.arange(len(ptr)), "node": ptr.cpu(), "edge": edge_ptr}
    levels = {key: _level(data, key, slices.get(key), ptrs) for key, _ in data}
    for key in levels:  # follow_batch=["x"] makes an attribute x_batch, of the same level as x
        levels[key] = levels.get(key.removesuffix("_batch"), levels[key])
    return levels, edge_ptr


def _level(data: Any, key: str, slices: Tensor | None, ptrs: dict[str, Tensor]) -> str:
    """Return "node" or "edge" if an attribute has one entry for each of them, otherwise "graph".

    PyG goes by the length: in a batch with as many nodes as graphs, it takes the labels of graphs
    for labels of nodes. This function also compares where the entries of each graph begin: the
    ``slices`` ``[G + 1]`` of the attribute, if they are known, must equal the ``ptr`` of the level.
    If several levels fit, the name of the attribute decides between them.
    """
    value = data[key]
    if isinstance(value, dict | list | tuple):
        inside = value.values() if isinstance(value, dict) else value
        if any(isinstance(value, Tensor) for value in inside):
            raise TypeError(
                f"{key} must be one Tensor, but is a {type(value).__name__} of them: it is not "
                "known whether they belong to nodes"
            )
    if not isinstance(value, Tensor) or value.dim() == 0 or key.endswith("ptr"):
        return "graph"
    # A batch shifts the numbers of nodes in an attribute by an increment for each graph.
    increment = 0 if key == "edge_index" or "batch" in key else data.__inc__(key, value)
    if torch.as_tensor(increment).any():
        raise ValueError(f"{key} holds numbers of nodes, which change when nodes are dropped")
    length = value.size(data.__cat_dim__(key, value))
    fits = [
        level
        for level, ptr in ptrs.items()
        if length == ptr[-1] and (slices is None or torch.equal(slices, ptr))
    ]
    named = "graph"
    if key in _NODE_NAMES or "node" in key:
        named = "node"
    elif "edge" in key:
        named = "edge"
    return named if named in fits else (*fits, "graph")[0]
