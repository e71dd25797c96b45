"""The record of public scripts answers the rows, and its lines are losses."""

import json

import pytest

from docs import public_scripts

ANSWERS = json.loads(public_scripts.RECORD.read_text())["rows"]
ROWS = [row for rows in public_scripts.SCRIPTS.values() for row in rows]


def test_the_record_answers_the_rows():
    assert [(found["source"], found["place"]) for found in ANSWERS] == [row[:2] for row in ROWS]
    assert [found["line"] for found in ANSWERS if found["kind"] == "checked"] == [
        row.line for row in ROWS if row.line
    ]
    assert len({found["source"] for found in ANSWERS if found["kind"] != "none"}) >= 15
    kinds = [found["kind"] for found in ANSWERS]
    count = f"Of {len(kinds)} functions, {kinds.count('exact')} are exact and"
    page = (public_scripts.DOCS / "public_scripts.md").read_text()
    assert f"{count} {kinds.count('nearly')} nearly" in page


@pytest.fixture(scope="module")
def names():
    return public_scripts.names() | vars(public_scripts.given())


@pytest.mark.parametrize("line", sorted({x["line"] for x in ANSWERS if x["kind"] != "none"}))
def test_lines_are_losses_of_this_package(line, names):
    value = eval(line, names)
    assert value.shape == ()
    assert value.isfinite()


def test_the_guide_has_the_figures_of_the_record():
    """Functions of the guide are recognised by name; DCL and SupContrast also have a factor."""
    guide = json.loads(public_scripts.RECORD.read_text())["guide"]
    kinds = [found["kind"] for found in guide]
    exact, nearly = kinds.count("exact"), kinds.count("nearly")
    assert exact + nearly == len(kinds) == len(public_scripts.GUIDE)
    others = {found["name"] for found in guide if found["name"] not in found["names"]}
    assert others == {"DCL", "SupContrast"}
    page = (public_scripts.DOCS / "swap.md").read_text().replace("\n", " ")
    assert f"**{len(kinds)} functions of the catalogue**" in page
    assert f"as they stand in their repositories, {exact} are exact" in page
