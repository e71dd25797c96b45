import functools
import importlib.util
import os
import re
import socket
from pathlib import Path

import hypothesis
import pytest
import torch
from helpers import pretend

# Workers of pytest-xdist share the cores, and so do the scripts that they start.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if workers > 1:
    threads = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)

# Hypothesis draws the same examples in each run. With HYPOTHESIS_PROFILE=explore it draws new ones,
# ten times as many, and prints how to repeat a failure.
profile = hypothesis.settings.register_profile
profile("repeatable", deadline=None, derandomize=True, max_examples=100)
profile("explore", deadline=None, derandomize=False, max_examples=1000, print_blob=True)
profile("dry run", deadline=None, derandomize=True, max_examples=4)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

connect = socket.socket.connect


def connect_here_only(self, address):
    """Processes of a test may connect to each other, and to no other machine."""
    host = address[0] if isinstance(address, tuple) else "localhost"
    if host not in ("localhost", "::1", socket.gethostname()) and not host.startswith("127."):
        raise AssertionError(f"a test wants to connect to {address}")
    return connect(self, address)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# A mark for each, which is also the name of its folder or file of tests, and what it imports.
FRAMEWORKS = {"pyg": "torch_geometric", "dgl": "dgl", "pygcl": "GCL", "lightning": "lightning"}


@pytest.fixture(
    scope="session",
    params=[pytest.param("pyg", marks=pytest.mark.pyg), pytest.param("dgl", marks=pytest.mark.dgl)],
)
def framework(request):
    """What all frameworks can do, under the same names: helpers.pyg_cases or helpers.dgl_cases."""
    return importlib.import_module(f"helpers.{request.param}_cases")


def leave_out_other_frameworks(config):
    """``-m pyg`` imports no framework but PyG, and ``-m "not dgl"`` no DGL.

    Plain pytest leaves out frameworks that are not installed. With ``-m``, by which make and CI say
    what they test, a missing framework is an error.
    """
    if not config.option.markexpr:
        missing = (name for name, of in FRAMEWORKS.items() if importlib.util.find_spec(of) is None)
        config.option.markexpr = " and ".join(f"not {name}" for name in missing)
    chosen, root = config.option.markexpr, Path(__file__).parents[1]
    is_one = chosen in FRAMEWORKS
    others = FRAMEWORKS.keys() - {chosen} if is_one else re.findall(r"not (\w+)", chosen)
    places = "tests/adapters/{0} tests/helpers/{0}_cases.py tests/programs/test_{0}.py"
    left_out = [str(root / place) for name in others for place in places.format(name).split()]
    if importlib.util.find_spec("triton") is None:  # its doctests would import it
        left_out.append(str(root / "pgcl_losses" / "pairs" / "fused.py"))
    config.option.ignore = [*(config.option.ignore or ()), *left_out]


def pytest_addoption(parser):
    about = "where the tests of tests/core make their tensors: cuda; or pretend, for a dry run"
    parser.addoption("--device", default="cpu", help=about)


def drawn_on_the_cpu(draw):
    """Let a function draw the same random numbers whichever device they are for."""

    @functools.wraps(draw)
    def drawn(*args, device=None, requires_grad=False, **kwargs):
        numbers = draw(*args, device="cpu", **kwargs).to(device or torch.get_default_device())
        return numbers.requires_grad_(requires_grad)

    return drawn


def make_tensors_on(device, patch):
    """Also the tensors of parameters, since this comes before a file of tests is imported."""
    if device == pretend.NAME:
        if not pretend.IS_POSSIBLE:
            raise pytest.UsageError("--device pretend needs a newer torch, and no GPU")
        pretend.register()
        torch.__future__.set_swap_module_params_on_conversion(True)
        hypothesis.settings.load_profile("dry run")
    torch.set_default_device(device)
    for name in ("rand", "randn", "randint", "randperm"):
        patch.setattr(torch, name, drawn_on_the_cpu(getattr(torch, name)))


def pytest_configure(config):
    patch = pytest.MonkeyPatch()
    patch.setattr(socket.socket, "connect", connect_here_only)
    config.add_cleanup(patch.undo)
    if config.option.device != "cpu":
        make_tensors_on(config.option.device, patch)
    leave_out_other_frameworks(config)
