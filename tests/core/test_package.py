"""What is installed: a core that needs torch and numpy alone, and adapters beside it."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def output_of(code, **options):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def test_the_core_imports_torch_and_numpy_alone():
    code = """
import sys, torch
already = set(sys.modules)
import pgcl_losses, pgcl_losses.adapters
new = {name.partition(".")[0] for name in set(sys.modules) - already}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
    assert output_of(code).split() == ["pgcl_losses"]


def test_imports_from_inside_of_a_checkout():
    """Where this folder hides the installed package: adapters, and no other folder."""
    code = """
import importlib, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import pgcl_losses.adapters
print(pgcl_losses.adapters.__file__)
try:
    import pgcl_losses.experiments
except ModuleNotFoundError as error:
    print(error)
"""
    output = output_of(code, cwd=CHECKOUT, env={"PYTHONPATH": str(CHECKOUT)})
    assert output.splitlines() == [
        str(CHECKOUT / "adapters" / "__init__.py"),
        "No module named 'pgcl_losses.experiments'",
    ]
