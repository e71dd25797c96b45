"""Frameworks by marks: ``pytest tests/adapters -m pyg`` imports no framework but PyG."""

import importlib

import pytest

FRAMEWORKS = {"pyg", "dgl", "pygcl"}  # the marks, and the folders of what one of them alone has


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("pyg", marks=pytest.mark.pyg),
        pytest.param("dgl", marks=pytest.mark.dgl),
    ],
)
def framework(request):
    """What all frameworks can do, under the same names: helpers.pyg_cases or helpers.dgl_cases."""
    return importlib.import_module(f"helpers.{request.param}_cases")


def pytest_ignore_collect(collection_path, config):
    """Modules in the folder of a framework import it."""
    chosen = config.option.markexpr
    others = FRAMEWORKS - {chosen} if chosen in FRAMEWORKS else set()
    return True if collection_path.name in others else None
