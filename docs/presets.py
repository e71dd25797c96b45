"""Write the tables of docs/swap.md from the table of presets in pgcl_losses/presets.py.

python -m docs.presets
"""

from pathlib import Path

from benchmarks.tables import fill, markdown
from pgcl_losses.presets import GROUPS, Preset, as_written

PAGE = Path(__file__).parent / "swap.md"


def row(name: str, preset: Preset) -> list[str]:
    options = as_written(preset.options)
    return [f"`{name}`", f"`{options}`", f"`{preset.expression()}`", preset.source]


def filled(text: str) -> str:
    """The page with the table of each group."""
    head = "script", "options", "value", "of the script"
    return fill(
        text,
        {
            f"presets: {group}": markdown(head, (row(*each) for each in presets.items()))
            for group, presets in GROUPS.items()
        },
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
