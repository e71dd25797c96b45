"""How a PyG batch is put together, and how it stays valid when nodes leave it.

Shapes: G graphs, V nodes and E edges in a batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import cumsum, select, subgraph

# What PyG takes for node attributes because of its name.
_NODE_NAMES = {"x", "feat", "pos", "batch", "node_type", "n_id", "tf"}


def is_batch(data: Any, name: str = "data") -> bool:
    """Whether it is a batch of graphs, and not one plain ``Data``; all else is an error."""
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
    """Where each graph's nodes begin, with the last one's end ``[G + 1]``, and each node's graph
    ``[V]``."""
    batched = is_batch(data)
    if data.edge_index is None or "adj" in data or "adj_t" in data:
        raise ValueError(f"data must have its edges only in edge_index, but is {data}")
    if torch.as_tensor(data.__inc__("edge_index", data.edge_index)).numel() > 1:
        raise ValueError("data must have nodes of one kind, but its __inc__ says edges join two")
    if isinstance(data.edge_index, EdgeIndex):
        data.edge_index = data.edge_index.as_tensor()  # it promises an order, which will change
    data.edge_index = data.edge_index.long()
    if "num_nodes" not in data and _NODE_NAMES.isdisjoint({*data.keys()} - {"batch"}):
        data.num_nodes = data.num_nodes  # else it would be read off the edges, which will change
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
    """Keeps the nodes of ``mask`` ``[V]``, the edges between them, and what belongs to them."""
    levels, edge_ptr = _levels(data, ptr)
    edge_index, _, edge_mask = subgraph(
        mask, data.edge_index, relabel_nodes=True, return_edge_mask=True
    )
    kept = {"node": mask.nonzero().view(-1), "edge": edge_mask.nonzero().view(-1)}
    ptr = cumsum(mask.long())[ptr]
    ends = {"node": ptr, "edge": cumsum(edge_mask.long())[edge_ptr.to(mask.device)]}
    for key, level in levels.items():
        if level in kept:
            data[key] = select(data[key], kept[level], data.__cat_dim__(key, data[key]))
            if f"{key}_ptr" in data:
                data[f"{key}_ptr"] = ends[level]
    data.edge_index = edge_index
    if "ptr" in data:
        data.ptr = ptr
    if "num_nodes" in data:
        data.num_nodes = len(kept["node"])
    if hasattr(data, "_num_nodes"):
        data._num_nodes = ptr.diff().tolist()
    if hasattr(data, "_slice_dict"):
        # What to_data_list() goes by. It lives on the CPU.
        ends = {level: end.cpu() for level, end in ends.items()}
        data._slice_dict = {
            key: ends.get(levels.get(key, "graph"), old) for key, old in data._slice_dict.items()
        }
        data._inc_dict = {**data._inc_dict, "edge_index": ends["node"][:-1]}
    return data


def _levels(data: Any, ptr: Tensor) -> tuple[dict[str, str], Tensor]:
    """The level of each attribute, and where each graph's edges end, if that is known."""
    slices = getattr(data, "_slice_dict", {})
    edge_ptr = slices.get("edge_index", torch.tensor([0, data.num_edges]))
    if int(edge_ptr[-1]) != data.num_edges:
        # An earlier transform changed the edges: their graphs are not known any more, and
        # to_data_list() has to say so.
        slices, edge_ptr = {}, torch.tensor([0, data.num_edges])
        del data._slice_dict, data._inc_dict
    ends = {"graph": torch.arange(len(ptr)), "node": ptr.cpu(), "edge": edge_ptr}
    levels = {key: _level(data, key, slices.get(key), ends) for key, _ in data}
    for key in levels:  # what follow_batch has made goes with what it follows
        levels[key] = levels.get(key.removesuffix("_batch"), levels[key])
    return levels, edge_ptr


def _level(data: Any, key: str, slices: Tensor | None, ends: dict[str, Tensor]) -> str:
    """Whether a tensor belongs to nodes, to edges, or to graphs or anything else.

    PyG goes by the length: if a batch has as many nodes as graphs, it takes labels of
    graphs for those of nodes. It is safer to go by where each graph's entries end. Names decide
    all other cases.
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
    increment = 0 if key == "edge_index" or "batch" in key else data.__inc__(key, value)
    if torch.as_tensor(increment).any():
        raise ValueError(f"{key} holds numbers of nodes, which change when nodes are dropped")
    length = value.size(data.__cat_dim__(key, value))
    fits = [
        level
        for level, end in ends.items()
        if length == end[-1] and (slices is None or torch.equal(slices, end))
    ]
    named = "graph"
    if key in _NODE_NAMES or "node" in key:
        named = "node"
    elif "edge" in key:
        named = "edge"
    return named if named in fits else (*fits, "graph")[0]
