"""Write the tables of docs/catalogue.md from the presets in pgcl_losses/presets.py.

python -m docs.programs.presets
"""

from pathlib import Path

from docs.programs.tables import fill, markdown
from pgcl_losses.presets import GROUPS, PRESETS, Preset, as_written

PAGE = Path(__file__).parents[1] / "catalogue.md"
NEGATIVES = {"all": "all other embeddings", "cross": "the other set", "memory": "the memory"}
# What an option, or the value of an option, changes in the formula of the page.
CHANGES = {
    "decoupled": "positives are not in the denominator",
    "dot": "s are dot products",
    "supcon": "the denominator adds up all positives",
    "sum": "numerator and denominator add up all positives",
    "hardness": "similar negatives count more",
    "debias": "what false negatives are expected to add is subtracted",
}


def row(name: str, preset: Preset) -> list[str]:
    """A script and its function, the line that makes ``loss_of`` and its call, what differs."""
    repository, path, function = preset.where.split()
    there = f"https://github.com/{repository}"
    dim = ", dim=D" if "memory_size" in preset.options else ""
    by_name, by_options = f'like("{name}"{dim})', f"({as_written(preset.options)})"
    made = f"`InfoNCE{by_options}`" if preset.value else f"`InfoNCE.{by_name}`"
    value = preset.expression()
    return [
        f"[{name}]({there})<br>[`{function}`]({there}/blob/HEAD/{path})",
        f"{preset.options['temperature']:.4g}",
        made if value == "loss_of(view1, view2)" else f"{made}<br>`{value}`",
        preset.note,
    ]


def formula(preset: Preset) -> tuple[str, ...]:
    """The options that change the formula of a loss, and what they change."""
    others = {"temperature", "reduction", "memory_size", "gather"}
    options = {name: value for name, value in preset.options.items() if name not in others}
    negatives = NEGATIVES[options.get("negatives", "all")]
    changes = [CHANGES.get(name, CHANGES.get(value, "")) for name, value in options.items()]
    return (
        f"`{as_written(options)}`" if options else "the defaults",
        "the first set" if options.get("queries") == "first" else "all embeddings",
        "the listed pairs" if "negative_pairs=" in preset.expression() else negatives,
        "; ".join(filter(None, changes)),
    )


def filled(text: str) -> str:
    """The page with the table of each group, and the table of formulas."""
    head = "script", "τ", "`loss_of`, its call", "what differs"
    tables = {
        f"presets: {group}": markdown(head, (row(*each) for each in presets.items()))
        for group, presets in GROUPS.items()
    }
    scripts: dict[tuple[str, ...], list[str]] = {}
    for name, preset in PRESETS.items():
        scripts.setdefault(formula(preset), []).append(name)
    head = "options", "queries i", "negatives j", "what changes", "scripts"
    lines = ([*cells, ", ".join(names)] for cells, names in scripts.items())
    return fill(text, {**tables, "formulas": markdown(head, lines)})


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
