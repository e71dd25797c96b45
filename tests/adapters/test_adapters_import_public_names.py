"""Adapters use the public names of the core alone, as a user's own adapter would."""

import ast

import pytest
from helpers.scripts import ROOT

import pgcl_losses

FILES = sorted((ROOT / "adapters").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_adapter_imports_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for imported in node.names:
                assert imported.name.partition(".")[0] != "pgcl_losses", imported.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module == "pgcl_losses":
                assert {imported.name for imported in node.names} <= {*pgcl_losses.__all__}
            else:
                assert node.module.partition(".")[0] != "pgcl_losses", node.module
        assert not isinstance(node, ast.ImportFrom) or node.level < 2, ast.unparse(node)
