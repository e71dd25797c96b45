"""Log S of all pairs, by one engine: which one, with a gradient, and over all processes."""

import importlib.util
import math
import os
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pgcl_losses.engine import dense, streaming
from pgcl_losses.engine.contract import Gaussian, Pairs, Past, Portion, check_once, d_temperature
from pgcl_losses.engine.past import OverPast
from pgcl_losses.ranks import Ranks

Engine = Literal["auto", "dense", "streaming", "triton"]
ENGINE_CHOICES = get_args(Engine)

# Up to so many pairs "auto" takes dense. On a CPU streaming was measured faster above it; elsewhere
# it bounds the memory, to a quarter of a GiB for each of about four matrices.
_DENSE_UP_TO = {"cpu": 1 << 20}
_DENSE_ELSEWHERE = 1 << 26

# When torch.compile of torch 2.4 traces an autograd function, it confuses tensors outside of it
# with others of the same name inside: wrong losses, and no error. 2.11 is the first version that we
# saw compute it right.
TRACEABLE = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 11)


def log_weighted_sums(
    pairs: Pairs,
    temperature: float | Tensor,
    engine: str,
    ranks: Ranks,
    past: Past | None = None,
) -> Tensor:
    """Log S ``[M]``, -inf where an embedding has no negative, with gradient to the embeddings.

    All processes have the same pairs, and each computes its portion of them. A tensor as
    temperature ``[]`` gets a gradient as well.
    """
    num_ranks = len(ranks.counts)
    if engine == "auto":
        engine = choose(pairs, num_ranks)
    if engine == "dense":
        if num_ranks > 1:
            raise ValueError(
                f"engine='dense' computes one matrix in one process, but {num_ranks} processes "
                "hold a batch together: choose engine='auto' or 'streaming', or gather=False"
            )
        log_s, log_totals, _ = dense.log_sums(pairs, temperature)
    else:
        check_engine(engine, pairs.embeddings)
        log_s, log_totals = _apply(_LogSums, pairs, temperature, engine, ranks)
    if past is not None:
        log_s_past, log_totals_past = _apply(OverPast, pairs, temperature, past, ranks)
        log_s = _log_add(log_s, log_s_past)
    if log_totals is None:
        return log_s
    # A tensor's logarithm: that of a number would have graphs compiled for each batch size.
    count = log_s.new_full((), pairs.embeddings.shape[0])
    if past is not None and log_totals_past is not None:
        log_totals = torch.logaddexp(log_totals, log_totals_past)
        count += past.num_present()
    return log_s + (count.log_() - log_totals)


def _apply(
    function: Any, pairs: Pairs, temperature: float | Tensor, *others: Any
) -> tuple[Tensor, Tensor | None]:
    """An autograd function of log-sums and log-totals, traced where that is possible."""
    if torch.compiler.is_compiling() and TRACEABLE and not isinstance(temperature, Tensor):
        # With a symbol in place of a plain number, torch 2.13 mixes up two graphs.
        temperature = math.fsum([temperature])
    apply = traceable(function.apply)
    log_sums, log_totals = apply(pairs.embeddings, temperature, pairs, *others)
    return log_sums, None if pairs.by_cosine is None else log_totals


def traceable(apply: Any) -> Any:
    """An autograd function, outside of a compiled graph where that would compute it wrong."""
    if torch.compiler.is_compiling() and not TRACEABLE:
        return torch.compiler.disable(apply)  # type: ignore[no-untyped-call]  # torch has no type there
    return apply


def _log_add(a: Tensor, b: Tensor) -> Tensor:
    """Log(e^a + e^b), whose gradient is 0 where both are -inf."""
    none = (a == -math.inf) & (b == -math.inf)
    both = (log.masked_fill(none, 0.0) for log in (a, b))
    return torch.logaddexp(*both).masked_fill(none, -math.inf)


def choose(pairs: Pairs, num_ranks: int) -> str:
    """What "auto" is for these pairs: the same in every run, and on all processes."""
    device = pairs.embeddings.device
    if num_ranks == 1:
        largest = _DENSE_UP_TO.get(device.type, _DENSE_ELSEWHERE)
        if len(pairs.embeddings) ** 2 <= largest:
            return "dense"
    known = pairs.by_cosine is None or isinstance(pairs.by_cosine, Gaussian)
    return "triton" if known and kernels_pass(device) else "streaming"


def kernels_pass(device: torch.device) -> bool:
    """Whether "auto" may take the fused kernels there. Its first call on a device tests them."""
    if device.type != "cuda" or not torch.cuda.is_available():  # there are tensors without numbers
        return False
    from pgcl_losses.engine import selftest  # it imports torch's compiler

    return bool(selftest.kernels_pass(device))


def choice_facts(engine: str, embeddings: Tensor) -> dict[str, bool]:
    """What several processes must agree on, so that "auto" is the same engine in all of them."""
    return {"kernels pass": kernels_pass(embeddings.device)} if engine == "auto" else {}


class _LogSums(torch.autograd.Function):
    """An engine's sums and gradient, added up over processes."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        temperature: float | Tensor,
        pairs: Pairs,
        engine: str,
        ranks: Ranks,
    ) -> tuple[Tensor, Tensor | None]:
        portion = Portion(ranks.rank, len(ranks.counts))
        sums = _module(engine).log_sums(pairs, temperature, portion)
        log_sums, log_totals = ranks.add_logs(sums.log_sums), sums.log_totals
        if log_totals is not None:
            log_totals = ranks.add_logs(log_totals)
            ctx.mark_non_differentiable(log_totals)
        ctx.save_for_backward(log_sums)
        ctx.pairs, ctx.temperature, ctx.engine, ctx.ranks = pairs, temperature, engine, ranks
        # A compiled graph keeps no layout from its forward to its backward pass.
        ctx.layout = None if torch.compiler.is_compiling() else sums.layout
        return log_sums, log_totals

    @staticmethod
    def backward(ctx: Any, d_log_s: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        check_once()
        (log_sums,) = ctx.saved_tensors
        pairs, temperature = ctx.pairs, ctx.temperature
        portion = Portion(ctx.ranks.rank, len(ctx.ranks.counts))
        # The losses of all processes look at the sums of all embeddings.
        d_log_s = ctx.ranks.add(d_log_s, "the sums' gradient")
        d_embeddings = _module(ctx.engine).gradient(
            pairs, temperature, log_sums, d_log_s, portion, ctx.layout
        )
        d_tau = None
        if ctx.needs_input_grad[1]:
            d_tau = d_temperature(pairs.embeddings.detach(), d_embeddings, temperature)
        return d_embeddings, d_tau, None, None, None


def _module(engine: str) -> ModuleType:
    if engine == "triton":
        from pgcl_losses.engine import triton  # an optional package: only once asked for

        return triton
    return streaming


def check_engine(engine: str, embeddings: Tensor) -> None:
    """Triton needs a package and a GPU, or the package's interpreter for tests."""
    if engine != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError(
            "engine='triton' needs the package triton: pip install triton, "
            "or choose engine='streaming'"
        )
    if embeddings.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "engine='triton' needs embeddings on a CUDA device, but they are on "
            f"{embeddings.device}; choose engine='streaming' there"
        )
