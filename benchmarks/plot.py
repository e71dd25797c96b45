"""Draw time and memory of the contrast over N from a record.

python -m benchmarks.plot                     # docs/images/engines-{time,memory}.png
python -m benchmarks.plot figures.json --output images
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
# In the order of drawing: color, line, marker.
LOOKS = {
    "dense": ("#1f77b4", "-", "o"),
    "chunks": ("#d62728", "-", "s"),
    "blocks": ("#d62728", "-", "s"),  # the engine before "chunks", which older records hold
    "torch.compile of dense": ("#17becf", "--", "^"),
    "PyGCL's InfoNCE": ("#ff7f0e", "--", "v"),
    "pytorch-metric-learning's NTXentLoss": ("#2ca02c", "--", "P"),
    "double loop, as published": ("#8c564b", "--", "X"),
    "GEMM limit": ("#999999", "-", ""),
}
PICTURES = {
    "time": ("milliseconds", "forward + backward, ms"),
    "memory": ("peak MiB", "peak memory beyond the inputs, MiB"),
}


def points(rows: list[dict[str, Any]], provider: str, metric: str) -> list[tuple[int, float]]:
    """(N, value) of the prototype mode; of InfoNCE, of the uniform mode."""
    mode = "uniform" if "InfoNCE" in provider or "NTXent" in provider else "prototype"
    wanted = ("contrast", provider, mode, metric)
    return sorted(
        (int(re.search(r"N=(\d+)", row["size"])[1]), row["value"])
        for row in rows
        if (row["benchmark"], row["provider"], row["mode"], row["metric"]) == wanted
    )


def picture(record: dict[str, Any], metric: str, label: str, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8.6, 4.6), layout="constrained")
    every = {name: points(record["rows"], name, metric) for name in LOOKS}
    lines = {name: line for name, line in every.items() if line}
    if not lines:
        raise SystemExit(f"the record has no {metric} of the benchmark 'contrast'")
    for name, line in lines.items():
        color, style, marker = LOOKS[name]
        axes.plot(*zip(*line, strict=True), style, color=color, marker=marker, ms=5, label=name)
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
    axes.set_xticks(sizes, [str(num) for num in sizes])
    axes.minorticks_off()
    axes.set(xlabel="N graphs (2N embeddings)", ylabel=label)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    machine = record["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    title = f"{where} · torch {machine['torch']} · float32"
    axes.set_title(title, fontsize=8, color="#666666")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"written to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    committed = ROOT / "benchmarks" / "results" / "contrast.json"
    parser.add_argument("record", type=Path, nargs="?")
    parser.add_argument("--output", type=Path, help="a new folder, for the pictures of RECORD")
    args = parser.parse_args()
    if bool(args.record) != bool(args.output) or (args.output and args.output.exists()):
        parser.error("RECORD and --output, a new folder, come together")
    record = json.loads((args.record or committed).read_text())
    folder = args.output or ROOT / "docs" / "images"
    for name, (metric, label) in PICTURES.items():
        picture(record, metric, label, folder / f"engines-{name}.png")
