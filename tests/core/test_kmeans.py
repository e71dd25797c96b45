"""Prototypes that are initialised from embeddings."""

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.rank_models import mean_over_ranks, of_seed
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import PGCLLoss, SinkhornPrototypes, kmeans
from pgcl_losses._normalize import unit_vectors
from pgcl_losses.kmeans import spherical_kmeans

DIM = 5
FEW = pytest.mark.filterwarnings("ignore:PGCLLoss. . different embed:UserWarning")


def unit(rows):
    return unit_vectors(rows, rows.dtype)


def groups(num_groups=4, per_group=20, spread=0.01, seed=0):
    """Rows around directions at right angles, and their groups."""
    directions = torch.eye(DIM)[:num_groups].repeat_interleave(per_group, 0)
    labels = torch.arange(num_groups).repeat_interleave(per_group)
    noise = spread * torch.randn(directions.shape, generator=of_seed(seed))
    return 3 * (directions + noise), labels


@FEW
@given(
    num_rows=st.integers(1, 12),
    num_centers=st.integers(1, 6),
    candidates=st.integers(1, 4),
    different=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    with_zero=st.booleans(),
    chunk=st.sampled_from([1, 3, 100]),
)
def test_agrees_with_the_oracle(
    num_rows, num_centers, candidates, different, seed, with_zero, chunk
):
    random = of_seed(seed)
    few = torch.randn(different, 3, dtype=torch.float64, generator=random)
    rows = unit(few[torch.randint(different, (num_rows,), generator=random)])
    if with_zero:
        rows[0] = 0
    start = unit(torch.randn(num_centers, 3, dtype=torch.float64, generator=random))
    draws = torch.rand(num_centers, candidates, dtype=torch.float64, generator=random)
    with mock.patch.object(kmeans, "_CHUNK", chunk):
        ours = spherical_kmeans(rows, start, draws)
    expected = oracle.kmeans(rows.numpy(), start.numpy(), draws.tolist(), kmeans._ROUNDS)
    np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_finds_groups(seed, dtype):
    rows, labels = groups(seed=seed)
    torch.manual_seed(seed)
    prototypes = SinkhornPrototypes(DIM, 4)
    assert prototypes.start_from_(rows.to(dtype)) is prototypes
    found = prototypes.assign(rows)
    pairs = set(zip(found.tolist(), labels.tolist(), strict=True))
    assert len(pairs) == len({cluster for cluster, _ in pairs}) == 4
    nearest = (unit(rows) @ unit(prototypes.weight).T).max(1).values
    assert nearest.min() > 0.99


def test_misses_no_well_separated_group():
    """Plain k-means++, with one candidate for a seed, misses one in 6 of these 60 cases."""
    for seed in range(60):
        torch.manual_seed(seed)
        directions = torch.linalg.qr(torch.randn(16, 6)).Q.T
        rows = directions.repeat_interleave(40, 0) + 0.05 * torch.randn(240, 16)
        prototypes = SinkhornPrototypes(16, 6)
        prototypes.start_from_(rows)
        assert len(prototypes.assign(directions).unique()) == 6


def test_is_repeatable_and_leaves_all_else_alone():
    rows, _ = groups(spread=1.0)
    torch.manual_seed(1)
    prototypes = SinkhornPrototypes(DIM, 6, queue_size=4)
    prototypes(*torch.randn(2, 8, DIM, requires_grad=True))
    weight, before = prototypes.weight, {k: v.clone() for k, v in prototypes.state_dict().items()}
    twin = copy.deepcopy(prototypes)
    for module in (prototypes, twin):
        torch.manual_seed(7)
        module.start_from_(rows)
    assert torch.equal(weight, twin.weight)
    assert prototypes.weight is weight  # the optimizer's own
    assert weight.requires_grad
    assert weight.grad is None
    lengths = before.pop("weight").norm(dim=1)
    torch.testing.assert_close(weight.norm(dim=1), lengths)
    assert not before.pop("initialised")
    for name, value in before.items():
        assert torch.equal(prototypes.state_dict()[name], value)


def test_past_rows_are_compared_with_the_new_prototypes():
    rows, _ = groups(spread=1.0)
    prototypes, plain = SinkhornPrototypes(DIM, 4, queue_size=6), SinkhornPrototypes(DIM, 4)
    views = torch.randn(2, 6, DIM)
    prototypes(*views.clone().requires_grad_())
    prototypes.start_from_(rows)
    plain.load_state_dict({"weight": prototypes.weight.detach(), "step": prototypes.step})
    now = torch.randn(2, 3, DIM)
    assignments = plain(*torch.cat([now, views], dim=1))  # the queue as a part of the batch
    for ours, expected in zip(prototypes(*now), assignments, strict=True):
        torch.testing.assert_close(ours.targets, expected.targets[:3])


def test_each_head_starts_by_itself():
    rows, _ = groups()
    torch.manual_seed(0)
    prototypes = SinkhornPrototypes(DIM, (4, 4, 2))
    prototypes.start_from_(rows)
    for head in prototypes.weight[:8].split(4):
        assert (unit(rows) @ unit(head).T).max(1).values.min() > 0.99
        assert len(prototypes.assign(rows)[:, 0].unique()) == 4


@pytest.mark.parametrize("spread", [0.1, 0.01, 0.001])
def test_rows_in_about_one_direction_are_told_apart(spread):
    random = of_seed(0)
    rows = torch.randn(96, generator=random) + spread * torch.randn(400, 96, generator=random)
    prototypes = SinkhornPrototypes(96, 10)
    prototypes.start_from_(rows)
    new = prototypes.weight.detach().double()
    nearest = (unit(new) @ unit(rows.double()).T).max(1).values
    assert (1 - nearest < spread**2).all()  # every one of them has moved
    assert len(prototypes.double().assign(rows.double()).unique()) == 10


def test_in_deterministic_mode_and_with_another_default_device():
    rows, _ = groups(spread=1.0)
    started = []
    for device, deterministic in (("cpu", False), ("meta", True)):
        torch.manual_seed(1)
        prototypes = SinkhornPrototypes(DIM, 6)
        torch.use_deterministic_algorithms(deterministic)
        try:
            with torch.device(device):
                started.append(prototypes.start_from_(rows).weight)
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch.equal(*started)


@FEW
class TestFewRows:
    def test_prototypes_that_find_no_row_stay(self):
        prototypes = SinkhornPrototypes(DIM, 6)
        before = prototypes.weight.detach().clone()
        rows = torch.eye(DIM)[:2].repeat(7, 1)
        prototypes.start_from_(rows)
        ours = prototypes.weight.detach()
        found = unit(ours[:2]) @ torch.eye(DIM)[:2].T
        torch.testing.assert_close(found.sort(0).values, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        torch.testing.assert_close(ours[2:], before[2:])

    @pytest.mark.parametrize("rows", [torch.zeros(4, DIM), torch.zeros(1, DIM)])
    def test_rows_without_a_direction_move_nothing(self, rows):
        prototypes = SinkhornPrototypes(DIM, 3)
        before = prototypes.weight.detach().clone()
        prototypes.start_from_(rows)
        torch.testing.assert_close(prototypes.weight.detach(), before)

    def test_one_row(self):
        prototypes = SinkhornPrototypes(DIM, 3)
        row = torch.randn(1, DIM)
        prototypes.start_from_(row)
        torch.testing.assert_close(unit(prototypes.weight[:1].detach()), unit(row))

    def test_a_prototype_without_a_length_gets_one(self):
        prototypes = SinkhornPrototypes(DIM, 3)
        with torch.no_grad():
            prototypes.weight.zero_()
        prototypes.start_from_(torch.randn(9, DIM))
        torch.testing.assert_close(prototypes.weight.norm(dim=1), torch.ones(3))


def test_between_a_forward_and_its_backward_is_an_error_of_autograd():
    """As for any change in place of a parameter: nothing is silently wrong."""
    pgcl = PGCLLoss(DIM, 3)
    loss = pgcl(*torch.randn(2, 6, DIM, requires_grad=True))
    pgcl.prototypes.start_from_(torch.randn(9, DIM))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.randn(4, 3), ValueError, r" has dimension 3 .*; make SinkhornPrototypes\(dim=3\)"),
        (torch.randn(DIM), ValueError, r"embeddings must have shape \[N, D\], but got \(5,\)"),
        (torch.randn(0, DIM), ValueError, "embeddings must not be empty"),
        (
            torch.tensor([[torch.nan] * DIM]),
            ValueError,
            "embeddings must be finite, but there is a",
        ),
        (torch.ones(4, DIM).long(), TypeError, "embeddings must be a floating-point Tensor"),
        ([[1.0] * DIM], TypeError, "embeddings must be a Tensor"),
    ],
)
def test_errors(rows, error, message):
    prototypes = SinkhornPrototypes(DIM, 3)
    before = prototypes.weight.detach().clone()
    with pytest.raises(error, match=message):
        prototypes.start_from_(rows)
    assert torch.equal(prototypes.weight, before)


COUNTS = {1: [9], 2: [2, 7], 3: [5, 0, 4]}


def over_ranks(rank, num_ranks):
    rows = torch.randn(9, DIM, generator=of_seed(3))
    started = []
    for gather in (False, True):
        torch.manual_seed(rank if gather else 0)  # no rank need start as the others do
        prototypes = PGCLLoss(DIM, (3, 4), gather=gather).prototypes
        torch.manual_seed(rank if gather else 0)  # ranks draw augmentations of their own
        mine = rows.split(COUNTS[num_ranks])[rank] if gather else rows
        started.append(prototypes.start_from_(mine).weight.detach())
    assert torch.equal(*started)
    torch.manual_seed(5)  # a generator that all ranks share goes on alike on all of them
    prototypes.start_from_(rows)
    after = torch.rand(3)
    torch.testing.assert_close(mean_over_ranks(after), after)
    if num_ranks > 1:
        wide = copy.deepcopy(prototypes).double() if rank else prototypes
        with pytest.raises(ValueError, match="because they differ"):
            wide.start_from_(rows)
        with pytest.raises(ValueError, match="embeddings must be finite"):
            prototypes.start_from_(torch.full((2, DIM), torch.nan))
        with pytest.raises(ValueError, match="because they differ"):
            prototypes.start_from_(rows / (rank > 0))
    return started[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_over_ranks(num_ranks):
    first, *others = on_ranks(over_ranks, num_ranks)
    assert all(torch.equal(first, other) for other in others)
