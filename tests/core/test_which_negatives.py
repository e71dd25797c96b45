"""Negatives: how much each key counts as a negative of a query, as small tables."""

import math

import torch

from pgcl_losses.pairs.negatives import add_log_weights
from pgcl_losses.pairs.partners import find_partners
from pgcl_losses.pairs.rows import Pairs, all_rows
from pgcl_losses.pairs.weights import Table

OUT = -math.inf


def logits_of(pairs, scores=None):
    """The logits of the first rows ``[I, K]``, of scores 0 unless they are given."""
    rows = all_rows(pairs)[0]
    scores = torch.zeros(rows.shape()) if scores is None else scores
    z = torch.zeros(pairs.num_embeddings(), 2)
    return add_log_weights(pairs, rows, scores.clone(), find_partners(pairs, rows, z, None), 1.0)


def test_plain_views_leave_nothing_out():
    """Positives are left out afterwards, by `leave_out`."""
    scores = torch.arange(16.0).view(4, 4)
    assert torch.equal(logits_of(Pairs((2, 2)), scores), scores)


def test_weights_by_cluster_are_looked_up():
    """Clusters 0, 1, 0, 1; a query leaves its own cluster out, and the other one counts thrice."""
    log_weights = torch.tensor([[OUT, math.log(3)], [math.log(3), OUT]])
    table = Table((log_weights,), torch.tensor([[0], [1], [0], [1]]))
    found = logits_of(Pairs((2, 2), cluster_weights=table)).exp()
    expected = [[0, 3, 0, 3], [3, 0, 3, 0], [0, 3, 0, 3], [3, 0, 3, 0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_empty_slots_of_a_memory_and_other_sets_do_not_count():
    filled = torch.tensor([True] * 4 + [True, False])
    pairs = Pairs((2, 2), memory=torch.zeros(2, 2), filled=filled)
    assert logits_of(pairs).tolist() == [[0, 0, 0, 0, 0, OUT]] * 4
    alone = pairs._replace(negatives="memory")
    assert logits_of(alone).tolist() == [[OUT, OUT, 0, OUT]] * 2  # of the first set


def test_a_function_of_the_user_sees_scores_and_negatives():
    seen = {}

    def halve(scores, pair):
        seen["negatives"] = pair.is_negative.tolist()
        return (scores / 2).masked_fill(pair.query == pair.key, OUT)

    metadata = torch.tensor([0, 1, 0, 2])
    pairs = Pairs((2, 2), score_mod=halve, metadata=metadata, learns=False)
    found = logits_of(pairs, torch.full((4, 4), 6.0))
    # Row i of both views is a partner, and so is the query itself.
    yes, no = True, False
    assert seen["negatives"] == [[no, yes, no, yes], [yes, no, yes, no]] * 2
    assert found.tolist() == [[OUT, 3, OUT, 3], [3, OUT, 3, OUT]] * 2


def test_nan_stays_nan():
    scores = torch.full((4, 4), math.nan)
    pairs = Pairs((2, 2), memory=torch.zeros(1, 2), filled=torch.tensor([True] * 4 + [False]))
    assert logits_of(pairs, torch.full((4, 5), math.nan)).isnan().all()
    assert logits_of(Pairs((2, 2)), scores).isnan().all()
