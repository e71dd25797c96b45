"""What is installed: a core that needs torch and numpy alone, and adapters in it."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pgcl_losses.adapters


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


def test_rooms_import_downwards():
    """`base` imports no other folder, `clusters` and `pairs` import `base` alone."""
    package = Path(pgcl_losses.__file__).parent
    for room, may_import in {"base": (), "clusters": ("base",), "pairs": ("base",)}.items():
        for path in (package / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("pgcl_losses"):
                    imported = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                    assert {*imported} <= {room, *may_import}, f"{path} imports {node.module}"


def test_a_folder_beside_the_package_is_not_run(tmp_path):
    """A user's project may have a folder `adapters/`, and the package may be copied into it."""
    shutil.copytree(Path(pgcl_losses.__file__).parent, tmp_path / "pgcl_losses")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "__init__.py").write_text("print('the folder of a user')")
    code = """
import contextlib, pgcl_losses
print(pgcl_losses.__file__)
with contextlib.suppress(ModuleNotFoundError):
    import pgcl_losses.adapters
"""
    paths = os.pathsep.join(map(str, [tmp_path, *sys.path]))
    output = output_of(code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert output.splitlines() == [str(tmp_path / "pgcl_losses" / "__init__.py")]


def test_adapters_have_one_name():
    """Under another name, each class of the adapters would exist twice."""
    folder = Path(pgcl_losses.adapters.__file__).parent
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("adapters", {str(folder / "__init__.py")!r})
try:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
except ImportError as error:
    print(error)
"""
    assert "installed as pgcl_losses.adapters, but was imported as adapters" in output_of(code)
