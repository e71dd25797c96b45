"""Kernels that are known to be right or wrong, for the check of the Triton engine's own.

A program by itself, as what Triton's interpreter has seen is not compiled any more.
"""

import json

import torch
import triton
import triton.language as tl

from benchmarks.compiled import Case, Launch, compiled
from benchmarks.kernels import problems


@triton.jit
def product_kernel(mine, others, sums, num_rows, PRECISION: tl.constexpr):
    row = tl.arange(0, 64)
    at = row[:, None] * 64 + row[None, :]
    me = tl.load(mine + at)
    total = tl.zeros([64, 64], tl.float32)
    for start in range(0, num_rows, 64):
        other = tl.load(others + start * 64 + at)
        total += tl.exp(tl.dot(me, tl.trans(other), input_precision=PRECISION))
    tl.store(sums + at, total)


def wrong(dtype: torch.dtype, precision: str, **options: int) -> list[str]:
    rows = torch.zeros(64, 64, dtype=dtype)
    arguments = rows, rows, torch.zeros(64, 64), 4096, precision
    launch = Launch(product_kernel, (1,), arguments, {"num_warps": 4, **options})
    case = Case(90, 64, "highest", "uniform")
    return problems(case, compiled(launch, case.arch))


if __name__ == "__main__":
    found = {
        "right": wrong(torch.bfloat16, "ieee"),
        "without tensor cores": wrong(torch.float32, "ieee"),
        "few registers": wrong(torch.bfloat16, "ieee", maxnreg=64),
        "much shared memory": wrong(torch.float32, "tf32", num_stages=16),
    }
    print(json.dumps(found))
