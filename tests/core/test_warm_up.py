"""A warm-up by InfoNCE, at whose end the prototypes are initialised by themselves."""

import copy
import gc
import io
import pickle
import warnings
from unittest import mock

import pytest
import torch
from helpers.cases import EVERY_MODE, FAMILY
from helpers.rank_models import Inside, gradients, mean_over_ranks, model_of, of_seed
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE, diagnostics, warm_up
from pgcl_losses._normalize import unit_vectors
from pgcl_losses.kmeans import draw, spherical_kmeans

DIM = 4
MEMBERS = [{"num_prototypes": 4}, *FAMILY]
COMPILING = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Guards may run:RuntimeWarning",
    "ignore:The .grad attribute:UserWarning",  # torch's own, where a graph breaks
)


def views_of(num_views=2, num_graphs=9, seed=None):
    random = None if seed is None else of_seed(seed)
    views = torch.randn(num_views, num_graphs, DIM, dtype=torch.float64, generator=random)
    return views.requires_grad_()


def pgcl_of(num_prototypes=3, **options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, num_prototypes, **{"warmup_steps": 2, **options}).double()


def of_kept(pgcl, views):
    """The prototypes that k-means finds among these embeddings."""
    random, weight = torch.Generator().manual_seed(0), pgcl.prototypes.weight.detach()
    rows = unit_vectors(torch.cat([of.detach().flatten(0, 1) for of in views]), torch.float64)
    heads = pgcl.prototypes.heads
    new = [spherical_kmeans(rows, of, draw(len(of), random)) for of in weight.split(heads)]
    return torch.cat(new) * weight.norm(dim=1, keepdim=True)


def weight_of(pgcl):
    return pgcl.prototypes.weight.detach().clone()


@given(
    member=st.sampled_from(MEMBERS),
    mode=st.sampled_from(EVERY_MODE),
    num_views=st.integers(2, 3),
    engine=st.sampled_from(["dense", "streaming"]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    memory_size=st.sampled_from([0, 7]),
    with_items=st.booleans(),
    contrast_weight=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_is_info_nce_and_then_pgcl(
    member, mode, num_views, engine, reduction, memory_size, with_items, contrast_weight
):
    options = {"engine": engine, "reduction": reduction, "memory_size": memory_size}
    of_pgcl = {**options, **mode, **member, "contrast_weight": contrast_weight}
    items = {"items": torch.arange(9) // 2} if with_items else {}
    pgcl = pgcl_of(**of_pgcl)
    info_nce = InfoNCE(**options, negatives=mode["negatives"]).double()
    seen, random = [], weight_of(pgcl)
    for _ in range(2):
        assert torch.equal(weight_of(pgcl), random)
        seen.append(views_of(num_views))
        terms, expected = pgcl.terms(*seen[-1], **items), info_nce(*seen[-1], **items)
        assert torch.equal(terms.loss, expected)
        assert terms.contrast is terms.loss
        assert terms.assignments == ()
        assert torch.equal(terms.consistency, torch.zeros_like(expected))
        names = {"loss", "contrast", "consistency", "mean_cosine"}
        assert diagnostics(terms, pgcl.prototypes.weight).keys() == names
        assert diagnostics(terms)["loss"] == expected.mean().item()
        d_views, d_weight = torch.autograd.grad(
            terms.loss.sum(), [seen[-1], pgcl.prototypes.weight]
        )
        assert torch.equal(d_views, torch.autograd.grad(expected.sum(), seen[-1])[0])
        assert torch.equal(d_weight, torch.zeros_like(d_weight))
    plain = pgcl_of(**of_pgcl, warmup_steps=0)
    torch.testing.assert_close(weight_of(pgcl), of_kept(plain, seen))
    plain.load_state_dict(pgcl.state_dict(), strict=False)
    views = views_of(num_views)
    terms, expected = pgcl.terms(*views, **items), plain.terms(*views, **items)
    assert torch.equal(terms.loss, expected.loss)
    assert torch.equal(weight_of(pgcl), weight_of(plain))  # they are initialised once


def test_moves_no_generator_and_is_repeatable():
    weights = []
    for seed in range(2):
        pgcl = pgcl_of()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        for step in range(3):
            pgcl(*views_of(seed=step))
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(weight_of(pgcl))
    assert torch.equal(*weights)


@pytest.mark.parametrize(("num_prototypes", "size"), [(3, 4096), (600, 4800)])
def test_keeps_the_last_embeddings_and_of_a_large_batch_a_sample(num_prototypes, size):
    kept = pgcl_of(num_prototypes).warm_up.kept
    assert len(kept.embeddings) == size
    pgcl = pgcl_of(num_prototypes, warmup_steps=1)
    kept = pgcl.warm_up.kept
    views = views_of(num_graphs=size, seed=1)
    rows = unit_vectors(views.detach(), torch.float64).flatten(0, 1)
    pgcl.warm_up.goes_on(pgcl.prototypes, None, True)
    pgcl.warm_up.keep(rows.unsqueeze(0), mock.Mock(rank=1))
    assert torch.equal(kept.embeddings, rows[::2])
    pgcl.warm_up.keep(rows[None, :10], mock.Mock(rank=1))
    assert torch.equal(kept.embeddings, torch.cat([rows[:10], rows[20::2]]))


@pytest.mark.parametrize("before", [True, False])
def test_prototypes_initialised_by_hand_stay(before):
    pgcl = pgcl_of()
    steps = 1 if before else 3
    for step in range(steps):
        pgcl(*views_of(seed=step))
    weight = weight_of(pgcl.prototypes.start_from_(torch.randn(20, DIM)) and pgcl)
    for step in range(3):
        pgcl(*views_of(seed=step))
    assert torch.equal(weight_of(pgcl), weight)
    assert pgcl.warm_up.over


def test_only_finite_training_forwards_count():
    pgcl, views = pgcl_of(memory_size=5), views_of()
    state = copy.deepcopy(pgcl.state_dict())
    with torch.no_grad():
        pgcl(*views)
    pgcl.eval()
    for broken in (views, views.detach() * torch.nan):
        if broken is not views:
            pgcl.train()
        for _ in range(3):
            pgcl(*broken)
        torch.testing.assert_close(pgcl.state_dict(), state, rtol=0, atol=0)
    info_nce = InfoNCE(memory_size=5)
    for _ in range(2):
        assert torch.equal(pgcl(*views), info_nce(*views))
    pgcl.eval()
    assert pgcl.terms(*views).assignments


def test_freezing_counts_from_its_end():
    pgcl = pgcl_of(freeze_steps=1)
    moving = []
    for step in range(4):
        loss = pgcl(*views_of(seed=step))
        moving.append(bool(torch.autograd.grad(loss, pgcl.prototypes.weight)[0].any()))
    assert moving == [False, False, False, True]


def test_every_parameter_has_a_gradient():
    pgcl = pgcl_of()
    pgcl.contrast.temperature = nn.Parameter(torch.tensor(0.3))
    pgcl.prototypes.temperature = nn.Parameter(torch.tensor(0.1))
    for step in range(3):
        pgcl.zero_grad()
        pgcl(*views_of(seed=step)).backward()
        assert all(parameter.grad is not None for parameter in pgcl.parameters())


def train(encoder, pgcl, optimizer, steps, generator):
    for step in range(steps):
        x = torch.randn(2, 8, 3, dtype=torch.float64, generator=generator)
        pgcl(*encoder(x)).backward()
        if step % 2:  # a step of two batches
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("stop", [2, 4, 6])
@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 pickles
def test_a_checkpoint_goes_on_bit_for_bit(stop):
    def make(seed):
        torch.manual_seed(seed)
        encoder = nn.Linear(3, DIM).double()
        pgcl = PGCLLoss(DIM, (3, 4), warmup_steps=4, queue_size=4, freeze_steps=1).double()
        modules = nn.ModuleList([encoder, pgcl])
        return modules, torch.optim.Adam(modules.parameters(), lr=0.05)

    whole, optimizer = make(0)
    generator = of_seed(5)
    train(*whole, optimizer, stop, generator)
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict(), generator.get_state()], file)
    copies = [copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
    train(*whole, optimizer, 4, generator)
    resumed, of_resumed = make(1)
    for model in (resumed, *copies):
        file.seek(0)
        state, of_optimizer, of_generator = torch.load(file, weights_only=False)
        of_resumed = torch.optim.Adam(model.parameters(), lr=0.05)
        if model is resumed:
            model.load_state_dict(state)
        of_resumed.load_state_dict(of_optimizer)
        generator.set_state(of_generator)
        train(*model, of_resumed, 4, generator)
        torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_of_a_longer_warm_up_initialises_the_prototypes():
    longer, pgcl = pgcl_of(warmup_steps=9), pgcl_of()
    seen = [views_of(seed=step) for step in range(3)]
    for views in seen:
        longer(*views)
    pgcl.load_state_dict(longer.state_dict())
    random = weight_of(pgcl)
    with torch.no_grad():
        assert not pgcl.terms(*views_of()).assignments
    assert torch.equal(weight_of(pgcl), random)
    assert pgcl.terms(*views_of()).assignments
    torch.testing.assert_close(weight_of(pgcl), of_kept(longer, seen))


def test_a_checkpoint_without_embeddings_goes_on_for_a_step():
    longer, pgcl = pgcl_of(warmup_steps=99), pgcl_of()
    large = views_of(num_graphs=4096)
    for _ in range(3):
        longer(*large)
    assert longer.warm_up.kept.written == 0  # as none of them will be the last ones
    pgcl.load_state_dict(longer.state_dict())
    assert not pgcl.terms(*views_of(seed=4)).assignments
    assert pgcl.terms(*views_of()).assignments
    torch.testing.assert_close(weight_of(pgcl), of_kept(longer, [views_of(seed=4)]))


def test_a_checkpoint_after_it_is_over_at_once():
    done, pgcl = pgcl_of(), pgcl_of()
    for step in range(3):
        done(*views_of(seed=step))
    model = nn.ModuleList([pgcl])
    model.load_state_dict(nn.ModuleList([done]).state_dict())
    assert pgcl.warm_up.over
    views = views_of()
    torch.testing.assert_close(pgcl.eval()(*views), done.eval()(*views))


def test_begins_anew_with_new_parameters():
    pgcl = pgcl_of(memory_size=3, queue_size=3)
    for _ in range(2):
        for step in range(4):
            assert bool(pgcl.terms(*views_of(seed=step)).assignments) == (step > 1)
        assert pgcl.warm_up.over
        random = weight_of(pgcl)
        for module in pgcl.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert not torch.equal(weight_of(pgcl), random)
        assert not any(of.any() for name, of in pgcl.named_buffers() if "items" not in name)


def test_old_prototypes_load():
    state = pgcl_of(warmup_steps=0).state_dict()
    del state["prototypes.initialised"]
    pgcl = pgcl_of(warmup_steps=0)
    pgcl.prototypes.start_from_(torch.randn(9, DIM))
    pgcl.load_state_dict(state)
    assert not pgcl.prototypes.initialised


def test_reads_numbers_of_the_device_only_where_it_may_end():
    pgcl, numbers = pgcl_of(warmup_steps=5), []
    read = torch.Tensor.__int__
    for step in range(8):
        views = views_of(seed=step) * (torch.nan if step == 1 else 1)
        with mock.patch.object(
            torch.Tensor, "__int__", lambda tensor, s=step: numbers.append(s) or read(tensor)
        ):
            pgcl(*views)
    # At first; at the end that NaN puts off; then the number of steps and of what is kept.
    assert numbers == [0, 4, 5, 5]
    assert pgcl.warm_up.over


def test_no_option_of_the_warm_up_changes_later():
    with pytest.raises(AttributeError, match="warmup_steps is 2 and cannot change in this PGCLL"):
        pgcl_of().warmup_steps = 3


def test_another_contrast_needs_info_nce():
    pgcl = pgcl_of()
    pgcl.contrast = nn.Identity()
    with pytest.raises(TypeError, match="contrast is a Identity without a method info_nce"):
        pgcl(*views_of())

    class Halved(PrototypeReweightedNCE):
        def info_nce(self, batch):
            return super().info_nce(batch) / 2

    pgcl.contrast = Halved()
    views = views_of()
    torch.testing.assert_close(pgcl(*views), InfoNCE()(*views) / 2)


def test_cannot_be_captured_or_transformed():
    pgcl, views = pgcl_of(), views_of()
    with (
        mock.patch.object(warm_up, "is_capturing", return_value=True) as capturing,
        pytest.raises(RuntimeError, match=r"CUDA graph.* after warmup_steps=2 training forwards"),
    ):
        pgcl(*views)
    with pytest.raises(RuntimeError, match=r"transform of torch.func: do so after warmup_steps=2"):
        torch.func.grad(lambda z: pgcl(z, z))(views[0].detach())
    for _ in range(3):
        pgcl(*views)
    with mock.patch.object(warm_up, "is_capturing", capturing):
        pgcl(*views)
    torch.func.grad(lambda z: pgcl(z, z))(views[0].detach())


@COMPILING
@pytest.mark.parametrize("options", [{}, {"memory_size": 5, "num_prototypes": (3, 4)}], ids=str)
def test_compiles_after_it(options):
    torch.compiler.reset()
    eager = pgcl_of(**options)
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return module.forward

    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, backend=counting)
    for step in range(5):
        views = [*views_of()]
        torch.testing.assert_close(compiled(*views), eager(*views))
        torch.testing.assert_close(twin.state_dict(), eager.state_dict())
        assert len(graphs) == (step > 2)
    torch.compiler.reset()
    torch.compile(twin, backend=counting, fullgraph=True)(*views)
    assert len(graphs) == 2
    with pytest.raises(Exception, match="warm-up runs in Python: compile without fullgraph=True"):
        torch.compile(pgcl_of(), backend=counting, fullgraph=True)(*views)


COUNTS = {1: [7], 2: [2, 5], 3: [4, 0, 3]}


def over_ranks(rank, num_ranks, wrapped):
    options = {"num_prototypes": (3, 4), "warmup_steps": 2, "memory_size": 5}
    ours, whole = Inside(*model_of(rank, **options)), Inside(*model_of(0, **options, gather=False))
    if not wrapped:
        ours = Inside(*model_of(0, **options))
    model = DistributedDataParallel(ours) if wrapped else ours
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (ours, whole)]
    for step in range(5):
        x = torch.randn(2, 7, 3, dtype=torch.float64, generator=of_seed(step))
        losses = model(*(of.split(COUNTS[num_ranks])[rank] for of in x)), whole(*x)
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        if not wrapped:
            for parameter in ours.parameters():
                parameter.grad = mean_over_ranks(parameter.grad)
        torch.testing.assert_close(gradients(ours), gradients(whole), rtol=1e-7, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
        state = ours.state_dict(), whole.state_dict()
        torch.testing.assert_close(*state, rtol=1e-6, atol=1e-8)
    return weight_of(ours.pgcl)


@pytest.mark.parametrize(("num_ranks", "wrapped"), [(1, False), (2, False), (3, False), (2, True)])
def test_over_ranks(num_ranks, wrapped):
    first, *others = on_ranks(over_ranks, num_ranks, wrapped)
    assert all(torch.equal(first, other) for other in others)


def different_calls(rank, num_ranks):
    _, pgcl = model_of(0, warmup_steps=2, memory_size=3)
    z = torch.randn(6, DIM, dtype=torch.float64, generator=of_seed(0))
    calls = {
        "SinkhornPrototypes.start_from_": lambda: pgcl.prototypes.start_from_(z),
        "PGCLLoss.remember": lambda: pgcl.remember(z),
        "InfoNCE.forward": lambda: InfoNCE()(z, z),
    }
    for name, call in calls.items():
        message = (
            f"^rank 0 calls {name}, rank 1 calls PGCLLoss.forward: all ranks must make the same "
            "calls$"
        )
        with pytest.raises(ValueError, match=message):
            call() if rank == 0 else pgcl(z, z)
    torch.testing.assert_close(*[mean_over_ranks(z.sum())] * 2)
    value = pgcl(z, z) if rank else pgcl.terms(z, z).loss  # terms are for any rank
    torch.testing.assert_close(mean_over_ranks(value), value.detach())


def apart(rank, num_ranks):
    _, pgcl = model_of(0, warmup_steps=1, gather=False)
    z = torch.randn(6, DIM, dtype=torch.float64, generator=of_seed(rank), requires_grad=True)
    with pytest.warns(UserWarning, match="gather=False .* broadcast pgcl.prototypes.weight"):
        pgcl(z, z)


@pytest.mark.parametrize("function", [different_calls, apart])
def test_errors_and_warnings_of_ranks(function):
    on_ranks(function, 2)


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
        gc.collect()
    return [str(warning.message) for warning in caught]


class TestSilentFailures:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"warmup_steps": 9}, "does not update the warm-up:"),
            ({"queue_size": 2, "memory_size": 3}, "does not update the memory and the queue:"),
            ({}, None),
        ],
    )
    def test_training_in_eval_mode(self, options, text):
        pgcl = pgcl_of(**{"warmup_steps": 0, **options}).eval()
        said = warned(lambda: [pgcl(*views_of()).backward() for _ in range(4)])
        assert len(said) == (text is not None)
        assert all(text in each for each in said)

    def test_not_of_a_validation(self):
        pgcl = pgcl_of()

        def epochs():
            for _ in range(3):
                pgcl.eval()
                with torch.no_grad():
                    pgcl(*views_of())
                pgcl(*views_of()).backward()
                pgcl.train()(*views_of()).backward()

        assert warned(epochs) == []

    @pytest.mark.parametrize(("forwards", "steps", "says"), [(17, 20, 1), (16, 20, 0), (20, 20, 0)])
    def test_a_warm_up_that_is_never_over(self, forwards, steps, says):
        def training():
            pgcl = pgcl_of(warmup_steps=steps)
            for _ in range(forwards):
                pgcl(*views_of())
            copy.deepcopy(pgcl)  # one that does not train

        said = warned(training)
        assert said == [] or "ended in the warm-up, after 17 of 20 forwards, so PGCL" in said[0]
        assert len(said) == says

    def test_an_optimizer_that_puts_parameters_back(self):
        """As SAM does: two forwards a step, then the parameters of before the second."""
        pgcl = pgcl_of(warmup_steps=4)
        found = []

        def train():
            for step in range(4):
                pgcl(*views_of(seed=step)).backward()
                before = weight_of(pgcl)
                pgcl(*views_of(seed=step)).backward()
                found.append(weight_of(pgcl))
                pgcl.prototypes.weight.data.copy_(before)

        (said,) = warned(train)
        assert "put the former ones back" in said
        torch.testing.assert_close(weight_of(pgcl), found[1])
        assert not torch.equal(found[0], found[1])

    def test_too_few_embeddings(self):
        pgcl = pgcl_of((3, 30))
        text = "PGCLLoss: 18 different embeddings initialise 30 prototypes, so 12 prototypes stay"
        z = views_of(num_graphs=9)
        assert [each[: len(text)] for each in warned(lambda: [pgcl(*z), pgcl(*z)])] == [text]

    def test_an_encoder_without_gradient(self):
        pgcl = pgcl_of(warmup_steps=99)
        (said,) = warned(lambda: [pgcl(*views_of().detach()) for _ in range(16)])
        assert "the embeddings had no gradient in 16 training forwards" in said


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PGCLLoss(9, tau=0.1), "^PGCLLoss has no argument tau: did you mean temperature"),
        (lambda: InfoNCE(tau=0.1), "^InfoNCE has no argument tau: did you mean temperature"),
        (lambda: PGCLLoss(9, K=3), "K: did you mean num_prototypes"),
        (lambda: PGCLLoss(9, lambda_=3), "lambda_: did you mean consistency_weight"),
        (lambda: PGCLLoss(9, lam=3), "lam: did you mean consistency_weight"),
        (lambda: PGCLLoss(9, eps=3), "eps: did you mean epsilon"),
        (lambda: PGCLLoss(embedding_dim=9), "embedding_dim: did you mean dim"),
        (lambda: PGCLLoss(hidden_dim=9), "hidden_dim: did you mean dim"),
        (lambda: PGCLLoss(9, lead_steps=3), "lead_steps: did you mean warmup_steps"),
        (lambda: InfoNCE(K=3), "unexpected keyword argument 'K'"),
        (lambda: PGCLLoss(4)(*views_of(), torch.arange(9)), "z3 .*: give labels as items="),
        (lambda: InfoNCE()(*views_of(), torch.arange(9)), "z3 .*: give labels as items="),
    ],
)
def test_arguments_by_other_names(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_subclass_has_arguments_of_its_own():
    class Mine(PGCLLoss):
        def __init__(self, tau, **options):
            super().__init__(DIM, temperature=tau, **options)

    assert pickle.loads(pickle.dumps(InfoNCE(temperature=0.3))).temperature == 0.3
    assert copy.deepcopy(Mine(tau=0.3)).temperature == 0.3


@given(options=st.sampled_from([*EVERY_MODE, {"soft_clusters": True}, {"queue_size": 5}]))
def test_without_consistency_no_prediction_is_computed(options):
    pgcl = pgcl_of(warmup_steps=0, consistency_weight=0.0, **options)
    plain = pgcl_of(warmup_steps=0, **options)
    with mock.patch.object(pgcl.consistency, "forward", side_effect=AssertionError):
        views = views_of()
        terms, expected = pgcl.terms(*views), plain.terms(*views)
    assert torch.equal(terms.loss, expected.contrast)
    assert torch.equal(terms.consistency, torch.zeros_like(terms.loss))
    torch.testing.assert_close(terms.assignments[0][1:], expected.assignments[0][1:])
    (ours,) = torch.autograd.grad(terms.loss, views)
    assert torch.equal(ours, torch.autograd.grad(expected.contrast, views)[0])
    torch.testing.assert_close(pgcl.state_dict(), plain.state_dict())
