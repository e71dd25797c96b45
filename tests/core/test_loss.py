"""The loss of a batch from the losses of its queries, of which some have no positives."""

import math

import pytest
import torch

from pgcl_losses.base.distributed import Processes
from pgcl_losses.pairs.loss import loss_of_pairs, num_compared, reduced
from pgcl_losses.pairs.rows import Inputs, Pairs

Z = torch.eye(4, dtype=torch.float64)  # all cosines are 0
PROCESSES = Processes([(2,), (2,)])
EACH = math.log(1 + 2)  # a positive and two negatives, or log 4 with three negatives


@pytest.mark.parametrize("engine", ["auto", "dense", "chunks"])
def test_a_mean_is_over_queries_that_have_positives(engine):
    def loss(pairs, reduction):
        return loss_of_pairs(pairs, Inputs(Z, 1.0, None), reduction, engine, PROCESSES)

    views = Pairs((2, 2))
    assert loss(views, "mean").item() == pytest.approx(EACH)
    assert loss(views, "sum").item() == pytest.approx(4 * EACH)
    assert loss(views, "none").tolist() == pytest.approx([EACH] * 4)
    labels = Pairs((2, 2), labels=torch.tensor([1, 1, 2, 3]))  # two queries without a positive
    assert loss(labels, "none").tolist() == pytest.approx([EACH, EACH, 0, 0])
    assert loss(labels, "mean").item() == pytest.approx(EACH)
    nobody = Pairs((2, 2), labels=torch.arange(4))
    assert loss(nobody, "mean").item() == 0


def test_reductions():
    losses = torch.tensor([1.0, 0.0, 5.0])
    assert reduced(losses.sum(), 3, "mean") == 2
    assert reduced(losses.sum(), torch.tensor(2), "mean") == 3
    assert reduced(losses.sum(), torch.tensor(0), "sum") == 6
    assert reduced(torch.zeros(()), torch.tensor(0), "mean") == 0
    assert reduced(losses, 3, "none") is losses


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 4),
        ({"labels": torch.tensor([1, 1, 2, 3])}, 2),
        ({"labels": torch.tensor([1, 1, 1, 1])}, 0),
        ({"labels": torch.arange(4)}, 0),
        ({"first_queries": True}, 2),
        ({"score_mod": lambda scores, pair: scores - torch.inf}, 0),
        ({"hardness": 1.0}, 4),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "dense", "chunks"])
def test_queries_with_positives_and_negatives_are_counted(options, number, engine):
    inputs = Inputs(Z, 1e-6, None)  # the losses are all the same: 0, or far from it
    assert num_compared(Pairs((2, 2), **options), inputs, engine, PROCESSES) == number
