"""Simulate the errors of the Triton engine's precisions; no GPU is needed.

Its kernels run in Triton's interpreter on a CPU, against the dense engine in float64. Rows are in
ten clusters, with cosines of about a half within one. The order in which tensor cores add up is not
simulated.

python -m benchmarks.errors   # three minutes
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pgcl_losses._normalize import unit_vectors
from pgcl_losses.engine import dense, triton
from pgcl_losses.engine.contract import Factors, Gaussian, Pairs
from pgcl_losses.engine.pairs import ALL_PAIRS
from pgcl_losses.weights import cosine_moments

from . import measure
from .compiled import FORMATS
from .kernels import versions

NUM_ROWS, DIM, NUM_CLUSTERS = 512, 128, 10
TEMPERATURES = (0.2, 0.05, 0.01)
MODES = ("table, own cluster excluded", "uniform", "gaussian")


@contextmanager
def bfloat16_as_on_gpus() -> Iterator[None]:
    """The interpreter multiplies bfloat16 as 16-bit integers, and cuts numbers off to get them."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def of_wide(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, kind)
        nearest = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(nearest.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    with (
        mock.patch.object(InterpreterBuilder, "create_dot", of_wide),
        mock.patch.object(InterpreterBuilder, "cast_impl", rounded),
    ):
        yield


def problem(mode: str) -> Pairs:
    """Two views, in float32."""
    torch.manual_seed(0)
    clusters = torch.randint(NUM_CLUSTERS, (NUM_ROWS // 2,)).repeat(2)
    rows = torch.randn(NUM_CLUSTERS, DIM)[clusters] + torch.randn(NUM_ROWS, DIM)
    rows = unit_vectors(rows, torch.float32)
    weights: tuple[Any, ...] = ()
    if mode.startswith("table"):
        table = torch.rand(NUM_CLUSTERS, NUM_CLUSTERS).log_().fill_diagonal_(-torch.inf)
        weights = (Factors(table, clusters, clusters),)
    elif mode == "gaussian":
        weights = (Gaussian(*cosine_moments(rows)),)
    return Pairs(rows, 2, False, weights)


def exact(pairs: Pairs, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-sums and the gradient of their mean, by the dense engine."""
    weights = tuple(type(one)(*(of(part, dtype) for part in one)) for one in pairs.weights)
    rows = pairs.rows.to(dtype).requires_grad_()
    log_sums = dense.log_sums(pairs._replace(rows=rows, weights=weights), temperature).log_sums
    (gradient,) = torch.autograd.grad(log_sums.mean(), rows)
    return log_sums.detach(), gradient


def of(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def simulated(pairs: Pairs, temperature: float, precision: str) -> tuple[Tensor, Tensor]:
    """The same by the kernels."""
    torch.set_float32_matmul_precision(precision)
    log_sums = triton.log_sums(pairs, temperature).log_sums
    slopes = torch.full_like(log_sums, 1 / NUM_ROWS)
    return log_sums, triton.gradient(pairs, temperature, log_sums, slopes, ALL_PAIRS)


def table(mode: str, temperature: float) -> list[dict[str, Any]]:
    pairs = problem(mode)
    true_sums, true_gradient = exact(pairs, temperature, torch.float64)
    with bfloat16_as_on_gpus():
        found = {name: simulated(pairs, temperature, name) for name in FORMATS}
    torch.set_float32_matmul_precision("highest")
    found["dense, float32"] = exact(pairs, temperature, torch.float32)
    made = []
    for name, (log_sums, gradient) in found.items():
        of_sums = (log_sums - true_sums).expm1().square().mean().sqrt().item()
        of_gradient = ((gradient - true_gradient).norm() / true_gradient.norm()).item()
        key = "errors", name, f"M={NUM_ROWS} D={DIM}", f"{mode}, tau={temperature}"
        made += [
            measure.row(*key, "millionths of a sum", 1e6 * of_sums),
            measure.row(*key, "millionths of the gradient", 1e6 * of_gradient),
        ]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "errors.json"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    measure.kept(args.output, versions())
    whole = []
    for mode in MODES:
        for temperature in TEMPERATURES:
            made = table(mode, temperature)
            measure.show(made)
            whole += made
    measure.save(args.output, whole, versions())
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
