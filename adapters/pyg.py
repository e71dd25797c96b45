"""Augmentations of PyTorch Geometric batches, and a module that computes the loss of a batch.

An augmentation returns a view of the whole batch and leaves the batch itself unchanged. Graph i of
the view is always made from graph i of the batch, because a graph that has nodes keeps at least one
of them. Attributes stay with their nodes and edges. If all graphs have as many edges as nodes, the
length of an attribute does not tell whether it belongs to nodes or edges. Its name then decides: an
attribute with "edge" in its name belongs to the edges, any other attribute to the nodes.

To find out which nodes a view has kept, number the nodes of the batch first:
``batch.node_id = torch.arange(batch.num_nodes)``. The mask of the nodes of view 1 that view 2 has
kept as well is then ``torch.isin(view1.node_id, view2.node_id)``.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    from torch_geometric.data import Data
    from torch_geometric.transforms import BaseTransform
    from torch_geometric.utils import mask_feature
except ImportError as error:
    raise ImportError(
        f"pgcl_losses.adapters.pyg needs torch_geometric ({error}): "
        "pip install 'torch-geometric>=2.8', or in a checkout of pgcl-losses: pip install '.[pyg]'"
    ) from error

from ._draws import draw_connected, draw_edges, draw_nodes
from ._model import POSITION, Choice, RandomDrop, RandomFraction, Views, advice, check_fill_value
from ._pyg_batch import is_batch, keep_nodes, structure

__all__ = [
    "AttributeMask",
    "ContrastiveModel",
    "EdgePerturb",
    "NodeDrop",
    "RandomChoice",
    "Subgraph",
]

# The names of arguments that an encoder may have: attributes of the view, and its number of graphs.
_TENSORS = ("x", "edge_index", "edge_attr", "edge_weight", "batch")
_COUNTS = ("num_graphs", "batch_size", "size")

_CONSTANT = "torch_geometric.transforms.Constant() gives each node a feature"


class NodeDrop(RandomDrop, BaseTransform):
    """Drops each node, together with its edges, with probability ``p``, which is below 1.

    If a graph would lose all its nodes, it keeps one of them, chosen at random.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from pgcl_losses.adapters.pyg import NodeDrop
        >>> path = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> view = NodeDrop(p=0.9)(Batch.from_data_list([path, path]))
        >>> view.num_graphs, bool((view.ptr.diff() >= 1).all())
        (2, True)

    """

    def forward(self, data: Data) -> Data:
        ptr, graph = structure(data)
        return keep_nodes(data, draw_nodes(ptr, graph, self.p), ptr)


class Subgraph(RandomDrop, BaseTransform):
    """Keeps a random connected subgraph of each graph, and drops the other nodes.

    As in GraphCL, the subgraph starts from a random node and grows along the edges, by one random
    neighbour at a time. It drops a fraction ``p`` of the nodes, below 1, and rounds their number
    down. The growth ends early when no neighbour is left, so a graph of several components may lose
    more nodes.
    """

    def forward(self, data: Data) -> Data:
        ptr, graph = structure(data)
        source, target = data.edge_index
        return keep_nodes(data, draw_connected(source, target, ptr, graph, self.p), ptr)


class EdgePerturb(RandomFraction, BaseTransform):
    """Replaces each edge, with probability ``p``, by a random edge in the same graph.

    The new edge joins two different nodes, chosen at random, which may already be neighbours. It
    takes over the attributes of the edge that it replaces. Edges between the same two nodes move
    together, each in its direction, so an undirected graph stays undirected. Self-loops stay.
    """

    def forward(self, data: Data) -> Data:
        ptr, graph = structure(data)
        source, target = data.edge_index
        data.edge_index = torch.stack(draw_edges(source, target, ptr, graph, self.p))
        return data


class AttributeMask(RandomFraction, BaseTransform):
    """Masks each node with probability ``p``: all its features in ``x`` become ``fill_value``.

    If the features are categories, ``fill_value`` may be the number of a mask token.
    """

    def __init__(self, p: float = 0.2, fill_value: float = 0.0) -> None:
        super().__init__(p)
        self.fill_value = fill_value

    def forward(self, data: Data) -> Data:
        is_batch(data)
        if data.x is None:
            raise ValueError(f"data must have node features x, but is {data}: {_CONSTANT}")
        check_fill_value(self.fill_value, "x", data.x.dtype)
        features = data.x.unsqueeze(-1).flatten(1)  # [V, F]
        features, _ = mask_feature(features, self.p, mode="row", fill_value=self.fill_value)
        data.x = features.view_as(data.x)
        return data


class RandomChoice(Choice, BaseTransform):
    """Applies one of ``transforms`` to a batch; each call draws one at random.

    This class is not a ``torch.nn.Module``. If a transform has parameters, ``model.parameters()``
    does not contain them.
    """

    def forward(self, data: Data) -> Data:
        return self.draw()(data)


class ContrastiveModel(Views):
    """Combines an encoder, augmentations and a loss into one module: ``Batch -> loss``.

    The signature of the encoder's ``forward`` decides what the encoder is called with. If it has an
    argument ``edge_index``, the encoder receives tensors by name: ``x``, ``edge_index``,
    ``edge_attr``, ``edge_weight`` and ``batch``, as far as the signature names them, and the
    number of graphs as ``num_graphs``, ``batch_size`` or ``size``. An encoder with any other
    signature is called with the view itself.

    The encoder returns one embedding for each graph or one for each node. For embeddings of graphs,
    pool with ``size=num_graphs`` if a graph may have no nodes; on a GPU this also saves a
    synchronisation. Embeddings of nodes need augmentations that keep all nodes
    (:class:`EdgePerturb`, :class:`AttributeMask`). The batch may then be a plain ``Data``.

    Args:
        encoder: a module with one of the signatures above.
        augment1, augment2: callables that make one view each from a batch, and leave the batch
            unchanged. ``torch.nn.Identity()`` stands for no augmentation.
        loss: a loss that is called with the embeddings of all views, such as
            :class:`pgcl_losses.PGCLLoss`. The model contains it as a submodule, so
            ``model.parameters()`` contains its parameters.
        further: augmentations that make a third view and more.

    Shape:
        - batch: G graphs with V nodes together, or one plain ``Data`` with V nodes
        - embeddings of each view: ``[G, D]`` or ``[V, D]``
        - output: the same as the output of the loss

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from torch_geometric.nn import GCNConv, global_mean_pool
        >>> from pgcl_losses import PGCLLoss
        >>> from pgcl_losses.adapters.pyg import AttributeMask, ContrastiveModel, NodeDrop
        >>> class Encoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv = GCNConv(3, 16)
        ...     def forward(self, x, edge_index, batch):
        ...         return global_mean_pool(self.conv(x, edge_index), batch)
        >>> path = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> model = ContrastiveModel(Encoder(), NodeDrop(), AttributeMask(), PGCLLoss(dim=16))
        >>> model(Batch.from_data_list([path] * 8)).backward()

    """

    pooling = "global_add_pool(x, batch)"

    def __init__(
        self,
        encoder: nn.Module,
        augment1: Callable[[Data], Data],
        augment2: Callable[[Data], Data],
        loss: Callable[..., Tensor],
        *further: Callable[[Data], Data],
    ) -> None:
        super().__init__(encoder, augment1, augment2, *further, loss=loss)
        self._names = _argument_names(encoder)

    def _contents(self, name: str, batch: Any) -> tuple[int, Tensor, Tensor | None]:
        if not is_batch(batch, name):
            return 1, torch.zeros(batch.num_nodes, dtype=torch.long), batch.get(POSITION)
        return len(batch.ptr) - 1, batch.batch, batch.get(POSITION)

    def _numbered(self, batch: Any) -> Any:
        is_batch(batch, "batch")
        batch, device = copy.copy(batch), getattr(batch.edge_index, "device", None)
        batch[POSITION] = torch.arange(batch.num_nodes, device=device)
        if hasattr(batch, "_slice_dict"):  # to_data_list() separates the graphs by these entries
            batch._slice_dict = {**batch._slice_dict, POSITION: batch.ptr.cpu()}
            batch._inc_dict = {**batch._inc_dict, POSITION: torch.zeros(len(batch.ptr) - 1)}
        return batch

    def _encode(self, view: Data) -> Any:
        counts = dict.fromkeys(_COUNTS, self._contents("view", view)[0])
        values = {name: counts.get(name, getattr(view, name, None)) for name in self._names}
        with advice("NoneType", f"the batch has no x: {_CONSTANT}" if view.x is None else ""):
            return self.encoder(**values) if values else self.encoder(view)

    def _check_one_graph(self, view: Data) -> None:
        if not is_batch(view):
            raise ValueError(
                "encoder returned 1 embedding for one plain Data, which needs one for each node: "
                "batch graphs by a DataLoader"
            )

    def _why_other_count(self, count: int, num_graphs: int) -> str:
        if count >= num_graphs:
            return ""
        return "; pool with size=batch.num_graphs if graphs at the end have no nodes"


def _argument_names(encoder: Callable[..., Tensor]) -> list[str]:
    """Return the names of the arguments that the encoder receives.

    The list is empty if the encoder receives the view itself. Raise if the encoder needs arguments
    that a batch does not have.
    """
    parameters = inspect.signature(getattr(encoder, "forward", encoder)).parameters.values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]
    names = [p.name for p in parameters if p.name in _TENSORS + _COUNTS]
    if all(p.kind in open_ended for p in parameters):
        raise TypeError(
            "encoder.forward has a signature that does not name its arguments: if torch.compile, "
            "DistributedDataParallel or another wrapper is around the encoder, put it around the "
            "ContrastiveModel instead"
        )
    if "batch" not in names:
        # Without `batch`, `size` is the argument of a convolution that holds the numbers of source
        # and target nodes in a bipartite graph, and not the number of graphs.
        names = [name for name in names if name != "size"]
    if "edge_index" not in names or (len(needed) == 1 and needed[0] not in names):
        names = []
    if len(needed) > 1 and not set(needed) <= set(names):
        renames = [
            f"{name} to {full}"
            for name in needed
            for full in ("edge_index", "batch")
            if full.startswith(name) and full not in needed
        ]
        hint = f": rename {', '.join(renames)}" if renames else ""
        raise TypeError(
            f"encoder.forward takes {', '.join(needed)}: it must take one Batch and nothing else, "
            f"or edge_index and others of {', '.join(_TENSORS + _COUNTS)}, by these names{hint}"
        )
    return names
