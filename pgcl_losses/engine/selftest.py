"""Whether the fused kernels give the same results on a device as plain operations.

Before "auto" takes them there, both compute a small random case of the same kind. The comparison is
read once it has arrived, without waiting for it. Until then the kernels are not trusted.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pgcl_losses._warn import warn
from pgcl_losses.arrival import Arrival, can_arrive
from pgcl_losses.engine import streaming
from pgcl_losses.engine.pairs import (
    ALL_PAIRS,
    LARGEST_EXPONENT,
    Factors,
    Gaussian,
    Pairs,
    Sums,
    mean_of,
    weight_of,
)
from pgcl_losses.engine.tiles import precision
from pgcl_losses._normalize import unit_vectors

# Relative errors, generous: they are there to tell wrong kernels from rounding.
_TOLERANCES = {"highest": 1e-4, "high": 1e-2, "medium": 3e-2}
# In two views. Half of each are in one cluster, which so has a block of 128 rows of its own.
_NUM_ROWS = 600
_COLUMNS_OF_A_TABLE = 10
_TEMPERATURE, _LOW_TEMPERATURE = 0.2, 0.02
_OLDEST_TRITON, _OLDEST_GPU = (3, 6), (8, 0)


class Case(NamedTuple):
    """A case for which kernels are compiled, or compute in another way. Each has its own trial."""

    precision: str  # of products
    device: torch.device
    dtype: torch.dtype  # of rows
    width: int
    low_temperature: bool
    num_views: int
    across_views: bool
    gaussian: bool
    factors: tuple[int, int, bool] | None  # see `_form`


# What came of each case: errors that are on their way, or whether the kernels are right.
OUTCOMES: dict[Case, dict[str, Arrival] | bool] = {}


def is_trusted(pairs: Pairs, temperature: float) -> bool:
    """Whether kernels have passed their trial for such pairs, and none has failed on the device.

    This begins the trial, except in a graph that is captured or compiled.
    """
    factors = weight_of(Factors, pairs.weights)
    case = (  # of plain numbers in a compiled graph, too, which operator.index makes of symbols
        pairs.rows.device,
        pairs.rows.dtype,
        operator.index(pairs.rows.shape[1]),
        bool(operator.index(1 / temperature > LARGEST_EXPONENT)),
        pairs.num_views if pairs.across_views else 2,
        pairs.across_views,
        weight_of(Gaussian, pairs.weights) is not None,
        None if factors is None else _form(factors),
    )
    if can_arrive(pairs.rows.detach()):
        _go_on(Case(precision(), *case))
    return bool(_has_passed(*case))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no type there
def _has_passed(device: torch.device, *others: object) -> bool:
    outcome = OUTCOMES.get(Case(precision(), device, *others))  # type: ignore[arg-type]
    return outcome is True and not _has_failed(device)


def _has_failed(device: torch.device) -> bool:
    outcomes = list(OUTCOMES.items())  # other threads, with devices of their own, may add some
    return any(case.device == device and passed is False for case, passed in outcomes)


def _form(factors: Factors) -> tuple[int, int, bool]:
    """Columns; how many a row looks up, 0 if it has a number for each; whether lines are few."""
    if factors.looked_up() and factors.lines is factors.right:
        return _COLUMNS_OF_A_TABLE, 1, True  # kernels for tables do not depend on their size
    heads = 0
    if not factors.right.is_floating_point():
        heads = 1 if factors.looked_up() else operator.index(factors.right.shape[1])
    return operator.index(factors.num_columns()), heads, factors.lines is not None


def _go_on(case: Case) -> None:
    """Begin the trial, or read what has arrived of it."""
    if _has_failed(case.device):
        return
    if case not in OUTCOMES:
        _begin(case)
    errors = OUTCOMES[case]
    if isinstance(errors, dict):
        _read(case, errors)


def _begin(case: Case) -> None:
    if not _can_run(case.device):
        OUTCOMES[case] = False
        return
    try:
        OUTCOMES[case] = _errors(case)
    except Exception as error:  # whatever it is: plain operations do without
        _fail(case, f"fail with {type(error).__name__}: {error}")


def _read(case: Case, errors: dict[str, Arrival]) -> None:
    tolerance = _tolerance(case)
    for of, arrival in errors.items():
        error = arrival.read()
        if error is None:
            return
        if not error <= tolerance:  # NaN is none, either
            _fail(
                case,
                f"differ from plain operations by {error:.1e} in {of}, where rounding explains "
                f"{tolerance:.0e}",
            )
            return
    OUTCOMES[case] = True


def _fail(case: Case, how: str) -> None:
    OUTCOMES[case] = False
    warn(
        f"engine='auto': on {case.device} the Triton kernels for {case.dtype} rows of width "
        f"{case.width} {how}. It takes engine='streaming' there from now on."
    )


def _can_run(device: torch.device) -> bool:
    try:
        import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return False
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    if version < _OLDEST_TRITON:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _OLDEST_GPU


def _temperature(case: Case) -> float:
    return _LOW_TEMPERATURE if case.low_temperature else _TEMPERATURE


def _tolerance(case: Case) -> float:
    of_products = _TOLERANCES[case.precision]
    of_exponents = of_products * _TEMPERATURE / _temperature(case)
    return of_exponents + 4 * torch.finfo(case.dtype).eps


@torch.no_grad()
def _errors(case: Case) -> dict[str, Arrival]:
    """The largest of the sums, the Gaussian's masses and the gradient, of the kernels."""
    from pgcl_losses.engine import triton  # it needs the package

    pairs = _example(case)
    exact = _wide(pairs)
    # Streaming has a gradient without autograd, which might be recorded, packed or counted by
    # whatever is around the loss.
    expected = _results(streaming.log_sums, streaming.gradient, exact, _temperature(case))
    # In two parts, each program goes from tile to tile.
    sums = functools.partial(triton.sums_by_kernels, splits=2)
    gradient = functools.partial(triton.gradient_by_kernels, splits=2)
    found = _results(sums, gradient, pairs, _temperature(case))
    return {of: Arrival(_error(found[of], expected[of])) for of in expected}


def _results(
    sums: Callable[..., Sums], gradient: Callable[..., Tensor], pairs: Pairs, temperature: float
) -> dict[str, Tensor]:
    log_sums, log_masses = sums(pairs, temperature, ALL_PAIRS)
    slopes = torch.linspace(-1, 2, len(log_sums), dtype=log_sums.dtype, device=log_sums.device)
    results = {
        "sums": log_sums,
        "masses": log_masses,
        "the gradient": gradient(pairs, temperature, log_sums, slopes, ALL_PAIRS),
    }
    return {of: result for of, result in results.items() if result is not None}


def _error(found: Tensor, expected: Tensor) -> Tensor:
    """Relative to 1 or the largest: logarithms of sums have their sums' relative errors."""
    largest = expected.abs().max() if expected.dim() > 1 else 1.0
    return (found - expected).abs().max() / largest


def _example(case: Case) -> Pairs:
    """Random pairs of a case, made on its device, with random numbers that are no one else's."""
    generator = torch.Generator(case.device).manual_seed(0)
    dtype = torch.promote_types(case.dtype, torch.float32)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=dtype, device=case.device)

    def number(below: int) -> Tensor:
        """Numbers, half of which are 0."""
        some = torch.randint(below, (_NUM_ROWS,), generator=generator, device=case.device)
        return some * (torch.arange(_NUM_ROWS, device=case.device) % 2)

    def log_weights(*shape: int) -> Tensor:
        """A quarter leaves pairs out, but not in the first line or column."""
        weights = random(*shape)
        weights[1:, 1:].masked_fill_(weights[1:, 1:] < 0.25, 0.0)
        return weights.log()

    def table(size: int) -> Tensor:
        """With its own cluster left out; all rows have negatives."""
        weights = log_weights(size, size)
        return weights.fill_diagonal_(-torch.inf) if size > 1 else weights

    directions = (random(5, case.width) - 0.5).index_select(0, number(5))
    rows = unit_vectors(directions + random(_NUM_ROWS, case.width) - 0.5, dtype).to(case.dtype)
    weights: list[Factors | Gaussian] = []
    if case.factors is not None:
        columns, heads, few_lines = case.factors
        if heads == 0:
            factors = Factors(log_weights(_NUM_ROWS, columns), random(_NUM_ROWS, columns))
        elif not few_lines:
            factors = Factors(log_weights(_NUM_ROWS, columns), number(columns))
        else:
            sizes = [columns // heads] * (heads - 1)
            sizes.append(columns - sum(sizes))
            of_heads = [(size, number(size)) for size in sizes]
            factors = mean_of([Factors(table(n), of, lines=of) for n, of in of_heads])
        weights.append(factors)
    if case.gaussian:
        weights.append(Gaussian(random(_NUM_ROWS) - 0.5, random(_NUM_ROWS) + 0.05))
    return Pairs(rows, case.num_views, case.across_views, tuple(weights))


def _wide(pairs: Pairs) -> Pairs:
    """The same numbers in float64."""
    weights = [
        type(weight)(*(_widened(of) for of in weight))  # type: ignore[arg-type]
        for weight in pairs.weights
    ]
    return pairs._replace(rows=pairs.rows.double(), weights=tuple(weights))


def _widened(values: Tensor | None) -> Tensor | None:
    return values.double() if values is not None and values.is_floating_point() else values
