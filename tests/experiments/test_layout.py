"""The folders of experiments import from `experiments.common`, and not from each other."""

import re
import subprocess
import sys

import pytest
from helpers.scripts import ROOT

EXPERIMENTS = ROOT / "experiments"
FOLDERS = {path.parent.name for path in EXPERIMENTS.glob("*/__init__.py")}


def imports(folder):
    """The folders of experiments that the modules of a folder import from."""
    texts = [path.read_text() for path in folder.rglob("*.py")]
    return {
        name
        for text in texts
        for name in re.findall(r"^(?:from|import) experiments\.?(\w*)", text, flags=re.MULTILINE)
    }


def test_folders_import_from_common_alone():
    assert {name: imports(EXPERIMENTS / name) - {name} for name in FOLDERS} == {
        name: set() if name == "common" else {"common"} for name in FOLDERS
    }
    assert imports(ROOT / "examples") == imports(ROOT / "pgcl_losses") == set()


def test_common_is_small():
    lines = [path.read_text().count("\n") for path in (EXPERIMENTS / "common").glob("*.py")]
    assert sum(lines) < 640


def test_no_program_changes_the_path_of_imports():
    for folder in ("adapters", "benchmarks", "docs", "examples", "experiments", "pgcl_losses"):
        for path in (ROOT / folder).rglob("*.py"):
            # Sphinx finds an extension that lies beside its configuration in no other way.
            if path != ROOT / "docs" / "conf.py":
                assert "sys.path" not in path.read_text(), path


@pytest.mark.parametrize(
    ("folder", "missing", "extra"),
    [("synthetic", "sklearn", "experiments"), ("transfer", "rdkit", "molecules")],
)
def test_errors_of_a_missing_package_name_the_extra(folder, missing, extra):
    code = f"import sys; sys.modules['{missing}'] = None; import experiments.{folder}"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    error = f"these experiments need {missing}: in the checkout, pip install -e '.[{extra}]'"
    assert error in result.stderr
