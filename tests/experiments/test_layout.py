"""The programs stand in rooms that share one shelf, and know nothing of each other."""

import re
import subprocess
import sys

import pytest
from helpers.scripts import ROOT

HOUSE = ROOT / "experiments"
ROOMS = {path.parent.name for path in HOUSE.glob("*/__init__.py")}


def imports(folder):
    """The rooms that the modules of a folder import from."""
    texts = [path.read_text() for path in folder.rglob("*.py")]
    return {
        room
        for text in texts
        for room in re.findall(r"^(?:from|import) experiments\.?(\w*)", text, flags=re.MULTILINE)
    }


def test_rooms_know_the_shelf_alone():
    assert {room: imports(HOUSE / room) - {room} for room in ROOMS} == {
        room: set() if room == "common" else {"common"} for room in ROOMS
    }
    assert imports(ROOT / "examples") == imports(ROOT / "pgcl_losses") == set()


def test_the_shelf_is_small():
    lines = [path.read_text().count("\n") for path in (HOUSE / "common").glob("*.py")]
    # 50 of them say what values every option of every program takes, 20 what an interval says.
    assert sum(lines) < 575


def test_no_program_reaches_for_the_path_of_imports():
    for folder in ("adapters", "benchmarks", "docs", "examples", "experiments", "pgcl_losses"):
        for path in (ROOT / folder).rglob("*.py"):
            # Sphinx finds an extension that lies beside its configuration in no other way.
            if path != ROOT / "docs" / "conf.py":
                assert "sys.path" not in path.read_text(), path


@pytest.mark.parametrize(
    ("room", "missing", "extra"),
    [("synthetic", "sklearn", "experiments"), ("transfer", "rdkit", "molecules")],
)
def test_errors_of_a_missing_package_name_the_extra(room, missing, extra):
    code = f"import sys; sys.modules['{missing}'] = None; import experiments.{room}"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    error = f"these experiments need {missing}: in the checkout, pip install -e '.[{extra}]'"
    assert error in result.stderr
