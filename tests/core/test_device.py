"""A step of one process on a GPU has the value and gradient of the CPU, and never waits for it.

Without a GPU the steps run on a device that is pretended (helpers.pretend).
"""

import copy
import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from helpers import pretend
from helpers.cases import CUT, DENSE, NOT_CUT, are_apart
from helpers.losses import (
    DIM,
    LOSSES,
    gradients,
    gradients_of,
    model_of,
    pgcl,
    portions_of,
)
from helpers.marks import device_type, few_graphs
from helpers.score_mods import SCORE_MODS
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.base.modes import is_eager
from pgcl_losses.presets import PRESETS

pytestmark = few_graphs
needs_cuda = pytest.mark.skipif(device_type() != "cuda", reason="needs --device cuda")


@contextmanager
def no_waiting(device):
    """A block in which Python may not wait for the device."""
    if device == pretend.NAME:
        with pretend.no_waiting():
            yield
        return
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def of_preset(name):
    """A loss with the options of a script, and what the script's call has besides two sets."""
    call, options = PRESETS[name].call, PRESETS[name].options
    if "memory_size" in options:
        return partial(InfoNCE, **{**options, "memory_size": 7, "dim": DIM}), "remember"
    given = [word for word in ("labels", "positives", "negatives") if word in call]
    return partial(InfoNCE, **options), " ".join(given)


CASES = LOSSES | {f"like {name}": of_preset(name) for name in PRESETS}
CASES |= {
    f"{kind}, score_mod {number}": (partial(loss, score_mod=function), "metadata")
    for number, function in enumerate(SCORE_MODS)
    for kind, loss in (("InfoNCE", InfoNCE), ("PGCL", pgcl))
}


def problem_of(name, engine):
    """A model, and its batches of two sets."""
    make, inputs = CASES[name]
    lengths = [7, 4 if "sets" in inputs else 7]
    batches = [portions_of([[x] for x in lengths], inputs, seed)[0] for seed in (0, 1)]
    model = model_of(partial(make, engine=engine))
    if getattr(model.loss, "negatives", "all") == "cross" and "positives" in inputs:
        for _, given, _ in batches:  # a positive in the set of its query is an error
            given["positive_weights"] *= are_apart(lengths, *given["positives"])
    if "remember" in inputs:
        model.loss.remember(torch.randn(3, DIM, dtype=torch.float64))
    return model, batches


# Every loss of the table in every way, and the others in chunks: small batches are cut or not.
IN_EVERY_WAY = [(name, way) for name in LOSSES for way in (DENSE, NOT_CUT, CUT)]
OTHERS = [(name, (NOT_CUT, CUT)[n % 2]) for n, name in enumerate(CASES) if name not in LOSSES]


@pytest.mark.parametrize(("name", "engine"), IN_EVERY_WAY + OTHERS, indirect=["engine"])
def test_a_training_step_never_waits_for_the_device(name, engine, device):
    """The second step is under autocast."""
    with torch.device("cpu"):
        model, batches = problem_of(name, engine)
    twin = copy.deepcopy(model).to(device)
    for batch, autocast in zip(batches, (False, True), strict=True):
        sets, given = tree_map(lambda x: x.to(device), (batch.sets, batch.given))
        expected = model(*batch.sets, **batch.given)
        expected.sum().backward()
        with no_waiting(device):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = twin(*sets, **given)
            loss.sum().backward()
        ours, others = ([value, *gradients_of(m)] for value, m in ((loss, twin), (expected, model)))
        torch.testing.assert_close(ours, others, check_device=False)
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), check_device=False)


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_device_does_not_matter(name, engine):
    """As with `torch.set_default_device("cuda")`, and embeddings on the CPU."""
    with torch.device("cpu"):
        model, (batch, _) = problem_of(name, engine)
    twin, results = copy.deepcopy(model), []
    for each, default in ((model, "cpu"), (twin, "meta")):
        with torch.device(default):
            loss = each(*batch.sets, **batch.given)
            loss.sum().backward()
        results.append([loss, *gradients_of(each)])
    torch.testing.assert_close(*results)


def test_what_is_an_error_where_python_reads_it_is_never_a_wrong_loss(engine, device):
    """A label of an unknown class gives NaN; a positive in the set of its query does not count."""
    (z1, z2), labels = torch.randn(2, 6, DIM, device=device), torch.arange(6, device=device)
    for unknown in (-1, -100):
        loss = InfoNCE(engine=engine)(z1, z2, labels=labels.where(labels != 2, unknown))
        assert loss.isnan()
    cross, pairs = InfoNCE(negatives="cross", engine=engine), [[0, 1, 7], [6, 9, 2]]
    expected = cross(z1, z2, positives=torch.tensor(pairs, device=device))
    within = torch.tensor([[*pairs[0], 0, 8], [*pairs[1], 3, 10]], device=device)
    torch.testing.assert_close(cross(z1, z2, positives=within), expected)


WAITING = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x * torch.tensor([1.0, 2.0, 3.0], device="cpu").to(x.device),
    "list": lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING)
def test_what_waits_is_found(wait, device):
    x = torch.arange(3.0, device=device)
    wait(x)
    with no_waiting(device):
        y = x.clone().mul_(2).masked_fill(x > 1, 0.0)
        with pytest.raises(RuntimeError, match=r"waits for the device|synchronizing CUDA"):
            wait(y)


def test_a_fake_tensor_on_a_gpu_is_never_read():
    with FakeTensorMode():
        assert not is_eager(torch.empty(3, device="cuda"))


@needs_cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch 2.11, once
@pytest.mark.parametrize(
    "name", ["InfoNCE", "hard and debiased", "PGCL", "score_mod of all negatives"]
)
def test_a_step_is_captured_in_a_cuda_graph(name):
    """Forward and backward, replayed with other embeddings than those of the capture."""
    make, _ = LOSSES[name]
    gc.collect()  # a graph of an earlier test that is freed during a capture breaks the capture
    eager = make().cuda()
    first, *others = ([torch.randn(64, DIM, requires_grad=True) for _ in "12"] for _ in range(3))
    captured = torch.cuda.make_graphed_callables(copy.deepcopy(eager), tuple(first))
    for views in others:
        losses = [loss_of(*views) for loss_of in (captured, eager)]
        results = [[loss, *gradients(loss.sum(), views)] for loss in losses]
        torch.testing.assert_close(*results)


@needs_cuda
@pytest.mark.parametrize("make", [InfoNCE, partial(PGCLLoss, 32)], ids=["InfoNCE", "PGCLLoss"])
def test_the_peak_of_memory_is_linear_in_the_batch(make):
    """From a batch that is cut on, a batch that is four times as large takes at most four times."""
    loss, peaks = make().cuda(), []
    for num in (8192, 32768):
        views = [torch.randn(num, 32, requires_grad=True) for _ in range(2)]
        gradients(loss(*views), views)  # what a device allocates once
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(loss(*views), views)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 4.5 * peaks[0]
    assert peaks[1] < 4 * 65536**2 / 20  # the matrix of all pairs, which is 16 GiB
