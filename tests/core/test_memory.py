"""A memory of past embeddings, as further negatives, of one process and of many."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import DIM, arrays, exact_losses, gradients, numbers, random_sets
from helpers.marks import engines, few_graphs

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = few_graphs
info_nce = partial(InfoNCE, dim=DIM)
pgcl = partial(PGCLLoss, DIM, 3)
both_losses = pytest.mark.parametrize("make", [info_nce, pgcl], ids=["InfoNCE", "PGCLLoss"])


def views_of(seed, length=4):
    return random_sets((length, length), seed)[0]


def state_of(loss):
    return copy.deepcopy(loss.state_dict())


def assert_same_state(loss, expected):
    torch.testing.assert_close(loss.state_dict(), expected, rtol=0, atol=0)


@engines
@pytest.mark.parametrize("size", [1, 7, 50])
@pytest.mark.parametrize("with_items", [False, True])
@pytest.mark.parametrize("mode", [{}, {"hardness": 1.0, "debias": 0.1, "negatives": "cross"}])
def test_every_step_agrees_with_the_oracle(engine, size, with_items, mode):
    """Training forwards store their batch, until `remember` is called."""
    past, options = oracle.Memory(size), {"memory_size": size, "engine": engine, **mode}
    loss = info_nce(**options, reduction="none").double()
    fresh = state_of(loss)
    for seed in range(6):
        if seed > 2:
            (z, *_), (items, *_) = random_sets((10 - seed,), 100 + seed)
            items = items if with_items else None
            loss.train(seed % 2 == 0)
            with torch.set_grad_enabled(seed < 5):
                assert loss.remember(10 * z, items) is None
            loss.train()
            if seed == 3:
                past.clear()
            past.store(arrays([z]), numbers([items]) if with_items else None)
        sets, items = random_sets((4, 2, 3) if with_items else (4, 4), seed)
        items = items if with_items else None
        with in_blocks(3):
            ours = loss(*sets, items=items)
            gradients(ours.sum(), sets)
        expected, _ = exact_losses(sets, items, past, **mode)
        np.testing.assert_allclose(ours.detach(), expected, rtol=1e-8, atol=1e-10)
        if seed < 3:
            past.store(arrays(sets), numbers(items))
    loss.memory.reset_parameters()
    assert_same_state(loss, fresh)


@engines
@pytest.mark.parametrize("size", [3, 100])
def test_a_backward_after_later_forwards_is_that_of_its_own_memory(engine, size):
    loss, later, total = info_nce(memory_size=size, engine=engine), [], 0.0
    for seed in range(3):
        views = views_of(seed)
        twin = copy.deepcopy(loss)
        later.append((views, gradients(twin(*views), views)))
        total = total + loss(*views)
    for views, expected in later:
        ours = torch.autograd.grad(total, views, retain_graph=True)
        torch.testing.assert_close(ours, expected)


def test_the_first_remember_empties_the_memory():
    used = pgcl(memory_size=50, weighting="sample")
    fresh = copy.deepcopy(used)
    for seed in range(5):
        used(*views_of(seed))
    for loss in (used, fresh):
        loss.remember(views_of(5)[0])
    assert_same_state(used, state_of(fresh))
    torch.testing.assert_close(used(*views_of(6)), fresh(*views_of(6)), rtol=0, atol=0)


@both_losses
@pytest.mark.parametrize(
    ("embeddings", "items", "error", "message"),
    [
        (torch.randn(4, DIM + 1), None, ValueError, "embeddings has dimension 4, but the memory"),
        (torch.randn(4, DIM).to("meta"), None, ValueError, "embeddings is on meta but the memory"),
        (torch.arange(12).view(4, 3), None, TypeError, "embeddings must be a floating-point"),
        (torch.randn(4, DIM), torch.arange(3), ValueError, "items has length 3 but embeddings"),
        (torch.randn(4, DIM), [0, 1, 2, 3], TypeError, "items must be a Tensor"),
    ],
)
def test_wrong_embeddings_are_not_stored(make, embeddings, items, error, message):
    loss = make(memory_size=5)
    loss.remember(torch.randn(4, DIM))
    before = state_of(loss)
    with pytest.raises(error, match=message):
        loss.remember(embeddings, items)
    assert_same_state(loss, before)


@both_losses
def test_embeddings_with_nan_are_not_stored(make):
    loss = make(memory_size=5)
    loss(*views_of(0))
    before = state_of(loss)
    loss.remember(torch.full((4, DIM), torch.nan))
    assert_same_state(loss, before)


@both_losses
def test_wrong_sizes_are_errors(make):
    for size, error in ((-1, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="memory_size"):
            make(memory_size=size)
    with pytest.raises(AttributeError, match=r"memory_size is 5 .* make a new one"):
        make(memory_size=5).memory_size = 9
    with pytest.raises(ValueError, match="memory_size is 0"):
        make().remember(torch.randn(4, DIM))
    with pytest.raises(ValueError, match="z1 has dimension 4"):
        make(memory_size=5)(*torch.randn(2, 5, DIM + 1))
