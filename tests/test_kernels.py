"""The check of compiled kernels sees what is wrong with one."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from helpers.scripts import ROOT

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    program = ROOT / "tests" / "helpers" / "product_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nothing_is_wrong_with_a_product_on_tensor_cores(wrong):
    assert wrong["right"] == []


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("without tensor cores", "tensor cores"),
        ("few registers", "registers in memory"),
        ("much shared memory", "shared memory"),
    ],
)
def test_each_problem_is_found(wrong, kernel, problem):
    (found,) = wrong[kernel]
    assert problem in found
