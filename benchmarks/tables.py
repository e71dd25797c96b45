"""Fill the tables of docs/performance.md from the records in benchmarks/results.

python -m benchmarks.tables
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.common.tables import markdown, refill

from . import measure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
MODES = {
    "prototype": ["blocks", "dense", "double loop, as published"],
    "sample": ["blocks"],
    "uniform": [
        "blocks",
        "dense",
        "InfoNCE, chunks as in Inf-CL",
        "PyGCL's InfoNCE",
        "pytorch-metric-learning's NTXentLoss",
    ],
}
PYGCL, SHORTEST = "PyGCL's InfoNCE itself", "division loop, shortest"
OPTIONS = {  # by their names in the record
    "uniform": 'weighting="uniform", exclude_same_cluster=False',
    "sample": 'weighting="sample"',
    "cross": 'negatives="cross"',
    "K=1000": "num_prototypes=1000",
    "temperature=0.01": "temperature=0.01",
    "heads (10, 42, 84)": "num_prototypes=(10, 42, 84)",
    "soft clusters": "soft_clusters=True",
    "negative_ranks=(2, 8)": "negative_ranks=(2, 8)",
}


def rows_of(record: str, benchmark: str) -> list[dict[str, Any]]:
    known = measure.read(ROOT / "benchmarks" / "results" / f"{record}.json")["rows"]
    return [row for row in known if row["benchmark"] == benchmark]


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
    columns = list(itertools.product((128, 512), (1, 2)))
    cells = [(f"N={num} D=96 K=10", f"threads={threads}") for num, threads in columns]
    lines = [
        [provider, *(cell(rows, metrics, provider, *one) for one in cells)]
        for provider in ("PGCLLoss", "pgcl_losses.InfoNCE", PYGCL)
    ]
    return markdown(["loss", *(f"N={num}, threads: {threads}" for num, threads in columns)], lines)


def contrast() -> str:
    rows, sizes = rows_of("cpu", "engines"), (128, 512, 4096, 16384)
    metrics = ["milliseconds", "ratio to GEMM limit", "peak MiB"]
    lines = [
        [mode, name, *(cell(rows, metrics, name, f"N={num} D=128 K=10", mode) for num in sizes)]
        for mode, names in [*MODES.items(), ("prototype", ["three products as written"])]
        for name in names
    ]
    return markdown(["weights", "by", *(f"N={num}" for num in sizes)], lines)


def options() -> str:
    rows, metrics = rows_of("options", "variants"), ["ratio to prototype, K=10"]
    lines = [
        [f"`{option}`", cell(rows, metrics, name, "N=4096 D=128", "blocks")]
        for name, option in OPTIONS.items()
    ]
    return markdown(["option", "ratio"], lines)


def libraries() -> str:
    rows, sizes = rows_of("libraries", "steps"), (32, 256, 1024, 4096)
    metrics = ["milliseconds", "ratio to InfoNCE", "peak MiB"]
    lines = [
        [mode, name, *(cell(rows, metrics, name, f"N={num} D=128", mode) for num in sizes)]
        for mode, name in dict.fromkeys((row["mode"], row["provider"]) for row in rows)
    ]
    return markdown(["step", "loss", *(f"N={num}" for num in sizes)], lines)


def sinkhorn() -> str:
    rows, sizes = rows_of("cpu", "sinkhorn"), ("N=128 K=10", "N=4096 K=100", "N=16384 K=1000")
    metrics, mode = ["milliseconds", f"ratio to {SHORTEST}"], "3 iterations"
    lines = [
        [name, *(cell(rows, metrics, name, size, mode) for size in sizes)]
        for name in dict.fromkeys(row["provider"] for row in rows if row["mode"] == mode)
    ]
    return markdown(["implementation", *sizes], lines)


def tables() -> dict[str, str]:
    return {made.__name__: made() for made in (step, contrast, options, libraries, sinkhorn)}


if __name__ == "__main__":
    refill({PAGE: tables()})
