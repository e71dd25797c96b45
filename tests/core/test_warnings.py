"""Silent failures are reported by one warning each; healthy training gives none."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers.cases import in_chunks
from helpers.ranks import on_ranks

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes
from pgcl_losses.watch import _PATIENCE

DIM = 6
STEPS = 64  # enough for each warning
ONE_DIRECTION = torch.linspace(1, 2, DIM)


@pytest.fixture(autouse=True)
def values_arrive_at_once(monkeypatch):
    """On a GPU they may arrive some steps later, and so may the warning."""
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: event.synchronize() is None)


def train(
    loss, views_of=lambda z, step: z, lr=1e-3, num_graphs=12, accumulate=1, until=None, **given
):
    """The warnings of a training, whose embeddings ``z`` [2, N, D] are parameters."""
    z = torch.nn.Parameter(torch.randn(2, num_graphs, DIM))
    optimizer = torch.optim.SGD([*loss.parameters()] or [z], lr=lr)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            loss(*views_of(z, step), **given).backward()
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            if until is not None and any(until in str(warning.message) for warning in caught):
                break
    return [str(warning.message) for warning in caught]


def collapsed(z, step, spread=0.05):
    return ONE_DIRECTION + spread * z[:1].expand_as(z)  # views that agree


ONE_CLUSTER = {"views_of": lambda z, step: ONE_DIRECTION + 1e-7 * z}
COLLAPSED = {"views_of": collapsed, "lr": 1e-5, "num_graphs": 40}
SHARP = {"num_prototypes": (3, 4), "epsilon": 0.01}
DETACHED = {"views_of": lambda z, step: z.detach()}
INFINITE = {"views_of": lambda z, step: (z.detach().abs() / 0).requires_grad_()}
LEARNED = {"temperature": torch.nn.Parameter(torch.tensor(0.2))}
LABELS = torch.arange(12)
NOTHING_LEFT = "no query has both positives and negatives"
NEGATIVE_PAIRS = torch.tensor([[0, 1], [5, 7]])
FAR = "the positives of all queries are far above their negatives"
WITHOUT_NOISE = {"views_of": lambda z, step: (100 * z[0], 100 * z[0] + 0)}


def all_but_one(scores, pair):
    return scores.masked_fill(pair.query == pair.key, -torch.inf)


class ByHand(torch.nn.Module):
    """PGCL composed of its modules, as the page composes it."""

    def __init__(self, dim, **options):
        super().__init__()
        self.pgcl = PGCLLoss(dim, **options)

    def forward(self, *views):
        prototypes, contrast, consistency = self.pgcl.children()
        a = prototypes(*views)
        return contrast(*views, a) + self.pgcl.consistency_weight * consistency(a)


class Short(ByHand):
    def forward(self, *views):
        prototypes, contrast, consistency = self.pgcl.children()
        a = prototypes(*views)
        return contrast(a) + self.pgcl.consistency_weight * consistency(a)


@pytest.mark.parametrize("loss", [PGCLLoss, ByHand, Short])
@pytest.mark.parametrize(
    ("text", "options", "training"),
    [
        ("hold NaN or inf", {}, {"views_of": lambda z, step: z / 0}),
        ("the contrast is 0, as no query has both", {"num_prototypes": 1}, {}),
        ("the contrast is 0, as no query has both", {}, {"num_graphs": 1}),
        ("12 graphs of a batch and 0 of the queue are balanced", {"num_prototypes": 16}, {}),
        ("the prototypes have not moved in 16 training forwards: ", {}, {"lr": 0}),
        ("had no gradient in 16 training forwards", {}, DETACHED),
        ("had no gradient", {"consistency_weight": 0, **LEARNED}, DETACHED),
        ("are in one cluster, normalise in the encoder", {"epsilon": 10.0}, ONE_CLUSTER),
        ("are collapsed: their mean cosine is 1.00", SHARP, COLLAPSED),
    ],
)
def test_one_warning(text, options, training, loss):
    (message,) = train(loss(DIM, **{"num_prototypes": 4, **options}), **training)
    assert message.startswith("pgcl_losses: ")
    assert text in message


@pytest.mark.parametrize(
    ("text", "options", "training"),
    [
        ("hold NaN or inf", {}, {"views_of": lambda z, step: z / 0}),
        ("hold NaN or inf", {"similarity": "dot"}, INFINITE),
        (NOTHING_LEFT, {}, {"num_graphs": 1}),
        (NOTHING_LEFT, {}, {"labels": (LABELS, LABELS + 12)}),
        (NOTHING_LEFT, {}, {"labels": 0 * LABELS}),
        ("two views are one tensor", {}, {"views_of": lambda z, step: (z[0],) * 2}),
        ("had no gradient", LEARNED, DETACHED),
        # A value of 0 has two causes, and what is counted says which.
        (FAR, {"similarity": "dot"}, WITHOUT_NOISE),
        (FAR, {"temperature": 1e-5}, WITHOUT_NOISE),
        (FAR, {"temperature": 1e-5, "hardness": 1.0, "debias": 0.01}, WITHOUT_NOISE),
        (FAR, {"temperature": 1e-5}, {**WITHOUT_NOISE, "labels": LABELS}),
        (FAR, {"temperature": 1e-5, "reduction": "sum", "over_positives": "sum"}, WITHOUT_NOISE),
        (
            FAR,
            {"temperature": 1e-5, "score_mod": all_but_one},
            {**WITHOUT_NOISE, "metadata": LABELS},
        ),
        (NOTHING_LEFT, {"score_mod": all_but_one}, {"metadata": 0 * LABELS}),
        (None, {}, {}),
        (None, {}, {"labels": (LABELS, LABELS.clamp_min(11))}),  # one positive in the batch
        (None, {}, {"labels": LABELS // 2, "views_of": lambda z, step: z[:1]}),
        (None, {"queries": "first", "memory_size": 4, "dim": DIM}, {"num_graphs": 1}),
    ],
)
def test_one_warning_of_info_nce(text, options, training):
    messages = train(InfoNCE(**options), **training)
    assert len(messages) == (text is not None)
    assert all(message.startswith("pgcl_losses: ") and text in message for message in messages)


def warnings_as_errors(rank, num_ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, z = InfoNCE(), torch.full((3, DIM), torch.nan, requires_grad=True)
        with pytest.raises(UserWarning, match="hold NaN or inf"):
            loss(z, z + 0)


def test_all_ranks_warn_so_that_none_waits_for_one_that_failed():
    on_ranks(warnings_as_errors, 2)


@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({}, {}),
        ({}, {"accumulate": _PATIENCE}),
        ({"freeze_steps": 1000}, {}),
        ({"weighting": "sample", "exclude_same_cluster": False}, {}),
        # Prototypes that cannot learn.
        ({"consistency_weight": 0}, {"lr": 0}),
        # A queue that makes up for small batches, and batches that alternate.
        ({"num_prototypes": 16, "queue_size": 4}, {}),
        ({"queue_size": 64}, {"num_graphs": 2}),
        ({"num_prototypes": 10}, {"views_of": lambda z, step: z if step % 2 else z[:, :3]}),
        # A gradient of one view, and of one batch in sixteen.
        ({}, {"views_of": lambda z, step: (z[0], z[1].detach())}),
        ({}, {"views_of": lambda z, step: z.detach() if step % _PATIENCE else z}),
        # A cluster of all embeddings in one of two heads, or without exclusion.
        ({"num_prototypes": (1, 4)}, {"num_graphs": 40}),
        ({"epsilon": 10.0, "consistency_weight": 0, "exclude_same_cluster": False}, ONE_CLUSTER),
        # Embeddings that differ, and those that no prototype has to tell apart.
        (SHARP, {**COLLAPSED, "views_of": lambda z, step: collapsed(z, step, spread=1.0)}),
        ({**SHARP, "consistency_weight": 0}, COLLAPSED),
    ],
)
@pytest.mark.parametrize("loss", [PGCLLoss, ByHand, Short])
def test_no_warning(options, training, loss):
    assert train(loss(DIM, **{"num_prototypes": 4, **options}), **training) == []


def epochs(*sizes):
    """Views of batches with these sizes, again and again."""
    return {"views_of": lambda z, step: z[:, : sizes[step % len(sizes)]], "num_graphs": 40}


@pytest.mark.parametrize(
    ("training", "num_warnings"),
    [
        (epochs(40, 40, 40, 5), 1),
        (epochs(*[40] * 12, 1), 1),
        (epochs(40, 40, 40, 6), 0),  # more than an eighth
        (epochs(40, 40, 2), 1),
        (epochs(*[40] * 5, *[5] * 5), 0),  # two loaders, one after the other
        (epochs(40, 5), 0),  # and in turns
        (epochs(*[40] * 50, 5, *[40] * 50), 0),  # once, such as a validation in train mode
        (epochs(5), 0),  # micro-batches of one size
        (epochs(40, 3, 17, 30, 2, 24, 9), 0),  # embeddings that a mask chooses
    ],
)
@pytest.mark.parametrize(
    "loss", [lambda dim: PGCLLoss(dim, 2), lambda dim: ByHand(dim, num_prototypes=2), "InfoNCE"]
)
def test_a_small_last_batch(loss, training, num_warnings):
    messages = train(InfoNCE() if loss == "InfoNCE" else loss(DIM), **training)
    of_last = [message for message in messages if "its step counts as much as any other" in message]
    assert len(of_last) == num_warnings
    assert len(messages) <= 1 + (loss == "InfoNCE")


def step_of(text, loss, **training):
    """The training forward in which a warning appears."""
    steps = []
    views_of = training.pop("views_of", lambda z, step: z)
    train(loss, lambda z, step: steps.append(step) or views_of(z, step), until=text, **training)
    return len(steps)


@pytest.mark.parametrize("loss", [PGCLLoss, ByHand])
def test_warnings_come_in_time(loss):
    assert step_of("have not moved", loss(DIM, num_prototypes=4), lr=0) <= 18
    assert step_of("are collapsed", loss(DIM, **SHARP), **COLLAPSED) <= 30


@pytest.mark.parametrize("loss", [ByHand, Short])
def test_two_views_that_are_one_tensor(loss):
    messages = train(loss(DIM, num_prototypes=4), lambda z, step: (z[0],) * 2)
    assert [text for text in messages if "two views are one tensor" in text] == messages[:1]


def test_several_forwards_before_the_first_backward_are_no_collapse():
    pgcl, z = PGCLLoss(DIM, **SHARP), torch.nn.Parameter(torch.randn(2, 40, DIM))
    for step in range(6):  # embeddings that leave their common direction
        spread = 0.05 + 0.04 * step
        sum(pgcl(*collapsed(z, step, spread)) for _ in range(4)).backward()
        pgcl.prototypes.weight.data += 1e-3 * torch.randn(7, DIM)


def test_pickling_assignments_is_silent():
    a = SinkhornPrototypes(DIM, 4)(*torch.randn(2, 12, DIM, requires_grad=True).detach())
    assert len(pickle.loads(pickle.dumps(a))) == 2


def test_a_cosine_that_falls_is_no_collapse():
    def views_of(z, step):  # as of a GCN on Cora: 0.999, and still 0.93 after 40 steps
        return collapsed(z, step, spread=0.05 + 0.01 * step)

    assert train(PGCLLoss(DIM, **SHARP), **{**COLLAPSED, "views_of": views_of}) == []


def test_prototypes_that_need_not_move():
    """Without a consistency they get no gradient."""
    prototypes, contrast = SinkhornPrototypes(DIM, 4), PrototypeReweightedNCE()
    for _ in range(STEPS):  # a warning would be an error
        z = torch.randn(2, 12, DIM, requires_grad=True)
        contrast(*z, prototypes(*z)).backward()


@pytest.mark.parametrize("initialise", [False, True])
def test_prototypes_that_start_at_collapsed_embeddings_do_not_warn(initialise):
    pgcl = PGCLLoss(DIM, **SHARP, temperature=0.02)

    def views_of(z, step):
        views = collapsed(z, step, spread=0.3)
        if initialise and step == 0:
            pgcl.prototypes.start_from_(views.flatten(0, 1))
        return views

    assert len(train(pgcl, **{**COLLAPSED, "views_of": views_of})) == (not initialise)


class TestPrototypesThatNoOptimizerMoves:
    @pytest.mark.parametrize(
        ("change", "lr", "warns"),
        [
            (lambda weight: weight.sub_(1e-3), 0, False),  # as a fused optimizer does
            (lambda weight: weight.div_(weight.norm(dim=1, keepdim=True)), 0, True),
            (lambda weight: weight.div_(weight.norm(dim=1, keepdim=True)), 1e-2, False),
        ],
    )
    def test_their_directions_count(self, change, lr, warns):
        pgcl = PGCLLoss(DIM, 4)

        def views_of(z, step):
            change(pgcl.prototypes.weight.data)
            return z

        assert len(train(pgcl, views_of, lr=lr)) == warns

    def test_a_consistency_that_is_switched_on_later(self):
        pgcl = PGCLLoss(DIM, 4, consistency_weight=0.0)

        def views_of(z, step):
            pgcl.consistency_weight = float(step > 10)
            return z

        assert len(train(pgcl, views_of, lr=0)) == 1


def test_validation_and_fixed_prototypes_do_not_warn():
    pgcl = PGCLLoss(DIM, 4, memory_size=3)
    z = torch.randn(2, 12, DIM)
    for _ in range(3):  # a warning would be an error
        pgcl.eval()
        with torch.no_grad():
            pgcl(*z)
        pgcl(*z.requires_grad_()).backward()
        pgcl.train()(*z).backward()
    for encoder_learns in (False, True):  # with fixed prototypes
        fixed = PGCLLoss(DIM, 4).requires_grad_(False)
        for _ in range(STEPS):
            fixed(*z.detach().requires_grad_(encoder_learns))


def test_the_warning_points_to_the_users_line_and_a_filter_silences_it():
    z = torch.randn(2, 12, DIM, requires_grad=True)
    pgcl = PGCLLoss(DIM, 16)
    pgcl(*z)
    pgcl(*z)
    with pytest.warns(UserWarning, match="are balanced over 16") as caught:
        pgcl(*z)
    assert caught[0].filename == __file__
    silenced = PGCLLoss(DIM, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pgcl_losses")
        for _ in range(STEPS):
            silenced(*z)


def test_copies_warn_again_and_checkpoints_hold_no_counts():
    pgcl = PGCLLoss(DIM, 4)
    keys = set(pgcl.state_dict())
    assert len(train(pgcl, lr=0)) == 1
    assert train(pgcl, lr=0) == []
    assert set(pgcl.state_dict()) == keys
    for fresh in (copy.deepcopy(pgcl), pickle.loads(pickle.dumps(pgcl))):
        assert len(train(fresh, lr=0)) == 1


def test_gradients_that_vmap_batches_are_not_watched():
    pgcl, z = PGCLLoss(DIM, 4, engine="dense"), torch.randn(2, 12, DIM, requires_grad=True)
    losses = torch.stack([pgcl(*z), 2 * pgcl(*z)])
    inputs = z, pgcl.prototypes.weight
    both = torch.autograd.grad(losses, inputs, torch.eye(2), is_grads_batched=True)
    pgcl(*z).backward()
    torch.testing.assert_close(both[1][0], pgcl.prototypes.weight.grad)


def test_an_encoder_without_gradient_is_reported_within_a_short_training():
    """In forward 16: a first loop of 20 batches does not end in silence."""
    for loss in (PGCLLoss(DIM, 4), ByHand(DIM, num_prototypes=4)):
        assert step_of("had no gradient", loss, **DETACHED) == _PATIENCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [{}, {"labels": LABELS}, {"negative_pairs": NEGATIVE_PAIRS}])
@pytest.mark.parametrize("chunk", [1 << 21, 50])
def test_the_reason_of_a_zero_is_right_under_autocast(dtype, given, chunk):
    """Where temperatures and scores are beyond the range of float16."""
    with in_chunks(chunk), torch.autocast("cpu", dtype):
        (message,) = train(InfoNCE(temperature=1e-6), **{**WITHOUT_NOISE, **given})
        assert FAR in message
        messages = train(PGCLLoss(DIM, 1))
    assert [NOTHING_LEFT in message for message in messages] == [True]
