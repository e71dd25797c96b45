"""The weighted log-sum-exp over pairs: one contract, several ways to compute it."""

import importlib.util

from torch import Tensor

from pgcl_losses.engine.dense import dense
from pgcl_losses.engine.pairs import Bells, Pairs, SameCluster, Table
from pgcl_losses.engine.streaming import streaming

ENGINE_CHOICES = ("auto", "dense", "streaming", "triton")

# Pairs of a block that still fit into the caches of a core: above, streaming is the faster one.
_DENSE_UP_TO = 1 << 20


def contrast_pairs(pairs: Pairs, temperature: float, engine: str) -> Tensor:
    """Each query's loss ``[R]`` by the engine of that name; "auto" picks dense or streaming."""
    if engine == "auto":
        fits = len(pairs.rows) * len(pairs.columns) <= _DENSE_UP_TO
        engine = "dense" if fits else "streaming"
    if engine == "triton":
        check_triton(pairs.rows)
        from pgcl_losses.engine.triton import triton  # an optional package: only once asked for

        return triton(pairs, temperature)
    return (dense if engine == "dense" else streaming)(pairs, temperature)


def check_triton(rows: Tensor) -> None:
    """The engine needs a package and a GPU, or the package's interpreter for tests."""
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            "engine='triton' needs the package triton: pip install triton, "
            "or choose engine='streaming'"
        )
    import triton  # type: ignore[import-untyped]  # it has no type hints

    if rows.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"engine='triton' needs rows on a CUDA device, but they are on {rows.device}; "
            "choose engine='streaming' there"
        )


__all__ = ["ENGINE_CHOICES", "Bells", "Pairs", "SameCluster", "Table", "contrast_pairs"]
