import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import MODES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pgcl_losses import (
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)

LAMBDA = 6.0
STATEFUL = {"queue_size": 20, "freeze_steps": 3}


@st.composite
def problems(draw):
    """Views and prototypes of moderate size, so that differences of the loss are accurate."""
    n, d, k = draw(st.integers(1, 4)), draw(st.integers(2, 3)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random.normal(size=(n, d)), random.normal(size=(n, d)), random.normal(size=(k, d))


def pgcl_of(prototypes, **options):
    pgcl = PGCLLoss(prototypes.shape[1], len(prototypes), **options).double()
    with torch.no_grad():
        pgcl.prototypes.weight.copy_(torch.tensor(prototypes))
    return pgcl


def oracle_total(z1, z2, prototypes, mode, at):
    """The whole loss; targets, clusters and weights are those of the rows and prototypes `at`."""
    at1, at2, at_prototypes = at
    q = [oracle.targets(z, at_prototypes, epsilon=0.05, iterations=3) for z in (at1, at2)]
    clusters = np.concatenate(q).argmax(1)
    weights = oracle.pair_weights(
        np.concatenate([at1, at2]), clusters, at_prototypes, mode["weighting"]
    )
    contrast = oracle.contrast(
        z1,
        z2,
        weights,
        clusters,
        mode["temperature"],
        mode["exclude_same_cluster"],
        mode["negatives"],
    )
    log_p = [oracle.log_predictions(z, prototypes, mode["temperature"]) for z in (z1, z2)]
    consistency = oracle.consistency(log_p, q)
    return oracle.mean(contrast) + LAMBDA * oracle.mean(consistency)


@settings(max_examples=50)
@given(problem=problems(), mode=st.fixed_dictionaries(MODES))
def test_value_and_gradients_agree_with_the_oracle(problem, mode):
    z1, z2, prototypes = problem
    pgcl = pgcl_of(prototypes, **mode)
    views = [torch.tensor(z, requires_grad=True) for z in (z1, z2)]
    loss = pgcl(*views)
    loss.backward()
    np.testing.assert_allclose(
        loss.item(), oracle_total(z1, z2, prototypes, mode, at=problem), rtol=1e-9
    )
    for mine, ours, place in (
        (z1, views[0].grad, 0),
        (z2, views[1].grad, 1),
        (prototypes, pgcl.prototypes.weight.grad, 2),
    ):

        def total(x, place=place):
            moved = [*problem]
            moved[place] = x
            return oracle_total(*moved, mode, at=problem)

        np.testing.assert_allclose(ours, oracle.gradient(total, mine), rtol=1e-5, atol=1e-6)


def test_gradcheck_without_consistency():
    # Targets move with the rows but are constants for the gradient, so that the whole loss is left
    # to the oracle, which can hold them fixed.
    pgcl = PGCLLoss(3, 2, weighting="uniform", exclude_same_cluster=False, consistency_weight=0)
    z1, z2 = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(pgcl.double(), (z1, z2))
    assert torch.autograd.gradgradcheck(pgcl, (z1, z2))


class TestAblationRows:
    """The rows of the paper's ablation are configurations."""

    z1, z2 = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(1))

    def parts(self, weighting, exclude):
        prototypes = SinkhornPrototypes(5, 4)
        first, second = prototypes(self.z1, self.z2)
        contrast = PrototypeReweightedNCE(weighting=weighting, exclude_same_cluster=exclude)(
            self.z1, self.z2, first.clusters, second.clusters, prototypes.weight
        )
        return prototypes, contrast, ConsistencyLoss()(first, second)

    @pytest.mark.parametrize(
        ("weighting", "exclude", "contrast_weight", "consistency_weight"),
        [
            pytest.param("uniform", False, 1.0, 0.0, id="InfoNCE"),
            pytest.param("uniform", False, 0.0, 1.0, id="consistency"),
            pytest.param("sample", False, 1.0, 0.0, id="sample-reweighted"),
            pytest.param("prototype", True, 1.0, 0.0, id="prototype-reweighted"),
            pytest.param("uniform", False, 1.0, 6.0, id="InfoNCE + consistency"),
            pytest.param("sample", False, 1.0, 6.0, id="sample-reweighted + consistency"),
            pytest.param("prototype", True, 1.0, 6.0, id="PGCL"),
        ],
    )
    def test_row(self, weighting, exclude, contrast_weight, consistency_weight):
        prototypes, contrast, consistency = self.parts(weighting, exclude)
        pgcl = PGCLLoss(
            5,
            4,
            weighting=weighting,
            exclude_same_cluster=exclude,
            contrast_weight=contrast_weight,
            consistency_weight=consistency_weight,
        )
        pgcl.prototypes.load_state_dict(prototypes.state_dict())
        terms = pgcl.terms(self.z1, self.z2)
        torch.testing.assert_close(terms.contrast, contrast)
        torch.testing.assert_close(terms.consistency, consistency)
        torch.testing.assert_close(
            terms.loss, contrast_weight * contrast + consistency_weight * consistency
        )
        terms.loss.backward()
        assert pgcl.prototypes.weight.grad is not None  # so DDP finds every parameter


def test_terms_and_reductions():
    torch.manual_seed(3)
    z1, z2 = torch.randn(2, 7, 4)
    terms = {}
    for reduction in ("none", "sum", "mean"):
        torch.manual_seed(0)
        terms[reduction] = PGCLLoss(4, 3, reduction=reduction).terms(z1, z2)
    each = terms["none"]
    assert each.loss.shape == each.contrast.shape == each.consistency.shape == (14,)
    for name in ("loss", "contrast", "consistency"):
        torch.testing.assert_close(getattr(each, name).sum(), getattr(terms["sum"], name))
        torch.testing.assert_close(getattr(each, name).mean(), getattr(terms["mean"], name))
    assert len(each.assignments) == 2
    assert each.assignments[0].targets.shape == (7, 3)


def test_paper_defaults():
    pgcl = PGCLLoss(96)
    assert (pgcl.consistency_weight, pgcl.contrast_weight) == (6.0, 1.0)
    assert pgcl.prototypes.weight.shape == (10, 96)
    assert (pgcl.prototypes.temperature, pgcl.contrast.temperature) == (0.2, 0.2)
    assert pgcl.prototypes.epsilon == 0.05
    assert "weighting='prototype'" in repr(pgcl)
    assert "consistency_weight=6.0" in repr(pgcl)


def encoder_and_loss(**options):
    torch.manual_seed(0)
    encoder = torch.nn.Linear(6, 4)
    pgcl = PGCLLoss(4, 3, **options)
    optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()], lr=0.05)
    return encoder, pgcl, optimizer


def train(encoder, pgcl, optimizer, batches):
    losses = []
    for x1, x2 in batches:
        optimizer.zero_grad()
        loss = pgcl(encoder(x1), encoder(x2))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(count, n=8):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 1, n, 6, generator=generator)
    return x + 0.1 * torch.randn(count, 2, n, 6, generator=generator)


class TestTraining:
    def test_a_checkpoint_continues_bit_for_bit(self):
        parts = encoder_and_loss(**STATEFUL)
        train(*parts, batches(4))
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in parts], buffer)
        straight = train(*parts, batches(9)[4:])

        buffer.seek(0)
        resumed = encoder_and_loss(**STATEFUL)
        for part, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
            part.load_state_dict(state)
        assert train(*resumed, batches(9)[4:]) == straight
        for name, tensor in parts[1].state_dict().items():
            assert torch.equal(resumed[1].state_dict()[name], tensor), name

    # Unpickling a tensor warns within torch 2.4 and 2.5.
    @pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")
    def test_copies_and_pickles_go_on_alike(self):
        _, pgcl, _ = parts = encoder_and_loss(**STATEFUL)
        train(*parts, batches(5))
        copies = [copy.deepcopy(pgcl), pickle.loads(pickle.dumps(pgcl))]
        z1, z2 = torch.randn(2, 8, 4)
        losses = [module(z1, z2) for module in (pgcl, *copies)]
        assert losses[0] == losses[1] == losses[2]
        assert all(int(module.prototypes.step) == 6 for module in (pgcl, *copies))

    def test_determinism_under_a_seed(self):
        first, second = (train(*encoder_and_loss(), batches(5)) for _ in range(2))
        assert first == second
        assert first[-1] < first[0]

    def test_moving_to_double_gives_double(self):
        pgcl = PGCLLoss(4, 3, queue_size=5)
        z1, z2 = torch.randn(2, 6, 4)
        narrow = pgcl(z1, z2)
        pgcl.double()
        wide = pgcl(z1.double(), z2.double())
        assert wide.dtype == torch.float64
        assert pgcl(z1, z2).dtype == torch.float64
        assert narrow.dtype == torch.float32

    def test_two_forwards_before_one_backward(self):
        z = torch.randn(4, 6, 4)
        together = PGCLLoss(4, 3, freeze_steps=1)
        apart = copy.deepcopy(together)
        (together(z[0], z[1]) + together(z[2], z[3])).backward()
        for pair in (z[:2], z[2:]):  # gradient accumulation
            apart(*pair).backward()
        assert together.prototypes.weight.grad.any()
        torch.testing.assert_close(together.prototypes.weight.grad, apart.prototypes.weight.grad)

    # torch 2.4 warns of itself there.
    @pytest.mark.filterwarnings("ignore:.*amp.autocast:FutureWarning")
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_activation_checkpointing(self, use_reentrant):
        pgcl = PGCLLoss(4, 3)
        gradients = []
        for run in (pgcl, lambda *views: checkpoint(pgcl, *views, use_reentrant=use_reentrant)):
            views = [view.clone().requires_grad_() for view in batches(1)[0, :, :, :4]]
            run(*views).backward()
            gradients.append(views[0].grad)
        torch.testing.assert_close(*gradients)

    def test_no_state_moves_without_training(self):
        pgcl = PGCLLoss(4, 3, **STATEFUL)
        z1, z2 = torch.randn(2, 6, 4)
        pgcl(z1, z2)
        before = copy.deepcopy(pgcl.state_dict())
        with torch.no_grad():
            pgcl(z1, z2)
        (-pgcl.eval()(z1.requires_grad_(), z2)).backward()  # a maximising phase
        for name, tensor in pgcl.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_batch_that_is_not_finite_shows_and_touches_nothing(self, bad):
        pgcl = PGCLLoss(4, 3, **STATEFUL)
        pgcl(*torch.randn(2, 6, 4))
        before = copy.deepcopy(pgcl.state_dict())
        z1, z2 = torch.randn(2, 6, 4)
        z2[4, 0] = bad
        terms = pgcl.terms(z1, z2)
        assert terms.loss.isnan()
        assert terms.contrast.isnan()
        assert terms.consistency.isnan()
        for name, tensor in pgcl.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    def test_switching_a_queue_on_does_not_make_the_loss_jump(self):
        encoder, pgcl, optimizer = encoder_and_loss()
        data = batches(120, n=32)
        before = train(encoder, pgcl, optimizer, data[:80])
        with_queue = PGCLLoss(4, 3, queue_size=256)
        with_queue.load_state_dict(pgcl.state_dict(), strict=False)

        # The very first step is the same to the bit: the queue starts empty and has no say.
        views = [encoder(x) for x in data[80]]
        assert copy.deepcopy(with_queue)(*views) == copy.deepcopy(pgcl)(*views)

        # While it fills, step-to-step changes stay what they were.
        optimizer.param_groups[0]["params"][-1:] = [with_queue.prototypes.weight]
        after = train(encoder, with_queue, optimizer, data[80:])
        usual = max(abs(np.diff(before[40:])))
        assert abs(after[0] - before[-1]) <= 1.5 * usual
        assert max(abs(np.diff(after))) <= 1.5 * usual


# Affairs of torch.compile: what it uses itself is deprecated, and Python 3.13.0 is slow for it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
class TestCompiled:
    @pytest.mark.parametrize("weighting", ["prototype", "sample", "uniform"])
    @pytest.mark.parametrize("negatives", ["all", "cross"])
    def test_fullgraph_equals_eager(self, weighting, negatives):
        torch.compiler.reset()
        eager = PGCLLoss(
            4,
            3,
            weighting=weighting,
            negatives=negatives,
            queue_size=20,
            freeze_steps=1,
            iterations=5,
        )
        twin = copy.deepcopy(eager)
        compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
        self.compare(eager, twin, compiled)

    def test_inductor(self):
        torch.compiler.reset()
        eager = PGCLLoss(4, 3, queue_size=20, freeze_steps=1)
        twin = copy.deepcopy(eager)
        self.compare(eager, twin, torch.compile(twin, fullgraph=True))

    def compare(self, eager, twin, compiled):
        for _ in range(3):
            views = torch.randn(2, 6, 4)
            results = []
            for loss in (eager, compiled):
                mine = [view.clone().requires_grad_() for view in views]
                value = loss(*mine)
                value.backward()
                results.append((value, *(view.grad for view in mine)))
            torch.testing.assert_close(results[0], results[1])
            torch.testing.assert_close(eager.prototypes.weight.grad, twin.prototypes.weight.grad)
        for name, tensor in eager.state_dict().items():
            torch.testing.assert_close(twin.state_dict()[name], tensor)


WAITING = {
    getattr(torch.ops.aten, name)
    for name in (
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique_dim",
    )
}


class NoWaiting(TorchDispatchMode):
    """Fails on operations that would make a GPU wait, and keeps count of large results."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.storages = large, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in WAITING, f"{function} waits for the device"
        for index in (item for listed in args if isinstance(listed, list) for item in listed):
            mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
            assert not mask, f"{function} by a mask waits for the device"
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.large:
                self.storages.add(tensor.untyped_storage().data_ptr())
        return result


@pytest.mark.parametrize("weighting", ["prototype", "sample", "uniform"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
def test_a_training_step_never_waits_for_the_device(weighting, negatives):
    pgcl = PGCLLoss(4, 3, weighting=weighting, negatives=negatives, queue_size=9, freeze_steps=1)
    z1, z2 = torch.randn(2, 6, 4, requires_grad=True).unbind()
    with NoWaiting(large=1 << 30):
        pgcl(z1, z2).backward()


def test_prototype_weighting_builds_no_matrix_of_weights():
    # The logits and their log-softmax are all there is of size 2N x 2N.
    pgcl = PGCLLoss(4, 3)
    z1, z2 = torch.randn(2, 50, 4, requires_grad=True).unbind()
    with NoWaiting(large=100 * 100) as watch:
        loss = pgcl(z1, z2)
    assert loss.isfinite()
    assert len(watch.storages) <= 2


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_computes_in_float32_and_returns_gradients_in_kind(self, dtype):
        pgcl = PGCLLoss(4, 3)
        z1, z2 = (v.to(dtype).requires_grad_() for v in torch.randn(2, 6, 4).unbind())
        loss = pgcl(z1, z2)
        loss.backward()
        torch.testing.assert_close(loss, pgcl(z1.float(), z2.float()))
        assert loss.dtype == torch.float32
        assert z1.grad.dtype == z2.grad.dtype == dtype
        assert pgcl.prototypes.weight.grad.dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_autocast_changes_nothing(self, dtype):
        pgcl = PGCLLoss(4, 3)
        z1, z2 = torch.randn(2, 6, 4)
        with torch.autocast("cpu", dtype=dtype):
            inside = pgcl(z1, z2)
        assert torch.equal(inside, pgcl(z1, z2))


@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 1, 1), (1, 4, 3), (2, 4, 30), (5, 1, 2), (5, 3, 1), (64, 8, 10)]
)
@pytest.mark.parametrize("length", [0.0, 1e-18, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("alike", ["independent", "identical rows", "opposed"])
def test_finite_in_finite_out(n, d, k, length, alike):
    z1, z2 = torch.randn(2, n, d)
    if alike == "identical rows":
        z1 = z2 = z1[:1].expand(n, d)
    elif alike == "opposed":
        z2 = -z1
    z1, z2 = ((length * torch.nn.functional.normalize(z)).requires_grad_() for z in (z1, z2))
    for options in ({}, {"temperature": 0.01, "epsilon": 1e-4}, {"weighting": "sample"}):
        pgcl = PGCLLoss(d, k, **options)
        loss = pgcl(z1, z2)
        assert loss.isfinite()
        gradients = torch.autograd.grad(loss, [z1, z2, pgcl.prototypes.weight])
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_length_does_not_matter():
    pgcl = PGCLLoss(4, 3)
    z1, z2 = torch.randn(2, 6, 4)
    losses = [pgcl(length * z1, z2) for length in (1e-8, 1.0, 1e18)]
    torch.testing.assert_close(losses, [losses[1]] * 3)


def test_functional_gradient():
    pgcl = PGCLLoss(4, 3).eval()  # in training, state moves
    z1, z2 = torch.randn(2, 6, 4)
    functional = torch.func.grad(lambda z: pgcl(z, z2))(z1)
    pgcl(z1.requires_grad_(), z2).backward()
    torch.testing.assert_close(functional, z1.grad)


def test_shapes_can_be_traced_without_data():
    z = torch.empty(6, 4, device="meta")
    assert PGCLLoss(4, 3, queue_size=5).to("meta")(z, z).shape == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"consistency_weight": -1.0}, ValueError, "consistency_weight must be a finite.*-1.0"),
        ({"consistency_weight": math.nan}, ValueError, "consistency_weight.*nan"),
        ({"contrast_weight": "1"}, TypeError, "contrast_weight must be a finite number.*'1'"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"engine": "fast"}, ValueError, "engine must be one of"),
        ({"num_prototypes": 0}, ValueError, "num_prototypes"),
        ({"temperature": 10**400}, ValueError, "temperature must be a finite number above 0"),
        ({"gather": None}, TypeError, "gather must be True or False, but got None"),
        ({"process_group": "all"}, TypeError, "process_group must be a ProcessGroup or None"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        PGCLLoss(**{"dim": 4, **options})


@pytest.mark.parametrize(
    ("z1", "z2", "error", "message"),
    [
        (torch.randn(4, 5), torch.randn(4, 5), ValueError, "z1 has width 5 but prototypes.weight"),
        (torch.randn(4, 3), torch.randn(5, 3), ValueError, r"z2 has shape \(5, 3\) but z1"),
        (torch.randn(4, 3), torch.randn(4, 3).half(), TypeError, "z2 is torch.float16 but z1"),
        (torch.randn(0, 3), torch.randn(0, 3), ValueError, "z1 must not be empty"),
        (torch.eye(3).to_sparse(), torch.eye(3), TypeError, "z1 must be a dense Tensor"),
        (torch.randn(4, 3), "z", TypeError, "z2 must be a Tensor.*but got str"),
        (
            torch.randn(4),
            torch.randn(4),
            ValueError,
            r"z1 must have shape \[N, D\], but got \(4,\)",
        ),
    ],
)
def test_bad_input(z1, z2, error, message):
    with pytest.raises(error, match=message):
        PGCLLoss(3)(z1, z2)
