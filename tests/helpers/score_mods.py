"""Functions that a user may give as `score_mod`, of metadata ``[M, 3]``: a group and a position."""

import math

import torch
from torch import nn

METADATA = 3


def of_the_same_group(scores, pair):
    return scores.masked_fill(pair.query[..., 0] != pair.key[..., 0], -math.inf)


def by_distance(scores, pair):
    return scores + (pair.query[..., 1] - pair.key[..., 1]).abs().log1p()


def below_a_cosine(scores, pair):
    return scores.masked_fill(scores * pair.temperature > 0.3, -math.inf)


def margin(scores, pair):
    return scores - 0.1 / pair.temperature


def factor(scores, pair):
    return scores * (1 - 0.3 * (pair.query[..., 0] == pair.key[..., 0]))


def far(scores, pair):
    """The derivative is infinite for a query with itself."""
    return scores + torch.log(1 - scores * pair.temperature)


def hardest(scores, pair):
    negatives = scores.masked_fill(~pair.is_negative, -math.inf)
    bound = negatives.topk(min(3, scores.shape[1])).values[:, -1:]
    return scores.masked_fill(negatives < bound, -math.inf)


def with_a_mean_of_one(scores, pair):
    """Weights that depend on the scores of all negatives, and are NaN without negatives."""
    w = (0.5 * scores * pair.temperature).exp()
    mean = (w * pair.is_negative).sum(1, keepdim=True) / pair.is_negative.sum(1, keepdim=True)
    return scores + (w / mean).log()


def in_place(scores, pair):
    return scores.sub_(pair.key[..., 1]).mul_(0.5).masked_fill_(pair.key[..., 0] == 0, -math.inf)


def in_float64(scores, pair):
    return scores.double() + pair.key[..., 1].double()


def not_a_number_elsewhere(scores, pair):
    return (scores / pair.temperature.sqrt()).where(pair.is_negative, math.nan)


def nothing(scores, pair):
    return torch.full_like(scores, -math.inf)


def constant(scores, pair):
    return pair.query[..., 1] * pair.key[..., 2]


class Frozen(nn.Module):
    """A module without anything that learns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tensor(0.3))

    def forward(self, scores, pair):
        return scores + self.bias * pair.query[..., 2]


SCORE_MODS = [
    *(of_the_same_group, by_distance, below_a_cosine, margin, factor, far, hardest),
    *(with_a_mean_of_one, in_place, in_float64, not_a_number_elsewhere, nothing, constant),
    Frozen(),
]


def random_metadata(count, generator=None, dtype=torch.float64):
    group = torch.randint(3, (count, 1), generator=generator)
    position = torch.randn(count, METADATA - 1, dtype=dtype, generator=generator)
    return torch.cat([group, position], dim=1)
