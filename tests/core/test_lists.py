"""Listed negatives: the losses from the pairs of a list, by numbers."""

import math

import pytest
import torch

from pgcl_losses.pairs.lists import losses_of_lists, plain_products, products_in_parts
from pgcl_losses.pairs.rows import Inputs, Listed, Pairs, all_rows

# Four embeddings on a circle, in steps of 90 degrees: cosines are 1, 0, -1 and 0.
Z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)


def losses(negatives, **options):
    query, key = torch.tensor(negatives).T
    pairs = Pairs((2, 2), negative_pairs=Listed.by_query(query, key)[0], **options)
    found = []
    for products in (plain_products, products_in_parts):
        parts = losses_of_lists(pairs, Inputs(Z, 1.0, None), all_rows(pairs), products)
        found.append(torch.cat([loss for loss, _ in parts]).tolist())
    assert found[0] == pytest.approx(found[1])
    return found[0]


def test_a_query_has_the_listed_negatives_and_no_others():
    """Views: the positive of query 0 is 2, with cosine -1, and the negative 1 has cosine 0."""
    of_0 = math.log(1 + 1 / math.exp(-1))
    assert losses([[0, 1]]) == pytest.approx([of_0, 0, 0, 0])


def test_a_pair_that_is_listed_twice_counts_twice():
    of_0 = math.log(1 + 2 / math.exp(-1))
    assert losses([[0, 1], [0, 1]]) == pytest.approx([of_0, 0, 0, 0])


def test_labels_make_positives_beside_the_list():
    """Labels 5, 5, 6, 7: only the queries 0 and 1 have a positive, with cosine 0."""
    labels = torch.tensor([5, 5, 6, 7])
    of_1 = math.log(1 + math.exp(-1))
    assert losses([[1, 3], [2, 0]], labels=labels) == pytest.approx([0, of_1, 0, 0])


def test_a_pair_counts_even_if_it_is_a_positive():
    assert losses([[0, 2]])[0] == pytest.approx(math.log(2))
