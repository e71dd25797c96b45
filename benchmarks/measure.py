"""Time losses in turn, and write the results as rows of a record."""

import argparse
import itertools
import json
import math
import platform
import re
import statistics
import time
import timeit
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

MIB = 2**20
SECONDS_PER_ROUND = 0.05
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
Loss = Callable[..., Tensor]
Step = Callable[[], Any]
Where = tuple[str, ...]  # benchmark, size and mode
Job = Callable[[], list[Row]]
Times = dict[str, list[float]]  # milliseconds by the name of a step, one value a round


def count(text: str) -> int:
    """A ``type`` of argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but it is {text}")
    return number


def parser(about: str, rounds: int | None, *, cpu_alone: bool = False) -> argparse.ArgumentParser:
    """The options of all benchmarks; those of a CPU alone have no `--device`, untimed no rounds."""
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    if rounds is not None:
        made.add_argument("--rounds", type=count, default=rounds)
    if not cpu_alone:
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = ["cuda"] * bool(gpus) + ["cpu", *gpus]
        made.add_argument("--device", choices=devices, default=devices[0])
    made.add_argument("--output", type=Path, help="default: benchmarks/results/<name>.json")
    return made


def report(name: str, args: argparse.Namespace, tables: Iterable[list[Row]]) -> None:
    """Show tables as they are measured, and write them into one record.

    A record that cannot be written is an error before the first measurement.
    """
    device = getattr(args, "device", "cpu")
    described = machine(device)
    path = args.output or RESULTS / f"{name}{'-cuda' * device.startswith('cuda')}.json"
    kept(path, described)
    print(described)
    measured = []
    for row in itertools.chain.from_iterable(tables):
        show(row)
        measured.append(row)
    if args.rounds is None or args.rounds > 1:  # a single round is a dry run
        check_sizes(measured)
    save(path, measured, described)
    print(f"written to {path}")


def check_sizes(table: Iterable[Row]) -> None:
    """An error if a batch took much longer than a larger one, as if the machine was busy."""
    times: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for row in table:
        size = re.match(r"N=([\d,]+)(.*)", row["size"])
        if size is not None and row["metric"] == "milliseconds":
            where = row["benchmark"], row["mode"], row["provider"], size[2]
            number = int(size[1].replace(",", ""))
            times.setdefault(where, []).append((number, row["value"]))
    for where, of_sizes in times.items():
        for (number, took), (larger, other) in itertools.pairwise(sorted(of_sizes)):
            if took > 1.5 * other:
                raise SystemExit(
                    f"{', '.join(where[:3])}: {took:.3g} ms at N={number}, but {other:.3g} at "
                    f"N={larger}: nothing is written; measure again on an idle machine"
                )


def show(row: Row) -> None:
    where = f"{row['benchmark']:10s} {row['size']:18s} {row['mode']:17s} {row['provider']:34s}"
    print(f"{where} {row['value']:9.3f} {row['metric']}")


def report_in_parts(name: str, args: argparse.Namespace, jobs: Iterable[tuple[Where, Job]]) -> None:
    """Run jobs until the minutes are over, and add their rows to one record after each of them.

    A job whose rows are in the record is not run again.
    """
    described, path = machine(args.device), args.output or RESULTS / f"{name}.json"
    table, end = kept(path, described), time.monotonic() + 60 * args.minutes
    done = {(row["benchmark"], row["size"], row["mode"]) for row in table}
    left = [(where, job) for where, job in jobs if where not in done]
    print(described)
    while left and time.monotonic() < end:
        _, job = left.pop(0)
        rows = job()
        for row in rows:
            show(row)
        table += rows
        save(path, table, described)
    print(f"written to {path}", *[f"{len(left)} are left: run it again"] * bool(left), sep="; ")


def kept(path: Path, machine: dict[str, Any]) -> list[Row]:
    """The rows of a record; a record of another machine is an error."""
    if not path.exists():
        return []
    try:
        known = json.loads(path.read_text())
        rows, other = known["rows"], known["machine"]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"{path} is no file of benchmarks: choose another --output") from None
    if other != machine:
        differing = [name for name in machine | other if machine.get(name) != other.get(name)]
        there = ", ".join(f"{name} {other.get(name)}" for name in differing)
        raise SystemExit(f"{path} was measured elsewhere, with {there}: choose another --output")
    return rows


def in_proc(file: str, pattern: str) -> str | None:
    """The first match in a file of /proc, which Linux alone has."""
    path = Path("/proc") / file
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found and found[1]


def machine(device: str) -> dict[str, Any]:
    """The hardware and versions of a record."""
    gpu = {}
    if device.startswith("cuda"):
        gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {
        **gpu,
        "cpu": in_proc("cpuinfo", r"model name\s*: (.*)") or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
    }


def available_bytes(device: str) -> float:
    """Memory for a benchmark: the free memory of a GPU, or three quarters of the system's."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return float(in_proc("meminfo", r"MemAvailable: *(\d+) kB") or math.inf) * 1024 * 3 / 4


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made in its block and still alive; ``peak`` is the most.

    What an operator allocates and frees within itself is not seen, nor is compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = {ref: size for ref, size in storages(result).items() if ref not in given}
        known = (self._alive | made).items()
        self._alive = {ref: size for ref, size in known if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def storages(tree: Any) -> dict[StorageWeakRef, int]:
    """The bytes of the storages of all tensors in a tree."""
    every = [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]
    return {StorageWeakRef(storage): storage.nbytes() for storage in every}


def peak_mib(run: Step, device: str) -> float:
    """Peak memory of one call, without what was allocated before it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    with LiveBytes() as live:
        run()
    return live.peak / MIB


def sets_of(
    *lengths: int, dim: int, device: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Random embeddings, a set for each length."""
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    return [torch.randn(length, dim, **options) for length in lengths]


def step_of(loss: Loss, *views: Tensor) -> Step:
    """A call for the value and its gradients, by the views and the parameters of the loss."""
    wanted = [*views, *(loss.parameters() if isinstance(loss, nn.Module) else ())]

    def step() -> tuple[Tensor, ...]:
        value = loss(*views)
        return value, *torch.autograd.grad(value, wanted)

    return step


def differences(step: Step, exact: Step) -> dict[str, float]:
    """Relative differences of the value and, the largest one, of the gradients."""
    value, *gradients = (
        ((own - other).norm() / other.norm()).item()
        for own, other in zip(step(), exact(), strict=True)
    )
    return {"value": value, "gradient": max(gradients)}


def clock() -> float:
    """Seconds, once a GPU in use has finished.

    On one thread of a CPU they are the process's own, whatever else runs on its core.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """A block in which PyTorch computes on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_in_turn(steps: dict[str, Step], rounds: int, seconds: float = math.inf) -> Times:
    """Milliseconds per call, one value a round; a round calls every step, in changing order.

    Steps that take turns share the clock speed and the load of the machine, so ratios within a
    round vary less than times. A step that would need more than ``seconds`` takes part in the
    first rounds only, in three at least. A warm-up of each step is discarded: the first dozens of
    calls of a small step are slower, while caches fill and threads start.
    """
    timers, calls, turns = {}, {}, {}
    for name, run in steps.items():
        timer = timers[name] = timeit.Timer(run, timer=clock)
        # At least 0.2 seconds of calls; one round is a dry run.
        number, total = timer.autorange() if rounds > 1 else (1, timer.timeit(1))
        once = total / number
        calls[name] = max(1, int(SECONDS_PER_ROUND / once))
        turns[name] = int(min(rounds, max(3, seconds / (once * calls[name]))))
    times: Times = {name: [] for name in steps}
    names = list(steps)
    for turn in tqdm(range(max(turns.values(), default=0)), leave=False, unit="round"):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if turn < turns[name]:
                milliseconds = 1e3 * timers[name].timeit(calls[name])
                times[name].append(milliseconds / calls[name])
    return times


def row(
    benchmark: str, provider: str, size: str, mode: str, metric: str, value: float, digits: int = 5
) -> Row:
    return {
        "benchmark": benchmark,
        "provider": provider,
        "size": size,
        "mode": mode,
        "metric": metric,
        "value": float(f"{value:.{digits}g}"),
    }


def rows(benchmark: str, size: str, mode: str, times: Times, *against: str) -> list[Row]:
    """Median time of each step, and the median of its ratio to some of them in the same round."""
    made = []
    for provider, values in times.items():
        measured = {"milliseconds": statistics.median(values)}
        for other in [name for name in against if name in times]:
            # Rounds with one of the two alone have no ratio.
            ratios = [a / b for a, b in zip(values, times[other], strict=False)]
            measured[f"ratio to {other}"] = statistics.median(ratios)
        made += [row(benchmark, provider, size, mode, *one) for one in measured.items()]
    return made


def compare(
    where: Where,
    steps: Mapping[str, Step],
    args: argparse.Namespace,
    *against: str,
    needs: Mapping[str, int] | None = None,  # bytes of the steps that need many
    with_peak: Container[str] = (),
    seconds: float = math.inf,
) -> list[Row]:
    """Time of the steps that fit into memory and work, and peak memory of some of them.

    What is left out is named. ``against`` and ``seconds`` are those of :func:`rows` and
    :func:`time_in_turn`.
    """
    working, peaks = {}, []
    for name, run in steps.items():
        needed = (needs or {}).get(name, 0)
        try:
            if needed > available_bytes(args.device):
                raise MemoryError(f"it needs about {needed / 2**30:.1f} GiB")
            run()  # compiles what compiles
            if name in with_peak:
                peak = peak_mib(run, args.device)
                peaks.append(row(where[0], name, *where[1:], "peak MiB", peak))
            working[name] = run
        except Exception as error:  # out of memory, no compiler, or the limits of another library
            tqdm.write(f"{', '.join(where)}: {name} is left out: {error}".partition("\n")[0])
    times = time_in_turn(working, args.rounds, seconds)
    return rows(*where, times, *against) + peaks


def save(path: Path, table: list[Row], machine: dict[str, Any]) -> None:
    """Write the rows beside those of other benchmarks on the same machine."""
    measured = {row["benchmark"] for row in table}
    others = [row for row in kept(path, machine) if row["benchmark"] not in measured]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # a record is whole, whenever a run is stopped
    part.write_text(json.dumps({"machine": machine, "rows": others + table}, indent=1) + "\n")
    part.replace(path)
