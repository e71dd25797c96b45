"""The lines of the catalogue for other repositories are losses, which `recognize` answers with."""

import re

import pytest
from helpers.scripts import ROOT
from test_docs import run_blocks

from pgcl_losses import InfoNCE, recognize

DOCS = ROOT / "docs"
PAGE = DOCS / "catalogue.md"
OTHERS, CATALOGUE = (
    re.findall(r"^\| \[.*?\)<br>`\w+` \| (?:`(.*?)`|.*?) \| (\w+)", part, flags=re.MULTILINE)
    for part in PAGE.read_text().split("### Functions of the catalogue")
)  # of each function: the line that replaces it, and the first word of the answer
LINES = sorted({line for line, _ in OTHERS + CATALOGUE if line})
LINES_OF_VIEWS = [line for line in LINES if re.fullmatch(r"[^()]*\([^()]*\)\([^=-]*\)", line)]


@pytest.fixture(scope="module")
def names():
    return run_blocks(DOCS / "negatives.md") | run_blocks(PAGE)


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_a_loss_of_what_the_page_names(line, names):
    value = eval(line, names)
    assert value.shape == ()
    assert value.isfinite()


@pytest.mark.parametrize("line", LINES_OF_VIEWS)
def test_recognize_answers_with_the_line(line):
    said = recognize(lambda z1, z2: eval(line, {"InfoNCE": InfoNCE, "z1": z1, "z2": z2}))
    assert (said.kind, said.line) == ("exact", line)


def test_the_pages_count_the_answers():
    page = PAGE.read_text().replace("\n", " ")
    kinds, of_catalogue = ([kind for _, kind in rows] for rows in (OTHERS, CATALOGUE))
    exact, nearly, checked = (kinds.count(kind) for kind in ("exact", "nearly", "checked"))
    assert f"Of {len(kinds)} functions, {exact} are exact and {nearly} nearly." in page
    assert f"The other {checked} have further inputs" in page
    exact, nearly = of_catalogue.count("exact"), of_catalogue.count("nearly")
    assert exact + nearly == len(of_catalogue)
    count = f"{exact} are exact and {nearly} nearly"
    assert f"{len(of_catalogue)} functions of the catalogue, as they stand" in page
    assert count in page
    guide = (DOCS / "swap.md").read_text().replace("\n", " ")
    assert f"Of [{len(of_catalogue)} functions of the catalogue]" in guide
    assert count in guide
