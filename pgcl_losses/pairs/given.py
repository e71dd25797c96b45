"""What a loss may be called with besides views or sets: which pairs count, and how much."""

from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.modes import can_be_read

Labels = Tensor | Sequence[Tensor]  # one tensor for all sets, or one for each set


class Given(NamedTuple):
    """The arguments of a loss by name, as :class:`InfoNCE` describes them."""

    labels: Labels | None = None  # [N] for each set
    positives: Tensor | None = None  # [2, P] pairs (query, key) of positions in all sets
    positive_weights: Tensor | None = None  # [P]
    metadata: Labels | None = None  # [N, ...] for each set
    negative_pairs: Tensor | None = None  # [2, P]

    def check(
        self, sets: Sequence[Tensor], negatives: str, queries: str, has_score_mod: bool
    ) -> dict[str, object]:
        """Check the arguments, which belong to sets ``[N_a, D]``; return the claims about them.

        ``negatives``, ``queries``, ``has_score_mod``: options of the loss.
        """
        if self.labels is not None:
            for of_set in of_sets("labels", self.labels, sets, "[N]"):
                check_labels(*of_set)
        if self.positives is not None:
            _check_pairs("positives", self.positives, sets, queries)
        self._check_weights(sets)
        if self.positives is not None and negatives == "cross":
            self._check_sets_of_positives(sets)
        if self.negative_pairs is not None:
            _check_pairs("negative_pairs", self.negative_pairs, sets, queries)
        weights = self.positive_weights
        return {
            "labels": self.labels is not None,
            "positives": self.positives is not None,
            "learned positive_weights": None if weights is None else weights.requires_grad,
            "metadata": self._check_metadata(sets, has_score_mod),
            "negative_pairs": self.negative_pairs is not None,
        }

    def _check_weights(self, sets: Sequence[Tensor]) -> None:
        value, weights = self.positives, self.positive_weights
        if weights is None:
            return
        if value is None:
            raise TypeError("positive_weights need positives=, pairs [2, P] such as an edge_index")
        if (
            not isinstance(weights, Tensor)
            or weights.shape != value.shape[1:]
            or weights.is_complex()
        ):
            expected = f"a real Tensor of shape [{value.shape[1]}], one for each pair of positives"
            raise TypeError(f"positive_weights must be {expected}, but got {check.shown(weights)}")
        check.device("positive_weights", weights, "z1", sets[0])
        if can_be_read(weights.detach()):
            # In float32, smaller weights lose digits and their inverses overflow; sums of larger
            # weights overflow.
            are_right = (weights == 0) | ((weights >= 1e-30) & (weights <= 1e20))
            for wrong in weights.detach()[~are_right].tolist():
                expected = "0 or from 1e-30 to 1e20"
                raise ValueError(f"positive_weights must be {expected}, but got {wrong}")

    def _check_sets_of_positives(self, sets: Sequence[Tensor]) -> None:
        """Check that no query has a positive in its own set, as its keys are in other sets."""
        assert self.positives is not None
        if not can_be_read(self.positives):
            return  # such a pair does not count there
        ends = self.positives.new_tensor([len(z) for z in sets]).cumsum(0)
        query, key = torch.bucketize(self.positives, ends, right=True)
        is_wrong = query == key
        if self.positive_weights is not None and can_be_read(self.positive_weights.detach()):
            is_wrong &= self.positive_weights.detach() != 0
        for pair in self.positives.T[is_wrong]:
            raise ValueError(
                f"positives has the pair {pair.tolist()} within one set, but with "
                "negatives='cross' the keys are in other sets. Positions count through all sets: "
                f"add len(z1) = {len(sets[0])} to the second row for keys in z2"
            )

    def _check_metadata(self, sets: Sequence[Tensor], has_score_mod: bool) -> list[object]:
        """Check the metadata; return their dtype and shape, or an empty list without any."""
        kinds: list[object] = []
        if self.metadata is None:
            return kinds
        if not has_score_mod:
            raise ValueError("metadata are for score_mod, but score_mod is None: give the loss one")
        for name, x, z_name, z in of_sets("metadata", self.metadata, sets, "[N, ...]"):
            if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested):
                kind = "a nested Tensor" if x.is_nested else f"layout {x.layout}"
                raise TypeError(f"{name} must be a dense Tensor, but got {kind}")
            if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != len(z):
                expected = f"a Tensor of shape [{len(z)}, ...], a row for each row of {z_name}"
                raise ValueError(f"{name} must be {expected}, but got {check.shown(x)}")
            if x.requires_grad:
                raise ValueError(
                    f"{name} requires grad, but metadata are constants: detach() it, or let "
                    "score_mod capture what learns, with engine='dense'"
                )
            check.device(name, x, z_name, z)
            kinds.append(f"{x.dtype}{[*x.shape[1:]]}")
            if kinds[-1] != kinds[0]:
                kind = f"{kinds[-1]} for each embedding"
                raise ValueError(f"{name} is {kind}, but metadata[0] is {kinds[0]}")
        return kinds[:1]


def of_sets(
    name: str, value: Any, sets: Sequence[Tensor], shape: str
) -> Iterator[tuple[str, Any, str, Tensor]]:
    """Pair what is given for each set, or one tensor for all sets, with the sets, all with names.

    ``shape``: what the message shows as the shape of each tensor.
    """
    given = [value] * len(sets) if isinstance(value, Tensor) else value
    if not isinstance(given, Sequence) or [x for x in given if isinstance(x, (Real, str))]:
        expected = f"a Tensor of shape {shape}, or a sequence of Tensors with one for each set"
        raise TypeError(f"{name} must be {expected}, but got {check.shown(value)}")
    if len(given) != len(sets):
        raise ValueError(f"{name} must be {len(sets)} Tensors, one per set, but got {len(given)}")
    for a, (each, z) in enumerate(zip(given, sets, strict=True)):
        yield name if isinstance(value, Tensor) else f"{name}[{a}]", each, f"z{a + 1}", z


def check_labels(name: str, value: Any, z_name: str, z: Tensor) -> None:
    """Check the labels ``[N]`` of embeddings ``[N, D]``."""
    check.clusters(name, value, z_name, z)
    if can_be_read(value) and bool(is_unknown(value).any()):
        raise ValueError(
            f"{name} must not hold -1 or -100: give each embedding whose class is unknown a "
            "label of its own, such as torch.where(labels >= 0, labels, num_classes + ids)"
        )


def is_unknown(labels: Tensor) -> Tensor:
    """Which labels other libraries take for an unknown class."""
    return (labels == -1) | (labels == -100)


def _check_pairs(name: str, value: Any, sets: Sequence[Tensor], queries: str) -> None:
    """Check listed pairs ``[2, P]`` of queries and keys.

    Both are positions in the concatenated sets. With ``queries="first"`` the queries must lie in
    the first set. Positions are read on a CPU only.
    """
    check.integers(name, value, "[2, P]", "z1", sets[0])
    if value.dim() != 2 or value.shape[0] != 2:
        raise ValueError(f"{name} must have shape [2, P], but got {tuple(value.shape)}")
    if can_be_read(value):
        count = sum(len(z) for z in sets)
        ends = value.new_tensor([[len(sets[0]) if queries == "first" else count], [count]])
        wrong = (value < 0) | (value >= ends) | (value[0] == value[1])
        for pair in value.T[wrong.any(0)]:
            raise ValueError(
                f"{name} must be pairs of two different embeddings, a query from 0 to "
                f"{int(ends[0]) - 1} and a key from 0 to {count - 1}, but got {pair.tolist()}"
            )
