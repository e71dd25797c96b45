"""Blocks of pairs: each pair of negatives once, and about as many pairs for each rank."""

import pytest
import torch
from helpers.blocks import in_blocks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses.engine.blocks import layout
from pgcl_losses.engine.contract import Pairs, Portion, Table, compared_sets


def clustered(num, num_views, num_clusters, negatives="all"):
    clusters = torch.randint(num_clusters, (num * num_views,))
    log_weights = torch.zeros(num_clusters, num_clusters).fill_diagonal_(-torch.inf)
    table = Table((log_weights,), clusters.unsqueeze(1))
    compared = compared_sets(num_views, negatives)
    embeddings = torch.randn(num * num_views, 2)
    return Pairs(embeddings, (num,) * num_views, compared, by_cluster=table), clusters


def times_computed(pairs, portions):
    """How often each pair of embeddings is in a block with negatives, of all portions."""
    times = torch.zeros(len(pairs.embeddings), len(pairs.embeddings), dtype=torch.int64)
    for portion in portions:
        laid = layout(pairs, portion)
        positions = torch.arange(len(times))
        order = positions if laid.order is None else laid.order
        for block in laid.blocks:
            assert block.negatives
            i, j = order[block.i.span], order[block.j.span]
            times[i.unsqueeze(1), j] += 1
            if block.i.span != block.j.span:
                times[j.unsqueeze(1), i] += 1
    return times


@given(
    num=st.integers(1, 12),
    num_views=st.integers(1, 3),
    num_clusters=st.integers(1, 5),
    negatives=st.sampled_from(["all", "cross"]),
    num_ranks=st.integers(1, 5),
    block=st.sampled_from([1, 3, 100]),
)
def test_each_pair_of_negatives_is_in_one_portion(
    num, num_views, num_clusters, negatives, num_ranks, block
):
    pairs, clusters = clustered(num, num_views, num_clusters, negatives)
    with in_blocks(block):
        times = times_computed(pairs, [Portion(rank, num_ranks) for rank in range(num_ranks)])
    view = torch.arange(len(clusters)) // num
    are_negatives = clusters.unsqueeze(1) != clusters
    if negatives == "cross":
        are_negatives &= view.unsqueeze(1) != view
    assert (times <= 1).all()
    assert (times[are_negatives] == 1).all()


def test_blocks_within_one_cluster_are_skipped():
    pairs, clusters = clustered(200, 2, 4)
    with in_blocks(40):
        times = times_computed(pairs, [Portion()])
    assert torch.equal(times == 0, clusters.unsqueeze(1) == clusters)


def test_ranks_have_about_equally_many_pairs():
    pairs, _ = clustered(300, 2, 3)
    for num_ranks in (2, 3, 4, 8, 13):
        with in_blocks(10):
            counts = [
                times_computed(pairs._replace(by_cluster=None), [Portion(rank, num_ranks)]).sum()
                for rank in range(num_ranks)
            ]
        assert max(counts) < 1.25 * min(counts)


@pytest.mark.parametrize(
    ("num_embeddings", "num_ranks", "num_blocks"),
    [(4096, 1, 1), (4098, 1, 3), (131072, 1, 32 * 33 // 2), (131072, 4, 32 * 33 // 2)],
)
def test_a_gpu_has_few_blocks(num_embeddings, num_ranks, num_blocks):
    pairs = Pairs(
        torch.empty(num_embeddings, 2, device="meta"),
        (num_embeddings // 2,) * 2,
        compared_sets(2, "all"),
    )
    portions = [Portion(rank, num_ranks) for rank in range(num_ranks)]
    of_portions = [layout(pairs, portion).blocks for portion in portions]
    sizes = [
        run.size()
        for of_portion in of_portions
        for block in of_portion
        for run in (block.i, block.j)
    ]
    assert sum(map(len, of_portions)) == num_blocks
    assert max(sizes) <= 4096


def test_blocks_on_a_cpu_have_up_to_640_embeddings():
    pairs, _ = clustered(2000, 2, 10)
    for some in (pairs, pairs._replace(by_cluster=None)):
        sizes = [block.i.size() for block in layout(some, Portion()).blocks]
        assert 320 < max(sizes) <= 640
