"""PGCLLoss: its value and gradients are those of the oracle."""

import copy
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from helpers import oracle
from helpers.cases import (
    DENSE,
    EVERY_MODE,
    FAMILY,
    WAYS,
    are_apart,
    in_chunks,
    listed,
    random_sets,
    upstream,
)
from helpers.losses import DIM, gradients, random_pairs
from helpers.marks import examples, few_graphs, negatives_of
from hypothesis import assume, given
from hypothesis import strategies as st

from pgcl_losses import (
    Assignment,
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    diagnostics,
)
from pgcl_losses.contrast import WEIGHTINGS

HEADS = [4, (3, 5), (2, 4, 3), (5, 1, 2, 6), (1,)]
HALF = [torch.float16, torch.bfloat16]
DTYPES = st.sampled_from([torch.float64, torch.float64, torch.float32, *HALF])
LAYOUTS = {
    "rows": lambda z: z,
    "columns": lambda z: z.mT.contiguous().mT,
    "strided": lambda z: z.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda z: z[:1].expand_as(z),
}


class Inputs(NamedTuple):
    """What a loss is called with: in each step other views, labels and pairs."""

    num_views: int = 2
    length: int = 4  # one graph alone is in all clusters
    seed: int = 0
    given: frozenset[str] = frozenset()  # labels, pairs
    dtype: torch.dtype = torch.float64
    layout: str = "rows"
    scale: float = 1.0  # of the first view

    def views(self, step):
        sets, _ = random_sets([self.length] * self.num_views, self.seed + step)
        views = [LAYOUTS[self.layout](z.detach().to(self.dtype)) for z in sets]
        return [self.scale * views[0], *views[1:]]

    def besides(self, step, queries, negatives):
        """The same for the loss and for the oracle."""
        ours, exact, total = {}, {}, self.num_views * self.length
        if "labels" in self.given:
            _, (labels, *_) = random_sets([self.length] * self.num_views, self.seed + step)
            ours["labels"], exact["labels"] = labels, [labels.tolist()] * self.num_views
        if "pairs" in self.given:
            num_queries = self.length if queries == "first" else total
            pairs, weights = random_pairs(total, num_queries, 12, self.seed)
            if negatives == "cross":  # a positive in the view of the query is an error
                weights = weights * are_apart([self.length] * self.num_views, *pairs)
            weights = weights.to(self.dtype)
            ours |= {"positives": pairs, "positive_weights": weights}
            exact["listed"] = listed(pairs, weights.double())
        return ours, exact


EXACT, ROUNDED = {"rtol": 1e-6, "atol": 1e-7}, {"rtol": 2e-3, "atol": 2e-3}


def assert_close(name, ours, expected, close):
    torch.testing.assert_close(ours, expected, **close, msg=lambda text: f"{name}: {text}")


def assert_agrees_with_the_oracle(options, inputs, way=DENSE, dtype=torch.float64):
    """Terms, targets and gradients, in a second step too where the loss has a memory."""
    torch.manual_seed(inputs.seed)
    pgcl = PGCLLoss(DIM, **options, engine=way.engine).to(dtype)
    mode = {name: value for name, value in options.items() if name != "num_prototypes"}
    weight, past = pgcl.prototypes.weight, oracle.Memory(mode.pop("memory_size", 0))
    exact_weight = weight.detach().double().requires_grad_()
    prototypes = exact_weight.split(pgcl.prototypes.heads)
    dtypes, computed = {inputs.dtype, dtype}, torch.promote_types(inputs.dtype, dtype)
    is_exact = (dtype if past.size else computed) == torch.float64  # a memory has its own dtype
    for step in range(2 if past.size else 1):
        views = inputs.views(step)
        at = [z.double().requires_grad_() for z in views]
        views = [z.requires_grad_() for z in views]
        given, exact = inputs.besides(step, mode.get("queries"), mode.get("negatives"))
        sets = [*at, past.embeddings] if step else at
        oracle.assume_clear_clusters(sets, prototypes, 1e-9 if is_exact else 1e-5)
        stored = {"memory": past.embeddings, "memory_labels": past.labels}
        expected = oracle.pgcl(at, prototypes, **stored, **exact, **mode)
        theirs = gradients(upstream(expected.loss), [*at, exact_weight])
        with in_chunks(way.chunk):
            terms = pgcl.terms(*views, **given)
            ours = gradients(upstream(terms.loss.double()), [*views, weight])

        close = EXACT if is_exact else ROUNDED
        for view, targets in zip(terms.assignments, expected.targets, strict=True):
            assert_close("targets", view.targets.double(), targets, close)
        for name in ("contrast", "consistency", "loss"):
            assert_close(name, getattr(terms, name).double(), getattr(expected, name), close)
        names = [f"gradient of view {n}" for n in range(1, len(views) + 1)]
        names.append("gradient of prototypes")
        for name, z, d_z, exact_d_z in zip(names, [*views, weight], ours, theirs, strict=True):
            assert (d_z.shape, d_z.dtype) == (z.shape, z.dtype), name
            # Gradients of short embeddings overflow in float16.
            assert d_z.isfinite().all() or z.dtype == torch.float16, name
            if dtypes == {torch.float64}:
                size = inputs.scale if z is views[0] else 1.0
                assert_close(name, size * d_z, size * exact_d_z, EXACT)
        past.store(at, exact.get("labels"))


def inputs_with(**axes):
    values = st.fixed_dictionaries({"seed": st.integers(0, 10**6), **axes})
    return values.map(lambda drawn: Inputs(**drawn))


FORMS = {
    "mean": {},
    "mean, decoupled": {"decoupled": True},
    "supcon": {"over_positives": "supcon"},
    "sum": {"over_positives": "sum"},
    "sum, decoupled": {"over_positives": "sum", "decoupled": True},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
QUERIES = st.sampled_from(["all", "first"])
TEMPERATURES = st.sampled_from([0.05, 0.1, 0.2, 0.5, 1.0])
MEMORY_SIZES = st.sampled_from([2, 5, 13, 40])
NO_LABELS_OR_LABELS = st.sampled_from([frozenset(), frozenset(["labels"])])


@few_graphs
@examples(40)
@given(inputs_with(num_views=st.integers(2, 4), length=st.integers(2, 5)), WAYS)
def test_views_of_any_number_and_length(inputs, way):
    assert_agrees_with_the_oracle({"num_prototypes": 4}, inputs, way)


@few_graphs
@pytest.mark.parametrize("heads", HEADS, ids=str)
@examples(15)
@given(exclude=st.booleans(), balance=st.booleans(), inputs=inputs_with(), way=WAYS)
def test_heads(heads, exclude, balance, inputs, way):
    options = {"num_prototypes": heads, "exclude_same_cluster": exclude}
    options["balance_predictions"] = balance
    assert_agrees_with_the_oracle(options, inputs, way)


@few_graphs
@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
@examples(6)
@given(temperature=TEMPERATURES, inputs=inputs_with(), way=WAYS)
def test_weightings_of_negatives(mode, temperature, inputs, way):
    options = {"num_prototypes": 4, "temperature": temperature, **mode}
    assert_agrees_with_the_oracle(options, inputs, way)


@few_graphs
@forms
@negatives_of
@pytest.mark.parametrize("queries", ["all", "first"])
@examples(5)
@given(inputs=inputs_with(num_views=st.integers(2, 3)), way=WAYS)
def test_queries_and_negatives(queries, negatives, form, inputs, way):
    options = {"num_prototypes": 4, "queries": queries, "negatives": negatives, **form}
    assert_agrees_with_the_oracle(options, inputs, way)


@few_graphs
@forms
@pytest.mark.parametrize("besides", ["labels", "pairs", "labels and pairs"])
@examples(5)
@given(data=st.data(), queries=QUERIES, way=WAYS)
def test_labels_and_pairs(besides, form, data, queries, way):
    given = frozenset(besides.split(" and "))
    inputs = data.draw(inputs_with(given=st.just(given), num_views=st.integers(2, 3)))
    options = {"num_prototypes": (3, 5), "queries": queries, **form}
    assert_agrees_with_the_oracle(options, inputs, way)


@few_graphs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("contrast_weight", "consistency_weight"), [(1.0, 6.0), (2.0, 3.0)])
@examples(4)
@given(inputs=inputs_with(given=NO_LABELS_OR_LABELS), way=WAYS)
def test_reductions_and_weights_of_terms(
    reduction, contrast_weight, consistency_weight, inputs, way
):
    options = {"num_prototypes": 4, "reduction": reduction}
    options |= {"contrast_weight": contrast_weight, "consistency_weight": consistency_weight}
    assert_agrees_with_the_oracle(options, inputs, way)


@few_graphs
@pytest.mark.parametrize("negatives", ["all", "cross", "memory"])
@examples(16)
@given(
    size=MEMORY_SIZES,
    heads=st.sampled_from([4, (3, 5)]),
    inputs=inputs_with(given=NO_LABELS_OR_LABELS),
    way=WAYS,
)
def test_a_memory(negatives, size, heads, inputs, way):
    options = {"num_prototypes": heads, "memory_size": size, "negatives": negatives}
    assert_agrees_with_the_oracle(options, inputs, way)


# Some embeddings are so short or so long that their squares are 0 or inf.
SCALES = st.sampled_from([1.0, 1.0, 1e-4, 1e4, 1e-15, 0.0])
ANY_NUMBERS = {"dtype": DTYPES, "layout": st.sampled_from([*LAYOUTS]), "scale": SCALES}


@few_graphs
@examples(60)
@given(inputs=inputs_with(**ANY_NUMBERS), dtype=DTYPES, way=WAYS)
def test_dtypes_layouts_and_norms_of_embeddings(inputs, dtype, way):
    assert_agrees_with_the_oracle({"num_prototypes": 4}, inputs, way, dtype=dtype)


@st.composite
def all_options(draw):
    queries, memory_size = draw(QUERIES), draw(st.just(0) | MEMORY_SIZES)
    contrast_weight, consistency_weight = draw(st.sampled_from([(1.0, 6.0), (2.0, 3.0)]))
    return {
        "num_prototypes": draw(st.sampled_from(HEADS)),
        "exclude_same_cluster": draw(st.booleans()),
        **draw(st.sampled_from([*FORMS.values()])),
        "temperature": draw(TEMPERATURES),
        "weighting": draw(st.sampled_from(WEIGHTINGS)),
        "negatives": draw(st.sampled_from(["all", "cross", *["memory"] * (memory_size > 0)])),
        "queries": queries,
        "memory_size": memory_size,
        "contrast_weight": contrast_weight,
        "consistency_weight": consistency_weight,
        "balance_predictions": draw(st.booleans()),
        "reduction": draw(st.sampled_from(["mean", *["sum", "none"] * (queries == "all")])),
    }


@few_graphs
@examples(100)
@given(
    options=all_options(),
    inputs=inputs_with(
        num_views=st.integers(2, 4),
        length=st.integers(2, 5),
        given=st.frozensets(st.sampled_from(["labels", "pairs"])),
        **ANY_NUMBERS,
    ),
    way=WAYS,
    dtype=DTYPES,
)
def test_any_combination(options, inputs, way, dtype):
    assume(not options["memory_size"] or dtype not in HALF)  # embeddings in a memory of float16
    assert_agrees_with_the_oracle(options, inputs, way, dtype)


every_member = pytest.mark.parametrize("options", [{"num_prototypes": 3}, *FAMILY], ids=str)


@every_member
@negatives_of
def test_second_derivatives_of_the_contrast(options, negatives):
    """By views and temperature, with targets and clusters held fixed."""
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, **options, negatives=negatives, engine="dense").double().eval()
    inputs = [view.requires_grad_() for view in torch.randn(3, 4, DIM, dtype=torch.float64)]
    constants = pgcl.prototypes(*inputs)

    def contrast(temperature, *views):
        pgcl.temperature = 1 * temperature
        return pgcl.contrast(*views, constants)

    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(contrast, (temperature, *inputs))


@every_member
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_modules_called_by_themselves_give_the_terms(options, weighting):
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, **options, weighting=weighting).double()
    views = torch.randn(3, 5, DIM, dtype=torch.float64)
    terms, assignments = pgcl.terms(*views), pgcl.prototypes(*views)
    for contrast in (
        pgcl.contrast(*views, assignments),
        pgcl.contrast(*views, assignments=assignments),
        pgcl.contrast(assignments),
        pgcl.contrast(*views, terms.assignments),
    ):
        torch.testing.assert_close(contrast, terms.contrast)
    for consistency in (pgcl.consistency(assignments), pgcl.consistency(*assignments)):
        torch.testing.assert_close(consistency, terms.consistency)
    if options == {"num_prototypes": 3}:
        clusters = [assignment.clusters for assignment in assignments]
        weight = pgcl.prototypes.weight
        by_clusters = pgcl.contrast(*views, clusters=clusters, prototypes=weight)
        torch.testing.assert_close(by_clusters, terms.contrast)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_assignments_of_terms_are_of_the_views_alone(weighting):
    """Without the memory and the positives that the loss was called with."""
    pgcl, views = PGCLLoss(DIM, 3, memory_size=8, weighting=weighting), torch.randn(2, 6, DIM)
    pgcl(*views.requires_grad_())
    pairs, plain = torch.tensor([[0, 1, 2], [3, 4, 9]]), pgcl.contrast(pgcl.prototypes(*views))
    terms = pgcl.terms(*views, positives=pairs, positive_weights=torch.rand(3) + 1)
    for contrast in (pgcl.contrast(terms.assignments), pgcl.contrast(*views, terms.assignments)):
        torch.testing.assert_close(contrast, plain)


def test_each_head_is_assigned_and_queued_by_itself():
    both = SinkhornPrototypes(DIM, (4, 6), queue_size=5)
    single = [SinkhornPrototypes(DIM, size, queue_size=5) for size in (4, 6)]
    with torch.no_grad():
        for one, weight in zip(single, both.weight.split((4, 6)), strict=True):
            one.weight.copy_(weight)
    for _ in range(3):
        views = torch.randn(2, 3, DIM)
        for ours, *of_heads in zip(both(*views), *(one(*views) for one in single), strict=True):
            for field in ("targets", "log_probs"):
                side_by_side = torch.cat([getattr(head, field) for head in of_heads], dim=1)
                torch.testing.assert_close(getattr(ours, field), side_by_side)
            assert torch.equal(ours.clusters, torch.stack([h.clusters for h in of_heads], dim=1))
        nearest = torch.stack([one.assign(views[0]) for one in single], dim=1)
        assert torch.equal(both.assign(views[0]), nearest)


def test_diagnostics_of_each_head():
    pgcl = PGCLLoss(DIM, (4, 6))
    terms = pgcl.terms(*torch.randn(2, 9, DIM))
    numbers = diagnostics(terms)
    assert "agreement" not in numbers
    for h, columns in enumerate((slice(4), slice(4, 10))):
        alone = [
            Assignment(a.log_probs[:, columns], a.targets[:, columns], a.clusters[:, h])
            for a in terms.assignments
        ]
        expected = diagnostics(alone, pgcl.prototypes.weight[columns])
        prefix = f"head{h}/"
        ours = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
        del expected["consistency_ratio"]
        del ours["within"]  # which needs the embeddings
        assert ours == pytest.approx(expected)


def test_defaults():
    pgcl = PGCLLoss(96)
    assert pgcl.prototypes.weight.shape == (10, 96)
    ours = pgcl.all_options()
    names = ("consistency_weight", "contrast_weight", "contrast.temperature", "prototypes.epsilon")
    assert [ours[name] for name in names] == [0.3, 1.0, 0.5, 0.05]
    for name, module in {
        "prototypes": SinkhornPrototypes(96),
        "contrast": PrototypeReweightedNCE(),
        "consistency": ConsistencyLoss(),
    }.items():  # PGCLLoss lists their defaults again
        for option, value in module.all_options().items():
            assert ours[f"{name}.{option}"] == value


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"num_prototypes": (3, 2)}, {"queue_size": 5}])
def test_a_term_of_weight_0_is_not_computed(options, reduction):
    options = {"num_prototypes": 3, **options}
    plain, views = PGCLLoss(DIM, **options), torch.randn(2, 9, DIM, requires_grad=True)
    for name, other, weight in (("contrast", "consistency", 0.3), ("consistency", "contrast", 1)):
        pgcl = PGCLLoss(DIM, **options, reduction=reduction, **{f"{name}_weight": 0.0})
        pgcl.load_state_dict(plain.state_dict())
        twin = copy.deepcopy(plain)
        twin.contrast.reduction = twin.consistency.reduction = reduction
        with mock.patch.object(getattr(pgcl, name), "forward", side_effect=AssertionError):
            terms, expected = pgcl.terms(*views), twin.terms(*views)
        torch.testing.assert_close(terms.loss, weight * getattr(expected, other))
        assert getattr(terms, name).item() == 0
        torch.testing.assert_close(terms.assignments[0][1:], expected.assignments[0][1:])
        losses = terms.loss.sum(), weight * getattr(expected, other).sum()
        torch.testing.assert_close(*(gradients(loss, views) for loss in losses))
        torch.testing.assert_close(pgcl.state_dict(), twin.state_dict())
