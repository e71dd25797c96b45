"""Base classes of the augmentations and of ContrastiveModel, which all frameworks share."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import nextafter
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import _checks as check
from pgcl_losses._module import LossModule

# ContrastiveModel stores the number of each node of a batch as this node attribute. Augmentations
# carry it along, so a view says which nodes of the batch it has kept.
POSITION = "pgcl_node_position"
_MASKS = "a loss of PyGCL needs the masks of its contrast models: give pgcl_losses.InfoNCE() here"


class RandomFraction:
    """Base class of augmentations that change a fraction ``p`` of the nodes or edges."""

    check_p = staticmethod(check.fraction)

    def __init__(self, p: float = 0.2) -> None:
        self.p = self.check_p("p", p)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


class RandomDrop(RandomFraction):
    """Base class of augmentations that drop a fraction ``p`` of the nodes.

    ``p`` must be below 1: a view whose graphs have lost all nodes has nothing left to compare.
    """

    expected = "a number of at least 0 and below 1, the fraction of nodes to drop"
    check_p = staticmethod(partial(check.number, expected=expected, highest=nextafter(1, 0)))


def check_fill_value(value: float, name: str, dtype: torch.dtype) -> None:
    """Raise if ``value`` has a fractional part that the integer features ``name`` cannot hold."""
    if not torch.can_cast(torch.float32, dtype) and value % 1:
        raise ValueError(
            f"fill_value must be a whole number where {name} is {dtype}, but got {value}"
        )


class Choice:
    """Base class of RandomChoice: it holds several augmentations and draws one for each call."""

    def __init__(self, transforms: Iterable[Callable[[Any], Any]] = (), *others: Any) -> None:
        if others or not isinstance(transforms, Iterable):
            raise TypeError(
                "transforms must be one list, as in RandomChoice([NodeDrop(), EdgePerturb()]), "
                f"but got {', '.join(map(check.shown, (transforms, *others)))}"
            )
        self.transforms = list(transforms)
        if not self.transforms:
            raise ValueError("transforms must hold at least one transform, but it is empty")
        for index, transform in enumerate(self.transforms):
            _check_callable(f"transforms[{index}]", transform)

    def draw(self) -> Callable[[Any], Any]:
        """Return one of the augmentations, each with the same probability."""
        return self.transforms[int(torch.randint(len(self.transforms), ()))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms})"


def _check_callable(name: str, value: Any) -> None:
    """Raise unless ``value``, the argument ``name``, can be called as this argument will be.

    Two mistakes are common and get a hint of their own: a class in place of an instance, and the
    arguments of ContrastiveModel in another order.
    """
    expected = "a callable that makes a view of a batch (torch.nn.Identity() for no augmentation)"
    expected = {"encoder": "a module", "loss": "a callable of embeddings"}.get(name, expected)
    is_misplaced = isinstance(value, LossModule) and name != "loss"
    is_misplaced |= isinstance(value, (RandomFraction, Choice)) and name == "encoder"
    hint = ""
    if isinstance(value, type):
        hint = f": give an instance, {value.__name__}(...)"
    elif is_misplaced:
        hint = ": ContrastiveModel takes encoder, augment1, augment2 and loss, in this order"
    elif callable(value):
        return
    raise TypeError(f"{name} must be {expected}, but got {check.shown(value)}{hint}")


@contextmanager
def advice(word: str, text: str) -> Iterator[None]:
    """Add ``text`` to an error that the code in this context raises because a value is missing.

    ``word`` is a part of such an error's message. Errors without it are raised unchanged, and so is
    every error if ``text`` is empty.
    """
    try:
        yield
    except (AttributeError, TypeError) as error:
        if not text or word not in str(error):
            raise
        raise TypeError(f"{error}: {text}") from error


class Views(nn.Module):
    """Base class of ContrastiveModel: it augments a batch, encodes the views and calls the loss.

    The subclass for a framework says which graphs and nodes a batch has, how the encoder is called,
    and what the likely cause of an error is.
    """

    encoder: Callable[..., Any]
    loss: Callable[..., Tensor]
    pooling: str  # for messages: the call that pools embeddings of nodes into embeddings of graphs
    why_other_graphs = ""  # for messages: why a view may have fewer or more graphs than the batch

    def __init__(
        self, encoder: nn.Module, *augments: Callable[[Any], Any], loss: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self._augments = [f"augment{number}" for number in range(1, len(augments) + 1)]
        names = ["encoder", *self._augments, "loss"]
        for name, part in zip(names, (encoder, *augments, loss), strict=True):
            _check_callable(name, part)
            setattr(self, name, part)

    def forward(self, batch: Any = None, *others: Any, **named: Any) -> Tensor:
        """Return the loss of the views of a batch.

        The method accepts further arguments only in order to explain how the model is called.
        """
        if others or named:
            raise TypeError(
                "ContrastiveModel is called with one batch alone, model(batch), and calls the "
                f"encoder itself, but got {1 + len(others) + len(named)} arguments"
            )
        embeddings = self.embeddings(batch)
        with advice("NoneType", _MASKS if hasattr(self.loss, "compute") else ""):
            return self.loss(*embeddings)

    def embeddings(self, batch: Any) -> tuple[Tensor, ...]:
        """Augment and encode a batch; return the embeddings of each view, ``[G, D]`` or ``[V, D]``.

        The loss is called with the same embeddings.
        """
        batch = self._numbered(batch)
        num_graphs, graph, _ = self._contents("batch", batch)
        views = ((name, getattr(self, name)(batch)) for name in self._augments)
        return tuple([self._embed(name, view, num_graphs, graph) for name, view in views])

    def _embed(self, name: str, view: Any, num_graphs: int, graph: Tensor) -> Tensor:
        """Encode the view of the augmentation ``name``, and check that its rows match the batch.

        Row i must be graph i or node i of the batch, which has ``num_graphs`` graphs and whose
        nodes belong to ``graph`` ``[V]``.
        """
        view_graphs, view_graph, position = self._contents(f"what {name} returns", view)
        if view_graphs != num_graphs:
            raise ValueError(
                f"{name} made {view_graphs} graphs of {num_graphs}: row i of every view must be "
                f"graph i{self.why_other_graphs}"
            )
        if position is not None and num_graphs > 1:
            _check_order(name, num_graphs, view_graph, graph.to(view_graph.device)[position])
        z = self._encode(view)
        if not isinstance(z, Tensor) or z.dim() != 2:
            got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f"encoder must return a Tensor of shape [graphs, D] or [nodes, D], but got {got}"
            )
        # Embeddings of nodes can be compared only if the view has all nodes in their order. A view
        # whose nodes carry no position is taken to have them in the order of the batch.
        position = torch.arange(len(view_graph)) if position is None else position
        if len(z) == len(graph) and torch.equal(position.cpu(), torch.arange(len(graph))):
            return z
        if len(z) == num_graphs:
            if num_graphs == 1:
                self._check_one_graph(view)
            return z
        reason = self._why_other_count(len(z), num_graphs)
        if len(z) == len(view_graph) and not reason:
            reason = (
                f"; for embeddings of graphs, the encoder ends with {self.pooling}; nodes as "
                "samples need views that keep all nodes in their order, such as the views of "
                "EdgePerturb and AttributeMask"
            )
        raise ValueError(
            f"encoder returned {len(z)} embeddings for the view of {name}, which has {num_graphs} "
            f"graphs and {len(view_graph)} nodes, while the batch has {len(graph)} nodes{reason}"
        )

    def _numbered(self, batch: Any) -> Any:
        """Return a copy of the batch whose nodes carry their numbers ``[V]`` as ``POSITION``.

        Raise if ``batch`` is not a batch of the framework.
        """
        raise NotImplementedError

    def _contents(self, name: str, batch: Any) -> tuple[int, Tensor, Tensor | None]:
        """Return the number of graphs, each node's graph ``[V]`` (int64) and position ``[V]``.

        The position is None if an augmentation has built a new batch whose nodes do not carry it.
        Raise if ``batch``, which the message calls ``name``, is not a batch of the framework.
        """
        raise NotImplementedError

    def _encode(self, view: Any) -> Any:
        """Call the encoder on a view, and return what the encoder returns."""
        raise NotImplementedError

    def _check_one_graph(self, view: Any) -> None:
        """Raise or warn if a view of one graph, with one embedding, is probably a mistake."""
        raise NotImplementedError

    def _why_other_count(self, count: int, num_graphs: int) -> str:
        """Return the likely reason why an encoder returns ``count`` embeddings, or an empty string.

        The reason ends the message of the error.
        """
        return ""


def _check_order(name: str, num_graphs: int, graph: Tensor, origin: Tensor) -> None:
    """Raise unless every graph of a view has a node that comes from the same graph of the batch.

    ``graph`` ``[V]`` is the graph of each node in the view, and ``origin`` ``[V]`` the graph of the
    batch that the node comes from. One such node is enough: an augmentation may add nodes.
    """
    is_in_place = (origin == graph).long()
    has_node_in_place = graph.new_ones(num_graphs)  # [G]; stays 1 for a graph without nodes
    has_node_in_place.scatter_reduce_(0, graph, is_in_place, "amax", include_self=False)
    if not has_node_in_place.all():
        raise ValueError(
            f"graph {int(has_node_in_place.argmin())} of the view of {name} has only nodes of "
            "other graphs: row i of every view must be graph i"
        )
