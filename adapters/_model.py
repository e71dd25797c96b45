"""Base classes of augmentations and models, the same for every framework."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import nextafter
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import _checks as check
from pgcl_losses._module import LossModule

POSITION = "pgcl_node_position"  # the attribute that says of a view which nodes it has kept
_MASKS = "a loss of PyGCL needs the masks of its contrast models: give pgcl_losses.InfoNCE() here"


class RandomFraction:
    """An augmentation of a fraction ``p`` of the nodes or edges."""

    check_p = staticmethod(check.fraction)

    def __init__(self, p: float = 0.2) -> None:
        self.p = self.check_p("p", p)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


class RandomDrop(RandomFraction):
    """Nodes are dropped: at ``p`` = 1 views would have nothing left to compare."""

    expected = "a number of at least 0 and below 1, the fraction of nodes to drop"
    check_p = staticmethod(partial(check.number, expected=expected, highest=nextafter(1, 0)))


def check_fill_value(value: float, name: str, dtype: torch.dtype) -> None:
    if not torch.can_cast(torch.float32, dtype) and value % 1:
        raise ValueError(
            f"fill_value must be a whole number where {name} is {dtype}, but got {value}"
        )


class Choice:
    """One of several augmentations, drawn anew for every call."""

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
        return self.transforms[int(torch.randint(len(self.transforms), ()))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms})"


def _check_callable(name: str, value: Any) -> None:
    expected = "a callable that makes a view of a batch (torch.nn.Identity() for no augmentation)"
    expected = {"encoder": "a module", "loss": "a callable of embeddings"}.get(name, expected)
    is_another = isinstance(value, LossModule) and name != "loss"
    is_another |= isinstance(value, (RandomFraction, Choice)) and name == "encoder"
    hint = ""
    if isinstance(value, type):
        hint = f": give an instance, {value.__name__}(...)"
    elif is_another:
        hint = ": ContrastiveModel takes encoder, augment1, augment2 and loss, in this order"
    elif callable(value):
        return
    raise TypeError(f"{name} must be {expected}, but got {check.shown(value)}{hint}")


@contextmanager
def advice(word: str, text: str) -> Iterator[None]:
    """Adds ``text`` to an error about a missing value, known by a word of its message."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if not text or word not in str(error):
            raise
        raise TypeError(f"{error}: {text}") from error


class Views(nn.Module):
    """From a batch to the embeddings of its views, and to their loss.

    The model of a framework says which graphs and nodes a batch has, how to encode a view, and what
    may be the cause of an error.
    """

    encoder: Callable[..., Any]
    loss: Callable[..., Tensor]
    pooling: str  # the last step of an encoder of graphs
    why_other_graphs = ""

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
        if others or named:
            raise TypeError(
                "ContrastiveModel is called with one batch alone, model(batch), and calls the "
                f"encoder itself, but got {1 + len(others) + len(named)} arguments"
            )
        embeddings = self.embeddings(batch)
        with advice("NoneType", _MASKS if hasattr(self.loss, "compute") else ""):
            return self.loss(*embeddings)

    def embeddings(self, batch: Any) -> tuple[Tensor, ...]:
        """The embeddings of every view, as the loss gets them."""
        batch = self._numbered(batch)
        num_graphs, graph, _ = self._contents("batch", batch)
        views = ((name, getattr(self, name)(batch)) for name in self._augments)
        return tuple([self._embed(name, view, num_graphs, graph) for name, view in views])

    def _embed(self, name: str, view: Any, num_graphs: int, graph: Tensor) -> Tensor:
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
                "samples need views that keep all nodes in their order, as those of EdgePerturb "
                "and AttributeMask do"
            )
        raise ValueError(
            f"encoder returned {len(z)} embeddings for the view of {name}, which has {num_graphs} "
            f"graphs and {len(view_graph)} nodes, while the batch has {len(graph)} nodes{reason}"
        )

    def _numbered(self, batch: Any) -> Any:
        """A copy whose nodes carry their ``POSITION`` ``[V]``; an error if it is no batch."""
        raise NotImplementedError

    def _contents(self, name: str, batch: Any) -> tuple[int, Tensor, Tensor | None]:
        """The number of graphs, each node's graph ``[V]`` (int64), and ``POSITION`` if nodes carry
        it; an error if it is no batch."""
        raise NotImplementedError

    def _encode(self, view: Any) -> Any:
        raise NotImplementedError

    def _check_one_graph(self, view: Any) -> None:
        """Whether a single embedding can be that of one graph."""
        raise NotImplementedError

    def _why_other_count(self, count: int, num_graphs: int) -> str:
        return ""


def _check_order(name: str, num_graphs: int, graph: Tensor, origin: Tensor) -> None:
    """Whether each graph has a node that comes from it ``[V]``; nodes of others may be added."""
    is_own = (origin == graph).long()
    has_own = graph.new_ones(num_graphs)  # [G]; without nodes it stays 1
    has_own.scatter_reduce_(0, graph, is_own, "amax", include_self=False)
    if not has_own.all():
        raise ValueError(
            f"graph {int(has_own.argmin())} of the view of {name} has only nodes of other graphs: "
            "row i of every view must be graph i"
        )
