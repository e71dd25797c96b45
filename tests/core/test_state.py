"""The state of a loss is all in its parameters and buffers, and forwards change no parameter."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.marks import compiling
from torch.optim.swa_utils import AveragedModel

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE

DIM = 4
LOSSES = {
    "InfoNCE": InfoNCE,
    "a memory of InfoNCE": lambda: InfoNCE(memory_size=8, dim=DIM),
    "PGCL": lambda: PGCLLoss(DIM, 3),
    "heads": lambda: PGCLLoss(DIM, (3, 2), negative_ranks=(0, 2)),
    "freezing": lambda: PGCLLoss(DIM, 3, freeze_steps=2),
    "a queue and a memory": lambda: PGCLLoss(DIM, 3, queue_size=8, memory_size=8),
    "all of it": lambda: PGCLLoss(DIM, (3, 2), freeze_steps=9, queue_size=30, memory_size=30),
}
every_loss = pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Model(torch.nn.Module):
    """An encoder with its loss as an attribute."""

    def __init__(self, loss):
        super().__init__()
        self.encoder, self.loss = torch.nn.Linear(5, DIM), loss

    def forward(self, x1, x2):
        return self.loss(self.encoder(x1), self.encoder(x2))


def model_of(make, seed=0):
    torch.manual_seed(seed)
    return Model(make())


def train(model, steps=3, after_step=lambda: None):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*torch.randn(2, 6, 5)).backward()
        optimizer.step()
        after_step()


@every_loss
def test_parameters_and_buffers_are_all_of_the_state(make):
    """An average that was made before training, and what DistributedDataParallel broadcasts."""
    model = model_of(make)
    averaged, copied = AveragedModel(model), model_of(make, seed=1)
    train(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        for name in ("parameters", "buffers"):
            for ours, theirs in zip(getattr(copied, name)(), getattr(model, name)(), strict=True):
                ours.copy_(theirs)
    for _ in range(2):  # two steps, of which the first one goes on with the state
        x = torch.randn(2, 6, 5)
        expected = model(*x)
        for other in (averaged.module, copied):
            assert_same(other(*x), expected)
            assert_same(other.state_dict(), model.state_dict())


@every_loss
def test_averages_of_parameters_and_buffers(make):
    model = model_of(make)
    averaged = AveragedModel(model, use_buffers=True)
    train(model, 3, lambda: averaged.update_parameters(model))
    assert averaged(*torch.randn(2, 6, 5)).isfinite()


def test_a_temperature_that_learns_is_copied_with_its_model():
    temperature = torch.nn.Parameter(torch.tensor(0.3))
    model = model_of(lambda: PGCLLoss(DIM, 3, temperature=temperature))
    train(model)
    averaged, copied = AveragedModel(model, use_buffers=True), copy.deepcopy(model)
    x = torch.randn(2, 6, 5)
    averaged.update_parameters(model)
    for other in (averaged.module, copied):
        assert_same(other(*x), model(*x))
        assert len([*other.parameters()]) == len([*model.parameters()])
    train(copied)
    loss = copied.loss
    assert loss.temperature is loss.contrast.temperature is loss.prototypes.temperature
    assert loss.temperature != model.loss.temperature == temperature


def test_prototypes_of_another_number_leave_a_fresh_loss():
    """With those tensors of a checkpoint that have the same shape."""
    for start in (False, True):
        old, new = PGCLLoss(DIM, 3), PGCLLoss(DIM, 5)
        if start:
            old.prototypes.start_from_(torch.randn(20, DIM))
        old(*torch.randn(2, 6, DIM, requires_grad=True))
        before = copy.deepcopy(new.state_dict())
        state = {k: v for k, v in old.state_dict().items() if v.shape == before[k].shape}
        new.load_state_dict(state, strict=False)
        assert_same(new.state_dict(), before)


def test_other_heads_of_as_many_prototypes_are_a_size_mismatch():
    with pytest.raises(RuntimeError, match=r"size mismatch for prototypes\.head_sizes"):
        PGCLLoss(DIM, (4, 2)).load_state_dict(PGCLLoss(DIM, (2, 4)).state_dict())


def test_the_state_is_small_and_its_shapes_stay():
    pgcl = PGCLLoss(64, 10)
    shapes = {name: value.shape for name, value in pgcl.state_dict().items()}
    for _ in range(3):
        pgcl(*torch.randn(2, 30, 64, requires_grad=True)).backward()
    state = pgcl.state_dict()
    assert {name: value.shape for name, value in state.items()} == shapes
    others = [value.nbytes for name, value in state.items() if name != "prototypes.weight"]
    assert sum(others) < 10_000


def test_a_memory_has_its_shape_from_the_start():
    model = model_of(lambda: InfoNCE(memory_size=64, dim=DIM))
    averaged = AveragedModel(model)
    shapes = [buffer.shape for buffer in model.buffers()]
    assert torch.Size([64, DIM]) in shapes
    train(model, 3, lambda: averaged.update_parameters(model))
    assert [buffer.shape for buffer in model.buffers()] == shapes
    assert_same([*averaged.module.buffers()], [*model.buffers()])
    with pytest.raises(TypeError, match=r"needs the embedding dimension, dim=\.\.\."):
        InfoNCE(memory_size=64)


@pytest.mark.filterwarnings("ignore:PGCLLoss")
@pytest.mark.parametrize("training", [True, False])
@every_loss
def test_no_forward_changes_a_parameter(make, training):
    """So a regulariser on the prototypes may be computed before the forward."""
    model = model_of(make).train(training)
    versions = [parameter._version for parameter in model.parameters()]
    for _ in range(4):
        regulariser = sum(parameter.square().sum() for parameter in model.parameters())
        (model(*torch.randn(2, 6, 5)) + regulariser).backward()
    assert [parameter._version for parameter in model.parameters()] == versions


@pytest.mark.parametrize(
    "loss",
    [
        InfoNCE(engine="dense"),
        InfoNCE(engine="dense", debias=0.1),
        PGCLLoss(DIM, 3, engine="dense").double(),
    ],
    ids=["InfoNCE", "debiased", "PGCL"],
)
def test_second_derivative_by_the_temperature_alone(loss):
    views = torch.randn(2, 6, DIM, dtype=torch.float64)  # of a frozen encoder

    def of_temperature(temperature):
        loss.temperature = temperature
        return loss(*views)

    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(of_temperature, temperature)
    assert torch.autograd.gradgradcheck(of_temperature, temperature)


def test_autocast_lowers_no_precision():
    z1, z2 = torch.randn(2, 30, 64)
    clusters = torch.randint(5, (2, 30))
    contrast = PrototypeReweightedNCE()
    given = {"clusters": clusters, "prototypes": torch.randn(5, 64)}
    expected = contrast(z1, z2, **given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = contrast(z1, z2, **given)
    assert torch.equal(inside, expected)


@pytest.mark.filterwarnings("ignore:PGCLLoss")  # fewer graphs than prototypes
@pytest.mark.parametrize(
    ("dim", "num_graphs", "epsilon"),
    [
        (8, 5, 0.01),
        (3, 64, 0.005),
    ],
)
def test_positions_of_clusters_are_the_same_in_float32_and_float64(dim, num_graphs, epsilon):
    """Most targets are too small for float32."""
    for seed in range(40):
        torch.manual_seed(seed)
        options = {"epsilon": epsilon, "negative_ranks": (8, 9), "consistency_weight": 0}
        pgcl, views = PGCLLoss(dim, 10, **options), torch.randn(2, num_graphs, dim)
        narrow = pgcl(*views)
        wide = pgcl.double()(*views.double())
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-6)


@compiling
def test_a_compiled_loss_takes_batches_of_any_size():
    torch.compiler.reset()
    loss = InfoNCE(hardness=1.0, engine="dense")
    compiled = torch.compile(loss)
    for num_graphs in (6, 9):
        views = F.normalize(torch.randn(2, num_graphs, DIM), dim=-1)
        torch.testing.assert_close(compiled(*views), loss(*views))
