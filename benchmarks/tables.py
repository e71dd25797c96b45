"""Fill tables of the documentation and sentences of README.md from benchmarks/results.

python -m benchmarks.tables
"""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs.tables import fill, markdown

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
NEGATIVES = ROOT / "docs" / "negatives.md"
LARGE = ROOT / "docs" / "large_graphs.md"
PYGCL = "PyGCL's InfoNCE"
MEMORY = ["process MiB", "peak MiB"]
ERROR = "millionths of the gradient"
# Rows of memory, and the rows of time that they belong to.
MASKS = {
    "a mask of all pairs": "the script's lines",
    "the same mask by score_mod": "our loss",
}


def rows_of(record: str, benchmark: str) -> list[dict[str, Any]]:
    """The rows of one benchmark; none before its first run."""
    path = ROOT / "benchmarks" / "results" / f"{record}.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in known if row["benchmark"] == benchmark]


def text(metric: str, value: float) -> str:
    if metric == "milliseconds":
        if value >= 600_000:
            return f"{value / 3_600_000:.2g} hours"
        return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
    if metric.startswith(("peak MiB", "needed MiB", "process MiB")):
        return f"{value:,.0f} MiB" if value >= 1 else f"{value:.1f} MiB"
    if "loss" in metric.split():
        return f"{value:.6f}"
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


def of_nodes(mode: str) -> str:
    """Every node is a negative: time, memory and value of a loss on each graph."""
    rows = [row for row in rows_of("nodes", "nodes") if row["mode"] == mode]
    metrics, lines = ["milliseconds", "ratio to InfoNCE", "process MiB", "peak MiB", "loss"], []
    for size, loss in dict.fromkeys((row["size"], row["provider"]) for row in rows):
        cells = [cell(rows, [metric], loss, size, mode) for metric in metrics]
        if needed := cell(rows, ["needed MiB"], loss, size, mode):
            cells[3] = f"not run: about {needed}"
        lines.append([size, loss, *cells])
    head = ["graph", "loss", "time", "ratio", "process grows by", "tensors hold", "value"]
    return markdown(head, lines)


def grace() -> str:
    return of_nodes("GRACE")


def magi() -> str:
    return of_nodes("MAGI")


def by_nodes(rows: list[dict[str, Any]], larger: list[int], chunk: float, memory: str) -> str:
    """What was measured of `InfoNCE` by nodes, and a formula from the largest measurement.

    The time is that of a pair, the memory that of a node beside one chunk of ``chunk`` MiB.
    ``memory``: the metric.
    """
    known: dict[int, dict[str, float]] = {}
    for row in rows:
        known.setdefault(int(row["size"].partition("N=")[2]), {})[row["metric"]] = row["value"]
    lines = []
    for num in [*sorted(known), *larger] if known else []:
        largest = known[max(known)]
        by_formula = {
            "milliseconds": largest["milliseconds"] * (num / max(known)) ** 2,
            memory: chunk + (largest[memory] - chunk) * num / max(known),
        }
        measured = known.get(num, {})
        cells = [text(name, measured[name]) if measured else "" for name in by_formula]
        lines.append([f"{num:,}", *cells, *(text(*item) for item in by_formula.items())])
    head = ["nodes", "time", "memory", "time by the formula", "memory by the formula"]
    return markdown(head, lines)


def extrapolated() -> str:
    rows = [row for row in rows_of("nodes", "nodes") if row["mode"] == "GRACE"]
    ours = [row for row in rows if row["provider"] == "InfoNCE"]
    return by_nodes(ours, [34_493, 169_343, 10**6], chunk=8, memory="process MiB")


def on_a_gpu() -> str:
    rows = [row for row in rows_of("gpu", "scripts") if int(row["size"][2:]) >= 8192]
    ours = [row for row in rows if (row["mode"], row["provider"]) == ("NT-Xent", "our loss")]
    return by_nodes(ours, [169_343, 10**6], chunk=256, memory="peak MiB")


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


def sentence(text: str, indent: str = "") -> str:
    """A sentence of README in lines of its width, with links and numbers in one piece."""
    return textwrap.fill(
        text,
        width=140,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def speed() -> str:
    """Sentences of README: a loss of all nodes, of many graphs, and a step of a training loop."""
    known = {
        (row["provider"], row["metric"]): text(row["metric"], row["value"])
        for row in rows_of("nodes", "nodes")
        if row["mode"] == "GRACE" and row["size"].startswith("CS ")
    }
    ours, theirs, script = "InfoNCE", "the script's loss", "GraphCL's loss_cal"
    times = dict(by_loss("loop", "loop", ["milliseconds"]))
    metrics, largest = ["milliseconds", "peak MiB"], "N=131072"
    on_gpu = cell(rows_of("gpu", "scripts"), metrics, "our loss", largest, "NT-Xent")
    return sentence(
        f"GRACE's loss of 18,333 nodes takes {known[ours, 'milliseconds']} and "
        f"{known[ours, 'process MiB']} on one CPU thread, the script's lines "
        f"{known[theirs, 'milliseconds']} and {known[theirs, 'process MiB']} "
        "([large graphs](docs/large_graphs.md)). On an H200, 131,072 graphs take "
        f"{on_gpu.replace(', ', ' and ')}. A step of GraphCL with 128 graphs takes "
        f"{times[ours]}, and {times[script]} with the "
        "script's loss ([performance](docs/performance.md)).",
        indent="  ",
    )


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
    """Sentences: low temperatures, listed positives and negatives, and `repulsion`."""
    cold = [
        row
        for row in rows_of("scripts", "temperatures")
        if (row["metric"], row["provider"]) == ("ratio to temperature=0.2", "temperature=0.01")
    ]
    several = [row for row in cold if "over_positives" in row["mode"]]
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
        "At temperature 0.01, with views aligned as after training, a step takes "
        f"{spread(row for row in cold if row not in several)} of its time at 0.2, and with "
        f'"supcon" and "sum" {spread(several)}. 100,000 listed positives take {spent[0]:.0f} to '
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


def score_mods() -> str:
    """Each function's ratio to the loss without one, by N."""
    columns, lines = by_column(rows_of("scripts", "score_mods"), ["ratio to none"])
    heads = (size.partition(" D=")[0] for size, _ in columns)
    return markdown(["function", *heads], [line for line in lines if line[0] != "none"])


def masks() -> str:
    times, rows = dict(by_loss("scripts", "masks", ["milliseconds"])), rows_of("scripts", "memory")
    size = next((row["size"] for row in rows if row["provider"] in MASKS), "")
    lines = [
        [loss, times[loss], *(cell(rows, [metric], name, size, "a step") for metric in MEMORY)]
        for name, loss in MASKS.items()
    ]
    return markdown(["loss", "time", "process grows by", "tensors hold"], lines)


def gpu() -> str:
    """Time and peak memory of each loss on the GPU of the record, by N."""
    machine = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["machine"]
    tables = [
        f"On an {machine['gpu']}, with torch {machine['torch']}, in float32:",
        by_size("scripts", "128", "1024", "8192", "65536"),
        'With TF32 (`torch.set_float32_matmul_precision("high")`):',
        by_size("TF32", "65536"),
        "Options:",
        by_size("forms", "1024", "8192"),
    ]
    return "\n\n".join(tables)


def by_size(benchmark: str, *sizes: str) -> str:
    """A line for each loss, with a column for each N."""
    rows = rows_of("gpu", benchmark)
    names = dict.fromkeys((row["mode"], row["provider"]) for row in rows)
    modes, metrics = [mode for mode, _ in names], ["milliseconds", "peak MiB"]
    lines = [
        [*name, *(cell(rows, metrics, name[1], f"N={size}", name[0]) for size in sizes)]
        for name in sorted(names, key=lambda name: modes.index(name[0]))
        if name[0] != PYGCL
    ]
    return markdown(["step", "loss", *(f"N={size}" for size in sizes)], lines)


def clip() -> str:
    """CLIP's loss beside other libraries: time, memory, and the error of the gradient."""
    columns, lines = by_column(rows_of("gpu", "clip"), ["milliseconds", "peak MiB", ERROR])
    precisions = {"highest": "float32", "high": "TF32"}
    named = [f"{size.split()[0]}, {precisions.get(mode, mode)}" for size, mode in columns]
    return markdown(["loss", *named], lines)


MADE = (
    *(loop, scripts, labels, costs, memory, options),
    *(libraries, gpu, clip),
)
PAGES = {
    PAGE: MADE,
    LARGE: (grace, magi, extrapolated, on_a_gpu),
    NEGATIVES: (score_mods, masks),
    README: (speed,),
}


def filled(page: Path) -> str:
    return fill(page.read_text(), {made.__name__: made() for made in PAGES[page]})


if __name__ == "__main__":
    for page, text_of_page in {page: filled(page) for page in PAGES}.items():
        page.write_text(text_of_page)
