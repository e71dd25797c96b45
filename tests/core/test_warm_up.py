"""The warm-up by InfoNCE, and the initialisation of the prototypes at its end."""

import copy
import gc
import io
import pickle
import warnings
from unittest import mock

import pytest
import torch
from helpers.cases import EVERY_MODE, FAMILY
from helpers.marks import compiling
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


def views_of(num_views=2, num_graphs=9, seed=None):
    random = None if seed is None else of_seed(seed)
    views = torch.randn(num_views, num_graphs, DIM, dtype=torch.float64, generator=random)
    return views.requires_grad_()


def pgcl_of(num_prototypes=3, **options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, num_prototypes, **{"warmup_steps": 2, **options}).double()


def of_kmeans(pgcl, views):
    """The prototypes that k-means makes of these embeddings."""
    random, weight = of_seed(0), pgcl.prototypes.weight.detach()
    z = unit_vectors(torch.cat([of.detach().flatten(0, 1) for of in views]), torch.float64)
    heads = pgcl.prototypes.heads
    new = [spherical_kmeans(z, of, draw(len(of), random)) for of in weight.split(heads)]
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
def test_the_loss_is_info_nce_and_then_pgcl(
    member, mode, num_views, engine, reduction, memory_size, with_items, contrast_weight
):
    options = {"engine": engine, "reduction": reduction, "memory_size": memory_size}
    of_pgcl = {**options, **mode, **member, "contrast_weight": contrast_weight}
    items = {"items": torch.arange(9) // 2} if with_items else {}
    pgcl = pgcl_of(**of_pgcl)
    info_nce = InfoNCE(**options, negatives=mode["negatives"]).double()
    batches, random = [], weight_of(pgcl)
    for _ in range(2):
        assert torch.equal(weight_of(pgcl), random)
        batches.append(views_of(num_views))
        terms, expected = pgcl.terms(*batches[-1], **items), info_nce(*batches[-1], **items)
        assert torch.equal(terms.loss, expected)
        assert terms.contrast is terms.loss
        assert terms.assignments == ()
        assert torch.equal(terms.consistency, torch.zeros_like(expected))
        names = {"loss", "contrast", "consistency", "mean_cosine"}
        assert diagnostics(terms, pgcl.prototypes.weight).keys() == names
        assert diagnostics(terms)["loss"] == expected.mean().item()
        d_views, d_weight = torch.autograd.grad(
            terms.loss.sum(), [batches[-1], pgcl.prototypes.weight]
        )
        assert torch.equal(d_views, torch.autograd.grad(expected.sum(), batches[-1])[0])
        assert torch.equal(d_weight, torch.zeros_like(d_weight))
    plain = pgcl_of(**of_pgcl, warmup_steps=0)
    torch.testing.assert_close(weight_of(pgcl), of_kmeans(plain, batches))
    plain.load_state_dict(pgcl.state_dict(), strict=False)
    views = views_of(num_views)
    terms, expected = pgcl.terms(*views, **items), plain.terms(*views, **items)
    assert torch.equal(terms.loss, expected.loss)
    assert torch.equal(weight_of(pgcl), weight_of(plain))  # initialised once


def test_the_initialisation_is_repeatable_and_leaves_the_generator_alone():
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
def test_the_last_embeddings_are_kept_and_a_sample_of_a_large_batch(num_prototypes, size):
    kept = pgcl_of(num_prototypes).warm_up.kept
    assert len(kept.embeddings) == size
    pgcl = pgcl_of(num_prototypes, warmup_steps=1)
    kept = pgcl.warm_up.kept
    views = views_of(num_graphs=size, seed=1)
    z = unit_vectors(views.detach(), torch.float64).flatten(0, 1)
    pgcl.warm_up.goes_on(pgcl.prototypes, None, True)
    pgcl.warm_up.keep(z.unsqueeze(0), mock.Mock(rank=1))
    assert torch.equal(kept.embeddings, z[::2])
    pgcl.warm_up.keep(z[None, :10], mock.Mock(rank=1))
    assert torch.equal(kept.embeddings, torch.cat([z[:10], z[20::2]]))


@pytest.mark.parametrize("before", [True, False])
def test_prototypes_that_the_user_initialised_stay(before):
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


def test_freeze_steps_count_from_the_end_of_the_warm_up():
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
def test_a_checkpoint_continues_bit_for_bit(stop):
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
    batches = [views_of(seed=step) for step in range(3)]
    for views in batches:
        longer(*views)
    pgcl.load_state_dict(longer.state_dict())
    random = weight_of(pgcl)
    with torch.no_grad():
        assert not pgcl.terms(*views_of()).assignments
    assert torch.equal(weight_of(pgcl), random)
    assert pgcl.terms(*views_of()).assignments
    torch.testing.assert_close(weight_of(pgcl), of_kmeans(longer, batches))


def test_a_checkpoint_without_embeddings_warms_up_for_one_more_step():
    longer, pgcl = pgcl_of(warmup_steps=99), pgcl_of()
    large = views_of(num_graphs=4096)
    for _ in range(3):
        longer(*large)
    assert longer.warm_up.kept.written == 0  # none of them would be among the last
    pgcl.load_state_dict(longer.state_dict())
    assert not pgcl.terms(*views_of(seed=4)).assignments
    assert pgcl.terms(*views_of()).assignments
    torch.testing.assert_close(weight_of(pgcl), of_kmeans(longer, [views_of(seed=4)]))


def test_a_checkpoint_from_after_the_warm_up_has_none():
    done, pgcl = pgcl_of(), pgcl_of()
    for step in range(3):
        done(*views_of(seed=step))
    model = nn.ModuleList([pgcl])
    model.load_state_dict(nn.ModuleList([done]).state_dict())
    assert pgcl.warm_up.over
    views = views_of()
    torch.testing.assert_close(pgcl.eval()(*views), done.eval()(*views))


def test_reset_parameters_starts_a_new_warm_up():
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


def test_checkpoints_without_the_flag_initialised_load():
    state = pgcl_of(warmup_steps=0).state_dict()
    del state["prototypes.initialised"]
    pgcl = pgcl_of(warmup_steps=0)
    pgcl.prototypes.start_from_(torch.randn(9, DIM))
    pgcl.load_state_dict(state)
    assert not pgcl.prototypes.initialised


def test_the_device_is_read_only_in_steps_that_may_be_the_last():
    pgcl, numbers = pgcl_of(warmup_steps=5), []
    read = torch.Tensor.__int__
    for step in range(8):
        views = views_of(seed=step) * (torch.nan if step == 1 else 1)
        with mock.patch.object(
            torch.Tensor, "__int__", lambda tensor, s=step: numbers.append(s) or read(tensor)
        ):
            pgcl(*views)
    # In step 0, in step 4, which NaN in step 1 keeps from being the last, and twice in step 5.
    assert numbers == [0, 4, 5, 5]
    assert pgcl.warm_up.over


def test_warmup_steps_cannot_change():
    with pytest.raises(AttributeError, match="warmup_steps is 2 and cannot change in this PGCLL"):
        pgcl_of().warmup_steps = 3


def test_a_contrast_of_the_user_needs_a_method_info_nce():
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


def test_a_warm_up_cannot_be_captured_or_transformed():
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


@compiling
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's, of graph breaks
@pytest.mark.parametrize("options", [{}, {"memory_size": 5, "num_prototypes": (3, 4)}], ids=str)
def test_the_loss_is_one_compiled_graph_after_the_warm_up(options):
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
def test_training_over_ranks_is_that_of_one_process(num_ranks, wrapped):
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
    value = pgcl(z, z) if rank else pgcl.terms(z, z).loss  # terms and forward are one call
    torch.testing.assert_close(mean_over_ranks(value), value.detach())


def without_gather(rank, num_ranks):
    _, pgcl = model_of(0, warmup_steps=1, gather=False)
    z = torch.randn(6, DIM, dtype=torch.float64, generator=of_seed(rank), requires_grad=True)
    with pytest.warns(UserWarning, match="gather=False .* broadcast pgcl.prototypes.weight"):
        pgcl(z, z)


@pytest.mark.parametrize("function", [different_calls, without_gather])
def test_errors_and_warnings_of_ranks(function):
    on_ranks(function, 2)


def warnings_of(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
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
        messages = warnings_of(lambda: [pgcl(*views_of()).backward() for _ in range(4)])
        assert len(messages) == (text is not None)
        assert all(text in message for message in messages)

    def test_validation_in_eval_mode_does_not_warn(self):
        pgcl = pgcl_of()

        def epochs():
            for _ in range(3):
                pgcl.eval()
                with torch.no_grad():
                    pgcl(*views_of())
                pgcl(*views_of()).backward()
                pgcl.train()(*views_of()).backward()

        assert warnings_of(epochs) == []

    @pytest.mark.parametrize(("forwards", "warns"), [(17, True), (16, False), (20, False)])
    def test_a_warm_up_that_is_never_over(self, forwards, warns):
        def training():
            pgcl = pgcl_of(warmup_steps=20)
            for _ in range(forwards):
                pgcl(*views_of())
            copy.deepcopy(pgcl)  # a copy that does not train does not warn
            del pgcl
            gc.collect()

        messages = warnings_of(training)
        assert len(messages) == warns
        assert all("the warm-up, after 17 of 20 forwards, so PGCL" in text for text in messages)

    def test_an_optimizer_that_restores_parameters(self):
        """SAM makes two forwards a step, and restores the parameters from before the second."""
        pgcl = pgcl_of(warmup_steps=4)
        weights = []

        def train():
            for step in range(4):
                pgcl(*views_of(seed=step)).backward()
                before = weight_of(pgcl)
                pgcl(*views_of(seed=step)).backward()
                weights.append(weight_of(pgcl))
                pgcl.prototypes.weight.data.copy_(before)

        (message,) = warnings_of(train)
        assert "put the former ones back" in message
        torch.testing.assert_close(weight_of(pgcl), weights[1])
        assert not torch.equal(*weights[:2])

    def test_too_few_embeddings(self):
        pgcl = pgcl_of((3, 30))
        text = "PGCLLoss: 18 different embeddings initialise 30 prototypes, so 12 prototypes stay"
        z = views_of(num_graphs=9)
        assert [each[: len(text)] for each in warnings_of(lambda: [pgcl(*z), pgcl(*z)])] == [text]

    def test_an_encoder_without_gradient(self):
        pgcl = pgcl_of(warmup_steps=99)
        (message,) = warnings_of(lambda: [pgcl(*views_of().detach()) for _ in range(16)])
        assert "the embeddings had no gradient in 16 training forwards" in message
