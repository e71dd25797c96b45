"""Which loss of this package a function of yours is: `recognize`.

The function is called on small random batches. The direction of a gradient does not change if a
loss is multiplied by a factor, or if a constant is added. So for each structure of a contrastive
loss one number has to be fitted, the temperature; factors follow from the length of the gradient,
and the constant follows from the value. A structure is the function if value and gradient agree on
further batches of other sizes.
"""

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.presets import PRESETS, as_written

# N and D of the batches. Structures are fitted to the first one; the last one has another dimension
# and, with labels, classes of one member.
_SIZES = ((9, 6), (8, 6), (10, 6), (12, 9))
_LABELS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4])  # of the first N embeddings
_LOWEST, _HIGHEST = 0.002, 100.0  # temperatures
_LOOKED_FOR = 0.05  # the relative error of a gradient up to which a small difference is looked for
_NEAR = 1e-3  # and up to which the function is nearly ours, if the difference is found
_TINY = 1e-6  # and up to which it is nearly ours in any case

Function = Callable[..., Any]
Views = Sequence[Tensor]
Parameters = tuple[float, ...]  # the logarithm of the temperature, and others of a structure


class Structure(NamedTuple):
    """A contrastive loss of two views, by what is in the denominator of a query."""

    similarity: str = "cosine"
    within: bool = False  # whether keys of the query's own view are negatives
    positives: int = 1  # how often the positive is in the denominator; 0: decoupled
    itself: bool = False  # whether the query is its own negative: nobody masked the diagonal
    extra: str = ""  # what the function has besides, a name of `_EXTRAS`

    def one_way(self, x: Tensor, y: Tensor, tau: Tensor, epsilon: Tensor) -> list[Tensor]:
        """The mean loss ``[B]`` of queries x, whose positives are the same rows of y; extra terms.

        ``tau`` and ``epsilon``: ``[B]``.
        """
        lengths = x.square().sum(1).mean().expand_as(tau)
        if self.similarity == "cosine":
            x, y = F.normalize(x), F.normalize(y)
        tau, epsilon = tau.view(-1, 1, 1), epsilon.view(-1, 1)
        eye, cross = torch.eye(len(x), dtype=torch.bool), x @ y.T / tau  # [B, N, N]
        keys, positive = [cross.masked_fill(eye, -math.inf)], cross.diagonal(dim1=1, dim2=2)
        if self.within:
            within = x @ x.T / tau
            keys.append(within if self.itself else within.masked_fill(eye, -math.inf))
        logits = torch.cat(keys, 2)
        log_sum = logits.logsumexp(2)  # [B, N]
        if self.positives:
            log_sum = torch.logaddexp(log_sum, positive + math.log(self.positives))
        if self.extra == "denominator":
            log_sum = torch.logaddexp(log_sum, epsilon.log())
        losses = log_sum - positive
        if self.extra == "logarithm":
            losses = -((-losses).exp() + epsilon).log()
        terms = [losses.mean(1)]
        if self.extra == "lengths":
            terms.append(lengths)
        if self.extra == "smoothing":  # the mean score of keys, by that of the positive
            is_key = logits > -math.inf
            total = logits.masked_fill(~is_key, 0.0).sum(2) + positive
            terms.append((total / (is_key.sum(2) + 1) - positive).mean(1))
        return terms

    def terms(self, views: Views, parameters: Tensor) -> list[Tensor]:
        """Both directions ``[B]``, each of which has a weight of its own; then an extra term."""
        numbers = parameters[:, 0].exp(), parameters[:, -1].exp()
        ways = [self.one_way(x, y, *numbers) for x, y in (views, views[::-1])]
        (first, *one), (second, *other) = ways
        if self.extra == "smoothing":  # both directions have the same term
            return [first, second, (one[0] + other[0]) / 2]
        return [first, second, *one, *other]

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {} if self.within else {"negatives": "cross"}
        options |= {} if self.positives else {"decoupled": True}
        return options | ({} if self.similarity == "cosine" else {"similarity": self.similarity})

    def differences(self) -> list[str]:
        """What ``InfoNCE`` does not do."""
        twice = f"the positive is {self.positives} times in the denominator"
        itself = "each embedding is its own negative: the diagonal is not masked"
        return [twice] * (self.positives > 1) + [itself] * self.itself


class Options(NamedTuple):
    """A loss by options of ``InfoNCE``: with labels, or with hard and debiased negatives."""

    given: dict[str, Any]
    fitted: tuple[str, ...] = ()  # options whose values are the parameters after the temperature
    labels: Tensor | None = None

    def terms(self, views: Views, parameters: Tensor) -> list[Tensor]:
        each = [self.terms_of_one(views, numbers) for numbers in parameters.tolist()]
        return [torch.stack(terms) for terms in zip(*each, strict=True)]

    def terms_of_one(self, views: Views, numbers: Sequence[float]) -> list[Tensor]:
        options: dict[str, Any] = dict(zip(self.fitted, numbers[1:], strict=True)) | self.given
        options["queries"] = "first" if self.labels is None else "all"
        loss = InfoNCE(temperature=math.exp(numbers[0]), engine="dense", **options)
        if self.labels is not None:
            return [loss(*views, labels=self.labels[: len(views[0])])]
        return [loss(*views), loss(*views[::-1])]

    def options(self) -> dict[str, Any]:
        return self.given

    def differences(self) -> list[str]:
        return []


Candidate = Structure | Options
_TWO_VIEWS: list[Candidate] = [
    Structure(similarity, within, positives, itself)
    for similarity, (within, itself), positives in itertools.product(
        ("cosine", "dot"), ((False, False), (True, False), (True, True)), (1, 0, 2)
    )
]
_HARD: list[Candidate] = [
    Options(given, ("hardness", "debias")) for given in ({}, {"negatives": "cross"})
]
_WITH_LABELS: list[Candidate] = [
    Options({**form, **similarity}, labels=_LABELS)
    for similarity in ({}, {"similarity": "dot"})
    for form in (
        *({}, {"over_positives": "supcon"}, {"over_positives": "sum"}),
        *({"decoupled": True}, {"over_positives": "sum", "decoupled": True}),
    )
]
# Small differences that are looked for, with what they add; the number is fitted.
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
    learned: list[Tensor]  # these views


class Fit(NamedTuple):
    """A candidate with the parameters that turn its gradient nearest to the function's."""

    error: float  # relative, of the gradient
    candidate: Candidate
    parameters: Parameters

    def temperature(self) -> float:
        return math.exp(self.parameters[0])


@dataclass(frozen=True)
class Recognized:
    """What `recognize` found. Print it, or use ``loss``, the ``InfoNCE`` to write in its place."""

    kind: str  # "exact", "nearly" or "none"
    loss: InfoNCE | None  # the same loss, or the nearest one
    line: str  # how the value is computed with it
    factor: float
    constant: float
    names: tuple[str, ...]  # scripts that have this loss, for `InfoNCE.like`
    differences: tuple[str, ...]  # what the function does besides, or facts about it
    error: float  # the largest relative error of the gradient, of the loss with its differences

    def __str__(self) -> str:
        lines = [self.line]
        if self.names and self.kind == "exact":
            lines.append(f'as in {", ".join(self.names)}: InfoNCE.like("{self.names[0]}")')
        agree = f"agree to {self.error:.0e} on batches of 8 to 12 graphs"
        if self.kind == "exact":
            lines.append(f"value and gradient {agree}")
        elif self.kind == "nearly":
            lines.append(f"nearly: with the following, value and gradient {agree}")
        else:
            lines[:1] = ["no loss of this package"]
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
    with _untouched(function):
        try:
            sizes = [(n, dim or each) for n, each in _SIZES]
            probes = [_probe(function, seed, size, labels) for seed, size in enumerate(sizes)]
            again = _probe(function, 0, sizes[0], labels)
        except _NotFiniteError as error:
            return _unknown([str(error)])
        if not torch.equal(again.gradient, probes[0].gradient) or again.value != probes[0].value:
            return _unknown(["it is random: two calls with one batch differ"])
        if len(probes[0].gradient) == 0 or not any(probe.gradient.any() for probe in probes):
            return _unknown(["its gradient is 0"])
        # A function that computes in float32 shows it by its value, or by its gradient.
        is_single = all(float(np.float32(probe.value)) == probe.value for probe in probes)
        is_single |= all(torch.equal(p.gradient.float().double(), p.gradient) for p in probes)
        return _Search(function, probes, labels, 3e-5 if is_single else 1e-9).result()


@contextmanager
def _untouched(function: Function) -> Iterator[None]:
    """A block after which the function's modules and the states of random numbers are as before."""
    owners = [function, getattr(function, "__self__", None), *getattr(function, "args", ())]
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


class _NotFiniteError(Exception):
    """The function is not finite on a batch."""


def _probe(
    function: Function,
    seed: int,
    size: tuple[int, int],
    labels: bool,
    change: Callable[[Tensor], Tensor] = lambda z: z,
) -> Probe:
    """Call the function on a random batch, of which each view may be changed before."""
    generator, (n, dim) = torch.Generator().manual_seed(seed), size
    first, noise = torch.randn(2, n, dim, dtype=torch.float64, generator=generator)
    lengths = 0.5 + torch.rand(2, n, 1, dtype=torch.float64, generator=generator)
    both = [first * lengths[0], (first + 0.7 * noise) * lengths[1]]
    views = [change(z).requires_grad_() for z in both[: 1 if labels else 2]]
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
            raise TypeError(f"it must return a scalar Tensor, but returned {shape}")
        if not value.requires_grad:
            raise TypeError("its value has no gradient: it is detached, or made under no_grad")
        gradients = torch.autograd.grad(value.sum(), views, allow_unused=True)
    except Exception as error:
        raise TypeError(
            f"the function failed with {what} on the CPU ({type(error).__name__}: {error}): wrap "
            "it, as in recognize(lambda z1, z2: model.loss(z1, z2)), or give dim= if it has one"
        ) from error
    learned = [view for view, d in zip(views, gradients, strict=True) if d is not None]
    parts = [d.flatten() for d in gradients if d is not None]
    gradient = torch.cat([first.new_zeros(0), *parts])
    if not value.isfinite().all() or not gradient.isfinite().all():
        where = f"a batch of {n}" + ", of which two labels have one embedding" * (
            labels and n == 12
        )
        raise _NotFiniteError(f"value or gradient is not finite on {where}")
    return Probe(views, value.item(), gradient, learned)


def _unknown(differences: Sequence[str]) -> Recognized:
    return Recognized("none", None, "", math.nan, math.nan, (), tuple(differences), math.inf)


class Solved(NamedTuple):
    """Terms of a candidate, weighed so that their gradient is nearest to the function's."""

    weights: Tensor  # [B, T]
    left: Tensor  # [B, P] what is left of the gradient, relative to its length
    values: Tensor  # [B, T]


def _solve(candidate: Candidate, parameters: Tensor, probe: Probe, negligible: float) -> Solved:
    """Weigh the terms of a candidate, for each of B sets of parameters ``[B, p]``."""
    terms = torch.stack(candidate.terms(probe.views, parameters), dim=1)  # [B, T]
    every = torch.eye(terms.numel(), dtype=terms.dtype).view(-1, *terms.shape)
    gradients = torch.autograd.grad(
        terms, probe.learned, every, is_grads_batched=True, materialize_grads=True
    )
    basis = torch.cat([d.flatten(1) for d in gradients], 1).view(*terms.shape, -1)  # [B, T, P]
    scale = basis.norm(dim=2, keepdim=True).clamp_min(1e-300)
    columns = (basis / scale).nan_to_num().mT
    target = probe.gradient.view(1, -1, 1).expand(len(terms), -1, -1)
    weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution.squeeze(2)
    # No loss of ours has a negative direction. What is as good as 0 is left out, and the rest is
    # weighed again.
    kept = weights > negligible * weights[:, :2].abs().amax(1, keepdim=True)
    kept[:, 2:] = True
    columns = columns * kept.unsqueeze(1)
    weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution.squeeze(2)
    weights = weights.where(kept, 0.0) / scale.squeeze(2)
    left = probe.gradient - (weights.unsqueeze(1) @ basis).squeeze(1)
    return Solved(weights, left.nan_to_num(nan=1e9) / probe.gradient.norm(), terms.detach())


def _minimise(residuals: Callable[[Tensor], Tensor], start: Sequence[float]) -> Parameters:
    """Find parameters with the smallest sum of squares, by Levenberg and Marquardt.

    ``residuals``: a function of some parameters ``[B, p]``, which returns ``[B, P]``.
    """
    num, h = len(start), 1e-6
    steps = h * torch.eye(num, dtype=torch.float64)
    around = torch.cat([torch.zeros_like(steps[:1]), steps, -steps])
    x, damping = torch.tensor(start, dtype=torch.float64), 1e-3
    left = residuals(x + around)
    for _ in range(40):
        jacobian = ((left[1 : num + 1] - left[num + 1 :]) / (2 * h)).T  # [P, p]
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
    return tuple(x.tolist())


class _Search(NamedTuple):
    """The search for the loss that a function is."""

    function: Function
    probes: list[Probe]
    labels: bool
    tolerance: float  # the relative error of a gradient by rounding

    def solve(self, candidate: Candidate, parameters: Tensor, probe: Probe) -> Solved:
        return _solve(candidate, parameters, probe, 100 * self.tolerance)

    def solved(self, candidate: Candidate, parameters: Sequence[float]) -> list[Solved]:
        """Solve all batches with the same parameters."""
        row = torch.tensor([parameters], dtype=torch.float64)
        return [self.solve(candidate, row, probe) for probe in self.probes]

    def result(self) -> Recognized:
        fits = self.fits(_WITH_LABELS if self.labels else _TWO_VIEWS, [()])
        best, is_near = fits[0], fits[0].error < _NEAR
        if self.tolerance < best.error < _LOOKED_FOR and isinstance(best.candidate, Structure):
            extended = [best.candidate._replace(extra=extra) for extra in _EXTRAS]
            near = [self.fit(each, [best.parameters[0], -9.0]) for each in extended]
            best = min([best, *[fit for fit in near if self.is_reason(fit)]], key=lambda x: x.error)
        if best.error > self.tolerance and not self.labels:
            fits += self.fits(_HARD, [(0.5, 0.05), (1.0, 0.1), (3.0, 0.2)], temperatures=8)
            fits = sorted(fits, key=lambda fit: fit.error)
            best, is_near = fits[0], True
        is_right = best.error <= self.tolerance and self.is_determined(best)
        if is_right and is_near and not best.candidate.differences():
            found = self.described(best)
            also = [fit for fit in fits if fit.error <= self.tolerance and fit is not best]
            same = [f"on these batches {self.described(x).line} is the same" for x in also]
            if found.kind != "none":
                return replace(found, differences=(*found.differences, *same))
            return replace(found, differences=("its factor or its value depends on the batch",))
        nearest = next(fit for fit in fits if not fit.candidate.differences())
        found = self.described(nearest)
        if nearest.error < _TINY and self.is_determined(nearest) and found.kind != "none":
            why = f"the gradient differs by {nearest.error:.0e}, as by an epsilon somewhere"
            return replace(found, kind="nearly", differences=(*found.differences, why))
        facts = [*best.candidate.differences(), *self.extras(best)] if is_right else []
        facts = [f"it would be one of ours, but {fact}" for fact in facts]
        return replace(found, kind="none", differences=(*facts, *self.facts()))

    def is_reason(self, fit: Fit) -> bool:
        """Whether an extra term has the same weight in all batches, and the sign of its name."""
        solved = self.solved(fit.candidate, fit.parameters)
        weights = torch.stack([x.weights[0, 2:] / x.weights[0, :2].sum() for x in solved])
        is_smoothing = getattr(fit.candidate, "extra", "") == "smoothing"
        same = (weights - weights[0]).abs() <= 1e-6 * weights.abs() + 100 * self.tolerance
        return bool(same.all()) and not (is_smoothing and bool((weights > 0).any()))

    def is_determined(self, fit: Fit) -> bool:
        """Whether the temperature is within its range, and another one would not do as well."""
        shifted = [fit.parameters[0] - math.log(1.5), *fit.parameters[1:]]
        inside = 1.001 * _LOWEST < fit.temperature() < 0.999 * _HIGHEST
        return inside and self.error(fit.candidate, shifted) > max(2 * fit.error, self.tolerance)

    def fits(
        self, candidates: Sequence[Candidate], starts: Sequence[Parameters], temperatures: int = 30
    ) -> list[Fit]:
        """Fit each candidate to the first batch, the best one first."""
        edges = math.log(_LOWEST), math.log(_HIGHEST)
        grid = torch.linspace(*edges, temperatures).tolist()
        each = torch.tensor([(tau, *more) for tau in grid for more in starts], dtype=torch.float64)
        found = []
        for candidate in candidates:
            errors = self.solve(candidate, each, self.probes[0]).left.norm(dim=1)
            found.append(self.fit(candidate, each[errors.argmin()].tolist()))
        return sorted(found, key=lambda fit: fit.error)

    def fit(self, candidate: Candidate, start: Sequence[float]) -> Fit:
        """Fit the parameters of a candidate; the error is the largest of all batches."""
        others = [(0.0, 100.0), (0.0, 0.99)] if isinstance(candidate, Options) else [(-40.0, 5.0)]
        limits = torch.tensor(
            [(math.log(_LOWEST), math.log(_HIGHEST)), *others], dtype=torch.float64
        )
        low, high = limits[: len(start)].unbind(1)

        def residuals(x: Tensor) -> Tensor:
            return self.solve(candidate, x.clamp(low, high), self.probes[0]).left

        found = torch.tensor(_minimise(residuals, start), dtype=torch.float64).clamp(low, high)
        tau, *more = found.tolist()
        rounded = math.log(float(f"{math.exp(tau):.6g}"))
        exact, near = (
            Fit(self.error(candidate, x), candidate, x) for x in ((tau, *more), (rounded, *more))
        )
        return near if near.error <= self.tolerance else exact

    def error(self, candidate: Candidate, parameters: Sequence[float]) -> float:
        """The largest relative error of the gradient, of all batches."""
        return max(float(x.left.norm()) for x in self.solved(candidate, parameters))

    def described(self, best: Fit) -> Recognized:
        """Say what was found, as a line of code and in words."""
        candidate, solved = best.candidate, self.solved(best.candidate, best.parameters)
        sizes = torch.tensor([len(probe.views[0]) for probe in self.probes]).double()
        ways = torch.cat([x.weights[:, :2] for x in solved])  # [4, 1 or 2], of each batch
        totals, differences = ways.sum(1), self.extras(best)
        near = max(1e-8, 100 * self.tolerance)
        varies = (ways / totals.unsqueeze(1) - ways[0] / totals[0]).abs().max() > near
        scales = {power: totals / sizes**power for power in (0.0, 1.0, 0.5, -1.0, -0.5, 2.0)}
        spread = {power: float((x / x[0] - 1).abs().max()) for power, x in scales.items()}
        power = min(spread, key=spread.__getitem__)
        scaled = scales[power]
        fixed = not bool(varies) and spread[power] <= near

        options = {"temperature": round_to(best.temperature(), best.error), **candidate.options()}
        if isinstance(candidate, Options):
            fitted = zip(candidate.fitted, best.parameters[1:], strict=True)
            options |= {name: round_to(value, best.error) for name, value in fitted if value > 1e-9}
        are_equal = ways.shape[1] == 2 and bool((ways[:, 0] / ways[:, 1] - 1).abs().max() < near)
        if ways.shape[1] == 2 and not are_equal:
            options["queries"] = "first"
        if power == 1:
            options["reduction"] = "sum"
            scaled = scaled / 2 if are_equal else scaled
        factor, constant = (
            round_to(float(scaled[0]), best.error),
            self.constant(best, solved, differences),
        )
        fixed &= math.isfinite(constant)
        z1, z2 = (
            name if any(view is x for x in self.probes[0].learned) else f"{name}.detach()"
            for name, view in zip(("z1", "z2"), (self.probes[0].views * 2)[:2], strict=True)
        )
        calls = ["(z, labels=labels)"] if self.labels else [f"({z1}, {z2})", f"({z2}, {z1})"]
        options = {name: options[name] for name in InfoNCE.options if name in options}
        loss = f"InfoNCE({as_written(options)})"
        if self.labels or are_equal or best.error > self.tolerance:
            parts = [(factor, f"{loss}{calls[0]}")]
        else:
            shares = [round_to(factor * float(x / totals[0]), best.error) for x in ways[0]]
            parts = [(x, f"{loss}{call}") for x, call in zip(shares, calls, strict=True) if x]
        line = " + ".join(call if x == 1 else f"{x:.12g} * {call}" for x, call in parts)
        if power not in (0, 1):
            line = f"len(z1) ** {power:g} * " + (line if len(parts) == 1 else f"({line})")
        line += f" + {constant:.12g}" * (constant > 0) + f" - {-constant:.12g}" * (constant < 0)
        kind = "none" if not fixed else "nearly" if differences else "exact"
        names, made = _names(options, self.labels), InfoNCE(**options)
        return Recognized(kind, made, line, factor, constant, names, tuple(differences), best.error)

    def extras(self, best: Fit) -> list[str]:
        """Name a small difference that was added to our loss, with its number."""
        extra = getattr(best.candidate, "extra", "")
        if not extra:
            return []
        weights = self.solved(best.candidate, best.parameters)[0].weights[0]
        number = math.exp(best.parameters[-1])
        if extra in ("smoothing", "lengths"):
            number = float(weights[2:][weights[2:].abs().argmax()])
        if extra == "smoothing":
            number /= -float(weights[:2].sum())
        return [_EXTRAS[extra].format(number)]

    def constant(self, best: Fit, solved: Sequence[Solved], differences: list[str]) -> float:
        """Find what the function adds to our value; say so if it depends on the batch."""
        each = [
            probe.value - float((x.weights * x.values).sum())
            for probe, x in zip(self.probes, solved, strict=True)
        ]
        noise = 10 * self.tolerance * max(1.0, *(abs(probe.value) for probe in self.probes))
        if max(each) - min(each) <= noise:
            return round_to(each[0]) if abs(each[0]) > noise else 0.0
        if best.error <= self.tolerance:
            views = 1 if best.candidate.options().get("negatives") == "cross" else 2
            counts = [views * (len(probe.views[0]) - 1) for probe in self.probes]
            logs = torch.tensor([[math.log(n), 1.0] for n in counts], dtype=torch.float64)
            values = torch.tensor(each, dtype=torch.float64)
            line = torch.linalg.lstsq(logs, values).solution
            slope, constant = line.tolist()
            if (logs @ line - values).abs().max() <= noise:
                by = f"{slope:.4g} * log(number of negatives)"
                differences.append(f"it adds {by} to the value")
                return round_to(constant) if abs(constant) > noise else 0.0
        return math.nan  # it depends on the batch

    def facts(self) -> list[str]:
        """What helps a person whose function is no loss of ours."""
        probe = self.probes[0]
        n, dim = probe.views[0].shape
        facts = []

        def value(change: Callable[[Tensor], Tensor]) -> float:
            return _probe(self.function, 0, (n, dim), self.labels, change).value

        def same(change: Callable[[Tensor], Tensor]) -> bool:
            return abs(value(change) - probe.value) <= 1e-4 * (abs(probe.value) + 1e-8)

        if len(probe.learned) < len(probe.views):
            facts.append("one of its views has no gradient")
        if not self.labels and not same(lambda z: z.flip(0)):
            facts.append("its value depends on the order of the graphs")
        if not same(lambda z: z * torch.linspace(0.5, 2, n).unsqueeze(1)):
            facts.append("its value depends on the lengths of embeddings, so it has no cosines")
        if same(lambda z: z + 0.3) and not same(torch.square):
            facts.append("it centres the embeddings: a vector that is added to all changes nothing")
        return facts


def round_to(number: float, error: float = 0.0) -> float:
    """Round to few digits, if the number is as near to them as it can be known."""
    near = min(max(1e-9, 10 * error), 1e-3) * abs(number)
    digits = (float(f"{number:.{n}g}") for n in range(1, 18))
    return next((x for x in digits if abs(x - number) <= near), number)


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
