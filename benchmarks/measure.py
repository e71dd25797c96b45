"""Time rivals in turn, and keep what was measured as rows of one table."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

SECONDS_PER_ROUND = 0.05


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(":")[2].strip() if lines else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.platform(),
    }


def time_in_turn(rivals: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds per call, one value a round; a round calls every rival, in changing order.

    Rivals that take turns meet the same moods of the machine, so ratios within a round are steady
    even where the times are not.
    """
    calls = {}
    for name, run in rivals.items():
        run()
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
        calls[name] = max(1, int(SECONDS_PER_ROUND / once))
    times: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    for turn in tqdm(range(rounds), leave=False, unit="round"):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            for _ in range(calls[name]):
                rivals[name]()
            times[name].append(1e3 * (time.perf_counter() - start) / calls[name])
    return times


def rows(
    benchmark: str, size: str, mode: str, times: dict[str, list[float]], against: str
) -> list[dict[str, Any]]:
    """Median time of each rival, and the median of its round-by-round ratio to one of them."""
    made = []
    for provider, values in times.items():
        ratios = [a / b for a, b in zip(values, times[against], strict=True)]
        for metric, value in (
            ("milliseconds", statistics.median(values)),
            (f"ratio to {against}", statistics.median(ratios)),
        ):
            made.append(
                {
                    "benchmark": benchmark,
                    "provider": provider,
                    "size": size,
                    "mode": mode,
                    "metric": metric,
                    "value": round(value, 4),
                }
            )
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


def save(path: Path, table: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "rows": table}, indent=1) + "\n")
