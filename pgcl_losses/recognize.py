"""Which loss of this package a function of yours is: `recognize`.

The function is called on small random batches. The direction of a gradient does not change if a
loss is multiplied by a factor, or if a constant is added. So for each candidate, a contrastive loss
with given options, one number has to be fitted, the temperature; factors follow from the length of
the gradient, and the constant follows from the value. A candidate is the function if value and
gradient agree on further batches of other sizes.
"""

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.presets import PRESETS, as_written

# N and D of the batches. Candidates are fitted to the first one; the last one has another dimension
# and, with labels, classes of one member.
_SIZES = ((9, 6), (8, 6), (10, 6), (12, 9))
_LABELS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4])  # of the first N embeddings
_LOWEST, _HIGHEST = math.log(0.002), math.log(100)  # logarithms of temperatures
_LOOKED_FOR = 0.05  # the relative error of a gradient up to which a small difference is looked for
_NEAR = 1e-3  # and up to which the function is nearly ours, if the difference is found
_HOPELESS = 0.3  # the error of a start from which no fit begins, unless it is the best one
_TINY = 1e-6  # and up to which it is nearly ours in any case

Function = Callable[..., Any]


class Structure(NamedTuple):
    """A contrastive loss of two views, by what is in the denominator of a query."""

    similarity: str
    within: bool  # whether keys of the query's own view are negatives
    itself: bool  # whether the query is its own negative: nobody masked the diagonal
    positives: int  # how often the positive is in the denominator; 0: decoupled

    def one_way(self, x: Tensor, y: Tensor, parameters: Tensor, extra: str) -> list[Tensor]:
        """The mean loss ``[B]`` of queries x, whose positives are the same rows of y; an extra."""
        tau, epsilon = parameters[:, 0].exp().view(-1, 1, 1), parameters[:, -1:].exp()
        lengths = x.square().sum(2).mean(1)
        if self.similarity == "cosine":
            x, y = F.normalize(x, dim=2), F.normalize(y, dim=2)
        eye, cross = torch.eye(x.shape[1], dtype=torch.bool), x @ y.mT / tau  # [B, N, N]
        keys, positive = [cross.masked_fill(eye, -math.inf)], cross.diagonal(dim1=1, dim2=2)
        if self.within:
            within = x @ x.mT / tau
            keys.append(within if self.itself else within.masked_fill(eye, -math.inf))
        logits = torch.cat(keys, 2)
        log_sum = logits.logsumexp(2)  # [B, N]
        if extra == "hardness":  # Robinson et al. 2021, with debiasing where debias is given
            hardness, debias = parameters[:, 1].view(-1, 1, 1), parameters[:, 2:]
            is_no_key = logits == -math.inf
            count = (~is_no_key).to(x.dtype).sum(2).log()
            weights = (hardness * logits).masked_fill(is_no_key, -math.inf)
            log_sum = (logits + weights).logsumexp(2) - weights.logsumexp(2) + count
            if debias.numel():
                sums = (log_sum.exp() - debias * (count + positive).exp()) / (1 - debias)
                log_sum = sums.maximum((count - 1 / tau.squeeze(2)).exp()).log()
        if self.positives:
            log_sum = torch.logaddexp(log_sum, positive + math.log(self.positives))
        if extra == "denominator":
            log_sum = torch.logaddexp(log_sum, epsilon.log())
        losses = log_sum - positive
        if extra == "logarithm":
            losses = -((-losses).exp() + epsilon).log()
        terms = [losses.mean(1)]
        if extra == "lengths":
            terms.append(lengths)
        if extra == "smoothing":  # the mean score of keys, by that of the positive
            is_key = logits > -math.inf
            total = logits.masked_fill(~is_key, 0.0).sum(2) + positive
            terms.append((total / (is_key.sum(2) + 1) - positive).mean(1))
        return terms

    def terms(self, views: Sequence[Tensor], parameters: Tensor, extra: str = "") -> Tensor:
        """Both directions, each of which has a weight of its own; then extra terms."""
        (first, *one), (second, *other) = (
            self.one_way(x, y, parameters, extra) for x, y in (views, views[::-1])
        )
        return torch.stack([first, second, *one, *other], 1)

    def candidate(self) -> "Candidate":
        """Return this loss by options of ``InfoNCE``, and by what ``InfoNCE`` does not do."""
        options: dict[str, Any] = {} if self.within else {"negatives": "cross"}
        options |= {} if self.positives else {"decoupled": True}
        options |= {} if self.similarity == "cosine" else {"similarity": self.similarity}
        twice = [f"the positive is {self.positives} times in the denominator"]
        itself = ["each embedding is its own negative: the diagonal is not masked"]
        differences = twice * (self.positives > 1) + itself * self.itself
        return Candidate(options, self.terms, differences=tuple(differences))


def _with_labels(views: Sequence[Tensor], parameters: Tensor, options: dict[str, Any]) -> Tensor:
    """``InfoNCE`` of embeddings ``[B, N, D]`` with labels."""
    labels = _LABELS[: views[0].shape[1]]
    losses = [InfoNCE(temperature=math.exp(x), engine="dense", **options) for x in parameters[:, 0]]
    values = [loss(z, labels=labels) for loss, z in zip(losses, views[0], strict=True)]
    return torch.stack(values).unsqueeze(1)


class Candidate(NamedTuple):
    """A loss of which the temperature is fitted, and perhaps further parameters."""

    options: dict[str, Any]  # of `InfoNCE`
    # The terms ``[B, T]`` of its value, by views ``[B, N, D]`` and by parameters ``[B, P]``. The
    # first parameter is the logarithm of the temperature.
    terms: Callable[..., Tensor]
    fitted: tuple[str, ...] = ()  # the other parameters: names of options, or the name of an extra
    differences: tuple[str, ...] = ()  # what `InfoNCE` does not do


_TWO_VIEWS = [
    Structure(similarity, *keys, positives).candidate()
    for similarity, keys, positives in itertools.product(
        ("cosine", "dot"), ((False, False), (True, False), (True, True)), (1, 0, 2)
    )
]


_HARD = [
    structure.candidate()._replace(terms=partial(structure.terms, extra="hardness"), fitted=fitted)
    for similarity, fitted in (("cosine", ("hardness", "debias")), ("dot", ("hardness",)))
    for structure in (Structure(similarity, within, False, 1) for within in (True, False))
]
_WITH_LABELS = [
    Candidate(options, partial(_with_labels, options=options))
    for similarity in ({}, {"similarity": "dot"})
    for form in (
        *({}, {"over_positives": "supcon"}, {"over_positives": "sum"}),
        *({"decoupled": True}, {"over_positives": "sum", "decoupled": True}),
    )
    for options in [{**form, **similarity}]
]
# Where the fit of further parameters starts, and their limits.
_STARTS = {
    "hardness": (0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0),
    "debias": (0.0, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7),
}
_LIMITS = {"hardness": (0.0, 100.0), "debias": (0.0, 0.99)}
# Small differences that are looked for, with what they add; the parameter is fitted.
_EXTRAS = {
    "denominator": "it adds {:.3g} to the denominator",
    "logarithm": "it adds {:.3g} within the logarithm",
    "smoothing": "it has a label smoothing of {:.3g}",
    "lengths": "it adds {:.3g} times the mean square of the embeddings' lengths",
}


class Probe(NamedTuple):
    """What the function makes of one batch."""

    views: list[Tensor]
    value: float
    gradient: Tensor  # by the views that have one
    learned: list[int]  # which views these are

    def solve(self, candidate: Candidate, parameters: Tensor, rounding: float) -> "Solved":
        """Weigh the terms of a candidate, for each of B sets of parameters ``[B, P]``."""
        views = [
            v.detach().expand(len(parameters), -1, -1).clone().requires_grad_() for v in self.views
        ]
        terms = candidate.terms(views, parameters)  # [B, T]
        learned = [views[place] for place in self.learned]
        gradients = [
            torch.autograd.grad(term.sum(), learned, retain_graph=True, materialize_grads=True)
            for term in terms.unbind(1)
        ]
        basis = torch.stack([torch.cat([d.flatten(1) for d in each], 1) for each in gradients], 1)
        scale = basis.norm(dim=2, keepdim=True).clamp_min(1e-300)  # [B, T, 1]
        columns = (basis / scale).nan_to_num().mT
        target = self.gradient.view(1, -1, 1).expand(len(terms), -1, -1)
        weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution.squeeze(2)
        # No loss of ours has a negative direction. What is as good as 0 is left out, and the rest
        # is weighed again.
        kept = weights > 100 * rounding * weights[:, :2].abs().amax(1, keepdim=True)
        kept[:, 2:] = True
        columns = columns * kept.unsqueeze(1)
        weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution.squeeze(2)
        weights = weights.where(kept, 0.0) / scale.squeeze(2)
        left = self.gradient - (weights.unsqueeze(1) @ basis).squeeze(1)
        left = left.nan_to_num(nan=1e9) / self.gradient.norm()
        return Solved(weights, left, terms.detach())


class Solved(NamedTuple):
    """Terms of a candidate, weighed so that their gradient is nearest to the function's."""

    weights: Tensor  # [B, T]
    left: Tensor  # [B, M] what is left of the gradient, relative to its length
    values: Tensor  # [B, T]


class Fit(NamedTuple):
    """A candidate with the parameters that turn its gradient nearest to the function's."""

    error: float  # relative, of the gradient: the largest one of all batches
    candidate: Candidate
    parameters: tuple[float, ...]
    solved: list[Solved]  # of each batch

    def temperature(self) -> float:
        return math.exp(self.parameters[0])


class _NotFiniteError(Exception):
    """The function is not finite on a batch."""


def _batch(seed: int, n: int, dim: int) -> list[Tensor]:
    """Two views of random embeddings, which have any lengths."""
    generator = torch.Generator().manual_seed(seed)
    first, noise = torch.randn(2, n, dim, dtype=torch.float64, generator=generator)
    lengths = 0.5 + torch.rand(2, n, 1, dtype=torch.float64, generator=generator)
    return [first * lengths[0], (first + 0.7 * noise) * lengths[1]]


def _probe(function: Function, views: Sequence[Tensor], labels: bool) -> Probe:
    """Call the function on a batch."""
    views = [z.detach().requires_grad_() for z in views[: 1 if labels else 2]]
    n, dim = views[0].shape
    what = f"embeddings [{n}, {dim}] and labels [{n}]" if labels else f"two views [{n}, {dim}]"
    try:
        try:  # the function gets copies, which it may change
            value = function(*[z.clone() for z in views], *[_LABELS[:n].clone()] * labels)
        except RuntimeError as error:  # a module in float32
            if not any(word in str(error) for word in ("Double", "double", "dtype")):
                raise
            value = function(*[z.float() for z in views], *[_LABELS[:n].clone()] * labels)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            mean = "of one loss for each row take the mean: lambda z1, z2: f(z1, z2).mean()"
            raise TypeError(f"it must return a scalar Tensor, but returned {shape}; {mean}")
        if not value.requires_grad:
            raise TypeError("its value has no gradient: it is detached, or made under no_grad")
        gradients = torch.autograd.grad(value.sum(), views, allow_unused=True)
    except Exception as error:
        raise TypeError(
            f"the function failed with {what} on the CPU ({type(error).__name__}: {error}): wrap "
            "it, as in recognize(lambda z1, z2: model.loss(z1, z2)), or give dim= if it has one"
        ) from error
    parts = [d.flatten() for d in gradients if d is not None]
    gradient = torch.cat([views[0].new_zeros(0), *parts])
    if not value.isfinite().all() or not gradient.isfinite().all():
        where = f"a batch of {n}" + ", of which two labels have one embedding" * (
            labels and n == 12
        )
        raise _NotFiniteError(f"value or gradient is not finite on {where}")
    learned = [place for place, d in enumerate(gradients) if d is not None]
    return Probe(views, value.item(), gradient, learned)


def _minimise(residuals: Callable[[Tensor], Tensor], start: Sequence[float]) -> list[float]:
    """Find parameters with the smallest sum of squares, by Levenberg and Marquardt.

    ``residuals``: a function of some sets of parameters ``[B, P]``, which returns ``[B, M]``.
    """
    num, h = len(start), 1e-6
    steps = h * torch.eye(num, dtype=torch.float64)
    around = torch.cat([torch.zeros_like(steps[:1]), steps, -steps])
    x, damping = torch.tensor(start, dtype=torch.float64), 1e-3
    left = residuals(x + around)
    for _ in range(40):
        jacobian = ((left[1 : num + 1] - left[num + 1 :]) / (2 * h)).T  # [M, P]
        gram = jacobian.T @ jacobian
        damped = gram + damping * gram.diagonal().clamp_min(1e-30).diag()
        new = x - torch.linalg.solve(damped, jacobian.T @ left[0])
        left_there = residuals(new + around)
        before, after = float(left[0].norm()), float(left_there[0].norm())
        if after < before:
            x, left, damping = new, left_there, damping / 10
        else:
            damping *= 10
        if after < 1e-14 or damping > 100 or before * (1 - 1e-6) < after < before:
            break
    return x.tolist()


def _spread(factors: Tensor) -> float:
    """How far factors of several batches differ."""
    return float((factors / factors[0] - 1).abs().max())


def round_to(number: float, error: float = 0.0) -> float:
    """Round to few digits, if the number is as near to them as it can be known."""
    near = min(max(1e-9, 10 * error), 1e-3) * abs(number)
    digits = (float(f"{number:.{n}g}") for n in range(1, 18))
    return next((x for x in digits if abs(x - number) <= near), number)


@dataclass(frozen=True)
class Recognized:
    """What `recognize` found. Print it, or use ``loss``, the ``InfoNCE`` to write in its place."""

    kind: str  # "exact", "nearly" or "none"
    differences: tuple[str, ...]  # what the function does besides, or facts about it
    loss: InfoNCE | None = None  # the same loss, or the nearest one
    line: str = ""  # how the value is computed with it
    factor: float = math.nan
    constant: float = math.nan
    names: tuple[str, ...] = ()  # scripts that have this loss, for `InfoNCE.like`
    error: float = math.inf  # the largest relative error of the gradient, with the differences

    def __str__(self) -> str:
        agree = f"agree to {self.error:.0e} on batches of 8 to 12 graphs"
        if self.kind == "exact":
            lines = [self.line, f"value and gradient {agree}"]
            if self.names:
                as_in = f'as in {", ".join(self.names)}: InfoNCE.like("{self.names[0]}")'
                lines.insert(1, as_in)
        elif self.kind == "nearly":
            lines = [self.line, f"nearly: with the following, value and gradient {agree}"]
        else:
            lines = ["no loss of this package"]
            if self.loss is not None:
                lines.append(f"nearest: {self.line}; its gradient is {self.error:.1%} off")
        return "\n".join([*lines, *(f"- {difference}" for difference in self.differences)])


def recognize(function: Function, *, labels: bool = False, dim: int | None = None) -> Recognized:
    """Find out which ``InfoNCE`` a function of yours is: its options, its factor, its names.

    The function is called with two views ``[N, D]`` of small random batches on the CPU, or with
    embeddings and their labels, and returns a scalar. It must not have other inputs that change:
    wrap it as ``lambda z1, z2: model.loss(z1, z2, temperature=0.5)``.

    The answer is exact if value and gradient agree on all batches, to rounding; nearly, if they
    agree after a small difference was added to our loss, which is named; otherwise the function is
    no loss of this package, and the answer has the nearest one and facts about the function. What
    the function does only for other inputs, such as large batches, is not seen.

    Modules that the function uses by name, or is a method of, have afterwards the parameters,
    buffers, gradients and mode that they had before. So have the states of random numbers.

    Args:
        function (callable): a function of two views, or of embeddings ``[N, D]`` and labels
            ``[N]``.
        labels (bool): whether the second argument of the function are labels.
        dim (int or None): D, for a function that takes embeddings of one dimension only. By default
            the batches have different dimensions.

    Examples:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from pgcl_losses import recognize
        >>> def my_loss(z1, z2):
        ...     scores = F.normalize(z1) @ F.normalize(z2).T / 0.1
        ...     return 2 * F.cross_entropy(scores, torch.arange(len(z1)))
        >>> found = recognize(my_loss)
        >>> found.kind, found.line
        ('exact', '2 * InfoNCE(temperature=0.1, negatives="cross", queries="first")(z1, z2)')

    """

    def probed(sizes: Sequence[tuple[int, int]]) -> list[Probe]:
        return [_probe(function, _batch(seed, *size), labels) for seed, size in enumerate(sizes)]

    with _untouched(function):
        sizes = [(n, dim or each) for n, each in _SIZES]
        missing: tuple[str, ...] = ()
        try:
            try:
                probes = probed(sizes)
            except _NotFiniteError as error:
                if not labels:
                    raise
                missing = (str(error),)
                probes = probed([*sizes[:-1], (10, sizes[-1][1])])  # no class of one member
            again = _probe(function, _batch(0, *sizes[0]), labels)
        except _NotFiniteError as error:
            return Recognized("none", (str(error),))
        if not torch.equal(again.gradient, probes[0].gradient) or again.value != probes[0].value:
            return Recognized("none", ("it is random: two calls with one batch differ",))
        if not any(probe.gradient.any() for probe in probes):
            return Recognized("none", ("its gradient is 0",))
        # A function that computes in float32 shows it by its value, or by its gradient.
        is_single = all(float(np.float32(probe.value)) == probe.value for probe in probes)
        is_single |= all(torch.equal(p.gradient.float().double(), p.gradient) for p in probes)
        found = _Search(function, probes, labels, 3e-5 if is_single else 1e-9).result()
        kind = "nearly" if missing and found.kind == "exact" else found.kind
        return replace(found, kind=kind, differences=(*found.differences, *missing))


@contextmanager
def _untouched(function: Function) -> Iterator[None]:
    """A block after which the function's modules and the states of random numbers are as before."""
    owners = [function, getattr(function, "__self__", None), *getattr(function, "args", ())]
    owners += getattr(function, "keywords", {}).values()  # of a partial
    if inspect.isfunction(function):
        captured = inspect.getclosurevars(function)
        owners += [*captured.nonlocals.values(), *captured.globals.values()]
    modules = {m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules()}
    training = [(module, module.training) for module in modules]
    tensors = {x for m in modules for x in (*m.parameters(), *m.buffers())}
    before = [(x, x.detach().clone(), x.grad) for x in tensors]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  # scripts use it
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for module, mode in training:
            module.training = mode
        for x, value, grad in before:
            x.data.copy_(value)
            x.grad = grad


class _Search(NamedTuple):
    """The search for the loss that a function is."""

    function: Function
    probes: list[Probe]
    labels: bool
    tolerance: float  # the relative error of a gradient by rounding

    def result(self) -> Recognized:
        fits = self.fits(_WITH_LABELS if self.labels else _TWO_VIEWS)
        best, is_near = fits[0], fits[0].error < _NEAR
        if self.tolerance < best.error < _LOOKED_FOR and not self.labels:
            start = torch.tensor([[best.parameters[0], -9.0]], dtype=torch.float64)
            for extra in _EXTRAS:
                terms = partial(fits[0].candidate.terms, extra=extra)
                fit = self.fit(fits[0].candidate._replace(terms=terms, fitted=(extra,)), start)
                best = fit if fit.error < best.error and self.is_reason(fit) else best
        if best.error > self.tolerance and not self.labels:
            fits = sorted([*fits, *self.fits(_HARD)], key=lambda fit: fit.error)
            best, is_near = fits[0], True
        is_right = best.error <= self.tolerance and self.is_determined(best)
        if is_right and is_near and not best.candidate.differences:
            found = self.described(best)
            if found.kind == "none":
                return replace(found, differences=("its factor or its value depends on the batch",))
            also = [fit for fit in fits if fit.error <= self.tolerance and fit is not best]
            same = [f"on these batches {self.described(x).line} is the same" for x in also]
            return replace(found, differences=(*found.differences, *same))
        nearest = next(fit for fit in fits if not fit.candidate.differences)
        found = self.described(nearest)
        if nearest.error < _TINY and self.is_determined(nearest) and found.kind != "none":
            why = f"the gradient differs by {nearest.error:.0e}, as by an epsilon somewhere"
            return replace(found, kind="nearly", differences=(*found.differences, why))
        facts = [*best.candidate.differences, *self.extras(best)] if is_right else []
        facts = [f"it would be one of ours, but {fact}" for fact in facts]
        return replace(found, kind="none", differences=(*facts, *self.facts()))

    def fits(self, candidates: Sequence[Candidate]) -> list[Fit]:
        """Fit each candidate, the best one first."""
        found = []
        for candidate in candidates:
            temperatures = torch.linspace(_LOWEST, _HIGHEST, num := 40)
            further = [torch.tensor(_STARTS[name]) for name in candidate.fitted]
            grid = torch.cartesian_prod(temperatures, *further).double()
            grid = grid.view(num, -1, 1 + len(further))
            left = self.probes[0].solve(candidate, grid.flatten(0, 1), self.tolerance).left
            errors, places = left.norm(dim=1).view(num, -1).min(0)  # of the best temperature
            near = int((errors < _HOPELESS).sum().clamp(1, 12))
            starts = grid[places, torch.arange(len(places))][errors.argsort()[:near]]
            found.append(self.fit(candidate, starts))
        return sorted(found, key=lambda fit: fit.error)

    def fit(self, candidate: Candidate, starts: Tensor) -> Fit:
        """Fit the parameters to the first batch, from each start until the candidate is right."""
        limits = [(_LOWEST, _HIGHEST), *(_LIMITS.get(x, (-40.0, 5.0)) for x in candidate.fitted)]
        low, high = torch.tensor(limits, dtype=torch.float64).unbind(1)

        def residuals(x: Tensor) -> Tensor:
            return self.probes[0].solve(candidate, x.clamp(low, high), self.tolerance).left

        fits = []
        for start in starts.tolist():
            found = torch.tensor(_minimise(residuals, start), dtype=torch.float64).clamp(low, high)
            log_tau, *more = found.tolist()
            rounded = math.log(float(f"{math.exp(log_tau):.6g}"))
            for parameters in ((rounded, *more), (log_tau, *more)):
                fits.append(self.at(candidate, parameters))
                if fits[-1].error <= self.tolerance:
                    return fits[-1]
        return min(fits, key=lambda fit: fit.error)

    def at(self, candidate: Candidate, parameters: Sequence[float]) -> Fit:
        """A candidate with given parameters, on all batches."""
        row = torch.tensor([parameters], dtype=torch.float64)
        solved = [probe.solve(candidate, row, self.tolerance) for probe in self.probes]
        error = max(float(x.left.norm()) for x in solved)
        return Fit(error, candidate, tuple(parameters), solved)

    def is_determined(self, fit: Fit) -> bool:
        """Whether the temperature is within its range, and another one would not do as well."""
        log_tau, *more = fit.parameters
        other = self.at(fit.candidate, (log_tau - math.log(1.5), *more))
        is_inside = _LOWEST + 1e-3 < log_tau < _HIGHEST - 1e-3
        return is_inside and other.error > max(2 * fit.error, self.tolerance)

    def is_reason(self, fit: Fit) -> bool:
        """Whether an extra term has the same weight in all batches, and the sign of its name."""
        weights = torch.stack([x.weights[0, 2:] / x.weights[0, :2].sum() for x in fit.solved])
        same = (weights - weights[0]).abs() <= 1e-6 * weights.abs() + 100 * self.tolerance
        return bool(same.all()) and not ("smoothing" in fit.candidate.fitted and weights.sum() > 0)

    def extras(self, fit: Fit) -> list[str]:
        """Name a small difference that was added to our loss, with its parameter."""
        name, weights = "".join(fit.candidate.fitted), fit.solved[0].weights[0]
        number = {
            "smoothing": -weights[2:].sum() / weights[:2].sum(),
            "lengths": weights[2:].abs().sum(),
        }.get(name, math.exp(fit.parameters[-1]))
        return [_EXTRAS[name].format(float(number))] if name in _EXTRAS else []

    def described(self, fit: Fit) -> Recognized:
        """Say what was found, as a line of code and in words."""
        power, factor, shares, is_fixed, mean_differs = self.factor(fit)
        constant, value_differs = self.constant(fit)
        options = {"temperature": round_to(fit.temperature(), fit.error), **fit.candidate.options}
        for name, number in zip(fit.candidate.fitted, fit.parameters[1:], strict=True):
            if name in _LIMITS and number > 1e-9:
                options[name] = round_to(number, fit.error)
        if shares == [0.5, 0.5]:
            factor, shares = (factor / 2 if power == 1 else factor), [1.0]
        elif len(shares) == 2:
            options["queries"], shares = "first", shares if fit.error < _TINY else [1.0]
        if power == 1:
            options["reduction"] = "sum"
        options = {name: options[name] for name in InfoNCE.options if name in options}

        z1, z2 = (
            name if place in self.probes[0].learned else f"{name}.detach()"
            for place, name in enumerate(("z1", "z2"))
        )
        calls = ["(z, labels=labels)"] if self.labels else [f"({z1}, {z2})", f"({z2}, {z1})"]
        parts = [
            ("" if number == 1 else f"{number:.12g} * ") + f"InfoNCE({as_written(options)}){call}"
            for x, call in zip(shares, calls, strict=False)  # one call, if both are equal
            if (number := round_to(factor * x, fit.error))
        ]
        line = " + ".join(parts)
        if power not in (0, 1):
            line = f"len({'z' if self.labels else 'z1'}) ** {power:g} * " + (
                line if len(parts) == 1 else f"({line})"
            )
        line += f" {'-' if constant < 0 else '+'} {abs(constant):.12g}" * (abs(constant) > 0)
        differences = [*self.extras(fit), *mean_differs, *value_differs]
        kind = "nearly" if differences else "exact"
        kind = kind if is_fixed and math.isfinite(constant) else "none"
        return Recognized(
            kind,
            tuple(differences),
            InfoNCE(**options),
            line,
            round_to(factor, fit.error),
            constant,
            _names(options, self.labels),
            fit.error,
        )

    def factor(self, fit: Fit) -> tuple[float, float, list[float], bool, list[str]]:
        """Find p and c of the factor ``c * N ** p``, and the shares of both directions.

        Also return whether they are the same in all batches, and how the mean differs from ours.
        """
        ways = torch.cat([x.weights[:, :2] for x in fit.solved])  # [4, 2], or [4, 1] with labels
        totals, near = ways.sum(1), max(100 * self.tolerance, 10 * self.rounding(fit))
        shares, differences = ways / totals.unsqueeze(1), []
        sizes = queries = torch.tensor([len(x.views[0]) for x in self.probes]).double()
        if self.labels:  # our mean is over queries with a positive
            every = [_LABELS[: len(probe.views[0])] for probe in self.probes]
            have_positives = [labels.bincount()[labels] > 1 for labels in every]
            queries = torch.stack([mask.sum() for mask in have_positives]).double()
            over_all = totals * sizes / queries
            if _spread(totals) > near >= _spread(over_all):
                totals, differences = over_all, ["a query without a positive is 0 in its mean"]
        factors = {power: totals / sizes**power for power in (0.0, 0.5, -1.0, -0.5, 2.0)}
        factors[1.0] = totals / queries
        power = min(factors, key=lambda power: _spread(factors[power]))
        is_fixed = _spread(factors[power]) <= near
        is_fixed &= float((shares - shares[0]).abs().max()) <= near
        power = power if is_fixed else 0.0
        is_even = shares.shape[1] == 2 and float((shares - 0.5).abs().max()) <= near
        each = [0.5, 0.5] if is_even else shares[0].tolist()
        return power, float(factors[power][0]), each, is_fixed, differences

    def rounding(self, fit: Fit) -> float:
        """The relative error that is no difference: by rounding, or by a tiny epsilon."""
        return max(self.tolerance, fit.error if fit.error < _TINY else 0.0)

    def constant(self, fit: Fit) -> tuple[float, list[str]]:
        """Find what the function adds to our value; NaN if it depends on the batch."""
        values = torch.tensor([probe.value for probe in self.probes], dtype=torch.float64)
        added = values - torch.cat([(x.weights * x.values).sum(1) for x in fit.solved])
        noise = 10 * self.rounding(fit) * max(1.0, float(values.abs().max()))
        constant, differences = float(added[0]), []
        if float(added.max() - added.min()) > noise:
            views = 1 if fit.candidate.options.get("negatives") == "cross" else 2
            counts = [views * (len(probe.views[0]) - 1) for probe in self.probes]
            logs = torch.tensor([[math.log(x), 1.0] for x in counts], dtype=torch.float64)
            line = torch.linalg.lstsq(logs, added).solution
            if fit.error > self.tolerance or float((logs @ line - added).abs().max()) > noise:
                return math.nan, []
            constant = float(line[1])
            differences.append(f"it adds {line[0]:.4g} * log(number of negatives) to the value")
        return round_to(constant) if abs(constant) > noise else 0.0, differences

    def facts(self) -> list[str]:
        """What helps a person whose function is no loss of ours."""
        probe = self.probes[0]
        n = len(probe.views[0])
        generator = torch.Generator().manual_seed(9)
        noise = [torch.randn(z.shape, dtype=z.dtype, generator=generator) for z in probe.views]

        def value(*views: Tensor) -> float:
            with suppress(TypeError, _NotFiniteError):
                return _probe(self.function, views, self.labels).value
            return math.nan

        def same(change: Callable[[Tensor], Tensor]) -> bool:
            difference = abs(value(*map(change, probe.views)) - probe.value)
            return difference <= 1e-4 * (abs(probe.value) + 1e-8)

        moved = value(
            *[
                z + 1e-4 * dz if place in probe.learned else z
                for place, (z, dz) in enumerate(zip(probe.views, noise, strict=True))
            ]
        )
        expected = probe.gradient @ torch.cat([noise[place].flatten() for place in probe.learned])
        unlike = abs((moved - probe.value) / 1e-4 - float(expected))
        lengths = torch.linspace(0.5, 2, n, dtype=torch.float64).unsqueeze(1)
        facts = {
            "one of its views has no gradient": len(probe.learned) < len(probe.views),
            "its gradient is not the derivative of its value: a part is detached, or it rounds to "
            "half precision": unlike > 0.1 * float(probe.gradient.norm()) + 0.01 * abs(probe.value),
            "its value depends on the order of the graphs": not self.labels
            and not same(lambda z: z.flip(0)),
            "its value depends on the lengths of embeddings: it has no cosines, or first calls a "
            "layer such as a projection head": not same(lambda z: z * lengths),
            "it centres the embeddings: a vector that is added to all changes nothing": same(
                lambda z: z + 0.3
            )
            and not same(torch.square),
        }
        return [fact for fact, holds in facts.items() if holds]


def _names(options: dict[str, Any], labels: bool) -> tuple[str, ...]:
    """The scripts whose loss has these options, at any temperature."""

    default = InfoNCE()

    def comparable(given: dict[str, Any]) -> dict[str, Any]:
        compared = [name for name in InfoNCE.options if name not in ("temperature", "reduction")]
        return {name: given.get(name, getattr(default, name)) for name in compared}

    wanted = comparable(options)
    return tuple(
        name
        for name, preset in PRESETS.items()
        if not preset.value
        and (", labels=" in preset.call if labels else preset.call.count(",") == 1)
        and ("=" in preset.call) == labels
        and comparable(preset.options) == wanted
    )
