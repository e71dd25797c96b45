"""The examples in docstrings of adapters, which pytest cannot import by their file names."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("pyg", "dgl")), "pygcl"],
)
def test_examples_of_an_adapter(name):
    adapter = importlib.import_module(f"pgcl_losses.adapters.{name}")
    failed, tried = doctest.testmod(adapter)
    assert tried > 0
    assert failed == 0
