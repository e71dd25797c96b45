"""PGCLLoss compiles to one graph, never waits for the device and builds no matrix of weights."""

import copy

import pytest
import torch
from helpers.marks import compiling, negatives_of
from torch.utils._python_dispatch import TorchDispatchMode

from pgcl_losses import PGCLLoss
from pgcl_losses.contrast import WEIGHTINGS

pytestmark = pytest.mark.slow


@compiling
class TestCompiled:
    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    @negatives_of
    def test_fullgraph_equals_eager(self, weighting, negatives):
        torch.compiler.reset()
        eager = PGCLLoss(
            4,
            3,
            weighting=weighting,
            negatives=negatives,
            queue_size=20,
            freeze_steps=1,
            iterations=5,
        )
        twin = copy.deepcopy(eager)
        compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
        self.compare(eager, twin, compiled)

    def test_inductor(self):
        torch.compiler.reset()
        eager = PGCLLoss(4, 3, queue_size=20, freeze_steps=1)
        twin = copy.deepcopy(eager)
        self.compare(eager, twin, torch.compile(twin, fullgraph=True))

    def compare(self, eager, twin, compiled):
        for _ in range(3):
            views = torch.randn(2, 6, 4)
            results = []
            for loss in (eager, compiled):
                mine = [view.clone().requires_grad_() for view in views]
                value = loss(*mine)
                value.backward()
                results.append((value, *(view.grad for view in mine)))
            torch.testing.assert_close(results[0], results[1])
            torch.testing.assert_close(eager.prototypes.weight.grad, twin.prototypes.weight.grad)
        for name, tensor in eager.state_dict().items():
            torch.testing.assert_close(twin.state_dict()[name], tensor)


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
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_a_training_step_never_waits_for_the_device(weighting, negatives, warmup_steps):
    options = {"weighting": weighting, "negatives": negatives, "warmup_steps": warmup_steps}
    pgcl = PGCLLoss(4, 3, **options, queue_size=9, freeze_steps=1)
    z1, z2 = torch.randn(2, 6, 4, requires_grad=True).unbind()
    pgcl(z1, z2)  # the first step of a warm-up waits
    with NoWaiting(large=1 << 30):
        pgcl(z1, z2).backward()


def test_prototype_weighting_builds_no_matrix_of_weights():
    # The logits are the only matrix of size 2N x 2N.
    pgcl = PGCLLoss(4, 3)
    z1, z2 = torch.randn(2, 50, 4, requires_grad=True).unbind()
    with NoWaiting(large=100 * 100) as watch:
        loss = pgcl(z1, z2)
    assert loss.isfinite()
    assert len(watch.storages) == 1
