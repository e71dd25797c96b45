"""The bytes that ranks send, and the memory that they need, for a loss over many ranks."""

import pytest
import torch
from helpers.blocks import in_blocks
from helpers.rank_models import DIM, SentBytes, model_of
from helpers.ranks import on_ranks
from live_bytes import LiveBytes

from pgcl_losses import PGCLLoss

pytestmark = pytest.mark.slow


def counted(rank, num_ranks, batches):
    given = []
    for counts in batches:
        torch.manual_seed(0)
        pgcl = PGCLLoss(DIM, 3, queue_size=8)
        z1, z2 = torch.randn(2, counts[rank], DIM, requires_grad=True).unbind()
        with SentBytes() as sent:
            pgcl(z1, z2).backward()
        given.append(sent.given)
    return given


@pytest.mark.parametrize("batches", [[[50]], [[1, 1], [50, 50], [3, 8]], [[7, 7, 7], [2, 30, 0]]])
def test_bytes_are_those_of_the_documentation(batches):
    num_ranks = len(batches[0])
    for of_rank in on_ranks(counted, num_ranks, batches):
        for given, counts in zip(of_rank, batches, strict=True):
            embeddings, prototypes = 2 * max(counts) * DIM * 4, 3 * DIM * 4
            sums = 2 * sum(counts) * 4
            documented = {
                "allgather_base": embeddings + sums + 3 * 8,
                "reduce_scatter_base": num_ranks * embeddings,
                "allreduce": sums + prototypes,
            }
            assert given == (documented if num_ranks > 1 else {})


def peak(rank, num_ranks, num_graphs):
    pgcl = model_of(0, engine="streaming")[1].float()
    z1, z2 = torch.randn(2, num_graphs, DIM, requires_grad=True).unbind()
    with in_blocks(64), LiveBytes() as live:
        pgcl(z1, z2).backward()
    return live.peak


def test_memory_grows_with_embeddings_and_not_with_pairs():
    (small, _), (large, _) = (on_ranks(peak, 2, num_graphs) for num_graphs in (150, 600))
    assert large < 5 * small  # four times the embeddings, sixteen times the pairs
