"""Write the tables of docs/swap.md from the table of presets in pgcl_losses/presets.py.

python -m docs.presets
"""

from pathlib import Path

from docs.tables import fill, markdown
from pgcl_losses.presets import GROUPS, Preset

PAGE = Path(__file__).parent / "swap.md"


def row(name: str, preset: Preset) -> list[str]:
    repository, path, function = preset.where.split()
    there, file = f"https://github.com/{repository}", path.rsplit("/", 1)[-1]
    has_own_call = preset.expression() != "loss_of(view1, view2)"
    return [
        f"[`{name}`]({there})",
        f"{preset.options['temperature']:.4g}",
        f"[`{file}`]({there}/blob/HEAD/{path}): `{function}`",
        "; ".join([f"`{preset.expression()}`"] * has_own_call + [preset.note] * bool(preset.note)),
    ]


def filled(text: str) -> str:
    """The page with the table of each group."""
    head = "script", "temperature", "its loss", "what differs"
    return fill(
        text,
        {
            f"presets: {group}": markdown(head, (row(*each) for each in presets.items()))
            for group, presets in GROUPS.items()
        },
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
