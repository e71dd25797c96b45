"""Augmentations of batched DGL graphs, and a module that computes the loss of a batch.

An augmentation returns a view of the whole batch and leaves the batch itself unchanged. Graph i of
the view is always made from graph i of the batch, because a graph that has nodes keeps at least one
of them.

A view keeps the node features. To find out which nodes it has kept, number the nodes of the batch
first: ``graph.ndata["node_id"] = torch.arange(graph.num_nodes())``.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    import dgl
    from dgl import DGLGraph
except Exception as error:  # with a torch that it was not built for, dgl fails in many ways
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

# Functions of DGL that return one large graph in place of a batch are a common mistake.
_FORGETTERS = "dgl.add_self_loop, AddEdge and others forget the batch: use them before dgl.batch"

# In the shapes below, a batch has G graphs, V nodes and E edges. `owner` [V] is each node's graph.


class NodeDrop(RandomDrop, dgl.BaseTransform):
    """Drops each node, together with its edges, with probability ``p``, which is below 1.

    If a graph would lose all its nodes, it keeps one of them, chosen at random.

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
    """Keeps a random connected subgraph of each graph, and drops the other nodes.

    As in GraphCL, the subgraph starts from a random node and grows along the edges, by one random
    neighbour at a time. It drops a fraction ``p`` of the nodes, below 1, and rounds their number
    down. The growth ends early when no neighbour is left, so a graph of several components may lose
    more nodes.
    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        ptr, owner = _structure(graph)
        return _keep_nodes(graph, draw_connected(*_edges(graph), ptr, owner, self.p), owner)


class EdgePerturb(RandomFraction, dgl.BaseTransform):
    """Replaces each edge, with probability ``p``, by a random edge in the same graph.

    The new edge joins two different nodes, chosen at random, which may already be neighbours. It
    takes over the features of the edge that it replaces. Edges between the same two nodes move
    together, each in its direction, so an undirected graph stays undirected. Self-loops stay.
    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        ptr, owner = _structure(graph)
        ends = draw_edges(*_edges(graph), ptr, owner, self.p)
        # dgl.AddEdge is no alternative: it adds edges between different graphs of the batch, and
        # returns a graph that is no longer a batch.
        sizes = {graph.ntypes[0]: graph.num_nodes()}
        view = dgl.heterograph({graph.canonical_etypes[0]: ends}, sizes, idtype=graph.idtype)
        view.ndata.update(graph.ndata)
        view.edata.update(graph.edata)
        return _set_batch(view, graph.batch_num_nodes(), graph.batch_num_edges())


class AttributeMask(RandomFraction, dgl.BaseTransform):
    """Masks each node with probability ``p``: all values of its feature become ``fill_value``.

    ``feat_name`` is the name of the feature in ``graph.ndata``. If the features are categories,
    ``fill_value`` may be the number of a mask token.
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
        # local_var() in place of clone() would share the numbers of nodes and edges with `graph`.
        view = graph.clone()
        view.ndata[self.feat_name] = feat
        return view


class RandomChoice(Choice, dgl.BaseTransform):
    """Applies one of ``transforms`` to a batch; each call draws one at random.

    This class is not a ``torch.nn.Module``. If a transform has parameters, ``model.parameters()``
    does not contain them.
    """

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        return self.draw()(graph)


class ContrastiveModel(Views):
    """Combines an encoder, augmentations and a loss into one module: batched ``DGLGraph -> loss``.

    The encoder returns one embedding for each graph or one for each node. Embeddings of nodes need
    augmentations that keep all nodes (:class:`EdgePerturb`, :class:`AttributeMask`).

    An augmentation may leave nodes without edges. ``GraphConv`` and similar layers accept such
    nodes only with ``allow_zero_in_degree=True``.

    Args:
        encoder: a module that is called with the view, or with ``(view, view.ndata[feat_name])`` if
            ``feat_name`` is given.
        augment1, augment2: callables that make one view each from a batch, and leave the batch
            unchanged. ``torch.nn.Identity()`` stands for no augmentation.
        loss: a loss that is called with the embeddings of all views, such as
            :class:`pgcl_losses.PGCLLoss`. The model contains it as a submodule, so
            ``model.parameters()`` contains its parameters.
        further: augmentations that make a third view and more.
        feat_name: the name of the node feature that the encoder takes beside the view. By default
            the encoder takes the view alone.

    Shape:
        - batch: G graphs with V nodes together, from ``dgl.batch`` or a ``GraphDataLoader``
        - embeddings of each view: ``[G, D]`` or ``[V, D]``
        - output: the same as the output of the loss

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
    """Raise unless ``value``, the argument ``name``, is a graph of one node and one edge type."""
    if not isinstance(value, DGLGraph):
        raise TypeError(f"{name} must be a DGLGraph, but got {type(value).__name__}")
    if not value.is_homogeneous:
        raise TypeError(
            f"{name} must be homogeneous, but has node types {value.ntypes} and edge types "
            f"{value.etypes}; dgl.to_homogeneous may help, before dgl.batch"
        )


def _names(graph: DGLGraph) -> list[str]:
    """Return the names of the user's node features, for error messages."""
    return sorted({*graph.ndata} - {POSITION})


def _node_feature(graph: DGLGraph, name: str) -> Tensor:
    """Return the node feature ``name`` ``[V, ...]``. Raise if the graph does not have it."""
    if name not in graph.ndata:
        raise ValueError(f"nodes must have the feature {name!r}, but have {_names(graph)}")
    feature: Tensor = graph.ndata[name]
    return feature


def _structure(graph: DGLGraph) -> tuple[Tensor, Tensor]:
    """Return where the nodes of each graph begin ``[G + 1]``, and the graph of each node ``[V]``.

    A graph that is not a batch counts as a batch of one graph.
    """
    _check_graph("graph", graph)
    sizes = graph.batch_num_nodes().long()  # [G]; set_batch_num_nodes may have stored int32
    if int(sizes.sum()) != graph.num_nodes():
        raise ValueError(
            f"the batch has {graph.num_nodes()} nodes but batch_num_nodes() adds up to "
            f"{int(sizes.sum())}: an earlier transform changed the nodes without updating it"
        )
    return nn.functional.pad(sizes.cumsum(0), (1, 0)), torch.repeat_interleave(sizes)


def _edges(graph: DGLGraph) -> tuple[Tensor, Tensor]:
    """Return the end nodes of the edges, ``[E]`` each, in the order of the edge features."""
    # Only the COO format is certain to return the edges in this order.
    source, target = graph.formats("coo").edges(order="eid")
    return source.long(), target.long()


def _keep_nodes(graph: DGLGraph, mask: Tensor, owner: Tensor) -> DGLGraph:
    """Return a batch of the nodes of ``mask`` ``[V]`` and the edges between them."""
    # dgl.remove_nodes would return a batch, but it fails for some graphs that are not a batch, and
    # it loses features that the user has called "_ID", because DGL uses this name itself.
    view = dgl.node_subgraph(graph, mask, store_ids=False)
    owner = owner[mask]  # from here on, of the nodes that are left
    edge_owner = owner[_edges(view)[0]]
    num_graphs = graph.batch_size
    return _set_batch(
        view, owner.bincount(minlength=num_graphs), edge_owner.bincount(minlength=num_graphs)
    )


def _set_batch(graph: DGLGraph, num_nodes: Tensor, num_edges: Tensor) -> DGLGraph:
    """Turn a graph into a batch of graphs with these numbers of nodes and edges, ``[G]`` each."""
    graph.set_batch_num_nodes(num_nodes)
    graph.set_batch_num_edges(num_edges)
    return graph
