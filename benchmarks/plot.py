"""Draw time and memory of the contrast over N from its records.

python -m benchmarks.plot                     # docs/images/engines-{time,memory}.png
python -m benchmarks.plot figures.json --output images
"""

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.common.arguments import file

ROOT = Path(__file__).parents[1]
# In the order of drawing: color, line, marker.
LOOKS = {
    "dense": ("#1f77b4", "-", "o"),
    "blocks": ("#d62728", "-", "s"),
    "flex": ("#9467bd", "-", "D"),
    "torch.compile of dense": ("#17becf", "--", "^"),
    "PyGCL's InfoNCE": ("#ff7f0e", "--", "v"),
    "InfoNCE, chunks as in Inf-CL": ("#7f3f98", "--", "d"),
    "pytorch-metric-learning's NTXentLoss": ("#2ca02c", "--", "P"),
    "double loop, as published": ("#8c564b", "--", "X"),
    "GEMM limit": ("#999999", "-", ""),
}
INFO_NCE = [name for name in LOOKS if "InfoNCE" in name or "NTXent" in name]
PICTURES = {
    "time": ("milliseconds", "forward + backward, ms"),
    "memory": ("peak MiB", "peak memory beyond the inputs, MiB"),
}


def lines_of(rows: list[dict[str, Any]], metric: str) -> dict[str, list[tuple[int, float]]]:
    """(N, value) by provider, of the prototype mode; of InfoNCE, of the uniform mode."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        mode = "uniform" if row["provider"] in INFO_NCE else "prototype"
        if (row["benchmark"], row["mode"], row["metric"]) == ("contrast", mode, metric):
            num = int(re.search(r"N=(\d+)", row["size"]).group(1))
            lines.setdefault(row["provider"], []).append((num, row["value"]))
    return {name: sorted(lines[name]) for name in LOOKS if name in lines}


def guide(axes: Axes, sizes: list[int], end: float, power: int) -> None:
    """A faint line of slope N or N^2 that ends at a value, at the largest N."""
    values = [end * (num / sizes[-1]) ** power for num in sizes]
    axes.plot(sizes, values, color="#cccccc", linewidth=1, linestyle=(0, (1, 2)), zorder=0)
    label = "N" if power == 1 else f"N$^{power}$"
    axes.annotate(label, (sizes[-1], end), (4, 0), textcoords="offset points", color="#999999")


def draw(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in lines.items():
        color, style, marker = LOOKS[name]
        axes.plot(*zip(*points, strict=True), style, color=color, marker=marker, ms=5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({num for points in lines.values() for num, _ in points})
    crowded = any(right < 1.5 * left for left, right in itertools.pairwise(sizes))
    axes.set_xticks(sizes, [str(num) for num in sizes], rotation=45 if crowded else 0)
    axes.minorticks_off()
    axes.set_xlabel("N graphs (2N embeddings)")
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(sizes) > 1:
        limits = axes.get_ylim()
        ends = [points[-1][1] for points in lines.values() if points[-1][0] == sizes[-1]]
        guide(axes, sizes, max(ends) * 1.6, 2)
        guide(axes, sizes, min(ends) / 1.6, 1)
        axes.set_ylim(limits[0] / 1.5, limits[1] * 2)


def caption(machine: dict[str, Any]) -> str:
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    return f"{where} · torch {machine['torch']} · float32"


def picture(results: list[dict[str, Any]], metric: str, label: str, path: Path) -> None:
    """One panel per machine, with one legend to the right of them."""
    panels = [(one["machine"], lines_of(one["rows"], metric)) for one in results]
    panels = [(machine, lines) for machine, lines in panels if lines]
    if not panels:
        raise SystemExit("no rows of the benchmark 'contrast': see python -m benchmarks.run --help")
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(5.6 * len(panels) + 3, 4.6), squeeze=False, layout="constrained"
    )
    for axes, (machine, lines) in zip(all_axes[0], panels, strict=True):
        draw(axes, lines)
        axes.set_title(caption(machine), fontsize=8, color="#666666")
    all_axes[0][0].set_ylabel(label)
    drawn = [name for name in LOOKS if any(name in lines for _, lines in panels)]
    handles = [
        plt.Line2D([], [], color=color, linestyle=style, marker=marker, ms=5)
        for color, style, marker in (LOOKS[name] for name in drawn)
    ]
    figure.legend(handles, drawn, loc="outside right center", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"written to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    committed = sorted((ROOT / "benchmarks" / "results").glob("contrast*.json"))  # CPU, CUDA
    parser.add_argument("results", type=file, nargs="*")
    parser.add_argument("--output", type=Path, help="a new folder, for the pictures of RESULTS")
    args = parser.parse_args()
    if bool(args.results) != bool(args.output):
        parser.error("RESULTS and --output come together; without both the site's are drawn anew")
    if args.output is not None and args.output.exists():
        parser.error(f"--output {args.output} is there already: choose another folder")

    results = [json.loads(path.read_text()) for path in args.results or committed]
    folder = args.output or ROOT / "docs" / "images"
    for name, (metric, label) in PICTURES.items():
        picture(results, metric, label, folder / f"engines-{name}.png")
