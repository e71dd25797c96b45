"""Whether the fused kernels give the same results on a device as plain operations.

Both compute a few small random cases, before "auto" takes the kernels there for the first time.
This module marks a function as constant for compiled graphs, which makes torch import its compiler.
So it is imported only when it is needed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses._modes import is_capturing
from pgcl_losses._warnings import warn
from pgcl_losses.engine.contract import ALL_PAIRS, Factors, Gaussian, Pairs, Table, compared_sets

# Relative errors at a temperature of 0.2, generous: they tell wrong kernels from rounding.
_TOLERANCES = {"highest": 1e-4, "high": 1e-2, "medium": 3e-2}
_LENGTHS = 150, *(25,) * 6  # most of the first set are in one cluster, and fill a block
_OLDEST_TRITON, _OLDEST_GPU = (3, 6), (8, 0)

_PASSED: dict[torch.device, bool] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no type there
def kernels_pass(device: torch.device) -> bool:
    """The first call for a device tests the kernels, and waits for the result."""
    if device not in _PASSED and _can_run(device):
        if is_capturing(device):
            raise RuntimeError(
                "engine='auto' tests its kernels when a loss first needs them, which a CUDA graph "
                "cannot capture: call the loss once before the capture"
            )
        _test(device)
    return _PASSED.get(device, False)


def _can_run(device: torch.device) -> bool:
    try:
        import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return False
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    if version < _OLDEST_TRITON:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _OLDEST_GPU


def _test(device: torch.device) -> None:
    try:
        with ThreadPoolExecutor(1) as pool:  # a thread has none of the caller's modes and hooks
            wrong = pool.submit(_find_wrong, device).result()
    except Exception as error:  # whatever it is: plain operations do without
        wrong = f"fail with {type(error).__name__}: {error}"
    _PASSED[device] = not wrong
    if wrong:
        warn(
            f"engine='auto': on {device} the Triton kernels {wrong}. It takes engine='streaming' "
            "there."
        )


def _find_wrong(device: torch.device) -> str:
    from pgcl_losses.engine import streaming
    from pgcl_losses.engine.triton.launch import gradient_by_kernels, log_sums_by_kernels
    from pgcl_losses.engine.triton.layout import precision

    both = _cases(device, torch.float32), _cases(device, torch.float64)
    for (pairs, temperature), (exact, _) in zip(*both, strict=True):
        sums = streaming.log_sums(exact, temperature)
        d_log_s = torch.linspace(-1, 2, len(sums.log_sums), dtype=torch.float64, device=device)
        d_exact = streaming.gradient(exact, temperature, sums.log_sums, d_log_s, ALL_PAIRS)
        # With two splits, each program goes from tile to tile.
        ours = log_sums_by_kernels(pairs, temperature, ALL_PAIRS, splits=2)
        d_ours = gradient_by_kernels(
            pairs, temperature, ours.log_sums, d_log_s.float(), ALL_PAIRS, splits=2
        )
        errors = {
            "sums": _error(ours.log_sums, sums.log_sums),
            "gradients": _error(d_ours, d_exact) / d_exact.abs().max().item(),
        }
        if ours.log_totals is not None and sums.log_totals is not None:
            errors["totals"] = _error(ours.log_totals, sums.log_totals)
        tolerance = _TOLERANCES[precision()] * 0.2 / temperature
        for name, error in errors.items():
            if not error <= tolerance:  # NaN is none, either
                return (
                    f"differ from plain operations by {error:.1e} in {name} at temperature "
                    f"{temperature}, where rounding explains {tolerance:.0e}"
                )
    return ""


def _error(ours: Tensor, exact: Tensor) -> float:
    return (ours - exact).abs().max().item()


def _cases(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pairs, float]]:
    """Pairs for every kernel and every branch that matters, with temperatures."""
    generator = torch.Generator(device).manual_seed(0)
    count = sum(_LENGTHS)

    def random(*shape: int) -> Tensor:
        numbers = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
        return numbers.to(dtype)

    numbers = torch.arange(count, device=device)
    clusters = torch.randint(10, (count, 1), generator=generator, device=device)
    clusters[numbers % 8 > 0] = 0
    table = Table((random(10, 10).log_().fill_diagonal_(-torch.inf),), clusters)
    left, right = (random(2, count, 10) - 0.25).clamp_min_(0)
    gaussian = Gaussian(random(count) - 0.5, random(count) + 0.05)
    for dim, temperature, negatives, items, by_cluster, by_cosine in (
        (16, 0.2, "cross", None, table, None),
        (16, 0.02, "all", None, None, None),
        (16, 0.02, "all", numbers % 90, Factors(left, right), gaussian),
        (320, 0.2, "all", None, table, gaussian),  # too wide for one kernel
    ):
        embeddings = F.normalize(random(count, dim) - 0.5, dim=1)
        compared = compared_sets(len(_LENGTHS), negatives)
        yield Pairs(embeddings, _LENGTHS, compared, items, by_cluster, by_cosine), temperature
