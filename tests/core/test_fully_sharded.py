"""Encoder and loss under FSDP2, compilation and activation checkpointing."""

import pytest
import torch
from helpers.rank_models import DIM, Inside, gradients, mean_over_ranks, model_of, of_seed
from helpers.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch", minversion="2.8")  # fully_shard has all of these options

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

pytestmark = pytest.mark.slow

COUNTS = ([4, 4], [3, 6], [7, 0], [1, 7])  # graphs of each rank, in each step
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
WHOLE = StateDictOptions(full_state_dict=True)


class Embedding(Inside):
    def forward(self, x1, x2):
        return self.encoder(x1), self.encoder(x2)


class Checkpointed(Inside):
    def forward(self, x1, x2):
        return self.pgcl(*[checkpoint(self.encoder, x, use_reentrant=False) for x in (x1, x2)])


class LossCheckpointed(Inside):
    def forward(self, x1, x2):
        views = self.encoder(x1), self.encoder(x2)
        return checkpoint(self.pgcl, *views, use_reentrant=False)


def encoder_alone(encoder, pgcl):
    fully_shard(encoder)
    model = Inside(encoder, pgcl)
    return model, model


def whole(encoder, pgcl, kind=Inside, **options):
    model = fully_shard(kind(encoder, pgcl), **options)
    return model, model


def every_module(encoder, pgcl):
    fully_shard(encoder)
    fully_shard(pgcl)
    return whole(encoder, pgcl)


def without_the_loss(encoder, pgcl):
    model, _ = whole(encoder, pgcl, Embedding, ignored_params=set(pgcl.parameters()))
    return model, lambda x1, x2: pgcl(*model(x1, x2))


def after_the_forward(encoder, pgcl, **options):
    model, _ = whole(encoder, pgcl, Embedding, **options)
    return model, lambda x1, x2: pgcl(*model(x1, x2))


def another_method(encoder, pgcl):
    fully_shard(pgcl)
    register_fsdp_forward_method(pgcl, "terms")
    model, _ = whole(encoder, pgcl, Embedding)
    return model, lambda x1, x2: pgcl.terms(*model(x1, x2)).loss


def encoder_checkpointed(encoder, pgcl):
    return whole(encoder, pgcl, Checkpointed)


def checkpointing_applied(encoder, pgcl):
    model = Inside(torch.nn.Sequential(encoder), pgcl)
    apply_activation_checkpointing(model, check_fn=lambda module: module is encoder)
    return whole(model.encoder, pgcl)


def loss_checkpointed(encoder, pgcl):
    return whole(encoder, pgcl, LossCheckpointed)


def compiled_around(encoder, pgcl):
    model, _ = every_module(encoder, pgcl)
    return model, torch.compile(model, backend="aot_eager")


def compiled_before(encoder, pgcl):
    encoder.compile(backend="aot_eager")
    return every_module(encoder, pgcl)


def ddp_compiled_around(encoder, pgcl):
    model = DistributedDataParallel(Inside(encoder, pgcl))
    return model, torch.compile(model, backend="aot_eager")


def ddp_checkpointed(encoder, pgcl):
    model = DistributedDataParallel(Checkpointed(encoder, pgcl))
    return model, model


WRAPPINGS = (
    encoder_alone,
    whole,
    every_module,
    without_the_loss,
    after_the_forward,
    another_method,
    encoder_checkpointed,
    checkpointing_applied,
    loss_checkpointed,
    compiled_around,
    compiled_before,
    ddp_compiled_around,
    ddp_checkpointed,
)


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batches(counts_of_steps=COUNTS):
    """Both views of each step ``[2, N, 3]``, and those of each rank."""
    random = of_seed(9)
    for counts in counts_of_steps:
        views = torch.randn(2, sum(counts), 3, dtype=torch.float64, generator=random)
        yield views, views.split(counts, dim=1)


def check_training(rank, model, loss_of, alone, counts_of_steps=COUNTS):
    """Losses and parameters are those of one process, step by step."""
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, alone)]
    for views, of_ranks in batches(counts_of_steps):
        losses = loss_of(*of_ranks[rank]), alone(*views)
        torch.testing.assert_close(*losses, **CLOSE)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine), other, **CLOSE)


def training(rank, num_ranks, wrap):
    torch.compiler.reset()
    # A checkpointed loss would queue each batch twice.
    queue_size = 0 if wrap is loss_checkpointed else 4
    model, loss_of = wrap(*model_of(0, queue_size=queue_size))
    alone = Inside(*model_of(0, queue_size=queue_size, gather=False))
    check_training(rank, model, loss_of, alone)


@pytest.mark.parametrize("wrap", WRAPPINGS, ids=lambda wrap: wrap.__name__)
def test_training_equals_that_of_one_process(wrap):
    on_ranks(training, 2, wrap)


def accumulating(rank, num_ranks, wrap):
    model, loss_of = wrap(*model_of(0))
    sharded = model if wrap is whole else model.encoder
    alone = Inside(*model_of(0, gather=False))
    for step, (views, of_ranks) in enumerate(batches(COUNTS[:2])):
        sharded.set_requires_gradient_sync(step == 1)
        loss_of(*of_ranks[rank]).backward()
        alone(*views).backward()
    torch.testing.assert_close([full(d) for d in gradients(model)], gradients(alone), **CLOSE)


@pytest.mark.parametrize("wrap", [encoder_alone, whole], ids=lambda wrap: wrap.__name__)
def test_accumulated_gradients_are_those_of_one_process(wrap):
    on_ranks(accumulating, 2, wrap)


def outside_of_forward(rank, num_ranks):
    encoder, pgcl = model_of(0)
    _, loss_of = after_the_forward(encoder, pgcl, reshard_after_forward=True)
    x = torch.randn(6, 3, dtype=torch.float64, generator=of_seed(rank))
    z = torch.randn(6, DIM, dtype=torch.float64, generator=of_seed(rank))
    calls = [
        lambda: loss_of(x, x),
        lambda: pgcl.terms(z, z),
        lambda: pgcl.prototypes.assign(z),
        lambda: pgcl.prototypes.start_from_(z),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"weight is sharded \(a DTensor\): leave it out of"):
            call()


def test_sharded_prototypes_outside_of_forward_are_an_error_on_all_ranks():
    on_ranks(outside_of_forward, 2)


class Initialising(Inside):
    def forward(self, rows):
        self.pgcl.prototypes.start_from_(rows)


def initialising(rank, num_ranks):
    rows = torch.randn(8, DIM, dtype=torch.float64, generator=of_seed(rank))
    encoder, before = model_of(0)
    random = before.prototypes.weight.detach().clone()
    before.prototypes.start_from_(rows)
    whole(encoder, before)
    encoder, left_out = model_of(0)
    without_the_loss(encoder, left_out)
    left_out.prototypes.start_from_(rows)
    encoder, within = model_of(0)
    model, _ = whole(encoder, within, Initialising)
    model(rows)
    model.reshard()
    weights = [full(pgcl.prototypes.weight) for pgcl in (before, left_out, within)]
    assert not torch.equal(weights[0], random)
    torch.testing.assert_close(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])


def test_prototypes_are_initialised_before_and_in_a_sharded_forward():
    on_ranks(initialising, 2)


def warming_up(rank, num_ranks, wrap, reshard_after_forward):
    options = {"num_prototypes": (3, 4), "warmup_steps": 2}
    given = {} if wrap is every_module else {"reshard_after_forward": reshard_after_forward}
    model, loss_of = wrap(*model_of(0, **options), **given)
    alone = Inside(*model_of(0, **options, gather=False))
    counts = [[*of_step, 2, 0][:num_ranks] for of_step in COUNTS]
    check_training(rank, model, loss_of, alone, counts)


@pytest.mark.parametrize(
    ("wrap", "reshard"), [(whole, False), (whole, True), (whole, 2), (every_module, None)]
)
def test_the_warm_up_ends_in_a_sharded_forward(wrap, reshard):
    on_ranks(warming_up, 4 if reshard == 2 else 2, wrap, reshard)


def resuming(rank, num_ranks):
    """A checkpoint of a sharded model, queue included, goes on sharded and in one process."""
    (_, first), *others = batches()
    model, _ = whole(*model_of(0, queue_size=16))
    model(*first[rank]).backward()  # leaves the parameters sharded
    state = get_model_state_dict(model, options=WHOLE)
    alone = Inside(*model_of(1, queue_size=16, gather=False))
    alone.load_state_dict(state)
    resumed, _ = whole(*model_of(1, queue_size=16))
    set_model_state_dict(resumed, state, options=WHOLE)  # shards the state, in place
    for views, of_ranks in others:
        expected = model(*of_ranks[rank])
        torch.testing.assert_close(resumed(*of_ranks[rank]), expected, rtol=0, atol=0)
        torch.testing.assert_close(alone(*views), expected, **CLOSE)


def test_a_checkpoint_of_a_sharded_model_holds_the_queue():
    on_ranks(resuming, 2)


def in_bfloat16(rank, num_ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = whole(*model_of(0), mp_policy=policy)
    alone = Inside(*model_of(0, gather=False))
    for views, of_ranks in batches():
        loss = model(*of_ranks[rank])
        loss.backward()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, mean_over_ranks(loss))
        torch.testing.assert_close(loss, alone(*views).float(), rtol=0.02, atol=0.02)


def test_mixed_precision():
    on_ranks(in_bfloat16, 2)
