"""Fill the tables that pages of docs/ have between markers, from the records.

python -m experiments.report
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from . import defaults
from .clusters import report as clusters
from .common.tables import DOCS, refill
from .false_negatives import report as false_negatives
from .few_labels import report as few_labels
from .graphcl import report as graphcl
from .nodes import domains
from .nodes import report as nodes
from .tu_sets import report as tu_sets
from .warm_up import report as warm_up

PICTURES: dict[str, Callable[[], Figure]] = {
    "temperature.png": few_labels.draw,
    "figures-4-5.png": tu_sets.draw,
    "false-negatives.png": false_negatives.draw,
    "warm-up.png": warm_up.draw,
    "prototypes.png": domains.draw,
}


def pages() -> dict[Path, dict[str, str]]:
    """All tables by page and marker."""
    tables: dict[Path, dict[str, str]] = {}
    for report in (
        defaults,
        few_labels,
        warm_up,
        false_negatives,
        clusters,
        tu_sets,
        nodes,
        domains,
        graphcl,
    ):
        for page, of_page in report.pages().items():
            tables.setdefault(page, {}).update(of_page)
    return tables


def main() -> None:
    refill(pages())
    for name, draw in PICTURES.items():
        draw().savefig(DOCS / "images" / name, dpi=130)


if __name__ == "__main__":
    main()
