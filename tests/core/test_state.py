"""The state of a loss is all in its parameters and buffers, and forwards change no parameter."""

import copy
import io
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.losses import DIM, LOSSES, model_of, pgcl, portions_of
from helpers.marks import few_graphs
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = few_graphs
every_loss = pytest.mark.parametrize("name", LOSSES)
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def train(model, name, seed, after_step=lambda: None):
    """The losses of some steps."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    for step in range(4):
        batch, _ = portions_of([[6], [6]], LOSSES[name][1], seed + step)
        optimizer.zero_grad()
        losses.append(model(*batch.sets, **batch.given))
        losses[-1].sum().backward()
        optimizer.step()
        after_step()
    return losses


def parameter(value):
    return torch.nn.Parameter(torch.tensor(value))


def through_a_file(model, name):
    file, loaded = io.BytesIO(), model_of(LOSSES[name][0], seed=1)
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    return loaded


@every_loss
def test_a_copy_continues_bit_for_bit(name):
    model = model_of(LOSSES[name][0])
    shapes = [tensor.shape for tensor in model.state_dict().values()]
    averaged = AveragedModel(model)  # made before training; as DDP it copies tensors
    train(model, name, 0)
    averaged.update_parameters(model)
    copies = [
        averaged.module,
        through_a_file(model, name),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    expected = train(model, name, 10)
    for other in copies:
        assert_same(train(other, name, 10), expected)
        assert_same(other.state_dict(), model.state_dict())
    assert [tensor.shape for tensor in model.state_dict().values()] == shapes


@every_loss
def test_a_loss_that_begins_on_meta_trains_on(name):
    """Without the values of what it has learned, which a checkpoint brings."""
    model = model_of(LOSSES[name][0])
    with torch.device("meta"):
        later = model_of(LOSSES[name][0])
    later.to_empty(device="cpu")
    for module in later.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    later.load_state_dict(model.state_dict())
    assert_same(train(later, name, 1), train(model, name, 1))
    assert_same(later.state_dict(), model.state_dict())


LOADINGS = {
    "copied": lambda loss, state: loss.load_state_dict(state),
    "assigned": lambda loss, state: loss.load_state_dict(state, assign=True),
    "assigned within a model": lambda loss, state: torch.nn.ModuleDict(
        {"of": loss}
    ).load_state_dict({f"of.{key}": value for key, value in state.items()}, assign=True),
    # As a file of safetensors has it, which keeps one name of a shared tensor.
    "by one name": lambda loss, state: loss.load_state_dict(
        {key: value for key, value in state.items() if key != "contrast.temperature"}, assign=True
    ),
    "from meta": lambda loss, state: loss.to("meta").to_empty(device="cpu").load_state_dict(state),
}


@pytest.mark.parametrize("load", LOADINGS)
def test_a_learned_temperature_stays_one_parameter_of_two_modules(load):
    tied, later = (PGCLLoss(DIM, 3, temperature=parameter(tau)) for tau in (0.2, 0.9))
    LOADINGS[load](later, copy.deepcopy(tied.state_dict()))
    assert_same(later.state_dict(), tied.state_dict())
    views = torch.randn(2, 8, DIM)
    for loss in (tied, later):
        optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss(*views).backward()
            optimizer.step()
    assert later.prototypes.temperature is later.contrast.temperature is later.temperature
    assert later.temperature.item() == tied.temperature.item() != pytest.approx(0.2)


def test_two_temperatures_stay_two():
    apart, later = (PGCLLoss(DIM, 3, temperature=parameter(tau)) for tau in (0.2, 0.9))
    for loss in (apart, later):
        loss.contrast.temperature = parameter(0.4)
    later.to("meta").to_empty(device="cpu").load_state_dict(apart.state_dict(), assign=True)
    assert_same(later.state_dict(), apart.state_dict())
    assert later.prototypes.temperature is not later.contrast.temperature


def test_no_two_tensors_of_a_state_share_memory():
    """safetensors refuses them. A learned temperature keeps the names of both modules."""

    def make(temperature):
        return torch.nn.ModuleDict({"loss": PGCLLoss(DIM, 3, temperature=parameter(temperature))})

    state, model = make(0.3).state_dict(), make(0.7)
    addresses = [x.untyped_storage().data_ptr() for x in state.values()]
    assert len(set(addresses)) == len(addresses)
    loss = model["loss"]
    for options in ({}, {"assign": True}):
        model.load_state_dict(state, **options)
        assert loss.temperature.item() == loss.prototypes.temperature.item() == pytest.approx(0.3)
    loss.temperature = tau = parameter(0.4)
    kept = model.state_dict(keep_vars=True)
    names = [name for name, x in kept.items() if x is tau]
    assert names == ["loss.prototypes.temperature", "loss.contrast.temperature"]


@pytest.mark.parametrize("wrap", [lambda module: module, partial(torch.compile, backend="eager")])
def test_a_wrapped_model_loads_what_it_saves(wrap):
    """torch.distributed.checkpoint wants every name of a module that is wrapped."""
    model = wrap(model_of(partial(PGCLLoss, DIM, 3, temperature=parameter(0.3))))
    set_model_state_dict(model, get_model_state_dict(model))
    loss = PGCLLoss(DIM, 3, temperature=parameter(0.3))
    loss.prototypes, loss.contrast = wrap(loss.prototypes), wrap(loss.contrast)
    loss.load_state_dict(loss.state_dict())


@every_loss
def test_averages_of_parameters_and_buffers(name):
    model = model_of(LOSSES[name][0])
    averaged = AveragedModel(model, use_buffers=True)
    train(model, name, 0, lambda: averaged.update_parameters(model))
    assert torch.cat([loss.view(-1) for loss in train(averaged, name, 10)]).isfinite().all()


@pytest.mark.parametrize("training", [True, False])
@every_loss
def test_no_forward_changes_a_parameter(name, training):
    """So a regulariser on the prototypes may be computed before the forward."""
    model = model_of(LOSSES[name][0]).train(training)
    versions = [parameter._version for parameter in model.parameters()]
    for step in range(4):
        batch, _ = portions_of([[6], [6]], LOSSES[name][1], step)
        regulariser = sum(parameter.square().sum() for parameter in model.parameters())
        (model(*batch.sets, **batch.given).sum() + regulariser).backward()
    assert [parameter._version for parameter in model.parameters()] == versions


@pytest.mark.parametrize("reason", ["eval", "no_grad", "inference", "nan", "inf"])
@pytest.mark.parametrize(
    "make",
    [
        partial(pgcl, queue_size=20, memory_size=30, freeze_steps=3),
        partial(InfoNCE, memory_size=30, dim=DIM),
    ],
    ids=["PGCL", "InfoNCE"],
)
def test_only_finite_training_forwards_change_the_state(make, reason):
    loss = make()
    loss(*torch.randn(2, 6, DIM))
    before, views = copy.deepcopy(loss.state_dict()), torch.randn(2, 6, DIM)
    if reason in ("nan", "inf"):
        views[1, 4, 0] = float(reason)
    loss.train(reason != "eval")
    modes = {"no_grad": torch.no_grad(), "inference": torch.inference_mode()}
    with modes.get(reason, nullcontext()):
        value = loss(*views)
    assert value.isnan() == (reason in ("nan", "inf"))
    assert_same(loss.state_dict(), before)


def test_prototypes_of_another_number_leave_a_fresh_loss():
    """With those tensors of a checkpoint that have the same shape."""
    old, new = PGCLLoss(DIM, 3), PGCLLoss(DIM, 5)
    old(*torch.randn(2, 6, DIM, requires_grad=True))
    before = copy.deepcopy(new.state_dict())
    state = {k: v for k, v in old.state_dict().items() if v.shape == before[k].shape}
    new.load_state_dict(state, strict=False)
    assert_same(new.state_dict(), before)


def test_other_heads_of_as_many_prototypes_are_a_size_mismatch():
    with pytest.raises(RuntimeError, match=r"size mismatch for prototypes\.head_sizes"):
        PGCLLoss(DIM, (4, 2)).load_state_dict(PGCLLoss(DIM, (2, 4)).state_dict())


@pytest.mark.parametrize(
    ("without", "loss", "ring"),
    [
        (InfoNCE(), InfoNCE(memory_size=5, dim=DIM), "memory"),
        (pgcl(), pgcl(memory_size=5), "memory"),
        (pgcl(), pgcl(queue_size=5), "queue"),
    ],
)
def test_a_checkpoint_with_a_memory_or_a_queue_needs_one_and_the_converse(without, loss, ring):
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*{ring}\.embeddings", '):
        without.load_state_dict(loss.state_dict())
    with pytest.raises(RuntimeError, match=rf'Missing key.*{ring}\.embeddings", '):
        loss.load_state_dict(without.state_dict())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("loss", [InfoNCE(), pgcl()], ids=["InfoNCE", "PGCL"])
def test_activation_checkpointing(loss, use_reentrant):
    views = torch.randn(2, 8, DIM, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(*views), views)
    checkpoint(loss, *views, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(views.grad, expected)
