import os
import socket

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

collect_ignore = ["helpers/product_kernels.py"]  # a program that needs triton without interpreter

# Workers of pytest-xdist share the cores, and so do the scripts that they start.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if workers > 1:
    threads = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

connect = socket.socket.connect


def connect_here_only(self, address):
    """What runs on this machine may talk to itself, as ranks do, and to nobody else."""
    host = address[0] if isinstance(address, tuple) else "localhost"
    if host not in ("localhost", "::1", socket.gethostname()) and not host.startswith("127."):
        raise AssertionError(f"a test wants to connect to {address}")
    return connect(self, address)


socket.socket.connect = connect_here_only


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
