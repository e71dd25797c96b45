"""DGL: augmentations that act on whole batches, and a module from batch to loss.

Whatever an augmentation does, row i of every view stays graph i: a graph with nodes keeps at least
one. The input batch does not change.

To know which nodes a view has kept, number them in ``ndata["node_id"]``: views carry it.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    import dgl
    from dgl import DGLGraph
except Exception as error:  # beside an unsuitable torch it fails in many ways
    raise ImportError(
        f"pgcl_losses.adapters.dgl needs dgl, whose import fails ({type(error).__name__}: {error})"
        ": with Python 3.11 or older, pip install dgl==1.1.3 packaging, or in a checkout of "
        "pgcl-losses: pip install '.[dgl]'"
    ) from error

from ._draws import draw_connected, draw_edges, draw_nodes
from ._model import POSITION, Choice, RandomDrop, RandomFraction, Views, advice, check_fill_value

__all__ = [
    "AttributeMask",
    "ContrastiveModel",
    "EdgePerturb",
    "NodeDrop",
    "RandomChoice",
    "Subgraph",
]

_FORGETTERS = "dgl.add_self_loop, AddEdge and others forget the batch: use them before dgl.batch"

# Shapes below: G graphs, V nodes and E edges in a batch.


class NodeDrop(RandomDrop, dgl.BaseTransform):
    """Drops every node, with its edges, with probability ``p`` below 1.

    A graph that would lose all its nodes keeps a random one.

    Examples:
        >>> import dgl
        >>> from pgcl_losses.adapters.dgl import NodeDrop
        >>> path = dgl.graph(([0, 1, 1, 2], [1, 0, 2, 1]))
        >>> view = NodeDrop(p=0.9)(dgl.batch([path, path]))
        >>> view.batch_size, bool((view.batch_num_nodes() >= 1).all())
        (2, True)

    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        ptr, owner = _structure(graph)
        return _keep_nodes(graph, draw_nodes(ptr, owner, self.p), owner)


class Subgraph(RandomDrop, dgl.BaseTransform):
    """Keeps a random connected subgraph of each graph.

    It drops a fraction ``p`` below 1 of the nodes, rounded down. The subgraph grows from a random
    node by one random neighbour at a time, along the edges, as GraphCL's does. It ends when no
    neighbour is left, so a graph of several components may lose more.
    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        ptr, owner = _structure(graph)
        return _keep_nodes(graph, draw_connected(*_edges(graph), ptr, owner, self.p), owner)


class EdgePerturb(RandomFraction, dgl.BaseTransform):
    """Drops every edge with probability ``p`` and adds a random one to its graph in its place.

    Edges between the same two nodes count as one edge here. They move together, each in its
    direction, so an undirected graph stays undirected. An added edge takes over the features of the
    one it replaces. It joins two different nodes, which may have been neighbours. Self-loops stay.
    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        ptr, owner = _structure(graph)
        ends = draw_edges(*_edges(graph), ptr, owner, self.p)
        # dgl's own AddEdge draws edges between graphs and forgets the batch.
        sizes = {graph.ntypes[0]: graph.num_nodes()}
        view = dgl.heterograph({graph.canonical_etypes[0]: ends}, sizes, idtype=graph.idtype)
        view.ndata.update(graph.ndata)
        view.edata.update(graph.edata)
        return _set_batch(view, graph.batch_num_nodes(), graph.batch_num_edges())


class AttributeMask(RandomFraction, dgl.BaseTransform):
    """Sets all of a node's feature ``feat_name`` to ``fill_value``, with probability ``p`` for each
    node.

    If features are categories, ``fill_value`` may be the number of a mask token.
    """

    def __init__(self, p: float = 0.2, fill_value: float = 0.0, feat_name: str = "feat") -> None:
        super().__init__(p)
        self.fill_value = fill_value
        self.feat_name = feat_name

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        _check_graph("graph", graph)
        feat = _node_feature(graph, self.feat_name).clone()  # [V, ...]
        check_fill_value(self.fill_value, self.feat_name, feat.dtype)
        feat[torch.rand(len(feat), device=feat.device) < self.p] = self.fill_value
        view = graph.clone()  # local_var() would share the sizes of the batch's graphs
        view.ndata[self.feat_name] = feat
        return view


class RandomChoice(Choice, dgl.BaseTransform):
    """Applies one of ``transforms`` to a batch, drawn anew for every call.

    It is no module: ``parameters()`` of a model does not have parameters of its transforms.
    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        return self.draw()(graph)


class ContrastiveModel(Views):
    """Encoder, augmentations and a loss as one module, batched ``DGLGraph -> loss``.

    The encoder returns one embedding per graph, or one per node. Embeddings of nodes need views
    that keep all nodes (:class:`EdgePerturb`, :class:`AttributeMask`).

    Views may have nodes without edges: ``GraphConv`` and similar layers accept them with
    ``allow_zero_in_degree=True``.

    Args:
        encoder: called with the view, or with ``(view, view.ndata[feat_name])``.
        augment1, augment2: make one view each from a batch, without changing it;
            ``torch.nn.Identity()`` for none.
        loss: is called with the embeddings of all views, such as :class:`pgcl_losses.PGCLLoss`. It
            is a submodule, so ``parameters()`` has its parameters.
        further: augmentations of a third view and more.
        feat_name: the node feature that the encoder wants beside the view, if any.

    Shape:
        - batch: G graphs of V nodes, from ``dgl.batch`` or a ``GraphDataLoader``
        - embeddings of each view: ``[G, D]`` or ``[V, D]``
        - output: that of the loss

    Examples:
        >>> import dgl, torch
        >>> from dgl.nn import GraphConv, Sequential, SumPooling
        >>> from pgcl_losses import PGCLLoss
        >>> from pgcl_losses.adapters.dgl import AttributeMask, ContrastiveModel, NodeDrop
        >>> encoder = Sequential(GraphConv(3, 16, allow_zero_in_degree=True), SumPooling())
        >>> augments = NodeDrop(), AttributeMask()
        >>> model = ContrastiveModel(encoder, *augments, PGCLLoss(dim=16), feat_name="feat")
        >>> path = dgl.graph(([0, 1, 1, 2], [1, 0, 2, 1]))
        >>> path.ndata["feat"] = torch.eye(3)
        >>> model(dgl.batch([path] * 8)).backward()

    """

    pooling = "SumPooling()(graph, feat)"
    why_other_graphs = f" ({_FORGETTERS})"

    def __init__(
        self,
        encoder: nn.Module,
        augment1: Callable[[DGLGraph], DGLGraph],
        augment2: Callable[[DGLGraph], DGLGraph],
        loss: Callable[..., Tensor],
        *further: Callable[[DGLGraph], DGLGraph],
        feat_name: str | None = None,
    ) -> None:
        super().__init__(encoder, augment1, augment2, *further, loss=loss)
        self.feat_name = feat_name

    def _contents(self, name: str, batch: Any) -> tuple[int, Tensor, Tensor | None]:
        _check_graph(name, batch)
        return batch.batch_size, _structure(batch)[1], batch.ndata.get(POSITION)

    def _numbered(self, batch: Any) -> Any:
        _check_graph("batch", batch)
        batch = batch.clone()
        batch.ndata[POSITION] = torch.arange(batch.num_nodes(), device=batch.device)
        return batch

    def _encode(self, view: DGLGraph) -> Any:
        if self.feat_name is not None:
            return self.encoder(view, _node_feature(view, self.feat_name))
        text = (
            "the encoder gets node features only with ContrastiveModel(..., feat_name=...), one of "
            f"{_names(view)}"
        )
        with advice("missing", text):
            return self.encoder(view)

    def _check_one_graph(self, view: DGLGraph) -> None:
        warnings.warn(f"the batch is one graph alone; {_FORGETTERS}", stacklevel=2)

    def _why_other_count(self, count: int, num_graphs: int) -> str:
        return f"; {_FORGETTERS}" if count == 1 else ""


def _check_graph(name: str, value: Any) -> None:
    if not isinstance(value, DGLGraph):
        raise TypeError(f"{name} must be a DGLGraph, but got {type(value).__name__}")
    if not value.is_homogeneous:
        raise TypeError(
            f"{name} must be homogeneous, but has node types {value.ntypes} and edge types "
            f"{value.etypes}; dgl.to_homogeneous may help, before dgl.batch"
        )


def _names(graph: DGLGraph) -> list[str]:
    return sorted({*graph.ndata} - {POSITION})


def _node_feature(graph: DGLGraph, name: str) -> Tensor:
    if name not in graph.ndata:
        raise ValueError(f"nodes must have the feature {name!r}, but have {_names(graph)}")
    feature: Tensor = graph.ndata[name]
    return feature


def _structure(graph: DGLGraph) -> tuple[Tensor, Tensor]:
    """Where each graph's nodes begin, with the last one's end ``[G + 1]``, and each node's graph
    ``[V]``."""
    _check_graph("graph", graph)
    sizes = graph.batch_num_nodes().long()  # [G]; set by hand, they may be int32
    if int(sizes.sum()) != graph.num_nodes():
        raise ValueError(
            f"the batch has {graph.num_nodes()} nodes but batch_num_nodes() adds up to "
            f"{int(sizes.sum())}: an earlier transform changed the nodes without updating it"
        )
    return nn.functional.pad(sizes.cumsum(0), (1, 0)), torch.repeat_interleave(sizes)


def _edges(graph: DGLGraph) -> tuple[Tensor, Tensor]:
    source, target = graph.formats("coo").edges(order="eid")  # other formats may have no order
    return source.long(), target.long()


def _keep_nodes(graph: DGLGraph, mask: Tensor, owner: Tensor) -> DGLGraph:
    """Keeps the nodes of ``mask`` ``[V]`` and the edges between them."""
    # dgl.remove_nodes keeps the batch by itself. But it fails for some graphs that are no batch,
    # and loses features that have the name it uses itself, "_ID".
    view = dgl.node_subgraph(graph, mask, store_ids=False)
    owner = owner[mask]  # of the nodes left
    edge_owner = owner[_edges(view)[0]]
    num_graphs = graph.batch_size
    return _set_batch(
        view, owner.bincount(minlength=num_graphs), edge_owner.bincount(minlength=num_graphs)
    )


def _set_batch(graph: DGLGraph, num_nodes: Tensor, num_edges: Tensor) -> DGLGraph:
    graph.set_batch_num_nodes(num_nodes)
    graph.set_batch_num_edges(num_edges)
    return graph
