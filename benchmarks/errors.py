"""Simulate the errors of the Triton engine's precisions; no GPU is needed.

Its kernels run in Triton's interpreter on a CPU, against the dense engine in float64. Embeddings
are in ten clusters, with cosines of about a half within one. The order in which tensor cores add up
is not simulated.

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
from pgcl_losses.engine.contract import ALL_PAIRS, Gaussian, Pairs, Table, compared_sets
from pgcl_losses.weights import cosine_moments

from . import measure
from .compiled import FORMATS
from .kernels import versions

NUM_EMBEDDINGS, DIM, NUM_CLUSTERS = 512, 128, 10
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


def problem(mode: str, dtype: torch.dtype = torch.float32) -> Pairs:
    """Two views; the same numbers of float32 in any type."""
    torch.manual_seed(0)
    clusters = torch.randint(NUM_CLUSTERS, (NUM_EMBEDDINGS // 2,)).repeat(2)
    embeddings = torch.randn(NUM_CLUSTERS, DIM)[clusters] + torch.randn(NUM_EMBEDDINGS, DIM)
    embeddings = unit_vectors(embeddings, torch.float32)
    table, gaussian = None, None
    if mode.startswith("table"):
        log_weights = torch.rand(NUM_CLUSTERS, NUM_CLUSTERS).log_().fill_diagonal_(-torch.inf)
        table = Table((log_weights.to(dtype),), clusters.unsqueeze(1))
    elif mode == "gaussian":
        gaussian = Gaussian(*(numbers.to(dtype) for numbers in cosine_moments(embeddings)))
    lengths = (NUM_EMBEDDINGS // 2, NUM_EMBEDDINGS // 2)
    return Pairs(embeddings.to(dtype), lengths, compared_sets(2, "all"), None, table, gaussian)


def exact(mode: str, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-sums and the gradient of their mean, by the dense engine."""
    pairs = problem(mode, dtype)
    pairs.embeddings.requires_grad_()
    log_sums = dense.log_sums(pairs, temperature).log_sums
    (gradient,) = torch.autograd.grad(log_sums.mean(), pairs.embeddings)
    return log_sums.detach(), gradient


def simulated(mode: str, temperature: float, precision: str) -> tuple[Tensor, Tensor]:
    """The same by the kernels."""
    pairs = problem(mode)
    torch.set_float32_matmul_precision(precision)
    log_sums = triton.log_sums(pairs, temperature).log_sums
    d_log_sums = torch.full_like(log_sums, 1 / NUM_EMBEDDINGS)
    return log_sums, triton.gradient(pairs, temperature, log_sums, d_log_sums, ALL_PAIRS)


def table(mode: str, temperature: float) -> list[dict[str, Any]]:
    true_sums, true_gradient = exact(mode, temperature, torch.float64)
    with bfloat16_as_on_gpus():
        found = {name: simulated(mode, temperature, name) for name in FORMATS}
    torch.set_float32_matmul_precision("highest")
    found["dense, float32"] = exact(mode, temperature, torch.float32)
    made = []
    for name, (log_sums, gradient) in found.items():
        of_sums = (log_sums - true_sums).expm1().square().mean().sqrt().item()
        of_gradient = ((gradient - true_gradient).norm() / true_gradient.norm()).item()
        key = "errors", name, f"M={NUM_EMBEDDINGS} D={DIM}", f"{mode}, tau={temperature}"
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
