"""The contrast of a batch of any size: chunks of rows, each with its gradient, one after the other.

Rows are independent, so a chunk of them is finished when it is left: scores, softmax, losses and
gradient. No matrix of all pairs exists, and nothing is computed twice. What a row means is decided
in `rows`; here its matrix ``[I, K]`` is computed once, in place, with the gradient of a softmax by
hand, and the form, a function of ``[I]`` and ``[I, P]``, is left to autograd.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses._modes import is_transformed
from pgcl_losses._normalize import full_precision
from pgcl_losses.distributed import Processes
from pgcl_losses.forms import Form
from pgcl_losses.rows import (
    Listed,
    Pairs,
    Partners,
    Rows,
    add_log_weights,
    all_rows,
    log_count_of,
    log_sums_of_list,
    partners,
    row_losses,
)

Engine = Literal["auto", "dense", "chunks"]

# Pairs of a chunk: on a CPU its few matrices stay in the cache; elsewhere launching an operation
# takes longer than computing a small matrix.
_CHUNK = 1 << 19
_CHUNK_ELSEWHERE = 1 << 24
# Numbers of the embeddings of listed pairs that are gathered at once.
_GATHERED = 1 << 20
# e^x below counts as 0: denormal numbers, from e^-87 in float32, make matrix products slow.
_LOWEST = -80.0
# e^x is computed as 2^(x log2 e), which takes a third of the time on a CPU.
_LOG2_E = math.log2(math.e)


class Inputs(NamedTuple):
    """What has a gradient: embeddings, temperature and the weights of listed positives."""

    z: Tensor  # [M, D]
    temperature: Any  # a number, or a Tensor []
    weights: Tensor | None  # [P]


class Gradient:
    """The gradient of a weighted sum of losses, added up over chunks."""

    def __init__(self, inputs: Inputs) -> None:
        self.z = torch.zeros_like(inputs.z)
        self.temperature = inputs.z.new_zeros(())
        self.weights = None if inputs.weights is None else torch.zeros_like(inputs.weights)


class Matrix:
    """The scores of some queries with all keys ``[I, K]``: log S and, in its place, its softmax."""

    def __init__(
        self, pairs: Pairs, rows: Rows, inputs: Inputs, others: Partners, form: Form
    ) -> None:
        z, self.temperature, self.rows, self.others = inputs.z, inputs.temperature, rows, others
        self.keys = [z[x] if x.stop <= len(z) else pairs.memory for x in rows.keys]
        self.q = z[rows.queries] / self.temperature  # [I, D]
        sizes = [len(k) for k in self.keys if k is not None]
        scores = z.new_empty(len(self.q), sum(sizes))
        for part, k in zip(scores.split(sizes, 1), self.keys, strict=True):
            torch.mm(self.q, k.T, out=part)
        self.x = others.scores(scores)  # [I, P]
        self.x = self.x.clone() if self.x is scores else self.x
        is_hard = pairs.hardness > 0
        logits = torch.zeros_like(scores) if is_hard else scores
        logits = add_log_weights(pairs, rows, logits, others, scores, self.temperature)
        self.log_count = log_count_of(pairs, form, logits)
        # Of each term of log S: e^x in place of the logits, and the factor that makes it a gradient.
        self.softmaxes: list[tuple[Tensor, Tensor]] = []
        self.log_s: Any = self.log_count if is_hard else 0.0
        for sign, scale in pairs.log_sum_terms():
            powers = logits.add(scores, alpha=scale) if is_hard else logits
            lowest = torch.finfo(powers.dtype).min
            peaks = powers.amax(1, keepdim=True).clamp_min_(lowest)  # -inf - -inf is NaN
            F.threshold_(powers.sub_(peaks), _LOWEST, -math.inf).mul_(_LOG2_E).exp2_()
            total = powers.sum(1, keepdim=True)
            log_sum = (total.log() + peaks).squeeze(1)
            self.log_s = log_sum if not is_hard else self.log_s + sign * log_sum
            # The total is 1 or more, as the largest power is 1; without negatives all powers are 0.
            self.softmaxes.append((powers, sign * scale / total.clamp_min_(1.0)))
        if is_hard and self.log_count is not None:
            self.log_s.masked_fill_(self.log_count == -math.inf, -math.inf)

    def add_gradient(self, d_log_s: Tensor, d_x: Tensor, into: Gradient) -> None:
        """Add the gradient by embeddings and temperature, of the derivatives by log S and x."""
        d_scores, *more = [p.mul_(by * d_log_s.unsqueeze(1)) for p, by in self.softmaxes]
        for other in more:
            d_scores += other
        if self.others.columns is None:
            d_scores += d_x
        else:
            d_scores.scatter_add_(1, self.others.columns[:, self.others.num_own :], d_x)
        d_q = torch.zeros_like(self.q)
        parts = d_scores.split([x.stop - x.start for x in self.rows.keys], 1)
        for part, k, numbers in zip(parts, self.keys, self.rows.keys, strict=True):
            d_q.addmm_(part, k)
            if numbers.stop <= len(into.z):  # the memory has no gradient
                into.z[numbers].addmm_(part.T, self.q)
        _add_gradient_of_queries(self.rows, self.q, d_q, self.temperature, into)


class List:
    """The scores of some queries with their positives alone: their negatives are listed."""

    def __init__(self, negatives: "ListedNegatives", rows: Rows, others: Partners) -> None:
        self.negatives, self.rows, self.others = negatives, rows, others
        z, self.temperature, _ = negatives.inputs
        self.q = z[rows.queries] / self.temperature  # [I, D]
        self.keys = z  # of positives that are known by a mask alone
        if others.columns is not None:
            self.columns = others.columns[:, others.num_own :]  # [I, P]
            self.keys = z[self.columns]  # [I, P, D]
        self.x = (self.keys @ self.q.unsqueeze(2)).squeeze(2)  # [I, P] or [I, M]
        self.log_s = negatives.log_s.detach()[rows.queries]
        self.log_count = negatives.log_count[rows.queries]

    def add_gradient(self, d_log_s: Tensor, d_x: Tensor, into: Gradient) -> None:
        self.negatives.d_log_s[self.rows.queries] = d_log_s
        d_q = (d_x.unsqueeze(1) @ self.keys).squeeze(1)
        if self.others.columns is None:
            into.z.addmm_(d_x.T, self.q)
        else:
            d_keys = d_x.unsqueeze(2) * self.q.unsqueeze(1)
            into.z.index_add_(0, self.columns.flatten(), d_keys.flatten(0, 1))
        _add_gradient_of_queries(self.rows, self.q, d_q, self.temperature, into)


class ListedNegatives:
    """log S of all embeddings by a list of negatives, without a matrix; and its gradient."""

    def __init__(self, pairs: Pairs, listed: Listed, inputs: Inputs, with_gradient: bool) -> None:
        self.listed, self.inputs = listed, inputs
        z, temperature, _ = inputs
        products = [torch.linalg.vecdot(z[query], z[key]) for _, query, key in self._parts()]
        self.logits = torch.cat(products) / temperature
        with torch.set_grad_enabled(with_gradient):
            self.logits.requires_grad_(with_gradient)
            self.log_s, self.log_count = log_sums_of_list(pairs, listed.query, self.logits)
        self.d_log_s = torch.zeros_like(self.log_count)

    def add_gradient(self, into: Gradient) -> None:
        z, temperature, _ = self.inputs
        (d_logits,) = torch.autograd.grad(self.log_s, self.logits, self.d_log_s)
        for part, query, key in self._parts():
            d_part = (d_logits[part] / temperature).unsqueeze(1)
            into.z.index_add_(0, query, d_part * z[key]).index_add_(0, key, d_part * z[query])
        if isinstance(temperature, Tensor):
            into.temperature -= (d_logits * self.logits.detach()).sum() / temperature

    def _parts(self) -> Any:
        """The list in parts, whose embeddings are gathered together."""
        size = max(1, _GATHERED // self.inputs.z.shape[1])
        for start in range(0, max(1, len(self.listed.query)), size):
            part = slice(start, start + size)
            yield part, self.listed.query[part], self.listed.key[part]


def _add_gradient_of_queries(
    rows: Rows, q: Tensor, d_q: Tensor, temperature: Any, into: Gradient
) -> None:
    """Scores are products with q = z / temperature."""
    into.z[rows.queries].add_(d_q / temperature)
    if isinstance(temperature, Tensor):
        into.temperature -= (q * d_q).sum() / temperature


def chunk_losses(
    pairs: Pairs,
    rows: Rows,
    inputs: Inputs,
    form: Form,
    negatives: ListedNegatives | None,
    d_losses: Tensor,
    into: Gradient | None,
) -> tuple[Tensor, Tensor | None]:
    """As `row_losses`; adds the gradient of the sum of d_losses * losses, if it is asked for."""
    wanted, (z, temperature, weights) = into is not None, inputs
    if weights is not None:
        weights = weights.detach().requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        others = partners(pairs, rows, z, weights)
    chunk: Matrix | List
    if negatives is None:
        chunk = Matrix(pairs, rows, inputs, others, form)
    else:
        chunk = List(negatives, rows, others)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        x, log_s = chunk.x.requires_grad_(wanted), chunk.log_s.requires_grad_(wanted)
        losses, exist = form(log_s, x, others.weights, temperature, chunk.log_count)
    if into is not None:
        leaves = [y for y in (log_s, x, temperature, weights) if isinstance(y, Tensor)]
        d_losses = d_losses.expand_as(losses)
        gradients = torch.autograd.grad(losses, leaves, d_losses, materialize_grads=True)
        d_log_s, d_x, *more = gradients
        chunk.add_gradient(d_log_s, d_x, into)
        if isinstance(temperature, Tensor):
            into.temperature += more[0]
        if into.weights is not None:
            into.weights += more[-1]
    return losses.detach(), exist


def losses_of_chunks(
    pairs: Pairs,
    inputs: Inputs,
    form: Form,
    own: list[slice] | None,
    d_losses: Tensor,
    into: Gradient | None,
) -> tuple[Tensor, Tensor]:
    """The losses of all queries ``[Q]``, or of this process's own, and how many have positives."""
    chunk = _CHUNK if inputs.z.device.type == "cpu" else _CHUNK_ELSEWHERE
    negatives = None
    if pairs.negative_pairs is not None:
        negatives = ListedNegatives(pairs, pairs.negative_pairs, inputs, into is not None)
    results, start = [], 0
    for rows in all_rows(pairs, chunk, own):
        stop = start + rows.queries.stop - rows.queries.start
        d = d_losses[start:stop] if d_losses.dim() else d_losses
        results.append(chunk_losses(pairs, rows, inputs, form, negatives, d, into))
        start = stop
    if negatives is not None and into is not None:
        negatives.add_gradient(into)
    return joined(results, inputs.z)


def joined(results: list[tuple[Tensor, Tensor | None]], z: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of all chunks ``[Q]``, and how many queries have positives ``[]``."""
    losses = [loss for loss, _ in results]
    counts = [z.new_full((), len(x)) if exist is None else exist.sum() for x, exist in results]
    if len(results) == 1:
        return losses[0], counts[0]
    return torch.cat([z[:0, 0], *losses]), sum(counts, z.new_zeros(()))


class _Chunks(torch.autograd.Function):
    """The losses of chunks ``[Q]``, or their sum, whose gradient is computed with it."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        temperature: Any,
        weights: Tensor | None,
        pairs: Pairs,
        form: Form,
        own: list[slice] | None,
        is_sum: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*[x.detach() if isinstance(x, Tensor) else x for x in (z, temperature, weights)])
        into = Gradient(inputs) if is_sum and any(ctx.needs_input_grad) else None
        losses, count = losses_of_chunks(pairs, inputs, form, own, z.new_ones(()), into)
        ctx.rest = pairs, form, own
        if into is not None:
            ctx.save_for_backward(into.z, into.temperature, into.weights)
        elif not is_sum:
            ctx.temperature = None if isinstance(temperature, Tensor) else temperature
            tau = temperature if isinstance(temperature, Tensor) else None
            ctx.save_for_backward(z, tau, weights)
        ctx.is_sum = is_sum
        ctx.mark_non_differentiable(count)
        return losses.sum() if is_sum else losses, count

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "with engine='chunks' the loss is differentiable once: engine='dense', in one "
                "process, is differentiable any number of times"
            )
        gradient: list[Any]
        if ctx.is_sum:
            gradient = [None if x is None else x * d for x in ctx.saved_tensors]
        else:
            z, tau, weights = ctx.saved_tensors
            inputs = Inputs(z, ctx.temperature if tau is None else tau, weights)
            into, (pairs, form, own) = Gradient(inputs), ctx.rest
            with full_precision(z.device):
                losses_of_chunks(pairs, inputs, form, own, d, into)
            gradient = [into.z, into.temperature, into.weights]
        gradient = [x if need else None for x, need in zip(gradient, ctx.needs_input_grad)]
        return *gradient, None, None, None, None


def loss_of_pairs(
    pairs: Pairs,
    z: Tensor,
    temperature: float | Tensor,
    weights: Tensor | None,
    form: Form,
    reduction: str,
    engine: str,
    processes: Processes,
) -> Tensor:
    """The mean or sum of the losses of queries that have positives, or all losses ``[Q]``.

    With several processes, each computes its own queries against the keys of all: the mean and the
    sum are then added up over processes.
    """
    own = None if processes.num_ranks() == 1 else processes.own_slices()
    if engine == "auto":
        by_autograd = torch.compiler.is_compiling() or is_transformed(z, temperature, weights)
        engine = "dense" if own is None and by_autograd else "chunks"
    if engine == "dense":
        if own is not None:
            raise ValueError(
                f"engine='dense' computes one matrix in one process, but {processes.num_ranks()} "
                "processes hold a batch together: choose engine='auto' or 'chunks', or gather=False"
            )
        rows_of_all = all_rows(pairs, None)
        results = [row_losses(pairs, rows, z, temperature, weights, form) for rows in rows_of_all]
        losses, count = joined(results, z)
        losses = losses if reduction == "none" else losses.sum()
    else:
        if reduction == "none" and pairs.memory is not None:
            # The backward reads the memory again, which the next step overwrites.
            pairs = pairs._replace(memory=pairs.memory.clone())
        losses, count = _Chunks.apply(z, temperature, weights, pairs, form, own, reduction != "none")
    if reduction == "none":
        return losses
    total, count = processes.sum_of(losses, count)
    return total / count.clamp_min(1) if reduction == "mean" else total
