"""The augmentations of batched graphs, as far as they do not depend on the framework.

The module of a framework completes each class by a subclass of :class:`Augmentation` that reads and
changes the batches of the framework. The random draws are in ``_draws.py``.
"""

import inspect
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ._draws import draw_connected, draw_edges, draw_nodes


class Augmentation:
    """Base class of augmentations that change a fraction ``p`` of the nodes or edges."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        doc = inspect.getdoc(cls) or ""  # an inherited one as well, which Sphinx would not show
        if doc.startswith("Examples:"):
            doc = f"{inspect.getdoc(cls.__mro__[1])}\n\n{doc}"
        cls.__doc__ = doc

    def __init__(self, p: float = 0.2) -> None:
        if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= p <= 1:
            raise ValueError(f"p must be a number from 0 to 1, but got {p!r:.60}")
        self.p: float = float(p)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"

    def structure(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sizes, graph, source and target of a batch, which ``_draws.py`` explains."""
        raise NotImplementedError

    def keep_nodes(self, batch: Any, mask: Tensor) -> Any:
        """Return a batch of the nodes of ``mask`` ``[V]`` and the edges between them."""
        raise NotImplementedError

    def keep_edges(self, batch: Any, mask: Tensor) -> Any:
        """Return a batch of all nodes and the edges of ``mask`` ``[E]``."""
        raise NotImplementedError

    def replace_edges(self, batch: Any, source: Tensor, target: Tensor) -> Any:
        """Return a batch whose edges have other end nodes ``[E]``, in the same graphs."""
        raise NotImplementedError

    def replace_features(self, batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
        """Return a batch whose node features ``[V, ...]`` are those that ``function`` returns."""
        raise NotImplementedError


class NodeDrop(Augmentation):
    """Drops each node, together with its edges, with probability ``p``.

    If a graph would lose all its nodes, it keeps one of them, chosen at random.
    """

    def forward(self, batch: Any) -> Any:
        sizes, graph, _, _ = self.structure(batch)
        return self.keep_nodes(batch, draw_nodes(sizes, graph, self.p))


class Subgraph(Augmentation):
    """Keeps a random connected subgraph of each graph, and drops the other nodes.

    As in GraphCL, the subgraph starts from a random node and grows along the edges, by one random
    neighbour at a time. It drops a fraction ``p`` of the nodes, rounds their number down, and keeps
    at least one node. The growth ends early when no neighbour is left, so a graph of several
    components may lose more nodes.
    """

    def forward(self, batch: Any) -> Any:
        return self.keep_nodes(batch, draw_connected(*self.structure(batch), self.p))


class EdgeDrop(Augmentation):
    """Drops each edge with probability ``p``, and keeps all nodes, as PyG's ``dropout_edge``.

    As in GRACE, BGRL and GCA with uniform probabilities, each direction of an undirected edge is
    drawn by itself, so a view may keep only one of the two. A graph may lose all its edges.
    """

    def forward(self, batch: Any) -> Any:
        _, _, source, _ = self.structure(batch)
        return self.keep_edges(batch, torch.rand(len(source), device=source.device) >= self.p)


class EdgePerturb(Augmentation):
    """Replaces each edge, with probability ``p``, by a random edge in the same graph.

    The new edge joins two different nodes, chosen at random, which may already be neighbours. It
    takes over the features of the edge that it replaces. Edges between the same two nodes move
    together, each in its direction, so an undirected graph stays undirected. Self-loops stay.
    """

    def forward(self, batch: Any) -> Any:
        return self.replace_edges(batch, *draw_edges(*self.structure(batch), self.p))


class AttributeMask(Augmentation):
    """Masks each node with probability ``p``: all its features become ``fill_value``.

    If the features are categories, ``fill_value`` may be the number of a mask token.
    """

    def __init__(self, p: float = 0.2, fill_value: float = 0.0) -> None:
        super().__init__(p)
        self.fill_value = fill_value

    def forward(self, batch: Any) -> Any:
        return self.replace_features(batch, self.mask)

    def mask(self, features: Tensor) -> Tensor:
        """Return features ``[V, ...]`` of which random rows are masked."""
        if not features.is_floating_point() and self.fill_value % 1:
            raise ValueError(
                f"fill_value must be an integer for features of {features.dtype}, but got "
                f"{self.fill_value}"
            )
        is_masked = torch.rand(len(features), device=features.device) < self.p
        return features.masked_fill(
            is_masked.view(-1, *[1] * (features.dim() - 1)), self.fill_value
        )


class FeatureMask(Augmentation):
    """Masks each column of the node features with probability ``p``, as PyG's ``mask_feature``.

    A masked column is 0 for all nodes, and all graphs of a batch lose the same columns, as in
    GRACE, BGRL and GCA with uniform probabilities.
    """

    def forward(self, batch: Any) -> Any:
        return self.replace_features(batch, self.mask)

    def mask(self, features: Tensor) -> Tensor:
        """Return features ``[V, ...]`` of which random columns ``[...]`` are 0."""
        is_masked = torch.rand(features.shape[1:], device=features.device) < self.p
        return features.masked_fill(is_masked, 0)


class RandomChoice(Augmentation):
    """Applies one of ``transforms`` to a batch; each call draws one at random.

    This class is not a ``torch.nn.Module``. If a transform has parameters, ``model.parameters()``
    does not contain them.
    """

    def __init__(self, transforms: Iterable[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)
        if not self.transforms or not all(map(callable, self.transforms)):
            raise ValueError(
                f"transforms must be a list of at least one callable, but got {self.transforms}"
            )

    def forward(self, batch: Any) -> Any:
        return self.transforms[int(torch.randint(len(self.transforms), ()))](batch)
