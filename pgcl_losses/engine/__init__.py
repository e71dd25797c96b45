"""The weighted log-sum-exp over pairs: one contract, several ways to compute it."""

from collections.abc import Callable

from torch import Tensor

from pgcl_losses.engine.dense import dense
from pgcl_losses.engine.pairs import Bells, Pairs, SameCluster, Table

_ENGINES: dict[str, Callable[[Pairs, float], Tensor]] = {"dense": dense}
ENGINE_CHOICES = ("auto", *_ENGINES)


def contrast_pairs(pairs: Pairs, temperature: float, engine: str) -> Tensor:
    """Each query's loss ``[R]`` by the engine of that name; "auto" picks the one that fits."""
    return _ENGINES["dense" if engine == "auto" else engine](pairs, temperature)


__all__ = ["ENGINE_CHOICES", "Bells", "Pairs", "SameCluster", "Table", "contrast_pairs"]
