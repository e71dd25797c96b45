"""What processes compare before they exchange embeddings."""

import pytest
import torch
from helpers.ranks import on_ranks

from pgcl_losses.distributed import _differs

STATES = {
    "the same": lambda rank: [torch.ones(3, 4), torch.tensor(5)],
    "another bit": lambda rank: [torch.ones(3, 4) * (1 + 2e-7 * rank), torch.tensor(5)],
    "another count": lambda rank: [torch.ones(3, 4), torch.tensor(5 + rank)],
    "swapped": lambda rank: [torch.ones(2) * rank, torch.ones(2) * (1 - rank)],
    "NaN alike": lambda rank: [torch.full((3,), torch.nan), torch.zeros(0, 4)],
    "another layout": lambda rank: [torch.arange(6.0).view(2, 3).mT.contiguous().mT],
}


def differs(rank, num_ranks):
    device = torch.device("cpu")
    return {name: _differs(state(rank), device, None) for name, state in STATES.items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_bit_that_differs_is_noticed_on_all_ranks(num_ranks):
    expected = dict.fromkeys(STATES, False)
    expected |= dict.fromkeys(["another bit", "another count", "swapped"], True)
    for found in on_ranks(differs, num_ranks):
        assert found == expected
