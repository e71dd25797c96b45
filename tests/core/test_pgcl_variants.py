"""PGCLLoss with several heads, more than two views, windows of positions and soft clusters."""

import itertools

import numpy as np
import pytest
import torch
from helpers.cases import FAMILY
from helpers.engine_oracle import log_of_weights
from helpers.marks import negatives_of

from pgcl_losses import (
    Assignment,
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    diagnostics,
)
from pgcl_losses.batch import Related
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.engine.pairs import Pairs

pytestmark = pytest.mark.slow

DIM = 3
variants = pytest.mark.parametrize("options", [{"num_prototypes": 3}, *FAMILY], ids=str)


@variants
@negatives_of
def test_gradcheck(options, negatives):
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, **options, negatives=negatives, engine="dense").double().eval()
    inputs = [view.requires_grad_() for view in torch.randn(3, 4, DIM, dtype=torch.float64)]
    assignments = pgcl.prototypes(*inputs)
    # Without a ranking the constant targets alone order the clusters.
    constants = [a._replace(log_probs=a.log_probs.detach(), ranking=None) for a in assignments]

    def contrast(*views):
        return pgcl.contrast(*views, assignments=constants, prototypes=pgcl.prototypes.weight)

    def consistency(weight, *views):
        ours = torch.func.functional_call(pgcl.prototypes, {"weight": weight}, views)
        pairs = zip(ours, constants, strict=True)
        return pgcl.consistency(*(a._replace(targets=constant.targets) for a, constant in pairs))

    assert torch.autograd.gradcheck(contrast, inputs)
    assert torch.autograd.gradgradcheck(contrast, inputs)
    weight = pgcl.prototypes.weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(consistency, (weight, *inputs))


@variants
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_modules_called_by_themselves_give_the_terms(options, weighting):
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, **options, weighting=weighting).double()
    views = torch.randn(3, 5, DIM, dtype=torch.float64)
    terms = pgcl.terms(*views)
    assignments = pgcl.prototypes(*views)
    weight = pgcl.prototypes.weight
    contrast = pgcl.contrast(*views, assignments=assignments, prototypes=weight)
    torch.testing.assert_close(contrast, terms.contrast)
    torch.testing.assert_close(pgcl.consistency(*assignments), terms.consistency)
    two = PrototypeReweightedNCE(weighting=weighting)
    one = SinkhornPrototypes(DIM, 4).double()
    assignments = one(*views)
    clusters = [assignment.clusters for assignment in assignments]
    torch.testing.assert_close(
        two(*views, assignments=assignments, prototypes=one.weight),
        two(*views, clusters=clusters, prototypes=one.weight),
    )


def test_two_equal_heads_are_one_head():
    torch.manual_seed(0)
    one, two = PGCLLoss(DIM, 4), PGCLLoss(DIM, (4, 4))
    with torch.no_grad():
        two.prototypes.weight.copy_(one.prototypes.weight.repeat(2, 1))
    views = torch.randn(2, 8, DIM, requires_grad=True)
    ours, theirs = one.terms(*views), two.terms(*views)
    torch.testing.assert_close(ours[:3], theirs[:3])
    d_ours, d_theirs = (torch.autograd.grad(terms.loss, views)[0] for terms in (ours, theirs))
    torch.testing.assert_close(d_ours, d_theirs)


class TestHeads:
    def test_shapes(self):
        prototypes = SinkhornPrototypes(DIM, (4, 6))
        assert prototypes.weight.shape == (10, DIM)
        (view,) = prototypes(torch.randn(7, DIM))
        assert view.targets.shape == view.log_probs.shape == (7, 10)
        assert (view.clusters.shape, view.heads) == ((7, 2), (4, 6))
        for q in (view.targets, view.log_probs.exp()):
            for of_head in q.split(view.heads, dim=1):
                torch.testing.assert_close(of_head.sum(1), torch.ones(7))
        z, unit = torch.randn(5, DIM), torch.nn.functional.normalize
        scores = unit(z) @ unit(prototypes.weight).T
        nearest = torch.stack([scores[:, :4].argmax(1), scores[:, 4:].argmax(1)], dim=1)
        assert torch.equal(prototypes.assign(z), nearest)
        assert "num_prototypes=(4, 6)" in repr(prototypes)
        assert SinkhornPrototypes(DIM, [4]).num_prototypes == 4

    def test_each_head_has_a_queue_and_balance_of_its_own(self):
        torch.manual_seed(0)
        both = SinkhornPrototypes(DIM, (4, 6), queue_size=5)
        single = [SinkhornPrototypes(DIM, size, queue_size=5) for size in (4, 6)]
        with torch.no_grad():
            for one, weight in zip(single, both.weight.split((4, 6)), strict=True):
                one.weight.copy_(weight)
        for _ in range(3):
            views = torch.randn(2, 3, DIM)
            ours, expected = both(*views), [one(*views) for one in single]
            for v, view in enumerate(ours):
                of_heads = [assignments[v] for assignments in expected]
                for field in ("targets", "log_probs"):
                    side_by_side = torch.cat([getattr(one, field) for one in of_heads], dim=1)
                    torch.testing.assert_close(getattr(view, field), side_by_side)

    def test_a_checkpoint_of_one_head_loads(self):
        old = PGCLLoss(DIM, 5, queue_size=4)
        old(*torch.randn(2, 6, DIM, requires_grad=True))
        for sizes in (5, [5], (5,)):
            new = PGCLLoss(DIM, sizes, queue_size=4)
            new.load_state_dict(old.state_dict())
            torch.testing.assert_close(new.state_dict(), old.state_dict(), rtol=0, atol=0)

    def test_diagnostics_of_each_head(self):
        pgcl = PGCLLoss(DIM, (4, 6))
        views = torch.randn(2, 9, DIM)
        terms = pgcl.terms(*views)
        numbers = diagnostics(terms, pgcl.prototypes.weight)
        assert "agreement" not in numbers
        for h in range(2):
            columns = slice(0, 4) if h == 0 else slice(4, 10)
            alone = [
                Assignment(a.log_probs[:, columns], a.targets[:, columns], a.clusters[:, h])
                for a in terms.assignments
            ]
            expected = diagnostics(alone, pgcl.prototypes.weight[columns])
            prefix = f"head{h}/"
            ours = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
            del expected["consistency_ratio"]
            assert ours == pytest.approx(expected)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"num_prototypes": (4, 0)}, ValueError, r"num_prototypes\[1\] must be at least 1"),
            ({"num_prototypes": ()}, ValueError, "or one for each head, but got"),
            ({"num_prototypes": (4, 2.5)}, TypeError, r"num_prototypes\[1\] must be a whole num"),
            ({"num_prototypes": "42"}, TypeError, "or a sequence of them with one for each head"),
            ({"num_prototypes": np.array([4, 5])}, TypeError, "or a sequence of them with one"),
            ({"negative_ranks": (0, 1)}, ValueError, "there would be no negative"),
            ({"negative_ranks": (2, 11)}, ValueError, r"must lie in 0\.\.10, .* got \(2, 11\)"),
            ({"negative_ranks": (3, 3)}, ValueError, "first < end, but got"),
            ({"negative_ranks": (-1, 3)}, ValueError, r"negative_ranks\[0\] must be at least 0"),
            ({"negative_ranks": 3}, TypeError, "must be None or two positions"),
            ({"negative_ranks": (1, 2, 3)}, TypeError, "must be None or two positions"),
            (
                {"negative_ranks": (2, 6), "num_prototypes": (10, 5)},
                ValueError,
                r"must lie in 0\.\.5, as there are 5 prototypes",
            ),
            ({"soft_clusters": 1}, TypeError, "soft_clusters must be True or False"),
        ],
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            PGCLLoss(DIM, **options)

    def test_inputs_of_the_contrast(self):
        views = torch.randn(3, 5, DIM)
        prototypes = SinkhornPrototypes(DIM, 4)
        assignments = prototypes(*views)
        clusters = [assignment.clusters for assignment in assignments]
        uniform = {"weighting": "uniform"}
        cases = [
            (
                {"soft_clusters": True},
                views,
                {"clusters": clusters},
                "soft_clusters need one",
            ),
            (
                {"negative_ranks": (0, 2)},
                views,
                {"clusters": clusters},
                r"negative_ranks and soft_clusters need",
            ),
            ({}, views, {"assignments": assignments[:2]}, "sequence of 3, one for each view"),
            ({"negative_ranks": (2, 5)}, views, {"assignments": assignments}, r"lie in 0\.\.4"),
            (
                {"weighting": "prototype"},
                views,
                {"assignments": assignments, "prototypes": torch.randn(5, DIM)},
                "prototypes are 5 but the assignments are to 4",
            ),
            (
                {},
                views[:, :4],
                {"assignments": assignments},
                r"assignments\[0\].clusters has length 5 but z1 has 4",
            ),
        ]
        for options, given, named, message in cases:
            with pytest.raises(ValueError, match=message):
                PrototypeReweightedNCE(**{**uniform, **options})(*given, **named)
        loss = PrototypeReweightedNCE(**uniform)
        with pytest.raises(TypeError, match="clusters and assignments both hold clusters"):
            loss(*views, clusters=clusters, assignments=assignments)
        with pytest.raises(TypeError, match=r"views must be two or more .* a list: unpack it"):
            loss(list(views), assignments=assignments)
        with pytest.raises(TypeError, match=r"assignments\[0\] must be an Assignment, but got Te"):
            loss(*views, assignments=clusters)
        with pytest.raises(TypeError, match="views must be two or more"):
            loss(views[0], assignments=assignments[:1])

    def test_heads_that_do_not_fit(self):
        (view,) = SinkhornPrototypes(DIM, (4, 6))(torch.randn(5, DIM))
        other = view._replace(heads=(6, 4))
        wrong = view._replace(heads=(4, 5))
        for views, message in (
            ((view, other), r"assignments\[1\].heads is \(6, 4\) but assignments\[0\].heads"),
            ((wrong, wrong), r"is \(4, 5\), 9 prototypes in all, but .* has 10 columns"),
        ):
            with pytest.raises(ValueError, match=message):
                ConsistencyLoss()(*views)
        narrow = view._replace(clusters=view.clusters[:, 0])
        with pytest.raises(ValueError, match=r"must have shape \[N, 2\], a column for each"):
            diagnostics([narrow])


def test_weights_of_a_query_have_mean_1():
    """Over all samples, if none is left out."""
    torch.manual_seed(0)
    views = torch.randn(2, 20, DIM, dtype=torch.float64)
    for soft, heads in itertools.product((False, True), ((5,), (5, 7))):
        pgcl = PGCLLoss(DIM, heads, soft_clusters=soft, exclude_same_cluster=False).double()
        weights = pgcl.contrast._weights(pgcl.prototypes(pgcl._batch(views.unbind(), Related())))
        of_pairs = log_of_weights(Pairs(views.flatten(0, 1), (20, 20), weights=weights)).exp()
        torch.testing.assert_close(of_pairs.mean(1), torch.ones(40, dtype=torch.float64))
