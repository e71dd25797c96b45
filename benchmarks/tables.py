"""Fill tables and sentences of the documentation from benchmarks/results.

python -m benchmarks.tables
"""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs.programs.tables import fill, markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
NEGATIVES = ROOT / "docs" / "negatives.md"
LARGE = ROOT / "docs" / "large_graphs.md"
PYGCL_ALONE = "PyGCL's InfoNCE"
TIME_AND_PEAK = ["milliseconds", "peak MiB"]
MEMORY = ["process MiB", "peak MiB"]
ERROR = "millionths of the gradient"
# Rows of memory, and the rows of time that they belong to.
MASKS = {
    "a mask of all pairs": "the script's lines",
    "the same mask by score_mod": "our loss",
}


def rows_of(record: str, benchmark: str) -> list[dict[str, Any]]:
    """The rows of one benchmark."""
    return [row for row in read(record)["rows"] if row["benchmark"] == benchmark]


def read(record: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{record}.json"
    return json.loads(path.read_text())


def text(metric: str, value: float) -> str:
    if metric == "milliseconds":
        if value >= 600_000:
            return f"{value / 3_600_000:.2g} hours"
        return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
    if metric.startswith(("peak MiB", "process MiB")):
        return f"{value:,.0f} MiB" if value >= 1 else f"{value:.1f} MiB"
    if metric == ERROR:
        return f"error {value:.2g}" if value < 100 else f"error {value:,.0f}"
    if metric.startswith("ratio"):
        return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
    return f"{value:.2f}" if "%" in metric else f"{value:.0f}"


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


def by_loss(record: str, benchmark: str, metrics: Iterable[str]) -> list[list[str]]:
    """A line for each loss of a benchmark of one size, with a cell for each metric."""
    rows = rows_of(record, benchmark)
    return [
        [name, *(cell(rows, [metric], name, row["size"], row["mode"]) for metric in metrics)]
        for name, row in {row["provider"]: row for row in rows}.items()
    ]


def all_nodes() -> str:
    """Every node is a negative: a line for each loss, with its time and memory on each graph."""
    lines: list[list[str]] = []
    for mode in ("GRACE", "MAGI"):
        rows = [row for row in rows_of("nodes", "nodes") if row["mode"] == mode]
        columns, measured = by_column(rows, ["milliseconds", "process MiB"])
        lines += [[f"{mode}: {loss}", *cells] for loss, *cells in measured]
    return markdown(["loss", *(size.partition(" P=")[0] for size, _ in columns)], lines)


def formula() -> str:
    """Time and memory of `InfoNCE` by nodes, from its largest measurement on a CPU and on a GPU.

    The time is that of a pair, the memory that of a node beside one chunk.
    """
    devices = [
        (("nodes", "nodes"), ("GRACE", "InfoNCE"), "process MiB", 8),
        (("gpu", "scripts"), ("NT-Xent", "our loss"), "peak MiB", 256),
    ]
    measured: list[tuple[int, float, float]] = []  # nodes, milliseconds and MiB beside a chunk
    for record, loss, memory, chunk in devices:
        rows = [row for row in rows_of(*record) if (row["mode"], row["provider"]) == loss]
        largest = max(int(row["size"].partition("N=")[2]) for row in rows)
        of = {row["metric"]: row["value"] for row in rows if row["size"].endswith(f"N={largest}")}
        measured.append((largest, of["milliseconds"], of[memory] - chunk))
    lines = []
    for num in (*(largest for largest, *_ in measured), 169_343, 10**6):
        cells = [
            f"{text('milliseconds', time * (num / largest) ** 2)}, "
            f"{text(memory, chunk + grown * num / largest)}"
            for (largest, time, grown), (*_, memory, chunk) in zip(measured, devices, strict=True)
        ]
        lines.append([f"{num:,}", *cells])
    return markdown(["nodes", "CPU, one thread", "NVIDIA H200"], lines)


def by_column(
    rows: list[dict[str, Any]], metrics: Iterable[str]
) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The sizes and modes of a benchmark, and a line for each loss with a cell for each of them."""
    columns = list(dict.fromkeys((row["size"], row["mode"]) for row in rows))
    providers = dict.fromkeys(row["provider"] for row in rows)
    return columns, [
        [x, *(cell(rows, metrics, x, *column) for column in columns)] for x in providers
    ]


def loop() -> str:
    lines = by_loss("loop", "loop", ["milliseconds", "ratio to GraphCL's loss_cal"])
    return markdown(["loss", "time per step", "ratio"], lines)


def sentence(text: str) -> str:
    """A sentence in lines of a page's width, with links and numbers in one piece."""
    return textwrap.fill(text, width=140, break_on_hyphens=False, break_long_words=False)


def scripts() -> str:
    """On one thread, ratios to the script's lines: of two views by N, and of queries and keys."""
    ratios, ours = ["ratio to the script's lines"], "our loss"
    rows = [row for row in rows_of("scripts", "losses") if " threads=1" in row["size"]]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = [
        [mode, *(cell(rows, ratios, ours, size, mode) for size in sizes)]
        for mode in dict.fromkeys(row["mode"] for row in rows)
    ]
    first = markdown(["script", *(size.partition(" D=")[0] for size in sizes)], lines)
    rows = [*rows_of("scripts", "retrieval"), *rows_of("scripts", "tables")]
    lines = [
        [mode, size.partition(" D=")[0], cell(rows, ratios, ours, size, mode)]
        for mode, size in dict.fromkeys((row["mode"], row["size"]) for row in rows)
    ]
    return f"{first}\n\n{markdown(['queries and keys', 'size', ours], lines)}"


def spread(rows: Iterable[dict[str, Any]]) -> str:
    values = sorted(row["value"] for row in rows)
    return f"{text('ratio', values[0])} to {text('ratio', values[-1])}"


def costs() -> str:
    """Sentences: options, low temperatures, listed positives and negatives, and `repulsion`."""
    changed = [
        f"{text(row['metric'], row['value'])} with `{row['provider']}`"
        for row in rows_of("options", "options")
        if row["metric"] == "ratio to default" and row["provider"] != "default"
    ]
    cold = [
        row
        for row in rows_of("scripts", "temperatures")
        if (row["metric"], row["provider"]) == ("ratio to temperature=0.2", "temperature=0.01")
    ]
    several = [row for row in cold if "over_positives" in row["mode"]]
    shared = [row for row in cold if "cross" in row["mode"]]
    positives = [row for row in rows_of("scripts", "positives") if row["metric"] == "milliseconds"]
    pairs = {row["size"]: {} for row in rows_of("scripts", "lists")}
    for row in rows_of("scripts", "lists"):
        pairs[row["size"]][row["metric"]] = text(row["metric"], row["value"])
    listed = [
        f"{size.partition(' D=')[0]} take {found['milliseconds']} and {found['peak MiB']}"
        for size, found in pairs.items()
    ]
    looks = [
        f"{text(row['metric'], row['value'])} as long as a step of {row['mode']}"
        for row in rows_of("scripts", "looks")
        if (row["provider"], row["metric"]) == ("repulsion", "ratio to a step")
    ]
    spent = sorted(row["value"] for row in positives)
    return sentence(
        f"PGCL's contrast of 4,096 graphs takes {', '.join(changed[:-1])} and {changed[-1]}, as a "
        "ratio to its time with the default options. "
        "At temperature 0.01, with views aligned as after training, a step takes "
        f"{spread(row for row in cold if row not in several + shared)} of its time at 0.2, with "
        f'"supcon" and "sum" {spread(several)}, and with `negatives="cross"` {spread(shared)}, as '
        "from 0.05 on both views share their powers. "
        f"100,000 listed positives take {spent[0]:.0f} to "
        f"{text('milliseconds', spent[-1])}, whether they are spread over all queries or belong to "
        f"one. With two listed negatives for each, {' and '.join(listed)}. `repulsion` of 10,000 "
        "graphs takes "
        f"{' and '.join(looks)}."
    )


def labels() -> str:
    """By number of classes, the ratio of each form to two views without labels."""
    rows = rows_of("scripts", "labels")
    rows = [row for row in rows if row["size"] == rows[-1]["size"]]
    forms = [name for name in dict.fromkeys(row["provider"] for row in rows) if "over" in name]
    forms = sorted(forms, key=lambda form: "mean" not in form)
    lines = [
        [
            mode,
            *(cell(rows, ["ratio to two views"], form, size, mode) for form in forms),
        ]
        for size, mode in dict.fromkeys((row["size"], row["mode"]) for row in rows)
    ]
    return markdown(["labels", *(f"`{form}`" for form in forms)], lines)


def memory() -> str:
    rows = rows_of("scripts", "memory")
    lines = [
        [
            name if " " in name else f"`{name}`",
            size.partition(" ")[0],
            *(cell(rows, [x], name, size, "a step") for x in MEMORY),
        ]
        for size, name in dict.fromkeys((row["size"], row["provider"]) for row in rows)
        if name not in MASKS
    ]
    return markdown(["loss", "size", "process grows by", "tensors hold"], lines)


def libraries() -> str:
    rows, sizes = rows_of("libraries", "steps"), (32, 256, 4096)
    lines: list[list[str]] = []
    for mode, name in dict.fromkeys((row["mode"], row["provider"]) for row in rows):
        metrics = ["milliseconds" if name == "InfoNCE" else "ratio to InfoNCE", "peak MiB"]
        cells = [cell(rows, metrics, name, f"N={num} D=128", mode) for num in sizes]
        lines.append([mode if name == "InfoNCE" else "", name, *cells])  # InfoNCE is the first
    return markdown(["step", "loss", *(f"N={num}" for num in sizes)], lines)


def heads() -> str:
    """A head by N: the time of the lines, ratios to it, and by how much a process grows."""
    rows = rows_of("heads", "heads")
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines: list[list[str]] = []
    for mode, name in dict.fromkeys((row["mode"], row["provider"]) for row in rows):
        of = "milliseconds" if name == "novae's lines" else "ratio to novae's lines"
        cells = [cell(rows, [of, "process MiB"], name, size, mode) for size in sizes]
        lines.append([mode if of == "milliseconds" else "", name, *cells])
    return markdown(["prototypes", "head", *(size.partition(" ")[0] for size in sizes)], lines)


def score_mods() -> str:
    """Sentences: the time of functions, and of a mask of all pairs beside a script's."""
    slower = [
        row
        for row in rows_of("scripts", "score_mods")
        if row["metric"] == "ratio to none" and row["provider"] != "none"
    ]
    times, rows = dict(by_loss("scripts", "masks", ["milliseconds"])), rows_of("scripts", "memory")
    size = next(row["size"] for row in rows if row["provider"] in MASKS)
    script, ours = (
        f"{times[loss]} and {cell(rows, ['process MiB'], name, size, 'a step')}"
        for name, loss in MASKS.items()
    )
    return sentence(
        f"A function of this page makes `InfoNCE` take {spread(slower)} of its time without one "
        "(128 to 2,048 graphs, D=96, one CPU thread). For 20,000 graphs with negatives of the "
        "same group in the other view, a script that builds the mask of all pairs takes "
        f"{script}, and our loss {ours}."
    )


def gpu() -> str:
    """Time and peak memory by N on the GPU of the record, and what kernels and TF32 save."""
    rows, machine = rows_of("gpu", "scripts"), read("gpu")["machine"]
    losses, sizes = ["our loss", "the script's lines"], ["128", "1024", "8192", "65536"]
    modes = [x for x in dict.fromkeys(row["mode"] for row in rows) if x != PYGCL_ALONE]
    lines = [
        [mode, loss, *(cell(rows, TIME_AND_PEAK, loss, f"N={size}", mode) for size in sizes)]
        for mode in modes
        for loss in losses
    ]
    table = markdown(["step", "loss", *(f"N={size}" for size in sizes)], lines)
    others = [(rows, "our loss, without kernels"), (rows_of("gpu", "TF32"), "our loss")]
    plain, tf32 = (
        ", ".join(cell(found, ["milliseconds"], loss, "N=65536", mode) for mode in modes[:3])
        for found, loss in others
    )
    return f"On an {machine['gpu']}, with torch {machine['torch']}:\n\n{table}\n\n" + sentence(
        f"With 65,536 graphs the first three losses take {plain} without the kernels, and {tf32} "
        "with the kernels and TF32."
    )


def clip() -> str:
    """CLIP's loss beside other libraries: time, memory, and the error of the gradient."""
    rows = [row for row in rows_of("gpu", "clip") if row["size"].startswith("N=65536 ")]
    columns, lines = by_column(rows, [*TIME_AND_PEAK, ERROR])
    precisions = {"highest": "float32", "high": "TF32"}
    named = [precisions.get(mode, mode) for _, mode in columns]
    return markdown(["loss", *named], lines)


MADE = (loop, scripts, labels, costs, memory, heads, libraries, gpu, clip)
PAGES = {
    PAGE: MADE,
    LARGE: (all_nodes, formula),
    NEGATIVES: (score_mods,),
}


def filled(page: Path) -> str:
    return fill(page.read_text(), {made.__name__: made() for made in PAGES[page]})


if __name__ == "__main__":
    for page, text_of_page in {page: filled(page) for page in PAGES}.items():
        page.write_text(text_of_page)
