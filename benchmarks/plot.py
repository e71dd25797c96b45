"""Draw time and memory over N on a GPU, from the record of `benchmarks.gpu`.

python -m benchmarks.plot                     # docs/images/gpu.png
python -m benchmarks.plot figures.json --output figure.png
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
# The losses in the order of drawing: color, line, marker.
LOOKS = {"the script's lines": ("#ff7f0e", "--", "v"), "our loss": ("#d62728", "-", "s")}
BENCHMARK, SCRIPT = "scripts", "NT-Xent"
PANELS = {
    "milliseconds": "forward + backward, ms",
    "peak MiB": "peak memory beyond the inputs, MiB",
}


def points(rows: list[dict[str, Any]], provider: str, metric: str) -> list[tuple[int, float]]:
    """(N, value) of one loss."""
    wanted = (BENCHMARK, provider, SCRIPT, metric)
    return sorted(
        (int(re.search(r"N=(\d+)", row["size"])[1]), row["value"])
        for row in rows
        if (row["benchmark"], row["provider"], row["mode"], row["metric"]) == wanted
    )


def panel(axes: Axes, rows: list[dict[str, Any]], metric: str, label: str) -> None:
    """Draw one metric of all losses over N."""
    every = {loss: points(rows, loss, metric) for loss in LOOKS}
    lines = {loss: line for loss, line in every.items() if line}
    for loss, line in lines.items():
        color, style, marker = LOOKS[loss]
        axes.plot(*zip(*line, strict=True), style, color=color, marker=marker, ms=5, label=loss)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    sizes = sorted({num for line in lines.values() for num, _ in line})
    ends = [line[-1][1] for line in lines.values() if line[-1][0] == sizes[-1]]
    # Faint lines of slope N^2 and N, above and below all others at the largest N.
    for name, power, end in (("N$^2$", 2, 1.6 * max(ends)), ("N", 1, min(ends) / 1.6)):
        values = [end * (num / sizes[-1]) ** power for num in sizes]
        axes.plot(sizes, values, color="#cccccc", linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        axes.annotate(name, (sizes[-1], end), (4, 0), textcoords="offset points", color="#999999")
    axes.set_ylim(low / 1.5, high * 2)
    axes.set_xticks(sizes, [str(num) for num in sizes], fontsize=8)
    axes.minorticks_off()
    axes.set(xlabel="N graphs (2N embeddings)", ylabel=label)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def picture(record: dict[str, Any]) -> Figure:
    """Draw time and memory side by side."""
    if not all(points(record["rows"], loss, metric) for loss in LOOKS for metric in PANELS):
        raise SystemExit(f"no time and memory of {SCRIPT} in the record: measure them on a GPU")
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for axes, (metric, label) in zip(both, PANELS.items(), strict=True):
        panel(axes, record["rows"], metric, label)
    machine = record["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    figure.suptitle(f"{where} · torch {machine['torch']} · float32", fontsize=8, color="#666666")
    handles = dict(zip(*reversed(both[0].get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, nargs="?")
    parser.add_argument("--output", type=Path, help="a new file, for the picture of RECORD")
    args = parser.parse_args()
    if bool(args.record) != bool(args.output) or (args.output and args.output.exists()):
        parser.error("RECORD and --output, a new file, come together")
    record = args.record or ROOT / "benchmarks" / "results" / "gpu.json"
    output = args.output or ROOT / "docs" / "images" / "gpu.png"
    picture(json.loads(record.read_text())).savefig(output, dpi=150)
    print(f"written to {output}")
