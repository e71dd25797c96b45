"""The rule that chooses defaults, and what the library has."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import defaults
from experiments.common.graphs import INFO_NCE, PGCL
from experiments.common.results import TIED, WORST_TIED
from experiments.defaults import Options
from pgcl_losses import InfoNCE, PGCLLoss

SETS = "digits", "MSRC_9", "Cora"
GRID = [Options(*o, "plain", 10) for o in itertools.product((0.2, 0.5), (1.0, 6.0))]
PAPER = Options(0.2, 6.0, "plain", 10)
DISTANCES = st.lists(st.floats(0, 9), min_size=len(SETS), max_size=len(SETS))


@given(st.lists(DISTANCES, min_size=len(GRID), max_size=len(GRID)))
def test_the_rule_against_a_literal_one(values):
    found = {
        (name, "all"): dict(zip(GRID, of_set, strict=True))
        for name, of_set in zip(SETS, np.array(values).T.tolist(), strict=True)
    }
    means, worsts = {}, {}
    for options, of in zip(GRID, values, strict=True):
        means[options] = sum(of) / len(of)
        worsts[options] = max(of)
    tied = [o for o in GRID if means[o] <= min(means.values()) + TIED]
    near = [o for o in tied if worsts[o] <= min(worsts[t] for t in tied) + WORST_TIED]
    shared = {o: (o.temperature == 0.2) + (o.consistency_weight == 6) for o in near}
    near = [o for o in near if shared[o] == max(shared.values())]
    expected = min(means[o] for o in near)
    assert means[defaults.chosen(found, GRID, PAPER)] == pytest.approx(expected)


def test_the_defaults_of_the_library_are_the_chosen_ones():
    chosen = defaults.choice(PGCL)
    pgcl = PGCLLoss(4)
    assert pgcl.temperature == pgcl.prototypes.temperature == chosen.temperature
    assert pgcl.consistency_weight == chosen.consistency_weight
    assert InfoNCE().temperature == defaults.choice(INFO_NCE).temperature
