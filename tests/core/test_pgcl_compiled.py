"""PGCLLoss compiles to one graph, never waits for the device and builds no matrix of pairs."""

import copy
from unittest import mock

import pytest
import torch
from helpers.blocks import in_blocks
from helpers.cases import EVERY_MODE, FAMILY
from helpers.marks import compiling, negatives_of
from torch.utils._python_dispatch import TorchDispatchMode

from pgcl_losses import PGCLLoss
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.engine import blocks

pytestmark = pytest.mark.slow


@compiling
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        *((mode, "aot_eager") for mode in EVERY_MODE if mode["exclude_same_cluster"]),
        *((member, "aot_eager") for member in [FAMILY[0], *FAMILY[3:]]),  # each option once
        ({}, "inductor"),
    ],
    ids=str,
)
def test_one_compiled_graph_equals_eager(options, backend):
    torch.compiler.reset()
    options = {"num_prototypes": 3, "iterations": 5, **options}
    eager = PGCLLoss(4, **options, queue_size=20, freeze_steps=1)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for _ in range(3):
        views = torch.randn(2, 6, 4)
        results = []
        for loss in (eager, compiled):
            mine = [view.clone().requires_grad_() for view in views]
            value = loss(*mine)
            value.backward()
            results.append((value, *(view.grad for view in mine)))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(eager.prototypes.weight.grad, twin.prototypes.weight.grad)
    torch.testing.assert_close(twin.state_dict(), eager.state_dict())


WAITING = {
    getattr(torch.ops.aten, name)
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_dim",
    )
}


class NoWaiting(TorchDispatchMode):
    """Fails on operations that wait for a GPU, and counts large results."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.storages = large, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in WAITING, f"{function} waits for the device"
        if "index" in function.name():
            for index in (item for listed in args if isinstance(listed, list) for item in listed):
                mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
                assert not mask, f"{function} by a mask waits for the device"
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.large:
                self.storages.add(tensor.untyped_storage().data_ptr())
        return result


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@negatives_of
def test_a_training_step_never_waits_for_the_device(weighting, negatives):
    options = {"weighting": weighting, "negatives": negatives, "memory_size": 5}
    pgcl = PGCLLoss(4, 3, **options, queue_size=9, freeze_steps=1)
    z1, z2 = torch.randn(2, 6, 4, requires_grad=True).unbind()
    pgcl(z1, z2)
    with NoWaiting(large=1 << 30):
        pgcl(z1, z2).backward()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_blocks_build_no_matrix_of_all_pairs(weighting):
    pgcl = PGCLLoss(4, 3, weighting=weighting, engine="blocks")
    z1, z2 = torch.randn(2, 50, 4, requires_grad=True).unbind()
    with (
        in_blocks(16),
        mock.patch.object(blocks, "_KEPT_UP_TO", 0),
        NoWaiting(large=100 * 100) as watch,
    ):
        pgcl(z1, z2).backward()
    assert not watch.storages
