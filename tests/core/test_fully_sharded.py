"""Encoder and loss under FSDP2, compilation and activation checkpointing."""

from functools import partial

import pytest
import torch
from helpers.losses import DIM, Model, mean_over_ranks, model_of, of_seed, pgcl, portions_of
from helpers.ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pgcl_losses import InfoNCE

if torch.__version__ < "2.6":
    pytest.skip("torch before 2.6 has no public fully_shard", allow_module_level=True)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.slow

COUNTS = ([4, 4], [3, 6], [7, 0], [1, 7])  # graphs of each rank, in each step
CLOSE = {"rtol": 1e-9, "atol": 1e-10}
WHOLE = StateDictOptions(full_state_dict=True)


class Embedding(Model):
    def forward(self, *views):
        return tuple(map(self.encoder, views))


class Checkpointed(Model):
    def forward(self, *views):
        return self.loss(*[checkpoint(self.encoder, x, use_reentrant=False) for x in views])


def whole(encoder, loss, kind=Model, **options):
    model = fully_shard(kind(loss, encoder), **options)
    return model, model


def encoder_alone(encoder, loss):
    model = Model(loss, fully_shard(encoder))
    return model, model


def every_module(encoder, loss):
    return whole(fully_shard(encoder), fully_shard(loss))


def after_the_forward(encoder, loss, **options):
    model, _ = whole(encoder, loss, Embedding, **options)
    return model, lambda *views: loss(*model(*views))


def without_the_loss(encoder, loss):
    return after_the_forward(encoder, loss, ignored_params=set(loss.parameters()))


def compiled_around(encoder, loss):
    model, _ = every_module(encoder, loss)
    return model, torch.compile(model, backend="aot_eager")


def ddp_compiled_around(encoder, loss):
    model = DistributedDataParallel(Checkpointed(loss, encoder))
    return model, torch.compile(model, backend="aot_eager")


WRAPPINGS = {
    "whole": whole,
    "encoder alone": encoder_alone,
    "every module": every_module,
    "after the forward": after_the_forward,
    "without the loss": without_the_loss,
    "encoder checkpointed": partial(whole, kind=Checkpointed),
    "compiled around": compiled_around,
    "DDP compiled around": ddp_compiled_around,
}


def sharded(wrap, seed=0, **options):
    """A sharded model, and how its loss is computed."""
    model = model_of(pgcl, seed, **options)
    return wrap(model.encoder, model.loss)


def batches():
    """The views of each step, all of them and those of each rank."""
    for seed, counts in enumerate(COUNTS):
        yield [portion.sets for portion in portions_of([counts, counts], seed=seed)]


def train_alike(rank, model, loss_of, alone):
    """Losses and parameters are those of one process, step by step."""
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, alone)]
    for views, *of_ranks in batches():
        losses = loss_of(*of_ranks[rank]), alone(*views)
        torch.testing.assert_close(*losses, **CLOSE)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            torch.testing.assert_close(full, other, **CLOSE)


def training(rank, num_ranks, name):
    model, loss_of = sharded(WRAPPINGS[name], queue_size=4)
    train_alike(rank, model, loss_of, model_of(pgcl, queue_size=4, gather=False))


@pytest.mark.parametrize("name", WRAPPINGS)
def test_training_equals_that_of_one_process(name):
    on_ranks(training, 2, name)


def outside_of_forward(rank, num_ranks):
    model, loss_of = sharded(partial(after_the_forward, reshard_after_forward=True))
    x, z = (torch.randn(6, d, dtype=torch.float64, generator=of_seed(rank)) for d in (3, DIM))
    for call in (
        lambda: loss_of(x, x),
        lambda: model.loss.terms(z, z),
        lambda: model.loss.prototypes.assign(z),
        lambda: model.loss.prototypes.start_from_(z),
    ):
        with pytest.raises(TypeError, match=r"weight is sharded \(a DTensor\): leave it out of"):
            call()


def test_sharded_prototypes_outside_of_forward_are_an_error_on_all_ranks():
    on_ranks(outside_of_forward, 2)


def resuming(rank, num_ranks):
    """A checkpoint of a sharded model, queue included, goes on sharded and in one process."""
    (_, *first), *others = batches()
    model, _ = sharded(whole, queue_size=16)
    model(*first[rank]).backward()  # leaves the parameters sharded
    state = get_model_state_dict(model, options=WHOLE)
    alone = model_of(pgcl, 1, queue_size=16, gather=False)
    alone.load_state_dict(state)
    resumed, _ = sharded(whole, 1, queue_size=16)
    set_model_state_dict(resumed, state, options=WHOLE)  # shards the state, in place
    for views, *of_ranks in others:
        expected = model(*of_ranks[rank])
        torch.testing.assert_close(resumed(*of_ranks[rank]), expected, rtol=0, atol=0)
        torch.testing.assert_close(alone(*views), expected, **CLOSE)


def test_a_checkpoint_of_a_sharded_model_holds_the_queue():
    on_ranks(resuming, 2)


def from_meta(rank, num_ranks):
    """A model that is made on meta and sharded there takes its values from a state."""
    alone = model_of(pgcl, queue_size=16, gather=False)
    with torch.device("meta"):
        model = fully_shard(model_of(pgcl, queue_size=16))
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    set_model_state_dict(model, alone.state_dict(), options=WHOLE)
    train_alike(rank, model, model, alone)


def test_a_model_that_begins_on_meta_trains_as_one_process_does():
    on_ranks(from_meta, 2)


class Warm(Model):
    """The recipe of a warm-up: `InfoNCE` in the first steps."""

    steps = 0

    def forward(self, *views):
        self.steps += 1
        loss = InfoNCE(gather=self.loss.gather) if self.steps <= len(COUNTS) // 2 else self.loss
        return loss(*map(self.encoder, views))


def after_a_warm_up(rank, num_ranks):
    model, _ = sharded(partial(whole, kind=Warm))
    alone = model_of(pgcl, gather=False)
    alone = Warm(alone.loss, alone.encoder)
    train_alike(rank, model, model, alone)


def test_pgcl_after_a_warm_up():
    on_ranks(after_a_warm_up, 2)


def in_bfloat16(rank, num_ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = sharded(partial(whole, mp_policy=policy))
    alone = model_of(pgcl, gather=False)
    for views, *of_ranks in batches():
        loss = model(*of_ranks[rank])
        loss.backward()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, mean_over_ranks(loss))
        torch.testing.assert_close(loss, alone(*views).float(), rtol=0.02, atol=0.02)


def test_mixed_precision():
    on_ranks(in_bfloat16, 2)
