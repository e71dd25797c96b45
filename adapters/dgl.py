"""Augmentations of batched DGL graphs, and a module that computes the loss of a batch.

An augmentation returns a view of the whole batch and leaves the batch itself unchanged. Graph i of
the view is always made from graph i of the batch, because a graph that has nodes keeps at least one
of them.

A view keeps the features of its nodes and edges. To find out which nodes it has kept, number the
nodes of the batch first: ``graph.ndata["node_id"] = torch.arange(graph.num_nodes())``.

An augmentation may leave nodes without edges. ``GraphConv`` and similar layers accept such nodes
only with ``allow_zero_in_degree=True``.

Examples:
    >>> import dgl, torch
    >>> from dgl.nn import GraphConv, SumPooling
    >>> from pgcl_losses import PGCLLoss
    >>> from pgcl_losses.adapters.dgl import AttributeMask, ContrastiveModel, NodeDrop
    >>> class Encoder(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = GraphConv(3, 16, allow_zero_in_degree=True)
    ...     def forward(self, view):
    ...         return SumPooling()(view, self.conv(view, view.ndata["feat"]))
    >>> model = ContrastiveModel(Encoder(), NodeDrop(), AttributeMask(), PGCLLoss(dim=16))
    >>> path = dgl.graph(([0, 1, 1, 2], [1, 0, 2, 1]))
    >>> path.ndata["feat"] = torch.eye(3)
    >>> model(dgl.batch([path] * 8)).backward()

"""

from collections.abc import Callable

import torch
from torch import Tensor

try:
    import dgl
    from dgl import DGLGraph
except Exception as error:  # with a torch that it was not built for, dgl fails in many ways
    raise ImportError(
        f"pgcl_losses.adapters.dgl needs dgl, whose import fails ({type(error).__name__}: {error})"
        ": with Python 3.11 or older, pip install dgl==1.1.3 packaging, or in a checkout of "
        "pgcl-losses: pip install -e '.[dgl]'"
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


class _Transform(_augmentations.Augmentation, dgl.BaseTransform):
    # A graph that is not a batch counts as a batch of one graph.

    def __call__(self, graph: DGLGraph) -> DGLGraph:
        if not isinstance(graph, DGLGraph) or not graph.is_homogeneous:
            got = getattr(graph, "canonical_etypes", type(graph).__name__)
            raise TypeError(f"graph must be a homogeneous DGLGraph, but got {got}")
        return self.forward(graph)

    def structure(self, graph: DGLGraph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sizes = graph.batch_num_nodes().long()  # set_batch_num_nodes may have stored int32
        return sizes, torch.repeat_interleave(sizes), *_edges(graph)

    def keep_nodes(self, graph: DGLGraph, mask: Tensor) -> DGLGraph:
        # dgl.remove_nodes would return a batch, but it fails for some graphs that are not a batch,
        # and it loses features that the user has called "_ID", because DGL uses this name itself.
        view = dgl.node_subgraph(graph, mask, store_ids=False)
        return _set_batch(view, torch.repeat_interleave(graph.batch_num_nodes())[mask], graph)

    def keep_edges(self, graph: DGLGraph, mask: Tensor) -> DGLGraph:
        coo = graph.formats("coo")  # DGL selects the edges of no other format
        view = dgl.edge_subgraph(coo, mask, relabel_nodes=False, store_ids=False)
        return _set_batch(view, torch.repeat_interleave(graph.batch_num_nodes()), graph)

    def replace_edges(self, graph: DGLGraph, source: Tensor, target: Tensor) -> DGLGraph:
        # dgl.AddEdge is no alternative: it adds edges between different graphs of the batch, and
        # returns a graph that is no longer a batch.
        sizes = {graph.ntypes[0]: graph.num_nodes()}
        ends = {graph.canonical_etypes[0]: (source, target)}
        view = dgl.heterograph(ends, sizes, idtype=graph.idtype)
        view.ndata.update(graph.ndata)
        view.edata.update(graph.edata)
        view.set_batch_num_nodes(graph.batch_num_nodes())
        view.set_batch_num_edges(graph.batch_num_edges())
        return view

    def replace_features(self, graph: DGLGraph, function: Callable[[Tensor], Tensor]) -> DGLGraph:
        if self.feat_name not in graph.ndata:
            got = sorted(graph.ndata)
            raise ValueError(f"graph must have the node feature {self.feat_name!r}, but has {got}")
        view = graph.clone()
        view.ndata[self.feat_name] = function(view.ndata[self.feat_name])
        return view


class NodeDrop(_augmentations.NodeDrop, _Transform): ...


class Subgraph(_augmentations.Subgraph, _Transform): ...


class EdgeDrop(_augmentations.EdgeDrop, _Transform):
    """
    Examples:
        >>> view = EdgeDrop(p=1.0)(dgl.graph(([0, 1], [1, 2])))
        >>> view.num_nodes(), view.num_edges()
        (3, 0)

    """


class EdgePerturb(_augmentations.EdgePerturb, _Transform): ...


class AttributeMask(_augmentations.AttributeMask, _Transform):
    """Masks each node with probability ``p``: all values of its feature become ``fill_value``.

    ``feat_name`` is the name of the feature in ``graph.ndata``. If the features are categories,
    ``fill_value`` may be the number of a mask token.
    """

    def __init__(self, p: float = 0.2, fill_value: float = 0.0, feat_name: str = "feat") -> None:
        super().__init__(p, fill_value)
        self.feat_name = feat_name


class FeatureMask(_augmentations.FeatureMask, _Transform):
    """Masks each column of a feature with probability ``p``: it becomes 0 for all nodes.

    ``feat_name`` is the name of the feature in ``graph.ndata``. All graphs of a batch lose the same
    columns, as in GRACE, BGRL and GCA with uniform probabilities.

    Examples:
        >>> graph = dgl.graph(([0, 1], [1, 2]))
        >>> graph.ndata["atom"] = torch.ones(3, 4)
        >>> FeatureMask(p=1.0, feat_name="atom")(graph).ndata["atom"].any()
        tensor(False)

    """

    def __init__(self, p: float = 0.2, feat_name: str = "feat") -> None:
        super().__init__(p)
        self.feat_name = feat_name


class RandomChoice(_augmentations.RandomChoice, _Transform): ...


def _set_batch(view: DGLGraph, owner: Tensor, graph: DGLGraph) -> DGLGraph:
    """Make the view, whose nodes belong to the graphs ``owner`` ``[V]``, a batch like ``graph``."""
    view.set_batch_num_nodes(owner.bincount(minlength=graph.batch_size))
    view.set_batch_num_edges(owner[_edges(view)[0]].bincount(minlength=graph.batch_size))
    return view


def _edges(graph: DGLGraph) -> tuple[Tensor, Tensor]:
    """Return the end nodes of the edges, ``[E]`` each, in the order of the edge features."""
    # Only the COO format is certain to return the edges in this order.
    source, target = graph.formats("coo").edges(order="eid")
    return source.long(), target.long()
