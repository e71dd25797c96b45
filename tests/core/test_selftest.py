"""The self-test of the kernels: wrong ones are reported once, and engine="auto" avoids them."""

import os
import sys
import warnings
from unittest import mock

import pytest
import torch

from pgcl_losses.engine import selftest, streaming

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read while triton is imported

pytest.importorskip("triton", minversion="3.6")

from helpers.interpreter import bfloat16_products
from helpers.marks import compiling
from triton.runtime.errors import OutOfResources

from pgcl_losses.engine.triton import launch  # only after the interpreter is switched on

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def _untested():
    with mock.patch.dict(selftest._PASSED, clear=True):
        yield


def kernels(log_sums=lambda sums: sums, gradient=lambda d_embeddings: d_embeddings):
    """Results of plain operations, changed, in place of those of the kernels."""
    return mock.patch.multiple(
        launch,
        log_sums_by_kernels=lambda *args, splits: log_sums(streaming.log_sums(*args)),
        gradient_by_kernels=lambda *args, splits: gradient(streaming.gradient(*args)),
    )


@pytest.mark.slow
def test_right_kernels_pass_and_leave_the_callers_modes_alone():
    state = torch.get_rng_state()
    packed = []
    with (
        bfloat16_products(),
        mock.patch.object(launch, "log_sums_by_kernels", wraps=launch.log_sums_by_kernels) as run,
        torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: None),
        torch.inference_mode(),
        torch.autocast(DEVICE.type),
    ):
        assert selftest.kernels_pass(DEVICE)
        cases = run.call_count
        assert selftest.kernels_pass(DEVICE)
    assert run.call_count == cases > 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not packed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"log_sums": lambda sums: sums._replace(log_sums=sums.log_sums + 0.01)},
            "differ from plain operations by 1.0e-02 in sums at temperature 0.2, where rounding",
        ),
        (
            {"log_sums": lambda sums: sums._replace(log_sums=sums.log_sums * torch.nan)},
            "by nan in sums",
        ),
        (
            {
                "log_sums": lambda sums: sums._replace(
                    log_totals=None if sums.log_totals is None else sums.log_totals + 0.1
                )
            },
            "by 1.0e-01 in totals",
        ),
        ({"gradient": lambda d_embeddings: d_embeddings * 1.01}, "by 1.0e-02 in gradients"),
        ({"gradient": lambda d_embeddings: d_embeddings.roll(1, 0)}, "in gradients"),
        (
            {"gradient": mock.Mock(side_effect=OutOfResources(300_000, 232_448, "shared memory"))},
            "fail with OutOfResources: out of res",
        ),
    ],
)
def test_wrong_kernels_are_reported_once(wrong, message):
    with kernels(**wrong), pytest.warns(UserWarning, match=message) as caught:
        assert not selftest.kernels_pass(DEVICE)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "It takes engine='streaming' there" in str(caught[0].message)
    with kernels():
        assert not selftest.kernels_pass(DEVICE)


def test_a_warning_as_an_error_is_raised_once():
    with kernels(gradient=torch.zeros_like), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="differ"):
            selftest.kernels_pass(DEVICE)
        assert not selftest.kernels_pass(DEVICE)


def test_a_capture_before_the_first_call_is_an_error():
    with kernels(), mock.patch.object(selftest, "is_capturing", return_value=True) as capturing:
        with pytest.raises(RuntimeError, match="call the loss once before the capture"):
            selftest.kernels_pass(DEVICE)
        capturing.return_value = False
        assert selftest.kernels_pass(DEVICE)
        capturing.return_value = True
        assert selftest.kernels_pass(DEVICE)


@compiling
def test_the_first_call_may_be_compiled_or_in_a_transform():
    def function(x):
        return (x + selftest.kernels_pass(x.device)).sum()

    x = torch.zeros(2, device=DEVICE)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    transforms = [compiled, torch.func.vmap(function), lambda x: torch.func.grad(function)(x).sum()]
    for transform in transforms:
        selftest._PASSED.clear()
        with kernels():
            assert transform(x.unsqueeze(0) if transform is transforms[1] else x).item() == 2.0


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [
        ("3.6.0", (8, 0), True),
        ("3.10.0+git1", (9, 0), True),
        ("3.6.0", (7, 5), False),
        ("3.5.1", (9, 0), False),
    ],
)
def test_kernels_need_triton_3_6_and_capability_8(version, capability, expected):
    with (
        mock.patch("triton.__version__", version),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
    ):
        assert selftest._can_run(torch.device("cuda", 0)) == expected


def test_without_triton_it_does_not_warn():
    with mock.patch.dict(sys.modules, {"triton": None}):
        assert not selftest.kernels_pass(DEVICE)
