"""Figures in the sentences of README and pages are those of the tables, which commands fill."""

import re

import pytest
from helpers.scripts import ROOT

from benchmarks import tables
from experiments.common.tables import fill

DOCS = ROOT / "docs"


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def cells(page, marker):
    """The lines of a table by their first cells, and in each the cells by their headings."""
    block = re.search(
        rf"<!-- {re.escape(marker)} -->\n(.*?)\n<!-- end -->", (DOCS / page).read_text(), re.DOTALL
    ).group(1)
    head, _, *lines = [line.strip("| ").split(" | ") for line in block.splitlines()]
    return [dict(zip(head, line, strict=False)) for line in lines]


def first_number(cell):
    return float(re.match(r"[-+]?[\d.]+", cell).group())


def line_of(page, marker, *names):
    (line,) = [line for line in cells(page, marker) if [*line.values()][: len(names)] == [*names]]
    return line


def one_shot(line):
    """The difference, and in how many settings it is above and below."""
    return re.fullmatch(r"\+?(\S+) \((\d+), (\d+)\)", line["1 label per class"]).groups()


def claims():
    """Sentences with the figures of tables, and the pages that have them."""
    held_out = line_of("where_it_helps.md", "differences", "synthetic clusters", "held out")
    gain, settings = one_shot(held_out)[0], held_out["settings"]
    yield (
        f"one-shot accuracy of InfoNCE followed by PGCL is {gain} points above InfoNCE "
        f"({settings} held-out settings, 5 seeds)",
        ["README.md", "docs/results.md", "docs/where_it_helps.md"],
    )
    at_best = line_of("where_it_helps.md", "best temperatures", "all")
    gain, above, below = one_shot(at_best)
    yield (
        f"the difference is {gain} points ({at_best['settings']} held-out settings, 5 seeds; "
        f"{above} above, {below} below after Holm's correction)",
        ["README.md"],
    )

    decisions = [
        first_number(line["1 label per class"]) for line in cells("real_graphs.md", "decision")
    ]
    photo, (small, large) = decisions[:2], [f"{abs(value):.1f}" for value in decisions[2:]]
    assert all(abs(value) < 0.5 for value in photo)
    yield f"{small} and {large} points below", ["README.md", "docs/results.md"]

    graphs = [first_number(line["PGCL minus InfoNCE"]) for line in cells("results.md", "graphs")]
    yield (
        f"between {-min(graphs):.1f} points below InfoNCE and {max(graphs):.1f} above "
        f"({'six' if len(graphs) == 6 else len(graphs)} sets, 5 seeds)",
        ["README.md"],
    )
    molecules = [
        line for line in cells("results.md", "molecules") if "recommended" not in str(line)
    ]
    worst = min(first_number(cell) for line in molecules for cell in [*line.values()][1:])
    yield f"up to {-worst:.0f} points of ROC-AUC", ["README.md", "docs/results.md"]

    tau, one = "tau=2", "1 / 5 labels per class"
    rising = [
        line
        for line in cells("real_graphs.md", "choice")
        if (line[one], line["settings"], line["steps"]) == ("InfoNCE", "6", "200")
    ]
    synthetic = line_of("where_it_helps.md", "temperatures", "InfoNCE")
    nodes = first_number(rising[0][tau]) - first_number(rising[0]["tau=0.4"])
    vectors = first_number(synthetic[tau]) - first_number(synthetic["tau=0.2"])
    yield (
        f"from 0.4 to 2 one-shot accuracy rises by {nodes:.0f} points on nodes of real graphs "
        "([development sets](real_graphs.md#development-cora-citeseer-dblp), 1 to 3 seeds), "
        f"and from 0.2 to 2 by {vectors:.0f} on",
        ["docs/choosing.md"],
    )


@pytest.mark.parametrize(
    ("claim", "page"), [(claim, page) for claim, pages in claims() for page in pages]
)
def test_a_figure_in_a_sentence_is_that_of_its_table(claim, page):
    assert claim in text_of(page)


def test_the_tables_of_speed_are_those_of_the_records():
    page = tables.PAGE.read_text()
    assert fill(page, tables.tables()) == page
