"""Figures in the sentences of README and pages are those of the tables, which commands fill."""

import re

from helpers.scripts import ROOT

from benchmarks import tables
from experiments.common.tables import fill

DOCS = ROOT / "docs"


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def line_of(page, marker, first):
    """The cells of a line of a table by their headings."""
    block = re.search(rf"<!-- {marker} -->\n(.*?)\n<!-- end -->", (DOCS / page).read_text(), re.S)
    head, _, *lines = [line.strip("| ").split(" | ") for line in block.group(1).splitlines()]
    (line,) = [line for line in lines if line[0] == first]
    return dict(zip(head, line, strict=True))


def test_figures_in_sentences_are_those_of_the_tables():
    digits = line_of("results.md", "digits", "PGCL minus InfoNCE")["1 label per class"]
    gain, interval = digits.lstrip("+").split(" ", 1)
    for page in ("README.md", "docs/results.md"):
        assert f"{gain} points above InfoNCE {interval}" in text_of(page), page
    assert f"{gain} points of one-shot accuracy" in text_of("docs/choosing.md")


def test_the_tables_of_speed_are_those_of_the_records():
    page = tables.PAGE.read_text()
    assert fill(page, tables.tables()) == page
