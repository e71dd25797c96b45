"""A memory of past embeddings, as further negatives, of one process and of many."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers import oracle
from helpers.cases import as_lists, random_sets
from helpers.losses import DIM, gradients, info_nce, pgcl
from helpers.marks import few_graphs

pytestmark = few_graphs
both_losses = pytest.mark.parametrize("make", [info_nce, pgcl], ids=["InfoNCE", "PGCLLoss"])
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def views_of(seed):
    return random_sets((4, 4), seed)[0]


@pytest.mark.parametrize("size", [1, 7, 50])
@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("mode", [{}, {"hardness": 1.0, "debias": 0.1, "negatives": "cross"}])
def test_every_step_agrees_with_the_oracle(engine, size, with_labels, mode):
    """Training forwards store their batch, until `remember` is called."""
    past, options = oracle.Memory(size), {"memory_size": size, "engine": engine, **mode}
    loss = info_nce(**options, reduction="none").double()
    fresh = copy.deepcopy(loss.state_dict())
    for seed in range(6):
        if seed > 2:
            (z, *_), (labels, *_) = random_sets((10 - seed,), 100 + seed)
            labels = labels if with_labels else None
            loss.train(seed % 2 == 0)
            with torch.set_grad_enabled(seed < 5):
                assert loss.remember(10 * z, labels=labels) is None
            loss.train()
            if seed == 3:
                past = oracle.Memory(size)
            past.store([z], as_lists([labels]) if with_labels else None)
        sets, labels = random_sets((4, 2, 3) if with_labels else (4, 4), seed)
        labels = labels if with_labels else None
        ours = loss(*sets, labels=labels)
        gradients(ours.sum(), sets)
        expected, _ = oracle.info_nce(sets, as_lists(labels), past.embeddings, past.labels, **mode)
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)
        if seed < 3:
            past.store(sets, as_lists(labels))
    loss.memory.reset_parameters()
    assert_same(loss.state_dict(), fresh)


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
    assert_same(used.state_dict(), fresh.state_dict())
    assert_same(used(*views_of(6)), fresh(*views_of(6)))


@both_losses
@pytest.mark.parametrize(
    ("embeddings", "labels", "error"),
    [
        (torch.randn(4, DIM + 1), None, ValueError),
        (torch.randn(4, DIM).to("meta"), None, ValueError),
        (torch.arange(4 * DIM).view(4, DIM), None, TypeError),
        (torch.randn(4, DIM), torch.arange(3), ValueError),
        (torch.randn(4, DIM), [0, 1, 2, 3], TypeError),
        (torch.full((4, DIM), torch.nan), None, None),
    ],
)
def test_wrong_embeddings_are_not_stored(make, embeddings, labels, error):
    loss = make(memory_size=5)
    loss.remember(torch.randn(4, DIM))
    before = copy.deepcopy(loss.state_dict())
    with pytest.raises(error, match=r"labels|embeddings") if error else nullcontext():
        loss.remember(embeddings, labels=labels)
    assert_same(loss.state_dict(), before)
