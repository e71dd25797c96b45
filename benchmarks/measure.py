"""Time losses in turn, and write the results as rows of a record."""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

from experiments.common.arguments import count, device

from .live_bytes import LiveBytes

MIB = 2**20
SECONDS_PER_ROUND = 0.05
WARM_UP = 0.1  # seconds of calls, about 100 small steps
RESULTS = Path(__file__).parent / "results"


def parser(about: str, rounds: int, *, cpu_alone: bool = False) -> argparse.ArgumentParser:
    """The options of all benchmarks; those of a CPU alone have no `--device`."""
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    made.add_argument("--rounds", type=count, default=rounds)
    if not cpu_alone:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        made.add_argument("--device", type=device, default=default)
    made.add_argument("--output", type=Path, help="default: benchmarks/results/<name>.json")
    return made


def report(name: str, args: argparse.Namespace, tables: Iterable[list[dict[str, Any]]]) -> None:
    """Show tables as they are measured, and write them into one record.

    A record that cannot be written is an error before the first measurement.
    """
    device = getattr(args, "device", "cpu")
    described = machine(device)
    path = args.output or RESULTS / f"{name}{'-cuda' * device.startswith('cuda')}.json"
    kept(path, described)
    print(described)
    measured = []
    for table in tables:
        show(table)
        measured += table
    save(path, measured, described)
    print(f"written to {path}")


def kept(path: Path, machine: dict[str, Any]) -> list[dict[str, Any]]:
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


def machine(device: str = "cpu") -> dict[str, Any]:
    """The hardware and versions of a record."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    gpu = {}
    if device.startswith("cuda"):
        gpu = {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {
        **gpu,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
    }


def available_bytes(device: str) -> float:
    """Memory for a benchmark: the free memory of a GPU, or half of that of the system."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if not info.exists():
        return math.inf
    (line,) = [one for one in info.read_text().splitlines() if one.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024 / 2


def peak_mib(run: Callable[[], Any], device: str) -> float:
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


def seconds_of(run: Callable[[], Any], calls: int = 1) -> float:
    """Seconds per call, until a GPU in use has finished."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def warm_up(run: Callable[[], Any], seconds: float = math.inf) -> float:
    """Seconds of the fastest call of a warm-up; of a single call if it takes more than ``seconds``.

    The first call of a small step takes many times as long as later ones, and some dozens of calls
    are still slower: caches fill, threads start, the allocator adapts to the sizes asked for.
    """
    first = fastest = seconds_of(run)
    spent = 0.0
    while first < seconds and spent < WARM_UP:
        once = seconds_of(run)
        fastest, spent = min(fastest, once), spent + once
    return fastest


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """A block in which PyTorch computes on ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_in_turn(
    steps: dict[str, Callable[[], Any]], rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Milliseconds per call, one value a round; a round calls every step, in changing order.

    Steps that take turns share the clock speed and the load of the machine, so ratios within a
    round vary less than times. A step that would need more than ``seconds`` takes part in the
    first rounds only, in three at least. A warm-up of each step is discarded.
    """
    calls, turns = {}, {}
    for name, run in steps.items():
        once = warm_up(run, seconds)
        calls[name] = max(1, int(SECONDS_PER_ROUND / once))
        turns[name] = int(min(rounds, max(3, seconds / (once * calls[name]))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in tqdm(range(max(turns.values())), leave=False, unit="round"):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            if turn < turns[name]:
                times[name].append(1e3 * seconds_of(steps[name], calls[name]))
    return times


def row(
    benchmark: str, provider: str, size: str, mode: str, metric: str, value: float
) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "provider": provider,
        "size": size,
        "mode": mode,
        "metric": metric,
        "value": float(f"{value:.5g}"),
    }


def rows(
    benchmark: str, size: str, mode: str, times: dict[str, list[float]], *against: str
) -> list[dict[str, Any]]:
    """Median time of each step, and the median of its ratio to some of them in the same round."""
    made = []
    for provider, values in times.items():
        measured = {"milliseconds": statistics.median(values)}
        for other in against:
            # Rounds with one of the two alone have no ratio.
            ratios = [a / b for a, b in zip(values, times[other], strict=False)]
            measured[f"ratio to {other}"] = statistics.median(ratios)
        made += [row(benchmark, provider, size, mode, *one) for one in measured.items()]
    return made


def show(table: list[dict[str, Any]]) -> None:
    """Print one line per benchmark, size, mode and provider."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in table:
        key = (row["benchmark"], row["size"], row["mode"], row["provider"])
        unit = " ms" if row["metric"] == "milliseconds" else f" {row['metric']}"
        lines.setdefault(key, []).append(f"{row['value']:9.3f}{unit}")
    for (benchmark, size, mode, provider), values in lines.items():
        print(f"{benchmark:10s} {size:18s} {mode:17s} {provider:34s} {'  '.join(values)}")


def save(path: Path, table: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Write the rows beside those of other benchmarks on the same machine."""
    measured = {row["benchmark"] for row in table}
    others = [row for row in kept(path, machine) if row["benchmark"] not in measured]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({"machine": machine, "rows": others + table}, indent=1) + "\n")
    os.replace(part, path)
