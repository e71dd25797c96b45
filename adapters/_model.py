"""Base classes of augmentations and models, the same for every framework."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import _checks as check


class RandomFraction:
    """An augmentation of a fraction ``p`` of the nodes or edges."""

    def __init__(self, p: float = 0.2) -> None:
        self.p = check.fraction("p", p)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(p={self.p})"


def check_augment(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(
            f"{name} must be a callable that makes a view of a batch, but got {value!r} "
            f"({type(value).__name__}); for no augmentation give torch.nn.Identity()"
        )


class Choice:
    """One of several augmentations, drawn anew for every call."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)
        if not self.transforms:
            raise ValueError("transforms must hold at least one transform, but it is empty")
        for index, transform in enumerate(self.transforms):
            check_augment(f"transforms[{index}]", transform)

    def draw(self) -> Callable[[Any], Any]:
        return self.transforms[int(torch.randint(len(self.transforms), ()))]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms})"


class Views(nn.Module):
    """From a batch to the embeddings of its views, and to their loss.

    The model of a framework says which graphs and nodes a batch has, how to encode a view, and what
    may be the cause of an error.
    """

    def __init__(
        self,
        encoder: nn.Module,
        augment1: Callable[[Any], Any],
        augment2: Callable[[Any], Any],
        loss: Callable[..., Tensor],
        *further: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        for number, augment in enumerate((augment1, augment2, *further), 1):
            check_augment(f"augment{number}", augment)
        self.encoder = encoder
        self.augment1 = augment1
        self.augment2 = augment2
        self.loss = loss
        for number, augment in enumerate(further, 3):
            setattr(self, f"augment{number}", augment)
        self.num_views = 2 + len(further)

    def forward(self, batch: Any) -> Tensor:
        return self.loss(*self.embeddings(batch))

    def embeddings(self, batch: Any) -> tuple[Tensor, ...]:
        """The embeddings of every view, as the loss gets them."""
        batch = self._numbered(batch)
        contents = self._contents("batch", batch)
        names = [f"augment{number}" for number in range(1, self.num_views + 1)]
        return tuple([self._embed(name, getattr(self, name)(batch), *contents) for name in names])

    def _embed(self, name: str, view: Any, num_graphs: int, nodes: Tensor) -> Tensor:
        view_graphs, view_nodes = self._contents(f"what {name} returns", view)
        if view_graphs != num_graphs:
            raise ValueError(
                f"{name} made {view_graphs} graphs of {num_graphs}: row i of every view must be "
                f"graph i{self._why_other_graphs()}"
            )
        z = self._encode(view)
        if not isinstance(z, Tensor) or z.dim() != 2:
            got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f"encoder must return a Tensor of shape [graphs, D] or [nodes, D], but got {got}"
            )
        if len(z) == len(nodes) and torch.equal(view_nodes.cpu(), nodes.cpu()):
            return z
        if len(z) == num_graphs:
            if num_graphs == 1:
                self._check_one_graph(view)
            return z
        reason = self._why_other_count(len(z), num_graphs)
        if len(z) == len(view_nodes) and not reason:
            reason = (
                "; nodes as samples need views that keep all nodes in their order, as those of "
                "EdgePerturb and AttributeMask do"
            )
        raise ValueError(
            f"encoder returned {len(z)} embeddings for the view of {name}, which has {num_graphs} "
            f"graphs and {len(view_nodes)} nodes, while the batch has {len(nodes)} nodes{reason}"
        )

    def _numbered(self, batch: Any) -> Any:
        """A copy whose nodes carry ``pgcl_node_position`` ``[V]``; an error if it is no batch.

        Like every attribute of nodes, it says of a view which nodes it has kept.
        """
        raise NotImplementedError

    def _contents(self, name: str, batch: Any) -> tuple[int, Tensor]:
        """The number of graphs, and ``pgcl_node_position`` ``[V]``; an error if it is no batch."""
        raise NotImplementedError

    def _encode(self, view: Any) -> Any:
        raise NotImplementedError

    def _check_one_graph(self, view: Any) -> None:
        """Whether a single embedding can be that of one graph."""
        raise NotImplementedError

    def _why_other_graphs(self) -> str:
        return ""

    def _why_other_count(self, count: int, num_graphs: int) -> str:
        return ""
