import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pgcl_losses


def test_the_core_imports_torch_and_numpy_alone():
    code = """
import sys, torch
already = set(sys.modules)
import pgcl_losses, pgcl_losses.adapters
new = {name.partition(".")[0] for name in set(sys.modules) - already}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["pgcl_losses"]


def test_public_names():
    assert pgcl_losses.__all__ == [
        "Assignment",
        "Batch",
        "ConsistencyLoss",
        "InfoNCE",
        "PGCLLoss",
        "PGCLTerms",
        "PrototypeReweightedNCE",
        "SinkhornPrototypes",
        "diagnostics",
        "sinkhorn",
    ]


def test_imports_from_inside_of_a_checkout():
    """Where this folder hides the installed package: adapters, and no other folder or package."""
    checkout = Path(__file__).parents[2]
    code = """
import importlib, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import pgcl_losses.adapters
print(pgcl_losses.adapters.__file__)
for name in ("pgcl_losses", "benchmarks", "experiments"):
    try:
        importlib.import_module("pgcl_losses." + name)
    except ModuleNotFoundError as error:
        print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=checkout,
        env={"PYTHONPATH": str(checkout)},
        check=True,
    )
    assert result.stdout.splitlines() == [
        str(checkout / "adapters" / "__init__.py"),
        "No module named 'pgcl_losses.pgcl_losses'",
        "No module named 'pgcl_losses.benchmarks'",
        "No module named 'pgcl_losses.experiments'",
    ]


def test_version_and_typing_marker():
    assert importlib.metadata.version("pgcl-losses") == pgcl_losses.__version__
    assert (Path(pgcl_losses.__file__).parent / "py.typed").exists()


def test_nothing_in_the_long_description_is_relative():
    """On a package's page there is no file beside it, so a relative link leads nowhere."""
    metadata = importlib.metadata.metadata("pgcl-losses")
    description = metadata["Description"] or metadata.get_payload()
    assert description.startswith("# pgcl-losses")
    targets = re.findall(r"\]\(([^)\s]+)", re.sub(r"```.*?```", "", description, flags=re.DOTALL))
    targets += re.findall(r"^\[[^\]]+\]:\s*(\S+)", description, flags=re.MULTILINE)
    targets += re.findall(r"(?:src|srcset|href)=[\"']?([^\"' >]+)", description)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
