"""Fill the tables of docs/performance.md from the records in benchmarks/results.

python -m benchmarks.tables
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.common.tables import markdown, refill

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
PYGCL = "PyGCL's InfoNCE itself"


def rows_of(record: str, benchmark: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"{record}.json"
    return [row for row in json.loads(path.read_text())["rows"] if row["benchmark"] == benchmark]


def text(metric: str, value: float) -> str:
    if metric == "milliseconds":
        return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
    if metric == "peak MiB":
        return f"{value:.0f} MiB" if value >= 1 else f"{value:.1f} MiB"
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def cell(
    rows: list[dict[str, Any]], metrics: Iterable[str], provider: str, size: str, mode: str
) -> str:
    """The metrics that were measured of one provider."""
    known = {
        row["metric"]: row["value"]
        for row in rows
        if (row["provider"], row["size"], row["mode"]) == (provider, size, mode)
    }
    return ", ".join(text(metric, known[metric]) for metric in metrics if metric in known)


def step() -> str:
    rows, metrics = rows_of("step", "step"), ["milliseconds", f"ratio to {PYGCL}"]
    columns = [(num, threads) for num in (128, 512) for threads in (1, 2)]
    cells = [(f"N={num} D=96 K=10", f"threads={threads}") for num, threads in columns]
    lines = [
        [provider, *(cell(rows, metrics, provider, *one) for one in cells)]
        for provider in dict.fromkeys(row["provider"] for row in rows)
    ]
    return markdown(["loss", *(f"N={num}, threads: {threads}" for num, threads in columns)], lines)


def grace() -> str:
    rows, lines = rows_of("grace", "grace"), []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        known = {row["metric"]: row["value"] for row in rows if row["provider"] == provider}
        lines.append(
            [
                f"`{provider}`" if "(" in provider else provider,
                f"{known['first loss']:.6f}",
                f"{known['last loss']:.6f}",
                f"{known['linear probe in %']:.2f} %",
                f"{known['peak MiB of the process']:.0f} MiB",
            ]
        )
    head = ["loss", "first epoch", f"last of {rows[0]['size']}", "linear probe", "peak memory"]
    return markdown(head, lines)


def options() -> str:
    rows = rows_of("options", "options")
    lines = [
        [f"`{row['provider']}`", text("ratio", row["value"])]
        for row in rows
        if row["metric"] == "ratio to default" and row["provider"] != "default"
    ]
    return markdown(["option", "ratio"], lines)


def libraries() -> str:
    rows, sizes = rows_of("libraries", "steps"), (32, 256, 4096)
    lines: list[list[str]] = []
    for mode, name in dict.fromkeys((row["mode"], row["provider"]) for row in rows):
        metrics = ["milliseconds" if name == "InfoNCE" else "ratio to InfoNCE", "peak MiB"]
        cells = [cell(rows, metrics, name, f"N={num} D=128", mode) for num in sizes]
        lines.append([mode if name == "InfoNCE" else "", name, *cells])  # InfoNCE is the first
    return markdown(["step", "loss", *(f"N={num}" for num in sizes)], lines)


def tables() -> dict[str, str]:
    return {made.__name__: made() for made in (step, grace, options, libraries)}


if __name__ == "__main__":
    refill({PAGE: tables()})
