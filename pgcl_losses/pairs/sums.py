"""The sums of rows: log S, the log-sum-exp of a query's negatives, and the scores of its positives.

`matrix_sums` computes them in plain torch, for ``engine="dense"``, torch.func and torch.compile.
`sums_in_place` computes the same in one matrix, which is overwritten, so that the sums can be
differentiated once: `sum_up` leads from scores to sums, `derivatives_by_scores` leads back to
scores, and `Gradient.add` from there to embeddings. All ways that keep a matrix call `row_losses`.
Listed negatives, which need no matrix, are in `lists`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base.modes import is_transformed, may_overwrite
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.pairs.forms import LossesOfRows
from pgcl_losses.pairs.negatives import add_log_weights, fill_others
from pgcl_losses.pairs.partners import Partners, find_partners, lowest
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows, number_of
from pgcl_losses.pairs.score_mod import Differentiated

# Of some rows: x, the scores / temperature of positives, in the layout of `Partners`; log S [I],
# -inf without negatives; the log of the number of negatives [I], or None if no formula needs it.
SumsOfRows = tuple[Tensor, Tensor, Tensor | None]
# The same before the sum over negatives: x, their logits [I, K], and the log of their number.
SeparatedRows = tuple[Tensor, Tensor, Tensor | None]
SumsFunction = Callable[[Pairs, Rows, Inputs, Partners], SumsOfRows]
# The cosine divided by this temperature is 20. In float32 not even a product of four powers e^20 or
# e^-20 overflows or is denormal.
_HIGH_TEMPERATURE = 0.05
# e^x is computed as 2^(x log2 e), which takes a third of the time on a CPU.
_LOG2_E = math.log2(math.e)


def row_losses(pairs: Pairs, rows: Rows, inputs: Inputs, sums: SumsFunction) -> LossesOfRows:
    """Compute the losses ``[I]`` of some rows, and which queries have positives (None: all have).

    ``sums``: `matrix_sums` or `sums_in_place`, which say what can be differentiated how often.
    """
    partners = find_partners(pairs, rows, inputs.z, inputs.positive_weights)
    x, log_s, log_count = sums(pairs, rows, inputs, partners)
    return pairs.form.losses(log_s, x, partners.positives, inputs.temperature, log_count)


def matrix_sums(pairs: Pairs, rows: Rows, inputs: Inputs, partners: Partners) -> SumsOfRows:
    """Compute the sums from the matrix of scores ``[I, K]``, in plain torch."""
    queries, keys = rows.embeddings(pairs, inputs.z)
    scores = queries @ torch.cat(keys).T / inputs.temperature  # [I, K]
    logits = scores.clone()
    x, logits, log_count = separated(pairs, rows, scores, logits, partners, inputs.temperature)
    if pairs.score_mod is not None:  # it may return inf, whose softmax is NaN
        logits = logits.masked_fill(logits == math.inf, math.nan)
    terms = [
        plus_scores(logits, scores, extra).logsumexp(1) for extra, _ in pairs.logsumexp_terms()
    ]
    return x, log_s_of(terms, log_count), log_count


def separated(
    pairs: Pairs, rows: Rows, scores: Tensor, logits: Tensor, partners: Partners, temperature: Any
) -> SeparatedRows:
    """Turn scores ``[I, K]`` into the scores of positives and the logits ``[I, K]`` of negatives.

    ``logits``: the scores themselves, which are changed in place, or a copy. Also return the log of
    the number of negatives ``[I]``, or None if no formula needs it.
    """
    x, log_count = partners.scores(scores), None
    logits = add_log_weights(pairs, rows, logits, partners, temperature)
    logits = partners.leave_out(logits)
    if pairs.form.debias > 0 or pairs.hardness > 0:
        is_negative = (logits <= lowest(logits.dtype) / 2).logical_not_()  # also a NaN
        log_count = is_negative.sum(1).to(logits.dtype).log()
    return x, logits, log_count


def plus_scores(logits: Tensor, scores: Tensor, extra: float) -> Tensor:
    """Compute logits + extra * scores; the logits themselves if there is no extra."""
    return logits if extra == 0 else logits.add(scores, alpha=extra)


def log_s_of(terms: Sequence[Tensor], log_count: Tensor | None) -> Tensor:
    """Compute log S ``[I]`` from its terms; -inf without negatives."""
    log_s = terms[0]
    if len(terms) == 2 and log_count is not None:
        log_s = log_s - terms[1] + log_count
    return torch.threshold(log_s, lowest(log_s.dtype) / 2, -math.inf)


def scale_of(temperature: float | Tensor, is_small: bool) -> float | Tensor:
    """The factor of derivatives by scores, see `Gradient`.

    ``is_small``: whether all logits are small. Then sums of powers may be far below 1, by which a
    larger factor could overflow.
    """
    scale: float | Tensor = 2.0 ** (32 if is_small else 48) / (1 + temperature)
    return scale


class Powers(NamedTuple):
    """What the derivative of log S by scores is made of: one entry for each log-sum-exp in it."""

    powers: list[Tensor]  # [I, K] e^(x - peak), 0 for keys that are no negatives
    totals: list[Tensor]  # [I, 1] their sums
    score_mod: Differentiated | None


def sum_up(
    pairs: Pairs,
    rows: Rows,
    scores: Tensor,
    partners: Partners,
    temperature: float | Tensor,
    learns_temperature: bool = False,
) -> tuple[SumsOfRows, Powers]:
    """Compute the sums from scores ``[I, K]``, which become the powers."""
    logits = scores if pairs.hardness == 0 else scores.clone()
    score_mod = None
    if pairs.score_mod is not None and pairs.learns:
        score_mod = Differentiated(pairs.score_mod, learns_temperature)
        pairs = pairs._replace(score_mod=score_mod)
    x, logits, log_count = separated(pairs, rows, scores, logits, partners, temperature)
    logsumexps, powers, totals = [], [], []
    for extra, _ in pairs.logsumexp_terms():
        terms = plus_scores(logits, scores, extra)
        peaks = exponentiate_(terms, has_small_logits(pairs, temperature))
        total = terms.sum(1)
        logsumexps.append(logsumexp_of(total, peaks))
        powers.append(terms)
        totals.append(total.unsqueeze(1))
    return (x, log_s_of(logsumexps, log_count), log_count), Powers(powers, totals, score_mod)


def has_small_logits(pairs: Pairs, temperature: float | Tensor) -> bool:
    """Whether Python knows that e^x of every logit x of a negative is far from overflow and 0."""
    others = pairs.cluster_weights, pairs.cosine_weights, pairs.score_mod
    if not pairs.normalize or pairs.hardness > 0 or others.count(None) < len(others):
        return False
    return number_of(temperature) >= _HIGH_TEMPERATURE


def exponentiate_(logits: Tensor, is_small: bool) -> Tensor | None:
    """Turn logits ``[I, K]`` into powers e^(x - peak), in place; return the peaks ``[I]`` of rows.

    ``is_small``: whether all logits are small. Then powers are e^x itself, without peaks, which
    takes 10 % off the time of a large batch.
    """
    peaks = None
    if not is_small:
        peaks = logits.amax(1, keepdim=True)
        logits.sub_(peaks)
        if logits.is_cpu:
            # Powers below eps^2 of the largest are lost to rounding. As 0 they take no time.
            smallest = 2 * math.log(torch.finfo(logits.dtype).eps)
            torch.threshold_(logits, smallest, -math.inf)
        peaks = peaks.squeeze(1)
    if logits.is_cpu:
        logits.mul_(_LOG2_E).exp2_()
    else:  # there this would be one more pass over the matrix, a tenth of the time
        logits.exp_()
    return peaks


def logsumexp_of(total: Tensor, peaks: Tensor | None) -> Tensor:
    """Compute log-sum-exps ``[I]`` from sums of powers, and replace a sum of 0 by a tiny number."""
    log_total = total.log()
    if peaks is not None:
        return log_total.add_(peaks)
    total.clamp_min_(torch.finfo(total.dtype).tiny)  # 0 without negatives
    return log_total


def derivatives_by_scores(
    pairs: Pairs,
    rows: Rows,
    partners: Partners,
    powers: Powers,
    d_log_s: Tensor,
    d_x: Tensor | None,
    scale: Any,
    may_overwrite: bool,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Compute the derivatives by scores ``[I, K]``, times a scale, from those by log S and by x.

    Without ``d_x`` they are those of negatives alone. Also return the derivative by the temperature
    that the user's function reads, if it learns. ``may_overwrite``: whether powers and the graph of
    the user's function are not needed again.
    """
    multiply = torch.Tensor.mul_ if may_overwrite else torch.mul
    d: Any = None
    each = zip(powers.powers, powers.totals, pairs.logsumexp_terms(), strict=True)
    for power, total, (_, factor) in each:
        part = multiply(power, (d_log_s * (factor * scale)).unsqueeze(1) / total)
        d = part if d is None else d.add_(part)
    by_tau: Sequence[Tensor] = ()
    if powers.score_mod is not None:
        # The user's function gets derivatives as they are, since it may use float16.
        d, *by_tau = powers.score_mod.gradients(d / scale, not may_overwrite)
        d = d * scale
        if pairs.cluster_weights is not None:  # they may leave out any keys
            d = d.where(powers.score_mod.is_negative, 0.0)
        d = fill_others(rows, partners, d, 0.0)
    if d_x is not None:
        partners.add_back(d, d_x * scale)
    return d, by_tau


class Passes(NamedTuple):
    """What happens to the scores between the products of matrices: plain torch, or kernels."""

    sum_up: Callable[..., tuple[SumsOfRows, Powers]]
    derivatives_by_scores: Callable[..., tuple[Tensor, Sequence[Tensor]]]


PLAIN = Passes(sum_up, derivatives_by_scores)


class Gradient:
    """The gradient by all inputs, to which rows add their parts.

    Denormal numbers, in float32 below 1e-38, make matrix products up to 25 times slower on some
    CPUs. At low temperatures the derivative by log S may be 1e-35, so its products with a softmax
    would all be denormal. So derivatives by scores are ``scale`` times as large, and the sum of
    their products is divided by ``divisor`` at the end. Neither exceeds 2^48, however small or
    large the temperature is, so that gradients of up to 1e23 remain finite.
    """

    def __init__(self, pairs: Pairs, inputs: Inputs, learns: Sequence[bool], like: Tensor) -> None:
        """``learns``: which inputs have a gradient. ``like``: a derivative, which may be many."""
        self.pairs, self.z, self.temperature = pairs, inputs.z, inputs.temperature
        self.scale = scale_of(self.temperature, has_small_logits(pairs, self.temperature))
        self.divisor = self.scale * self.temperature
        self.products = like.new_zeros(inputs.z.shape)  # [M, D]
        # By the temperature and by the weights of positives, if they learn.
        self.others = [
            like.new_zeros(x.shape) if learns_x else None
            for x, learns_x in zip(inputs[1:], learns[1:], strict=True)
        ]

    def add(self, rows: Rows, d: Tensor, by_tau: Sequence[Tensor]) -> None:
        """Add what `derivatives_by_scores` has returned for some rows."""
        z, products, by_temperature = self.z, self.products, self.others[0]
        queries, keys = rows.embeddings(self.pairs, z)
        own = products[slice(*rows.queries)]
        # The derivative by the temperature follows from the queries' part alone.
        d_queries = own if by_temperature is None else torch.zeros_like(own)
        with full_precision(d.device):
            parts = [d] if len(keys) == 1 else d.split_with_sizes([*map(len, keys)], 1)
            for part, some in zip(parts, keys, strict=True):
                add_product(d_queries, part, some)
            for part, (start, stop) in zip(parts, rows.keys, strict=True):
                if stop <= len(z):  # the memory has no gradient
                    add_product(products[start:stop], part.T, queries)
        if by_temperature is not None:
            own.add_(d_queries)
            by_scores = (queries / -self.divisor * d_queries).sum() / self.temperature
            self.others[0] = sum([by_scores, *by_tau], by_temperature)

    def by_inputs(self, others: Sequence[Tensor | None] = (None, None)) -> Inputs:
        """Return the gradient, None for inputs that do not learn; nothing can be added then.

        ``others``: what autograd has found by the temperature and by the weights of positives.
        """
        each = zip(self.others, others, strict=True)
        totals = [total if total is None or part is None else total + part for total, part in each]
        return Inputs(self.products.div_(self.divisor), *totals)


def sums_in_place(
    pairs: Pairs,
    rows: Rows,
    inputs: Inputs,
    partners: Partners,
    passes: Passes = PLAIN,
    matrix: Tensor | None = None,
    gradient: Gradient | None = None,
) -> SumsOfRows:
    """Compute the sums as `matrix_sums` does, but overwrite the matrix of scores ``[I, K]``.

    Chunks of rows share the memory of a ``matrix``, and a ``gradient``: the backward of each chunk
    adds its part by the embeddings and the temperature there, instead of returning it.
    """
    rest = pairs, rows, partners, passes, matrix, gradient
    sums: SumsOfRows = _SumsInPlace.apply(*inputs[:2], *rest)  # type: ignore[no-untyped-call]  # torch has no type there
    return sums


class _SumsInPlace(torch.autograd.Function):
    """The matrix holds scores, then logits, then powers e^x, then the derivatives by scores."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float | Tensor, *rest: Any) -> SumsOfRows:
        pairs, rows, partners, passes, matrix, shared = rest
        queries, keys = rows.embeddings(pairs, z)
        scores = product(queries / temperature, keys, matrix)
        learns_tau = ctx.needs_input_grad[1]
        sums: SumsOfRows
        sums, powers = passes.sum_up(pairs, rows, scores, partners, temperature, learns_tau)
        if shared is None:
            ctx.save_for_backward(z, *powers.powers, *powers.totals)
            powers = powers.score_mod
        # Else hooks of saved tensors, such as save_on_cpu, would copy the matrix of each chunk.
        ctx.rest = temperature, powers, *rest
        if sums[2] is not None:
            ctx.mark_non_differentiable(sums[2])
        return sums

    @staticmethod
    def backward(ctx: Any, d_x: Tensor, d_log_s: Tensor, _: Any) -> tuple[Any, ...]:
        raise_if_differentiated_twice()
        temperature, powers, pairs, rows, partners, passes, _, gradient = ctx.rest
        is_shared = gradient is not None
        if not is_shared:
            z, *saved = ctx.saved_tensors
            learns = (*ctx.needs_input_grad[:2], False)
            gradient = Gradient(pairs, Inputs(z, temperature, None), learns, d_log_s)
            saved, half = [x.contiguous() for x in saved], len(saved) // 2  # hooks may change it
            powers = Powers(saved[:half], saved[half:], powers)
        d, by_tau = passes.derivatives_by_scores(
            pairs, rows, partners, powers, d_log_s, d_x, gradient.scale, may_overwrite(d_log_s)
        )
        gradient.add(rows, d, by_tau)
        return *((None, None) if is_shared else gradient.by_inputs()[:2]), *[None] * 6


def product(queries: Tensor, keys: Sequence[Tensor], matrix: Tensor | None) -> Tensor:
    """Multiply queries by their keys ``[I, K]``, maybe in the memory of a larger matrix."""
    if matrix is None:
        parts = [queries @ some.T for some in keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    sizes = [*map(len, keys)]
    scores = matrix[: len(queries) * sum(sizes)].view(len(queries), -1)
    for some, out in zip(keys, scores.split_with_sizes(sizes, 1), strict=True):
        torch.mm(queries, some.T, out=out)
    return scores


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a matrix product in place. Under vmap, torch has no such operation."""
    if is_transformed(a):
        total += a @ b
    else:
        total.addmm_(a, b)


def raise_if_differentiated_twice() -> None:
    """Raise an error in a backward with ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the loss is differentiable once: engine='dense', in one process, is differentiable "
            "any number of times"
        )
