"""The parameters that turn the gradient of a candidate nearest to a function's.

The direction of a gradient does not change if a loss is multiplied by a factor, or if a constant is
added. So one number is fitted for most candidates: the temperature. How much each direction of the
loss counts follows by least squares over all batches.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pgcl_losses.recognition.candidates import DIFFERENCES, OPTIONS, TERMS, Candidate
from pgcl_losses.recognition.probe import Probe

_LOWEST, _HIGHEST = math.log(0.002), math.log(100)  # logarithms of temperatures
_HOPELESS = 0.3  # the error of a start from which no fit begins, unless it is the best one


class Fit(NamedTuple):
    """A candidate with the parameters that turn its gradient nearest to the function's."""

    candidate: Candidate
    parameters: tuple[float, ...]
    error: float  # relative, of the gradient: the largest one of all batches
    weights: Tensor  # [T] of its terms, in all batches
    growth: "Growth"  # how the factor grows with the batch
    values: Tensor  # [batches] its value with these weights
    error_alone: float  # the error if each batch may have weights of its own

    def given(self) -> dict[str, float]:
        """The parameters by name."""
        row = torch.tensor([self.parameters], dtype=torch.float64)
        return {name: float(x) for name, x in self.candidate.given(row).items()}


class Growth(NamedTuple):
    """A factor of N to a power, or of the number of queries."""

    power: float
    factors: Tensor  # [batches]
    difference: str = ""


class Search(NamedTuple):
    """The search for the candidate that a function is."""

    probes: list[Probe]
    growths: list[Growth]
    tolerance: float  # the relative error of a gradient by rounding

    def fits(self, candidates: Sequence[Candidate]) -> list[Fit]:
        """Fit the candidates that are near enough somewhere on a grid, the best one first."""
        on_grid = []
        for candidate in candidates:
            temperatures = torch.linspace(_LOWEST, _HIGHEST, num := 40)
            further = [torch.tensor(OPTIONS[name][0]) for name in candidate.fitted]
            grid = torch.cartesian_prod(temperatures, *further).double()
            grid = grid.view(num, -1, 1 + len(further))
            left = self.left(candidate, grid.flatten(0, 1))
            errors, places = left.norm(dim=1).view(num, -1).min(0)  # of the best temperature
            near = int((errors < _HOPELESS).sum().clamp(1, 6))
            starts = grid[places, torch.arange(len(places))][errors.argsort()[:near]]
            on_grid.append((float(errors.min()), candidate, starts))
        on_grid.sort(key=lambda x: x[0])
        found = [
            self.fit(candidate, starts)
            for number, (error, candidate, starts) in enumerate(on_grid)
            if error < _HOPELESS or number == 0
        ]
        return sorted(found, key=lambda fit: fit.error)

    def fit(self, candidate: Candidate, starts: Tensor) -> Fit:
        """Fit the parameters to the first batch, from each start until the candidate is right."""
        limits = {name: (0.0, high) for name, (_, high) in OPTIONS.items()}
        limits["temperature"] = _LOWEST, _HIGHEST
        bounds = [limits.get(name, (-40.0, 5.0)) for name in candidate.names()]
        low, high = torch.tensor(bounds, dtype=torch.float64).unbind(1)

        def residuals(x: Tensor) -> Tensor:
            return self.left(candidate, x.clamp(low, high))

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

    def left(self, candidate: Candidate, parameters: Tensor) -> Tensor:
        """What is left of the gradient of the first batch for B sets of parameters ``[B, M]``."""
        basis, _ = _basis(self.probes[0], candidate, parameters)
        return self.weigh([basis], [self.probes[0].direction()])[1][0]

    def at(self, candidate: Candidate, parameters: Sequence[float]) -> Fit:
        """A candidate with given parameters, on all batches."""
        row = torch.tensor([parameters], dtype=torch.float64)
        each = [_basis(probe, candidate, row) for probe in self.probes]
        targets = [probe.direction() for probe in self.probes]
        alone = [self.weigh([x], [y])[1][0].norm() for (x, _), y in zip(each, targets, strict=True)]
        fits = []
        for growth in self.growths:
            grown = [
                basis * factor for (basis, _), factor in zip(each, growth.factors, strict=True)
            ]
            weights, left = self.weigh(grown, targets)
            error = max(float(x.norm()) for x in left)
            values = torch.stack([(weights * x).sum() for _, x in each]) * growth.factors
            fit = Fit(
                candidate, tuple(parameters), error, weights[0], growth, values, float(max(alone))
            )
            if error <= self.tolerance:
                return fit
            fits.append(fit)
        return min(fits, key=lambda fit: fit.error)

    def weigh(
        self, basis: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Weigh terms ``[B, T, M]``, so that their gradients are nearest to those of all batches.

        Return the weights ``[B, T]``, and what is left of each batch ``[B, M]``.
        """
        joined = torch.cat(list(basis), 2)  # [B, T, all M]
        scale = joined.norm(dim=2, keepdim=True).clamp_min(1e-300)
        columns = (joined / scale).nan_to_num().mT
        target = torch.cat(list(targets)).view(1, -1, 1).expand(len(joined), -1, -1)
        weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution.squeeze(2)
        # Both directions of a loss of ours have the same sign. What is as good as 0 or has the
        # other sign is left out, and the rest is weighed again.
        ways = weights[:, :2]
        largest = ways.gather(1, ways.abs().argmax(1, keepdim=True))
        kept = weights * largest.sign() > 100 * self.tolerance * largest.abs()
        kept[:, 2:] = True
        columns = columns * kept.unsqueeze(1)
        weights = torch.linalg.lstsq(columns, target, driver="gelsd").solution.squeeze(2)
        weights = weights.where(kept, 0.0) / scale.squeeze(2)
        left = [
            (y - (weights.unsqueeze(1) @ x).squeeze(1)).nan_to_num(nan=1e9)
            for x, y in zip(basis, targets, strict=True)
        ]
        return weights, left

    def is_determined(self, fit: Fit) -> bool:
        """Whether the temperature is within its range, and another one would not do as well."""
        log_tau, *more = fit.parameters
        other = self.at(fit.candidate, (log_tau - math.log(1.5), *more))
        is_inside = _LOWEST + 1e-3 < log_tau < _HIGHEST - 1e-3
        return is_inside and other.error > max(2 * fit.error, self.tolerance)

    def with_differences(self, fit: Fit, number: int = 2) -> Fit:
        """Add what scripts do besides, one after the other, as long as it brings a fit nearer."""
        best = fit
        for name, (_, start) in DIFFERENCES.items():
            if name not in fit.candidate.fitted:
                candidate = fit.candidate._replace(fitted=(*fit.candidate.fitted, name))
                starts = [[*fit.parameters, math.log(start * x)] for x in (1.0, 1e3)]
                found = self.fit(candidate, torch.tensor(starts, dtype=torch.float64))
                best = found if found.error < best.error else best
        if not fit.candidate.fitted:
            for extra in TERMS:
                terms = partial(fit.candidate.terms, extra=extra)
                here = torch.tensor([fit.parameters], dtype=torch.float64)
                found = self.fit(fit.candidate._replace(terms=terms), here)
                ours = found.weights[:2].sum()
                is_reason = extra != "smoothing" or float(found.weights[2:].sum() / ours) <= 0
                best = found if is_reason and found.error < best.error else best
        if number == 1 or best.error <= self.tolerance or best.error > 0.3 * fit.error:
            return best
        return self.with_differences(best, number - 1)


def differences(fit: Fit) -> list[str]:
    """Say what a function does besides a loss of ours."""
    given, extra = fit.given(), getattr(fit.candidate.terms, "keywords", {}).get("extra", "")
    found = [text.format(given[name]) for name, (text, _) in DIFFERENCES.items() if name in given]
    if extra:
        more, ours = fit.weights[2:], fit.weights[:2].sum()
        number = more.abs().sum() if extra == "lengths" else -more.sum() / ours
        found.append(TERMS[extra].format(float(number)))
    return [*fit.candidate.differences, *found]


def _basis(probe: Probe, candidate: Candidate, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients ``[B, T, M]`` of the terms of a candidate, and their values ``[B, T]``.

    The gradients are divided by the length of the function's gradient.
    """
    views = [
        z.detach().expand(len(parameters), -1, -1).clone().requires_grad_() for z in probe.views
    ]
    terms = candidate.terms(views, candidate.given(parameters))
    learned = [views[place] for place in probe.learned]
    gradients = [
        torch.autograd.grad(term.sum(), learned, retain_graph=True, materialize_grads=True)
        for term in terms.unbind(1)
    ]
    basis = torch.stack([torch.cat([d.flatten(1) for d in each], 1) for each in gradients], 1)
    return basis / probe.gradient.norm(), terms.detach()


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
