"""Write the tables of docs/swap.md from the table of presets in pgcl_losses/presets.py.

python docs/presets.py
"""

import re
from pathlib import Path

from pgcl_losses.presets import GROUPS, Preset, as_written

PAGE = Path(__file__).parent / "swap.md"


def row(name: str, preset: Preset) -> str:
    return (
        f"| `{name}` | `{as_written(preset.options)}` | `{preset.expression()}` | {preset.source} |"
    )


def filled(text: str) -> str:
    """The page, with the table of each group between two comments that mark its place."""
    for group, presets in GROUPS.items():
        rows = ["| script | options | value | of the script |", "| --- | --- | --- | --- |"]
        rows += [row(*each) for each in presets.items()]
        start, end = f"<!-- presets: {group} -->\n", "<!-- end -->"
        table = start + "\n".join(rows) + f"\n{end}"
        pattern = re.escape(start) + ".*?" + re.escape(end)
        text, count = re.subn(pattern, lambda _, table=table: table, text, flags=re.DOTALL)
        assert count == 1, f"{PAGE.name} has no place for {group}"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
