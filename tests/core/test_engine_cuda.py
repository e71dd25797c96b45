""" "auto" on CUDA: dense where memory is free for it, then trusted kernels, then streaming.

What only a GPU has is put in its place: its memory, and graphs that are captured.
"""

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from pgcl_losses import PGCLLoss, engine
from pgcl_losses.engine import TRACEABLE, Pairs, cuda, streaming, trial
from pgcl_losses.ranks import Ranks

GIB = 1 << 30


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Tensors on "meta" and the CPU are taken for some on a GPU of 80 GiB, 32 of them free."""
    memory = {"free": 30 * GIB, "reserved": 5 * GIB, "allocated": 3 * GIB, "capturing": False}

    def when_asked(number):
        assert not memory["capturing"]
        return number

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: when_asked((memory["free"], 80 * GIB))
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: when_asked(memory["reserved"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: memory["allocated"])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: mock.Mock(total_memory=80 * GIB)
    )
    monkeypatch.setattr(cuda, "is_capturing", lambda _: memory["capturing"])
    monkeypatch.setattr(cuda, "_free", {})
    monkeypatch.setattr(trial, "OUTCOMES", {})
    return memory


def choice(num_rows, dtype=torch.float32):
    return cuda.choose(Pairs(torch.empty(num_rows, 2, dtype=dtype, device="meta"), 2), 0.2)


@pytest.mark.parametrize("trusted", [False, True])
def test_dense_while_four_matrices_fit_into_a_quarter_of_what_is_free(gpu, monkeypatch, trusted):
    monkeypatch.setattr(trial, "is_trusted", lambda *_: trusted)
    larger = "triton" if trusted else "streaming"
    # 16 matrices of 4 bytes in 32 GiB: 2^29 pairs, 23170 rows.
    assert (choice(23170), choice(23172)) == ("dense", larger)
    assert (choice(16384, torch.float64), choice(16386, torch.float64)) == ("dense", larger)
    gpu["free"] = 6 * GIB
    assert (choice(11584), choice(11586)) == ("dense", larger)
    gpu["free"], gpu["reserved"] = 0, gpu["allocated"]
    assert (choice(2048), choice(2050)) == ("dense", larger)


def test_small_batches_do_not_ask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", mock.Mock(side_effect=AssertionError))
    assert choice(2048) == "dense"


def test_while_a_graph_is_captured_what_was_known_counts(gpu):
    gpu["capturing"] = True
    assert (choice(36634), choice(36636)) == ("dense", "streaming")  # of all the 80 GiB
    gpu["capturing"] = False
    assert choice(23172) == "streaming"
    gpu["capturing"], gpu["free"] = True, 80 * GIB
    assert (choice(23170), choice(23172)) == ("dense", "streaming")


def test_tensors_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with FakeTensorMode():
        for num_rows, expected in ((2048, "dense"), (2050, "streaming")):
            pairs = Pairs(torch.empty(num_rows, 2, device="cuda"), 2)
            assert engine._choose(pairs, 0.2, num_ranks=1) == expected


def test_ranks_do_not_ask_what_may_differ_between_them(monkeypatch):
    monkeypatch.setattr(cuda, "choose", mock.Mock(side_effect=AssertionError))
    with FakeTensorMode():
        for device in ("cpu", "cuda:0"):
            for num_rows in (4, 4096):
                pairs = Pairs(torch.empty(num_rows, 2, device=device), 2)
                assert engine._choose(pairs, 0.2, num_ranks=2) == "streaming"


@pytest.mark.parametrize(
    ("device", "num_rows", "expected"),
    [
        ("cpu", 1024, "dense"),
        ("cpu", 1026, "streaming"),
        ("meta", 11584, "dense"),
        ("meta", 11586, "streaming"),
    ],
)
def test_other_devices(monkeypatch, device, num_rows, expected):
    monkeypatch.setattr(cuda, "choose", mock.Mock(side_effect=AssertionError))
    pairs = Pairs(torch.empty(num_rows, 2, device=device), 2)
    assert engine._choose(pairs, 0.2, num_ranks=1) == expected


@pytest.fixture
def as_on_cuda(gpu, monkeypatch):
    """The CPU's own tensors are chosen for as on a GPU without free memory."""
    gpu.update(free=0, reserved=0, allocated=0)
    monkeypatch.setattr(cuda, "_ALWAYS_DENSE", 0)
    monkeypatch.setattr(engine, "_choose", lambda pairs, t, num_ranks: cuda.choose(pairs, t))


@pytest.mark.usefixtures("as_on_cuda")
def test_steps_stream_until_the_kernels_have_passed(monkeypatch):
    pytest.importorskip("triton", minversion="3.6")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and take no rows of the CPU")
    from helpers.interpreter import bfloat16_products

    from pgcl_losses.engine import triton

    rows = torch.nn.functional.normalize(torch.randn(12, 3))
    expected = engine.log_weighted_sums(Pairs(rows, 2), 0.2, "dense", Ranks((6,)))
    used = []
    for name, module in (("triton", triton), ("streaming", streaming)):

        def spy(pairs, *args, original=module.gradient, name=name):
            if len(pairs.rows) == len(rows):  # and not those of the trial
                used.append(name)
            return original(pairs, *args)

        monkeypatch.setattr(module, "gradient", spy)
    with bfloat16_products():
        with mock.patch("pgcl_losses._warnings.Arrival.read", return_value=None):
            for _ in range(2):
                step(rows, expected)
        for _ in range(2):
            step(rows, expected)
    assert used == ["streaming", "streaming", "triton", "triton"]


def step(rows, expected):
    leaf = rows.clone().requires_grad_()
    log_sums = engine.log_weighted_sums(Pairs(leaf, 2), 0.2, "auto", Ranks((6,)))
    torch.testing.assert_close(log_sums.detach(), expected, rtol=1e-5, atol=1e-5)
    log_sums.sum().backward()
    assert leaf.grad.any()


# torch.compile itself uses what is deprecated, and finds Python 3.13.0 slow.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("free", [0, 80 * GIB], ids=["streaming", "dense"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_compiled_graph(gpu, monkeypatch, free, dynamic):
    gpu["free"] = free
    monkeypatch.setattr(trial, "_can_run", lambda _: False)
    torch.compiler.reset()
    pgcl = PGCLLoss(4, 3)
    compiled = torch.compile(pgcl, fullgraph=TRACEABLE, backend="aot_eager", dynamic=dynamic)
    for num_rows in (9, 12):
        views = [view.requires_grad_() for view in torch.randn(2, num_rows, 4)]
        expected = pgcl(*views)
        loss = compiled(*views)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, views), torch.autograd.grad(expected, views)
        )
