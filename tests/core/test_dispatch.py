"""The choice of engine="auto": by the number of pairs, the kind of device and the self-test."""

from unittest import mock

import pytest
import torch
from helpers.marks import compiling
from torch._subclasses import FakeTensorMode

from pgcl_losses import PGCLLoss
from pgcl_losses.engine import dispatch
from pgcl_losses.engine.contract import Gaussian, Pairs, compared_sets


def pairs_of(count, device="cpu", **weights):
    embeddings = torch.empty(count, 2, device=device)
    return Pairs(embeddings, (count // 2,) * 2, compared_sets(2, "all"), **weights)


@pytest.mark.parametrize(
    ("device", "count", "expected"),
    [
        ("cpu", 1024, "dense"),
        ("cpu", 1026, "streaming"),
        ("meta", 8192, "dense"),
        ("meta", 8194, "streaming"),
        ("cuda", 8192, "dense"),
        ("cuda", 8194, "streaming"),  # there is no GPU behind it
    ],
)
def test_the_choice_of_one_process(device, count, expected):
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert dispatch.choose(pairs_of(count, device), num_ranks=1) == expected


@pytest.mark.parametrize("passed", [False, True])
def test_triton_is_chosen_if_its_self_test_passed(monkeypatch, passed):
    monkeypatch.setattr(dispatch, "kernels_pass", lambda device: passed)
    large = "triton" if passed else "streaming"
    for num_ranks in (1, 2):
        assert dispatch.choose(pairs_of(8194), num_ranks) == large
        gaussian = Gaussian(torch.zeros(8194), torch.ones(8194))
        assert dispatch.choose(pairs_of(8194, by_cosine=gaussian), num_ranks) == large
        unknown = mock.Mock()
        assert dispatch.choose(pairs_of(8194, by_cosine=unknown), num_ranks) == "streaming"
    assert dispatch.choose(pairs_of(64), num_ranks=1) == "dense"
    assert dispatch.choose(pairs_of(64), num_ranks=2) == large  # one matrix cannot be shared


def test_the_choice_does_not_depend_on_free_memory_or_events(monkeypatch):
    """So that a resumed run repeats the choices of the first."""
    for name in ("mem_get_info", "memory_reserved", "memory_allocated", "Event"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(side_effect=AssertionError))
    with FakeTensorMode():
        for count in (64, 8192, 8194, 1 << 17):
            for num_ranks in (1, 2):
                first = dispatch.choose(pairs_of(count, "cuda"), num_ranks)
                assert dispatch.choose(pairs_of(count, "cuda"), num_ranks) == first


@compiling
@pytest.mark.parametrize("dense_up_to", [0, 1 << 20], ids=["streaming", "dense"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_each_choice_is_one_compiled_graph(monkeypatch, dense_up_to, dynamic):
    monkeypatch.setattr(dispatch, "_DENSE_UP_TO", {"cpu": dense_up_to})
    torch.compiler.reset()
    pgcl = PGCLLoss(4, 3)
    compiled = torch.compile(
        pgcl, fullgraph=dispatch.TRACEABLE, backend="aot_eager", dynamic=dynamic
    )
    for count in (9, 12):
        views = [view.requires_grad_() for view in torch.randn(2, count, 4)]
        expected, loss = pgcl(*views), compiled(*views)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(loss, views), torch.autograd.grad(expected, views)
        )
