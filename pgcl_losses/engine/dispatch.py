"""log S of every query by one engine: which one, with its gradient, over all processes."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pgcl_losses._modes import is_transformed
from pgcl_losses.distributed import Processes
from pgcl_losses.engine import dense
from pgcl_losses.engine.blocks import Blocks
from pgcl_losses.engine.pairs import Pairs

if TYPE_CHECKING:
    from pgcl_losses.engine.flex import Flex

Engine = Literal["auto", "dense", "blocks", "flex"]

_DENSE_UP_TO = 8192  # embeddings: about four matrices of a quarter of a GiB each


def choose(
    engine: str,
    embeddings: Tensor,
    temperature: float | Tensor,
    num_embeddings: int,
    num_ranks: int,
) -> str:
    """The engine of "auto", by shapes, device and mode: the same on all processes."""
    if engine == "dense" and num_ranks > 1:
        raise ValueError(
            f"engine='dense' computes one matrix in one process, but {num_ranks} processes hold a "
            "batch together: choose engine='auto' or 'blocks', or gather=False"
        )
    if engine != "auto":
        return engine
    if num_ranks > 1:
        return "blocks"
    if is_transformed(embeddings, temperature):
        return "dense"
    may_be_dense = torch.compiler.is_compiling() or embeddings.device.type != "cpu"
    return "dense" if may_be_dense and num_embeddings <= _DENSE_UP_TO else "blocks"


def log_weighted_sums(
    pairs: Pairs, temperature: float | Tensor, engine: str, processes: Processes
) -> Tensor:
    """log S ``[Q]``, -inf where a query has no negatives, with gradient to the embeddings.

    All processes have the same pairs, and each computes its portion of them. A tensor as
    temperature ``[]`` gets a gradient as well. ``engine`` is not "auto".
    """
    if engine == "dense":
        return dense.log_sums(pairs, temperature)
    log_sums: Tensor
    log_totals: Tensor | None
    log_sums, log_totals = _LogSums.apply(  # type: ignore[no-untyped-call]  # torch has no type there
        pairs.embeddings, temperature, pairs, engine, processes
    )
    if log_totals is None:
        return log_sums
    return log_sums + (pairs.num_samples().log_() - log_totals)


class _LogSums(torch.autograd.Function):
    """An engine's sums and their gradient, added up over processes."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        temperature: float | Tensor,
        pairs: Pairs,
        engine: str,
        processes: Processes,
    ) -> tuple[Tensor, Tensor | None]:
        given = pairs, temperature, processes.rank, processes.num_ranks()
        sums = _engine(engine)(*given).log_sums(any(ctx.needs_input_grad))
        log_s, log_totals = processes.add_logs(sums.log_sums), sums.log_totals
        if log_totals is not None:
            log_totals = processes.add_logs(log_totals)
            ctx.mark_non_differentiable(log_totals)
        ctx.save_for_backward(log_s, *sums.kept)
        ctx.given, ctx.engine, ctx.processes = given, engine, processes
        return log_s, log_totals

    @staticmethod
    def backward(ctx: Any, d_log_s: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        check_once()
        log_s, *kept = ctx.saved_tensors
        # The losses of all processes depend on the sums of all embeddings.
        d_log_s = ctx.processes.add(d_log_s, "the gradient of sums over pairs")
        computation = _engine(ctx.engine)(*ctx.given)
        d_embeddings, d_temperature = computation.gradient(log_s, d_log_s, kept)
        return d_embeddings, d_temperature, None, None, None


def check_once() -> None:
    """Raise an error if a backward pass is to be differentiated (``create_graph=True``)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "with this engine the loss is differentiable once: engine='dense', in one process, is "
            "differentiable any number of times"
        )


def _engine(name: str) -> "type[Blocks | Flex]":
    if name == "flex":
        from pgcl_losses.engine.flex import Flex  # imports a part of torch that few need

        return Flex
    return Blocks
