"""The numbers that turn the gradient of a candidate nearest to the gradient of a function.

The direction of a gradient does not change if a loss is multiplied by a factor, or if a constant is
added. So only the temperature is fitted for most candidates. How much each direction of the loss
counts follows by least squares over all batches.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.recognition.candidates import GRIDS, Candidate
from pgcl_losses.recognition.probe import Probe, labels_of

_HOPELESS = 0.3  # a candidate with a larger error on the grid is not fitted, unless it is the first
_SLOW = 0.98  # a fit ends with a step that makes the error less than 2 % smaller
_STARTS = 12  # the number of places of the grid from which further numbers are fitted


class Growth(NamedTuple):
    """How the factor of a function grows with the batch."""

    factors: Tensor  # [batches]
    power: float = 0.0  # of N, as the line writes it
    is_sum: bool = False  # whether it is ``reduction="sum"``
    differences: tuple[str, ...] = ()


class Fit(NamedTuple):
    """A candidate with the numbers that turn its gradient nearest to the function's."""

    candidate: Candidate
    numbers: dict[str, float]
    growth: Growth
    weights: Tensor  # [T], how much each of the candidate's terms counts in all batches
    values: Tensor  # [batches], the value with these weights
    errors: Tensor  # [batches], relative errors of the gradient
    alone: Tensor  # [batches], the errors if each batch has weights of its own

    @property
    def error(self) -> float:
        return float(self.errors.max())


class Search(NamedTuple):
    """The search for the candidate that a function is."""

    probes: list[Probe]
    growths: list[Growth]
    is_single: bool  # whether the function computes in float32

    @property
    def tolerance(self) -> float:
        """The relative error of a gradient by rounding."""
        return 3e-5 if self.is_single else 1e-9

    def fits(self, candidates: Sequence[Candidate]) -> list[Fit]:
        """Fit the candidates that are near enough on the first batch, the best fit first.

        The search begins with the candidates that have the fewest numbers, and ends with a fit that
        is right to rounding.
        """
        found: list[Fit] = []
        on_grid = [(*self.on_grid(candidate), candidate) for candidate in candidates]
        on_grid.sort(key=lambda x: (len(x[2].further), x[0]))
        for error, starts, candidate in on_grid:
            if not found or error < _HOPELESS:
                found.append(self.fit(candidate, starts))
                if found[-1].error <= self.tolerance:
                    break
        return sorted(found, key=lambda fit: fit.error)

    def on_grid(self, candidate: Candidate) -> tuple[float, Tensor]:
        """The smallest error on the first batch, and the places ``[S, P]`` where a fit starts.

        A fit starts from the best places of the grid that have a smaller error than the next
        temperatures: hard and debiased losses have local minima.
        """
        axes = [
            torch.linspace(math.log(low), math.log(high), num, dtype=torch.float64)
            for low, high, num in (GRIDS[name] for name in candidate.names())
        ]
        grid = torch.cartesian_prod(*axes).view(-1, len(axes))
        errors = self.left(candidate, grid).norm(dim=1)
        lines = F.pad(errors.view(len(axes[0]), -1).T, (1, 1), value=math.inf)
        is_lowest = (lines[:, 1:-1] <= lines[:, 2:]) & (lines[:, 1:-1] <= lines[:, :-2])
        lowest = errors.where(is_lowest.T.flatten(), math.inf)
        return float(errors.min()), grid[lowest.argsort()[: min(_STARTS, int(is_lowest.sum()))]]

    def fit(self, candidate: Candidate, starts: Tensor) -> Fit:
        """Fit the numbers to the first batch, with a round temperature if that one is right."""
        found = _minimise(partial(self.left, candidate), starts)
        best = found[self.left(candidate, found).norm(dim=1).argmin()]
        numbers = dict(zip(candidate.names(), best.exp().tolist(), strict=True))
        temperature = float(f"{numbers['temperature']:.6g}")
        rounded = self.at(candidate, {**numbers, "temperature": temperature})
        return rounded if rounded.error < self.tolerance else self.at(candidate, numbers)

    def left(self, candidate: Candidate, parameters: Tensor) -> Tensor:
        """What is left of the gradient of the first batch for parameters ``[B, P]``."""
        basis, _ = _basis(self.probes[0], candidate, parameters)
        return self.weigh(basis, self.probes[0].direction())[1]

    def at(self, candidate: Candidate, numbers: dict[str, float]) -> Fit:
        """A candidate with given numbers, on all batches."""
        parameters = torch.tensor([[*numbers.values()]], dtype=torch.float64).log()
        each = [_basis(probe, candidate, parameters) for probe in self.probes]
        targets = [probe.direction() for probe in self.probes]
        alone = [self.weigh(x, y)[1].norm() for (x, _), y in zip(each, targets, strict=True)]
        fits = []
        for growth in self.growths:
            grown = [x * factor for (x, _), factor in zip(each, growth.factors, strict=True)]
            weights, left = self.weigh(torch.cat(grown, 2), torch.cat(targets))
            errors = [x.norm() for x in torch.split(left[0], [len(y) for y in targets])]
            values = torch.stack([(weights * x).sum() for _, x in each]) * growth.factors
            both = torch.stack(errors), torch.stack(alone)
            fits.append(Fit(candidate, numbers, growth, weights[0], values, *both))
            if fits[-1].error <= self.tolerance:
                break
        return min(fits, key=lambda fit: fit.error)

    def weigh(self, basis: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh terms ``[B, T, M]``, so that their gradient is nearest to the target ``[M]``.

        Return the weights ``[B, T]``, and what is left of the target ``[B, M]``.
        """
        scale = basis.norm(dim=2, keepdim=True).clamp_min(1e-300)
        columns = (basis / scale).nan_to_num().mT
        y = target.view(1, -1, 1).expand(len(basis), -1, -1)
        weights = torch.linalg.lstsq(columns, y, driver="gelsd").solution  # [B, T, 1]
        # Both directions of a loss of ours have the same sign. What is as good as 0 or has the
        # other sign is left out, and the rest is weighed again.
        largest = weights.gather(1, weights.abs().argmax(1, keepdim=True))
        kept = weights * largest.sign() > 100 * self.tolerance * largest.abs()
        columns = columns * kept.mT
        weights = torch.linalg.lstsq(columns, y, driver="gelsd").solution * kept
        left = (y - columns @ weights).squeeze(2).nan_to_num(nan=1e9)
        return (weights / scale).squeeze(2), left

    def is_determined(self, fit: Fit) -> bool:
        """Whether no other value of any of the numbers would do as well."""
        others = [{**fit.numbers, name: x / 1.5} for name, x in fit.numbers.items()]
        errors = [self.at(fit.candidate, numbers).error for numbers in others]
        return min(errors) > max(2 * fit.error, self.tolerance)


def search_for(probes: list[Probe], labels: bool) -> Search:
    """Prepare a search for the function that was probed."""
    sizes = queries = torch.tensor([len(x.views[0]) for x in probes]).double()
    if labels:  # our mean is over queries with a positive
        every = [labels_of(len(x.views[0])) for x in probes]
        queries = torch.tensor([float((x.bincount()[x] > 1).sum()) for x in every]).double()
    growths = [Growth(torch.ones_like(sizes)), Growth(queries, is_sum=True)]
    growths += [Growth(sizes**power, power) for power in (0.5, -1.0, -0.5, 2.0)]
    if not torch.equal(queries, sizes):
        over_all = ("a query without a positive is 0 in its mean",)
        growths.append(Growth(queries / sizes, differences=over_all))
    is_single = all(x.is_single() for x in probes)
    return Search([x.in_span() for x in probes], growths, is_single)


def _basis(probe: Probe, candidate: Candidate, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients ``[B, T, M]`` of the terms of a candidate, and their values ``[B, T]``.

    The gradients are divided by the length of the function's gradient.
    """
    views = [
        z.detach().expand(len(parameters), -1, -1).clone().requires_grad_() for z in probe.views
    ]
    terms = candidate.terms(views, parameters)
    learned = [views[place] for place in probe.learned]
    gradients = [
        torch.autograd.grad(term.sum(), learned, retain_graph=True, materialize_grads=True)
        for term in terms.unbind(1)
    ]
    basis = torch.stack([torch.cat([d.flatten(1) for d in each], 1) for each in gradients], 1)
    return basis / probe.gradient.norm(), terms.detach()


def _minimise(residuals: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Find the parameters with the smallest sum of squares, by Levenberg and Marquardt.

    Args:
        residuals (callable): a function of parameters ``[B, P]`` that returns ``[B, M]``.
        x (Tensor): the starts ``[S, P]``, each of which is followed by itself.

    """
    num, h = x.shape[1], 1e-6
    steps = h * torch.eye(num, dtype=x.dtype)
    around = torch.cat([torch.zeros_like(steps[:1]), steps, -steps])  # [1 + 2 P, P]

    def nearby(x: Tensor) -> Tensor:  # [S, 1 + 2 P, M]
        left = residuals((x.unsqueeze(1) + around).flatten(0, 1))
        return left.view(len(x), len(around), -1)

    left, damping = nearby(x), torch.full_like(x[:, :1, None], 1e-3)
    for _ in range(40):
        jacobian = (left[:, 1 : num + 1] - left[:, num + 1 :]) / (2 * h)  # [S, P, M]
        gram = jacobian @ jacobian.mT
        damped = gram + damping * gram.diagonal(dim1=1, dim2=2).clamp_min(1e-30).diag_embed()
        step = torch.linalg.solve(damped, jacobian @ left[:, :1].mT).squeeze(2)
        new = x - step.clamp(-2, 2)
        left_there = nearby(new)
        before, after = left[:, 0].norm(dim=1), left_there[:, 0].norm(dim=1)
        is_better = (after < before).view(-1, 1, 1)
        x, left = new.where(is_better[:, 0], x), left_there.where(is_better, left)
        damping = torch.where(is_better, damping / 10, damping * 10).clamp_min(1e-5)
        is_slow = (after > _SLOW * before) & (after < before) | (damping.flatten() > 10)
        if is_slow.all() or left[:, 0].norm(dim=1).min() < 1e-13:
            break
    return x
