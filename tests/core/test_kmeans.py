"""k-means, and prototypes that are initialised by it."""

import copy
import warnings
from unittest import mock

import pytest
import torch
from helpers import oracle
from helpers.losses import mean_over_ranks, of_seed
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parametrizations

from pgcl_losses import SinkhornPrototypes
from pgcl_losses.base.normalize import unit_vectors
from pgcl_losses.clusters import kmeans
from pgcl_losses.clusters.kmeans import spherical_kmeans

DIM = 5
FEW = pytest.mark.filterwarnings("ignore:pgcl_losses. . different embed:UserWarning")


def unit(z):
    return unit_vectors(z, z.dtype)


@FEW
@given(
    num_embeddings=st.integers(1, 12),
    num_centers=st.integers(1, 6),
    candidates=st.integers(1, 4),
    different=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    with_zero=st.booleans(),
    chunk=st.sampled_from([1, 3, 100]),
)
def test_agrees_with_the_oracle(
    num_embeddings, num_centers, candidates, different, seed, with_zero, chunk
):
    random = of_seed(seed)
    few = torch.randn(different, 3, dtype=torch.float64, generator=random)
    z = unit(few[torch.randint(different, (num_embeddings,), generator=random)])
    if with_zero:
        z[0] = 0
    initial = unit(torch.randn(num_centers, 3, dtype=torch.float64, generator=random))
    draws = torch.rand(num_centers, candidates, dtype=torch.float64, generator=random, device="cpu")
    with mock.patch.object(kmeans, "_CHUNK", chunk):
        ours = spherical_kmeans(z, initial, draws)
    expected = oracle.kmeans(z, initial, draws.tolist(), kmeans._ROUNDS)
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_separate_groups_become_prototypes_of_every_head(dtype):
    directions = torch.eye(DIM)[:4]
    z = 3 * directions.repeat_interleave(20, 0) + 0.03 * torch.randn(80, DIM)
    prototypes = SinkhornPrototypes(DIM, (4, 4, 2))
    assert prototypes.start_from_(z.to(dtype)) is prototypes
    for head, size in enumerate((4, 4, 2)):
        assert len(prototypes.assign(directions)[:, head].unique()) == size
    nearest = (directions @ unit(prototypes.weight[:8]).T).view(4, 2, 4).amax(2)
    assert nearest.min() > 0.99


@pytest.mark.parametrize("spread", [0.1, 0.01, 0.001])
def test_embeddings_that_hardly_differ_initialise_different_prototypes(spread):
    z = torch.randn(96) + spread * torch.randn(400, 96)
    prototypes = SinkhornPrototypes(96, 10)
    prototypes.start_from_(z)
    new = prototypes.weight.detach().double()
    nearest = (unit(new) @ unit(z.double()).T).max(1).values
    assert (1 - nearest < spread**2).all()  # each prototype is near an embedding
    assert len(prototypes.double().assign(z.double()).unique()) == 10


def test_start_from_is_repeatable_and_changes_directions_alone():
    """Also in deterministic mode, and with another default device."""
    z = torch.randn(80, DIM)
    prototypes = SinkhornPrototypes(DIM, 6, queue_size=4)
    prototypes(*torch.randn(2, 8, DIM, requires_grad=True))
    weight, before = prototypes.weight, copy.deepcopy(prototypes.state_dict())
    twin = copy.deepcopy(prototypes)
    torch.manual_seed(7)
    prototypes.start_from_(z)
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):
            twin.start_from_(z)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(weight, twin.weight)
    assert prototypes.weight is weight  # the optimizer's own
    assert weight.requires_grad
    assert weight.grad is None
    torch.testing.assert_close(weight.norm(dim=1), before.pop("weight").norm(dim=1))
    for name, value in before.items():
        assert torch.equal(prototypes.state_dict()[name], value)


@pytest.mark.parametrize("by", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_weight_that_is_computed_from_others_is_an_error(by):
    prototypes = by(SinkhornPrototypes(DIM, 4))
    with pytest.raises(TypeError, match="weight is computed from others"):
        prototypes.start_from_(torch.randn(80, DIM))


class TestFewEmbeddings:
    @pytest.mark.parametrize(
        ("z", "different"),
        [(torch.eye(DIM)[:2].repeat(7, 1), 2), (torch.eye(DIM)[:1], 1), (torch.zeros(4, DIM), 0)],
    )
    def test_unused_prototypes_stay_where_they_are(self, z, different):
        prototypes = SinkhornPrototypes(DIM, 6)
        before = prototypes.weight.detach().clone()
        with pytest.warns(UserWarning, match=f"^pgcl_losses: {different} different"):
            prototypes.start_from_(z)
        after = prototypes.weight.detach()
        moved = unit(after[:different]).sum(0)
        torch.testing.assert_close(moved, torch.eye(DIM)[:different].sum(0))
        torch.testing.assert_close(after[different:], before[different:])

    def test_prototypes_of_zeros_get_unit_length(self):
        prototypes = SinkhornPrototypes(DIM, 3)
        torch.nn.init.zeros_(prototypes.weight)
        prototypes.start_from_(torch.randn(9, DIM))
        torch.testing.assert_close(prototypes.weight.norm(dim=1), torch.ones(3))


COUNTS = {1: [9], 2: [2, 7], 3: [5, 0, 4]}


def over_ranks(rank, num_ranks):
    z = torch.randn(9, DIM, generator=of_seed(3))
    weights = []
    for gather in (False, True):
        torch.manual_seed(rank if gather else 0)  # ranks begin with prototypes of their own
        prototypes = SinkhornPrototypes(DIM, (3, 4), gather=gather)
        torch.manual_seed(rank if gather else 0)  # ranks draw augmentations of their own
        mine = z.split(COUNTS[num_ranks])[rank] if gather else z
        weights.append(prototypes.start_from_(mine).weight.detach())
    assert torch.equal(*weights)
    torch.manual_seed(5)  # generators with one seed stay alike on all ranks
    prototypes.start_from_(z)
    after = torch.rand(3)
    torch.testing.assert_close(mean_over_ranks(after), after)
    return weights[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_prototypes_over_ranks_are_those_of_one_process(num_ranks):
    first, *others = on_ranks(over_ranks, num_ranks)
    assert all(torch.equal(first, other) for other in others)


def errors_on_one_rank(rank, num_ranks):
    prototypes = SinkhornPrototypes(DIM, 6)
    wide = copy.deepcopy(prototypes).double() if rank else prototypes
    with pytest.raises(ValueError, match=r"rank 0: weight=torch\.float32"):
        wide.start_from_(torch.ones(2, DIM))
    for bad_rank in (0, 1):
        z = torch.full((2, DIM), torch.nan if rank == bad_rank else 1.0)
        with pytest.raises(ValueError, match=f"rank {bad_rank}: .*embeddings must be finite"):
            prototypes.start_from_(z)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="1 different embeddings initialise 6 prototypes"):
            prototypes.start_from_(torch.ones(2, DIM))


def test_an_error_on_one_rank_is_one_on_all():
    on_ranks(errors_on_one_rank, 2)
