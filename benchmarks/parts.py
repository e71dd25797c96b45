"""Measure what a training step of PGCL spends on each of its parts, forward and backward.

A stopwatch runs while a part does; nothing else is changed. A backward operation counts for the
part whose forward operation caused it. Only for a CPU, where work is over once a call returns.

python -m benchmarks.parts
python -m benchmarks.parts --sizes 128 --rounds 5 --output /tmp/parts.json
"""

import pkgutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from experiments.common.arguments import count
from pgcl_losses import PGCLLoss

from . import measure

DIM = 96
NUM_PROTOTYPES = 10
NORMALISATION = "normalisation"
REST = "rest"  # checks, positives, reduction, and autograd itself
FORWARD, BACKWARD = "pairs, forward", "pairs, backward"
# Modules of the loss and functions; the time of one that runs within another is subtracted.
MODULES = {"prototypes": "prototypes", "consistency": "consistency", "contrast": "weights"}
FUNCTIONS = {
    "pgcl_losses.batch.unit_vectors": NORMALISATION,
    "pgcl_losses.info_nce.WeightedInfoNCE.of_batch": REST,
    "pgcl_losses.info_nce.log_weighted_sums": FORWARD,
}
PARTS = [NORMALISATION, *MODULES.values(), FORWARD, BACKWARD, REST]


class Stopwatch:
    """Seconds of each part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running = [REST]  # one within the other
        self._since = 0.0
        self._followed: set[Node] = set()

    def run(self, step: Callable[[], None]) -> None:
        self._since = time.perf_counter()
        step()
        self._charge()
        self._followed.clear()

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._begin(part)
            result = function(*args, **kwargs)
            self._end()
            self._follow(BACKWARD if part == FORWARD else part, result)
            self._since = time.perf_counter()  # following takes time
            return result

        return timed

    def _follow(self, part: str, result: Any) -> None:
        """Time backward what this part has made: what was not there before it."""
        nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        while nodes:
            node = nodes.pop()
            # Those without next functions are the leaves' own.
            if node is None or node in self._followed or not node.next_functions:
                continue
            self._followed.add(node)
            node.register_prehook(lambda _: self._begin(part))
            node.register_hook(lambda *_: self._end())
            nodes += [before for before, _ in node.next_functions]

    def _begin(self, part: str) -> None:
        self._charge()
        self._running.append(part)

    def _end(self) -> None:
        self._charge()
        self._running.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


@contextmanager
def watched(pgcl: PGCLLoss) -> Iterator[Stopwatch]:
    """A block in which the parts of a loss are timed."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for name, part in MODULES.items():
            module = getattr(pgcl, name)
            timed = watch.of(part, module.forward)
            stack.enter_context(mock.patch.object(module, "forward", timed))
        for path, part in FUNCTIONS.items():
            stack.enter_context(mock.patch(path, watch.of(part, pkgutil.resolve_name(path))))
        yield watch


def part_times(num: int, rounds: int) -> list[dict[str, Any]]:
    z1, z2 = (torch.randn(num, DIM, requires_grad=True) for _ in range(2))
    pgcl = PGCLLoss(DIM, NUM_PROTOTYPES)

    def step() -> None:
        z1.grad = z2.grad = pgcl.prototypes.weight.grad = None
        pgcl(z1, z2).backward()

    calls = max(1, int(measure.SECONDS_PER_ROUND / min(measure.seconds_of(step) for _ in range(3))))
    times: dict[str, list[float]] = {"step": [], "watched step": []}
    of_parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(rounds):
        times["step"].append(1e3 * measure.seconds_of(step, calls))
        with watched(pgcl) as watch:
            for _ in range(calls):
                watch.run(step)
        times["watched step"].append(1e3 * sum(watch.seconds.values()) / calls)
        for part, seconds in watch.seconds.items():
            of_parts[part].append(1e3 * seconds / calls)

    size, mode = f"N={num} D={DIM} K={NUM_PROTOTYPES}", "PGCLLoss"
    table = measure.rows("parts", size, mode, times, "step")
    for part, values in of_parts.items():
        fractions = [part / of for part, of in zip(values, times["watched step"], strict=True)]
        key = "parts", part, size, mode
        table.append(measure.row(*key, "milliseconds", statistics.median(values)))
        table.append(measure.row(*key, "fraction of the step", statistics.median(fractions)))
    return table


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21, cpu_alone=True)
    parser.add_argument("--sizes", type=count, nargs="+", default=[128, 512, 4096], help="N")
    args = parser.parse_args()

    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "PGCLLoss: the prototypes have not moved")  # no optimizer
    measure.report(args, (part_times(num, args.rounds) for num in args.sizes))
