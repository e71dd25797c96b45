"""`score_mod`: what is an error, what is ignored, and what functions of the user's may do."""

import pickle
from functools import partial

import pytest
import torch
from helpers import oracle
from helpers.cases import CUT, NOT_CUT
from helpers.losses import DIM, gradients
from helpers.marks import assert_error, few_graphs
from helpers.score_mods import SCORE_MODS, Frozen, by_distance, far, margin, random_metadata
from torch import nn

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes

pytestmark = few_graphs
N = 7
Z1, Z2 = torch.randn(2, N, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
METADATA = random_metadata(2 * N, torch.Generator().manual_seed(1)).split(N)
in_chunks_or_not = pytest.mark.parametrize(
    "engine", [NOT_CUT, CUT], ids=["not cut", "cut"], indirect=True
)


def views():
    return [z.clone().requires_grad_() for z in (Z1, Z2)]


class Scale(nn.Module):
    """A module that learns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, scores, pair):
        return scores * self.scale


@in_chunks_or_not
@pytest.mark.parametrize("what", ["module", "parameter", "temperature", "embeddings"])
def test_what_learns_besides_needs_dense(what, engine):
    (z1, z2), module = views(), Scale()
    tau = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    captured = {
        "module": module,
        "parameter": lambda scores, pair: scores + 2 * module.scale,
        "temperature": lambda scores, pair: scores - 0.1 / tau,
        "embeddings": lambda scores, pair: scores + (3 * z1).mean(),
    }
    loss = InfoNCE(score_mod=captured[what], temperature=tau, engine=engine)
    words = ["score_mod uses a Tensor", "requires grad", "engine='dense'", "pair.temperature"]
    assert_error(ValueError, lambda: loss(z1, z2), words)
    loss.engine = "dense"
    learned = {"temperature": tau, "embeddings": z1}.get(what, module.scale)
    assert (gradients(loss(z1, z2), [learned])[0] != 0).any()
    with torch.no_grad():  # nothing is differentiated
        loss.engine = engine
        assert loss(z1, z2).isfinite()
    module.requires_grad_(False)
    if what in ("module", "parameter"):
        loss(z1, z2).backward()


def test_parameters_of_a_module_are_those_of_the_loss():
    loss = InfoNCE(score_mod=Scale(), engine="dense")
    assert list(loss.state_dict()) == ["score_mod.scale"]
    loss.score_mod = by_distance
    assert list(loss.parameters()) == []
    loss.score_mod = Frozen()
    assert loss(*views(), metadata=METADATA).isfinite()
    loss.score_mod = None
    torch.testing.assert_close(loss(Z1, Z2), InfoNCE()(Z1, Z2))


@pytest.mark.parametrize("function", SCORE_MODS[:8])
def test_derivatives_of_dense(function):
    z1, z2 = views()
    tau = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def value(z1, z2, tau):
        loss = InfoNCE(score_mod=function, temperature=0.3, engine="dense")
        object.__setattr__(loss, "temperature", tau)
        return loss(z1, z2, metadata=METADATA)

    assert torch.autograd.gradcheck(value, (z1, z2, tau), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(value, (z1, z2, tau))


def test_a_derivative_that_is_infinite_elsewhere(engine):
    """log(1 - cosine) of a query with itself, for embeddings and a learned temperature."""
    (z1, z2), tau = views(), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    loss = InfoNCE(score_mod=far, temperature=tau, engine=engine)(z1, z2)
    losses, exist = oracle.info_nce([z1, z2], temperature=tau, score_mod=far)
    expected = oracle.mean_of_queries(losses, exist)
    torch.testing.assert_close(loss, expected)
    found = gradients(loss, [z1, z2, tau])
    torch.testing.assert_close(found, gradients(expected, [z1, z2, tau]))
    assert all(d.isfinite().all() for d in found)


@in_chunks_or_not
def test_what_learns_is_noticed_beside_frozen_embeddings(engine):
    loss = InfoNCE(score_mod=Scale(), engine=engine)
    assert_error(ValueError, lambda: loss(Z1, Z2), ["engine='dense'"])
    pgcl = PGCLLoss(DIM, 3, score_mod=Scale(), engine=engine).double()
    assert_error(ValueError, lambda: pgcl(Z1, Z2), ["engine='dense'"])
    losses = InfoNCE(score_mod=Scale(), engine=engine, reduction="none")
    assert_error(ValueError, lambda: losses(*views()), ["engine='dense'"])  # in the forward


@pytest.mark.parametrize(
    ("function", "temperature"),
    [
        (lambda scores, pair: scores.half(), 0.2),
        (lambda scores, pair: scores + torch.exp(-0.9 * scores).add(1e-30).log(), 0.015),
        (lambda scores, pair: scores.sum(1, keepdim=True).expand_as(scores), 0.2),
        (lambda scores, pair: scores.exp(), 1.0),
        (lambda scores, pair: scores, 0.2),
        (lambda scores, pair: scores.mT.contiguous().mT, 0.2),
    ],
    ids=["float16", "large derivatives", "expanded", "exp", "itself", "transposed"],
)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_functions_with_a_difficult_graph(function, temperature, reduction, engine):
    z1, z2 = (z.float().requires_grad_() for z in (Z1, Z2))
    made = {"score_mod": function, "temperature": temperature, "reduction": reduction}
    expected = gradients(InfoNCE(**made, engine="dense")(z1, z2).sum(), [z1, z2])
    loss = InfoNCE(**made, engine=engine)(z1, z2).sum()
    first = gradients(loss, [z1, z2], retain_graph=True)
    assert all(d.isfinite().all() for d in first)
    size = float(torch.cat(expected).abs().max())
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-3 * size)
    torch.testing.assert_close(gradients(loss, [z1, z2]), first)


def test_a_number_and_a_learned_temperature(engine):
    """A number arrives as a tensor without a gradient, in batches of any size."""
    shapes = []

    def function(scores, pair):
        shapes.append(pair.temperature.shape)
        return scores.clamp(max=0.9 / float(pair.temperature))

    InfoNCE(score_mod=function, engine=engine)(*views()).backward()
    assert set(shapes) == {torch.Size([])}


def test_temperatures_under_vmap():
    def value(tau):
        loss = InfoNCE(score_mod=far, engine="dense")
        object.__setattr__(loss, "temperature", tau)
        return loss(Z1, Z2)

    taus = torch.tensor([0.2, 0.4], dtype=torch.float64)
    found = torch.func.grad(lambda taus: torch.vmap(value)(taus).sum())(taus)
    expected = torch.stack([torch.func.grad(value)(tau) for tau in taus])
    torch.testing.assert_close(found, expected)


def test_not_a_number_for_a_negative(engine):
    def one_nan(scores, pair):
        return scores.masked_fill(pair.query[..., 1] == pair.query[..., 1].max(), torch.nan)

    assert InfoNCE(score_mod=one_nan, engine=engine)(*views(), metadata=METADATA).isnan()
    broken = torch.full_like(Z1, torch.nan)
    assert InfoNCE(score_mod=margin, engine=engine)(broken, Z2).isnan()
    prototypes = torch.full((3, DIM), torch.nan, dtype=torch.float64)
    clusters = [torch.arange(N) % 3] * 2
    contrast = PrototypeReweightedNCE(score_mod=margin, engine=engine)
    assert contrast(Z1, Z2, clusters=clusters, prototypes=prototypes).isnan()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_metadata_of_any_kind(dtype, shape, engine):
    """Of any dtype and shape, one tensor for all views or one for each."""
    metadata = torch.randint(2, (N, *shape)).to(dtype)

    def function(scores, pair):
        assert pair.query.dtype == pair.key.dtype == dtype
        assert pair.query.shape[1:] == (1, *shape)
        assert pair.key.shape == (1, scores.shape[1], *shape)
        differs = (pair.query != pair.key).view(*scores.shape, -1).any(-1)
        return scores.masked_fill(differs, -torch.inf)

    loss = InfoNCE(score_mod=function, engine=engine)
    value = loss(*views(), metadata=metadata)
    torch.testing.assert_close(loss(*views(), metadata=(metadata, metadata)), value)
    same = (metadata.view(N, -1)[:, None] == metadata.view(N, -1)).all(-1).repeat(2, 2)
    losses, exist = oracle.info_nce([Z1, Z2], weights=same.double())
    torch.testing.assert_close(value, oracle.mean_of_queries(losses, exist))


def test_an_infinite_score_is_a_nan(engine):
    """A score of inf would be a negative that outweighs everything."""

    def one_inf(scores, pair):
        return scores.masked_fill(pair.query[..., 1] == pair.query[..., 1].max(), torch.inf)

    z = views()
    loss = InfoNCE(score_mod=one_inf, engine=engine)(*z, metadata=METADATA)
    assert loss.isnan()
    assert all(d.isnan().any() for d in gradients(loss, z))


@pytest.mark.parametrize("make", [InfoNCE, partial(PGCLLoss, DIM, 3)])
def test_a_loss_with_a_function_of_a_module_is_pickled_and_shown(make):
    loss = make(score_mod=by_distance)
    copied = pickle.loads(pickle.dumps(loss))
    assert getattr(copied, "contrast", copied).score_mod is by_distance
    assert "score_mod=helpers.score_mods.by_distance" in repr(loss)
    assert " at 0x" not in repr(make(score_mod=Frozen())) + repr(make(score_mod=lambda s, p: s))


def test_terms_and_modules_get_metadata():
    pgcl = PGCLLoss(DIM, 3, score_mod=by_distance).double().eval()
    terms = pgcl.terms(Z1, Z2, metadata=METADATA)
    torch.testing.assert_close(terms.loss, pgcl(Z1, Z2, metadata=METADATA))
    contrast = pgcl.contrast(Z1, Z2, terms.assignments, metadata=METADATA)
    torch.testing.assert_close(contrast, terms.contrast)
    pgcl.contrast.score_mod = None
    assert (pgcl.contrast(Z1, Z2, terms.assignments) - contrast).abs() > 1e-3


def test_a_contrast_of_the_user_may_read_metadata():
    class Own(nn.Module):
        def forward(self, batch):
            return batch.metadata.mean() + 0 * batch.embeddings.sum()

    pgcl = PGCLLoss(DIM, 3, consistency_weight=0.0).double()
    pgcl.contrast = Own()
    torch.testing.assert_close(pgcl(Z1, Z2, metadata=METADATA), torch.cat(METADATA).mean())


def test_has_metadata():
    found = []

    def function(scores, pair):
        found.append(hasattr(pair, "query"))
        return scores

    InfoNCE(score_mod=function)(Z1, Z2)
    InfoNCE(score_mod=function)(Z1, Z2, metadata=METADATA)
    assert found == [False, True]


def returning(value):
    return lambda: InfoNCE(score_mod=lambda scores, pair: value(scores))(Z1, Z2)


def with_metadata(metadata, score_mod=by_distance):
    return lambda: InfoNCE(score_mod=score_mod)(Z1, Z2, metadata=metadata)


with torch.device("cpu"):  # torch itself mixes devices when it makes one
    NESTED = torch.nested.nested_tensor([torch.zeros(2)] * N, layout=torch.jagged)
LEARNED = METADATA[0].clone().requires_grad_()
ERRORS = [
    (TypeError, lambda: InfoNCE(score_mod=0.3), "score_mod", "None, or a function", "0.3"),
    (TypeError, returning(lambda scores: None), "score_mod must return", "None"),
    (TypeError, returning(lambda scores: scores > 0), "masked_fill", "torch.bool"),
    (TypeError, returning(lambda scores: scores[:, :1]), "(14, 14)", "(14, 1)"),
    (TypeError, returning(lambda scores: scores[:1]), "(14, 14)", "(1, 14)"),
    (AttributeError, with_metadata(None), "pair.query", "metadata="),
    (ValueError, with_metadata(METADATA, None), "metadata", "score_mod is None"),
    (ValueError, with_metadata(METADATA[0][1:]), "metadata", "[7, ...]", "(6, 3)"),
    (ValueError, with_metadata((METADATA[0], METADATA[1][1:])), "metadata[1]", "z2"),
    (ValueError, with_metadata(torch.tensor(1.0)), "metadata", "[7, ...]"),
    (ValueError, with_metadata(METADATA[:1]), "metadata must be 2 Tensors", "1"),
    (ValueError, with_metadata((METADATA[0], METADATA[1].float())), "float32", "metadata[0]"),
    (ValueError, with_metadata((METADATA[0], METADATA[1][:, :2])), "[2]", "[3]"),
    (TypeError, with_metadata([1.0] * N), "metadata must be a Tensor", "list"),
    (TypeError, with_metadata(METADATA[0].cpu().to_sparse()), "metadata", "dense", "sparse_coo"),
    (TypeError, with_metadata(NESTED), "metadata", "dense", "nested"),
    (ValueError, with_metadata(LEARNED), "metadata requires grad", "detach()", "engine='dense'"),
    (
        TypeError,
        lambda: InfoNCE(score_mod=lambda scores: scores),
        "score_mod",
        "a pair",
        "too many",
    ),
    (TypeError, lambda: InfoNCE()(Z1, Z2, features=Z1), "features", "did you mean metadata"),
    (TypeError, lambda: InfoNCE(mask_mod=margin), "mask_mod", "did you mean score_mod"),
]


@pytest.mark.parametrize(("error", "call", "words"), [(e, c, w) for e, c, *w in ERRORS])
def test_mistakes(error, call, words):
    assert_error(error, call, words)


def test_options_that_cannot_be_combined():
    pairs = torch.tensor([[0, 1], [2, 9]])
    for name, options, given in (
        ("hardness", {"hardness": 0.5}, {}),
        ("debias", {"debias": 0.1}, {}),
        ("memory_size", {"memory_size": 5, "dim": DIM}, {}),
        ("negative_pairs", {}, {"negative_pairs": pairs}),
    ):
        loss = InfoNCE(score_mod=margin, **options)
        assert_error(ValueError, partial(loss, Z1, Z2, **given), ["score_mod", name, "choose"])
    pgcl = PGCLLoss(DIM, 3, memory_size=5, score_mod=margin).double()
    assert_error(ValueError, partial(pgcl, Z1, Z2), ["score_mod", "memory_size"])


def test_the_weights_of_pgcl_by_hand():
    """As the documentation shows: its table looked up by the clusters of both embeddings."""
    prototypes = SinkhornPrototypes(DIM, 3).double()
    assignments = prototypes(Z1, Z2)
    clusters = [assignment.clusters for assignment in assignments]
    q = torch.nn.functional.one_hot(torch.cat(clusters), 3).double()
    weights = oracle.family_weights(torch.cat([Z1, Z2]), [q], [prototypes.weight])
    table = torch.zeros(3, 3, dtype=torch.float64)
    table[torch.cat(clusters)[:, None], torch.cat(clusters)] = weights

    def by_hand(scores, pair):
        return scores + table.log()[pair.query, pair.key]

    ours = PrototypeReweightedNCE()(Z1, Z2, assignments)
    torch.testing.assert_close(
        InfoNCE(temperature=0.5, score_mod=by_hand)(Z1, Z2, metadata=clusters), ours
    )
