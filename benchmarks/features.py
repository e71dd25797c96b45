"""Check what losses people use instead do at the edges, beside ours: the README's table.

python -m benchmarks.features            # peers that are not installed are left out
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from pgcl_losses import PGCLLoss

from . import measure, peers

Loss = Callable[[Tensor, Tensor], Tensor]
MAKERS: dict[str, Callable[[float], Loss]] = {
    "pgcl_losses": lambda temperature: PGCLLoss(32, temperature=temperature),
    "PyGCL InfoNCE": peers.pygcl_info_nce,
    "pytorch-metric-learning NTXentLoss": peers.nt_xent,
    "lightly NTXentLoss": peers.lightly_nt_xent,
}


def installed() -> dict[str, Callable[[float], Loss]]:
    makers = {}
    for name, make in MAKERS.items():
        try:
            make(0.2)
            makers[name] = make
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return makers


def views(num_rows: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, num_rows, 32).to(dtype).requires_grad_().unbind()


def is_finite(loss: Loss, z1: Tensor, z2: Tensor) -> bool:
    """The value and its gradient."""
    value = loss(z1, z2)
    gradients = torch.autograd.grad(value, (z1, z2), allow_unused=True)
    return all(bool(t.isfinite().all()) for t in (value, *gradients) if t is not None)


def one_graph(make: Callable[[float], Loss]) -> bool:
    return is_finite(make(0.2), *views(1))


def zero_row(make: Callable[[float], Loss]) -> bool:
    z1, z2 = (view.detach().clone() for view in views())
    z1[3] = 0
    return is_finite(make(0.2), z1.requires_grad_(), z2.requires_grad_())


def cold(make: Callable[[float], Loss]) -> bool:
    return is_finite(make(0.01), *views())


def half(make: Callable[[float], Loss]) -> bool:
    """As exact as rounding the input to float16 allows."""
    torch.manual_seed(0)
    loss = make(0.2)
    rounded = views(dtype=torch.float16)
    exact = loss(*(view.detach().double().float() for view in rounded))
    return abs(loss(*rounded).item() - exact.item()) < 1e-4 * abs(exact.item())


def counted(make: Callable[[float], Loss]) -> bool:
    """Views with different numbers of rows are an error, and not another loss."""
    z1, z2 = views()
    try:
        make(0.2)(z1, z2[:-1])
    except (ValueError, RuntimeError, IndexError, AssertionError):
        return True
    return False


CHECKS = {
    "one graph in the batch: finite": one_graph,
    "a row of zeros: finite value and gradient": zero_row,
    "temperature 0.01 in float32: finite": cold,
    "float16 rows: as exact as float32": half,
    "views that differ in length: an error": counted,
}


def answer(check: Callable[[Callable[[float], Loss]], bool], make: Callable[[float], Loss]) -> str:
    try:
        return "yes" if check(make) else "no"
    except Exception as error:  # whatever a peer raises is its answer
        return type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="of a view, to measure memory")
    args = parser.parse_args()
    makers = installed()
    print(f"| | {' | '.join(makers)} |")
    print("| --- |" + " --- |" * len(makers))
    for about, check in CHECKS.items():
        print(f"| {about} | {' | '.join(answer(check, make) for make in makers.values())} |")
    z1, z2 = views(args.rows)
    peaks = []
    for make in makers.values():
        loss = make(0.2)

        def step(loss: Loss = loss) -> None:
            torch.autograd.grad(loss(z1, z2), (z1, z2))

        peak = measure.peak_mib(step, "cpu")
        peaks.append(f"{peak:.0f}")
    print(f"| peak memory of a step at N={args.rows}, D=32, MiB | {' | '.join(peaks)} |")


if __name__ == "__main__":
    main()
