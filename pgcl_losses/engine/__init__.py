"""The weighted log-sum-exp over pairs: one contract, several ways to compute it."""

import importlib.util
import os

from torch import Tensor

from pgcl_losses.engine.dense import dense
from pgcl_losses.engine.pairs import Bells, Pairs, SameCluster, Table
from pgcl_losses.engine.streaming import streaming

ENGINE_CHOICES = ("auto", "dense", "streaming", "triton")

# The largest number of pairs for which "auto" takes the dense engine. On a CPU streaming is faster
# above it, as measured; elsewhere it is a bound on memory, half a GiB a matrix.
_DENSE_UP_TO = {"cpu": 3 << 18}
_DENSE_ELSEWHERE = 1 << 27


def contrast_pairs(pairs: Pairs, temperature: float, engine: str) -> Tensor:
    """Each query's loss ``[R]`` by the engine of that name; "auto" picks dense or streaming."""
    if engine == "auto":
        largest = _DENSE_UP_TO.get(pairs.rows.device.type, _DENSE_ELSEWHERE)
        small = len(pairs.rows) * len(pairs.columns) <= largest
        engine = "dense" if small else "streaming"
    if len(pairs.rows) == 0:  # a rank without rows: no work, but still a place in the graph
        engine = "dense"
    if engine == "triton":
        check_engine(engine, pairs.rows)
        from pgcl_losses.engine.triton import triton  # an optional package: only once asked for

        return triton(pairs, temperature)
    return (dense if engine == "dense" else streaming)(pairs, temperature)


def check_engine(engine: str, rows: Tensor) -> None:
    """Triton needs a package and a GPU, or the package's interpreter for tests."""
    if engine != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            "engine='triton' needs the package triton: pip install triton, "
            "or choose engine='streaming'"
        )
    if rows.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"engine='triton' needs rows on a CUDA device, but they are on {rows.device}; "
            "choose engine='streaming' there"
        )


__all__ = [
    "ENGINE_CHOICES",
    "Bells",
    "Pairs",
    "SameCluster",
    "Table",
    "check_engine",
    "contrast_pairs",
]
