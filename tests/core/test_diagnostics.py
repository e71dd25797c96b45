"""Numbers to log."""

import math

import pytest
import torch
from helpers import oracle
from helpers.losses import of_seed
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import Assignment, PGCLLoss, SinkhornPrototypes, diagnostics


def assignment_of(clusters, k):
    clusters = torch.as_tensor(clusters)
    return Assignment(torch.zeros(len(clusters), k), torch.eye(k)[clusters], clusters)


@given(n=st.integers(1, 5), k=st.integers(1, 8), seed=st.integers(0, 10**6), one=st.booleans())
def test_agrees_with_counting(n, k, seed, one):
    random = of_seed(seed)
    clusters = torch.randint(1 if one else k, (2 * n,), generator=random)
    prototypes = torch.randn(k, 4, dtype=torch.float64, generator=random)
    weights = oracle.pair_weights(None, clusters, prototypes, "prototype")
    negatives = [(i, j) for i in range(2 * n) for j in range(2 * n) if i % n != j % n]
    remaining = [pair for pair in negatives if clusters[pair[0]] != clusters[pair[1]]]
    fractions = [float((clusters == c).double().mean()) for c in range(k)]
    expected = {
        "largest_cluster": max(fractions),
        "dead_prototypes": fractions.count(0),
        "entropy": -sum(p * math.log(p) for p in fractions if p),
        "agreement": float((clusters[:n] == clusters[n:]).double().mean()),
        "masked_negatives": 1 - len(remaining) / len(negatives) if negatives else math.nan,
        "mean_weight": math.nan,
    }
    if remaining:
        expected["mean_weight"] = sum(float(weights[pair]) for pair in remaining) / len(remaining)

    views = [assignment_of(of_view, k) for of_view in clusters.chunk(2)]
    numbers = diagnostics(views, prototypes)
    for name in ("consistency_ratio", "used", "spread"):  # of predictions and targets
        del numbers[name]
    assert numbers == pytest.approx(expected, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_diagnostics_of_terms_include_the_losses(reduction):
    pgcl = PGCLLoss(4, 3, reduction=reduction)
    terms = pgcl.terms(*torch.randn(2, 6, 4))
    numbers = diagnostics(terms)
    assert numbers == pytest.approx(diagnostics(terms, pgcl.prototypes.weight))
    assert numbers["contrast"] == pytest.approx(terms.contrast.mean().item())
    assert numbers["loss"] == pytest.approx(numbers["contrast"] + 0.3 * numbers["consistency"])
    assert numbers["consistency_ratio"] == pytest.approx(numbers["consistency"] / math.log(3))
    assert numbers["mean_cosine"] == pytest.approx(terms.mean_cosine.item())
    assert {type(value) for value in numbers.values()} == {float, int}


def test_agreement_is_the_mean_over_pairs_of_views():
    views = [assignment_of(clusters, 3) for clusters in ([0, 1, 2, 2], [0, 1, 2, 1], [0, 2, 2, 0])]
    # First and second agree on three of four graphs, first and third on two, the others on two.
    assert diagnostics(views)["agreement"] == pytest.approx(7 / 12)
    assert math.isnan(diagnostics(views[:1])["agreement"])


@given(
    n=st.integers(1, 6),
    heads=st.sampled_from([3, (2, 4)]),
    views=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_within_against_a_loop(n, heads, views, seed):
    """Each embedding's distance from the mean of its cluster, and from the mean of all."""
    random = of_seed(seed)
    torch.manual_seed(seed)
    prototypes = SinkhornPrototypes(4, heads).double()
    z = torch.randn(views, n, 4, dtype=torch.float64, generator=random)
    a = prototypes(*z)
    numbers, units = diagnostics(a), [row / row.norm() for row in z.flatten(0, 1)]
    several = isinstance(heads, tuple)
    for h in range(2 if several else 1):
        clusters = [c for view in a for c in view.clusters.view(n, -1)[:, h].tolist()]
        inside = total = 0.0
        for unit, cluster in zip(units, clusters, strict=True):
            others = [u for u, c in zip(units, clusters, strict=True) if c == cluster]
            inside += float(((unit - sum(others) / len(others)) ** 2).sum())
            total += float(((unit - sum(units) / len(units)) ** 2).sum())
        name = f"head{h}/within" if several else "within"
        expected = inside / total if total else math.nan
        assert numbers[name] == pytest.approx(expected, abs=1e-9, nan_ok=True)
    assert "within" not in diagnostics([*a])  # of which the embeddings are not known
    if not several and views > 1:
        pgcl = PGCLLoss(4, heads).double()
        pgcl.prototypes = prototypes
        of_terms = diagnostics(pgcl.terms(*z))["within"]
        assert of_terms == pytest.approx(numbers["within"], nan_ok=True)


@given(n=st.integers(1, 6), heads=st.sampled_from([3, (2, 4)]), seed=st.integers(0, 10**6))
def test_used_spread_and_rank_against_loops(n, heads, seed):
    torch.manual_seed(seed)
    prototypes = SinkhornPrototypes(4, heads, epsilon=0.5).double()
    z = torch.randn(2, n, 4, dtype=torch.float64)
    a = prototypes(*z)
    numbers, start = diagnostics(a), 0

    def entropy(values):
        return -sum(float(x) * math.log(x) for x in values if x > 0)

    for h, size in enumerate(prototypes.heads):
        prefix, columns = (
            (f"head{h}/" if isinstance(heads, tuple) else ""),
            range(start, start + size),
        )
        start += size
        p = [[math.exp(row[k]) for k in columns] for view in a for row in view.log_probs.tolist()]
        q = [[float(row[k]) for k in columns] for view in a for row in view.targets]
        mean = [sum(row[k] for row in p) / len(p) for k in range(size)]
        assert numbers[f"{prefix}used"] == pytest.approx(math.exp(entropy(mean)))
        spread = math.exp(sum(map(entropy, q)) / len(q))
        assert numbers[f"{prefix}spread"] == pytest.approx(spread)
    units = torch.nn.functional.normalize(z.flatten(0, 1), dim=1)
    values = torch.linalg.eigvalsh(units.T @ units).clamp_min(0).sqrt()
    rank = math.exp(entropy((values / values.sum()).tolist()))
    assert numbers["effective_rank"] == pytest.approx(rank, rel=1e-5)


def test_what_the_new_numbers_are_at_their_ends():
    prototypes = SinkhornPrototypes(4, 4, temperature=0.01)
    prototypes.weight.data = torch.eye(4)
    apart, one = torch.eye(4).repeat(5, 1), torch.ones(20, 4)
    learned, collapsed = diagnostics(prototypes(apart, apart)), diagnostics(prototypes(one, one))
    assert learned["used"] == pytest.approx(4, abs=1e-3)
    assert learned["spread"] == pytest.approx(1, abs=1e-3)
    assert learned["effective_rank"] == pytest.approx(4, abs=1e-3)
    assert collapsed["used"] == pytest.approx(4, abs=1e-3)  # which alone would call it perfect
    assert collapsed["spread"] == pytest.approx(4, abs=1e-3)
    assert collapsed["effective_rank"] == pytest.approx(1, abs=1e-3)
    nothing = diagnostics(prototypes(torch.full((3, 4), torch.nan), torch.ones(3, 4)))
    assert math.isnan(nothing["effective_rank"])
