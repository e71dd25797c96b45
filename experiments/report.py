"""Fills the tables of docs/results.md, reproduce.md and choosing.md from the records.

python -m experiments.report
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from .common.tables import DOCS, refill
from .digits import report as digits
from .nodes import report as nodes
from .transfer import report as transfer
from .unsupervised import report as unsupervised

PICTURES: dict[str, Callable[[], Figure]] = {
    "temperature.png": digits.draw,
    "figures-4-5.png": unsupervised.draw,
}


def pages() -> dict[Path, dict[str, str]]:
    """All tables by page and marker."""
    tables: dict[Path, dict[str, str]] = {}
    for report in (digits, unsupervised, nodes, transfer):
        for page, of_page in report.pages().items():
            tables.setdefault(page, {}).update(of_page)
    return tables


def main() -> None:
    refill(pages())
    for name, draw in PICTURES.items():
        draw().savefig(DOCS / "images" / name, dpi=130)


if __name__ == "__main__":
    main()
