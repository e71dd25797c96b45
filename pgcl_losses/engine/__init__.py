"""The weighted sums over pairs: one contract (`pairs.py`), several ways to compute it."""

import importlib.util
import math
import os
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pgcl_losses.engine import dense, streaming
from pgcl_losses.engine.pairs import Factors, Gaussian, Pairs, Share, Sums, Weight, mean_of
from pgcl_losses.ranks import Ranks

Engine = Literal["auto", "dense", "streaming", "triton"]
ENGINE_CHOICES = get_args(Engine)

# The largest number of pairs for which "auto" takes the dense engine, except on CUDA. On a CPU
# streaming was measured faster above it. Elsewhere it bounds the memory: half a GiB a matrix.
_DENSE_UP_TO = {"cpu": 1 << 20}
_DENSE_ELSEWHERE = 1 << 27

# When torch.compile of torch 2.4 traces an autograd function, it confuses tensors outside of it
# with others of the same name inside: wrong losses, and no error. 2.11 is the first version that we
# saw compute it right.
TRACEABLE = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 11)


def log_weighted_sums(pairs: Pairs, temperature: float, engine: str, ranks: Ranks) -> Tensor:
    """Log S ``[M]``, -inf where a row has no negative, with gradient to the rows.

    All ranks have the same pairs, and each computes its share of them.
    """
    if engine == "auto":
        engine = _choose(pairs, temperature, len(ranks.counts))
    if engine == "dense":
        if len(ranks.counts) == 1:
            return _scaled(dense.log_sums(pairs, temperature), len(pairs.rows))
        engine = "streaming"  # one matrix cannot be shared, blocks of it can
    check_engine(engine, pairs.rows)
    add_up = _AddUp.apply
    if torch.compiler.is_compiling():
        if TRACEABLE:  # with a symbol in place of a plain number, torch 2.13 mixes up two graphs
            temperature = math.fsum([temperature])
        else:
            add_up = torch.compiler.disable(add_up)  # type: ignore[no-untyped-call]  # torch has no type there
    log_sums: Tensor = add_up(pairs.rows, pairs, temperature, engine, ranks)  # type: ignore[no-untyped-call]  # torch has no type there
    return log_sums


def _choose(pairs: Pairs, temperature: float, num_ranks: int) -> str:
    """What "auto" is for these pairs.

    All ranks must choose the same engine, as engines share out pairs in different ways. Free memory
    and trusted kernels may differ between ranks, so several ranks take streaming.
    """
    if num_ranks > 1:
        return "streaming"
    if pairs.rows.device.type == "cuda":
        from pgcl_losses.engine import cuda  # it imports torch's compiler

        return cuda.choose(pairs, temperature)
    largest = _DENSE_UP_TO.get(pairs.rows.device.type, _DENSE_ELSEWHERE)
    return "dense" if len(pairs.rows) ** 2 <= largest else "streaming"


class _AddUp(torch.autograd.Function):
    """An engine's sums and gradient, added up over ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, pairs: Pairs, temperature: float, engine: str, ranks: Ranks
    ) -> Tensor:
        share = Share(ranks.rank, len(ranks.counts))
        log_sums, log_masses = _module(engine).log_sums(pairs, temperature, share)
        log_sums = ranks.add_logs(log_sums)
        if log_masses is not None:
            log_masses = ranks.add_logs(log_masses)
        ctx.save_for_backward(log_sums)
        ctx.pairs, ctx.temperature, ctx.engine, ctx.ranks = pairs, temperature, engine, ranks
        return _scaled(Sums(log_sums, log_masses), len(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        (log_sums,) = ctx.saved_tensors
        share = Share(ctx.ranks.rank, len(ctx.ranks.counts))
        # The losses of all ranks look at the sums of all rows.
        slopes = ctx.ranks.add(slopes, "the sums' gradient")
        d_rows = _module(ctx.engine).gradient(ctx.pairs, ctx.temperature, log_sums, slopes, share)
        return d_rows, None, None, None, None


def _module(engine: str) -> ModuleType:
    if engine == "triton":
        from pgcl_losses.engine import triton  # an optional package: only once asked for

        return triton
    return streaming


def _scaled(sums: Sums, num_rows: int) -> Tensor:
    """Log S with the Gaussian's scale in it, if there is a Gaussian."""
    if sums.log_masses is None:
        return sums.log_sums
    # A tensor's logarithm: that of a number would have graphs compiled for each number of rows.
    log_num_rows = sums.log_masses.new_full((), num_rows).log_()
    return sums.log_sums + (log_num_rows - sums.log_masses)


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
    "Engine",
    "Factors",
    "Gaussian",
    "Pairs",
    "Weight",
    "check_engine",
    "log_weighted_sums",
    "mean_of",
]
