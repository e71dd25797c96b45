"""Encoder and loss under FSDP2, compilation and activation checkpointing."""

import pytest
import torch
from helpers.rank_models import DIM, Inside, mean_over_ranks, model_of, of_seed
from helpers.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torch", minversion="2.8")  # fully_shard has all of these options

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


def whole(encoder, pgcl, kind=Inside, **options):
    model = fully_shard(kind(encoder, pgcl), **options)
    return model, model


def encoder_alone(encoder, pgcl):
    fully_shard(encoder)
    model = Inside(encoder, pgcl)
    return model, model


def every_module(encoder, pgcl):
    fully_shard(encoder)
    fully_shard(pgcl)
    return whole(encoder, pgcl)


def after_the_forward(encoder, pgcl, **options):
    model, _ = whole(encoder, pgcl, Embedding, **options)
    return model, lambda x1, x2: pgcl(*model(x1, x2))


def without_the_loss(encoder, pgcl):
    return after_the_forward(encoder, pgcl, ignored_params=set(pgcl.parameters()))


def another_method(encoder, pgcl):
    fully_shard(pgcl)
    register_fsdp_forward_method(pgcl, "terms")
    model, _ = whole(encoder, pgcl, Embedding)
    return model, lambda x1, x2: pgcl.terms(*model(x1, x2)).loss


def encoder_checkpointed(encoder, pgcl):
    return whole(encoder, pgcl, Checkpointed)


def loss_checkpointed(encoder, pgcl):
    return whole(encoder, pgcl, LossCheckpointed)


def compiled_around(encoder, pgcl):
    model, _ = every_module(encoder, pgcl)
    return model, torch.compile(model, backend="aot_eager")


def ddp_compiled_around(encoder, pgcl):
    model = DistributedDataParallel(Checkpointed(encoder, pgcl))
    return model, torch.compile(model, backend="aot_eager")


WRAPPINGS = (
    whole,
    encoder_alone,
    every_module,
    after_the_forward,
    without_the_loss,
    another_method,
    encoder_checkpointed,
    loss_checkpointed,
    compiled_around,
    ddp_compiled_around,
)


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batches():
    """Both views of each step ``[2, N, 3]``, and those of each rank."""
    random = of_seed(9)
    for counts in COUNTS:
        views = torch.randn(2, sum(counts), 3, dtype=torch.float64, generator=random)
        yield views, views.split(counts, dim=1)


def training(rank, num_ranks, wrap):
    """Losses and parameters are those of one process, step by step."""
    torch.compiler.reset()
    # A checkpointed loss would queue each batch twice.
    queue_size = 0 if wrap is loss_checkpointed else 4
    model, loss_of = wrap(*model_of(0, queue_size=queue_size))
    alone = Inside(*model_of(0, queue_size=queue_size, gather=False))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, alone)]
    for views, of_ranks in batches():
        losses = loss_of(*of_ranks[rank]), alone(*views)
        torch.testing.assert_close(*losses, **CLOSE)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine), other, **CLOSE)


@pytest.mark.parametrize("wrap", WRAPPINGS, ids=lambda wrap: wrap.__name__)
def test_training_equals_that_of_one_process(wrap):
    on_ranks(training, 2, wrap)


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


def initialising(rank, num_ranks):
    rows = torch.randn(8, DIM, dtype=torch.float64, generator=of_seed(rank))
    (encoder, pgcl), (_, expected) = (model_of(0) for _ in range(2))
    expected.prototypes.start_from_(rows)
    without_the_loss(encoder, pgcl)
    model_of(0)  # the generator as before
    pgcl.prototypes.start_from_(rows)
    torch.testing.assert_close(pgcl.prototypes.weight, expected.prototypes.weight)


def test_prototypes_left_out_of_sharding_may_be_initialised():
    on_ranks(initialising, 2)


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
