"""Every way to compute a loss agrees with the oracle; chunks keep no matrix of all pairs."""

import functools
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from helpers import oracle
from helpers.cases import WAYS, any_pairs, as_on, for_oracle, in_chunks, upstream
from helpers.losses import (
    ARITHMETIC,
    DIM,
    function_of,
    gradients,
    loss_of,
    of_seed,
    random_pairs,
)
from helpers.marks import examples, few_graphs
from helpers.memory import AliveTensors, kept_for_backward, largest_tensor
from hypothesis import assume, given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE
from pgcl_losses.base.distributed import Processes
from pgcl_losses.pairs.forms import Form
from pgcl_losses.pairs.loss import choose_way, loss_of_pairs
from pgcl_losses.pairs.rows import Inputs, Listed, Pairs, all_rows

pytestmark = few_graphs
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


@examples(400)
@given(
    problem=any_pairs(),
    temperature=st.sampled_from([0.01, 0.02, 0.2, 1.0]),
    way=WAYS,
    learned=st.booleans(),
    readable=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    form=st.fixed_dictionaries(
        {
            "over_positives": st.sampled_from(["mean", "supcon", "sum"]),
            "decoupled": st.booleans(),
            "debias": st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        }
    ),
)
def test_losses_and_gradients(problem, temperature, way, learned, readable, reduction, form):
    """By embeddings, weights of positives and the temperature."""
    pairs = problem.pairs
    is_unit = problem.z.norm(dim=1).max() < 1.1
    is_weighted = pairs.cluster_weights is not None or pairs.cosine_weights is not None
    if is_weighted or pairs.score_mod is not None or not is_unit:
        form = {**form, "debias": 0.0}
    form["decoupled"] &= form["over_positives"] != "supcon"
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    weights = problem.positive_weights
    weights = weights if weights is None else weights.clone().requires_grad_()
    z = problem.z.clone().requires_grad_()
    losses, exist = oracle.info_nce(**for_oracle(problem, z, weights), **form, temperature=tau)
    with in_chunks(way.chunk), as_on(readable):
        ours = loss_of_pairs(
            pairs._replace(form=Form(**form)),
            Inputs(z, tau if learned else temperature, weights),
            reduction,
            way.engine,
            Processes([(length,) for length in pairs.lengths]),
        )
        inputs = [z, *[weights] * (weights is not None), *[tau] * learned]
        gradient = gradients(upstream(ours) + 0 * z.sum(), inputs)
    expected = {"mean": oracle.mean_of_queries(losses, exist), "sum": losses.sum(), "none": losses}
    close(ours, expected[reduction])
    d_oracle = gradients(upstream(expected[reduction]), inputs)
    # With debias, weights of 0 may have derivatives as large as e^(1 / tau)^2, which no loss needs.
    assume(not any((d.abs() >= 1e15).any() for d in d_oracle))
    close(gradient[: len(inputs) - learned], d_oracle[: len(inputs) - learned])
    close(
        gradient[len(inputs) - learned :], d_oracle[len(inputs) - learned :], rtol=1e-6, atol=1e-6
    )


# What is asked for, how the pairs differ from two plain views of 4 graphs, and which way it takes.
WHICH_WAY = [
    ("auto", {}, "two views"),
    ("chunks", {"negatives": "cross"}, "two views"),
    ("dense", {}, "dense"),
    ("auto", {"lengths": (4, 4, 4)}, "one chunk"),
    ("auto", {"labels": torch.arange(8)}, "one chunk"),
    ("auto", {"memory": torch.zeros(3, DIM)}, "chunks"),
    ("auto", {"negative_pairs": Listed(torch.tensor([0]), torch.tensor([1]))}, "lists"),
    ("dense", {"negative_pairs": Listed(torch.tensor([0]), torch.tensor([1]))}, "dense"),
]


@pytest.mark.parametrize(("engine", "more", "way"), WHICH_WAY)
def test_the_table_of_ways(engine, more, way):
    pairs = Pairs((4, 4))._replace(**more)
    inputs, rows = Inputs(torch.zeros(pairs.num_embeddings(), DIM), 0.2, None), all_rows(pairs)
    assert choose_way(engine, pairs, inputs, rows, 1) == way
    on_two_processes = {"two views": "one chunk"}.get(way, way)
    if engine != "dense":
        assert choose_way(engine, pairs, inputs, rows, 2) == on_two_processes
    if way in ("two views", "one chunk"):
        with in_chunks(20):
            assert choose_way(engine, pairs, inputs, rows, 1) == "chunks"


def test_what_is_listed_is_not_read():
    """A GPU would have to be waited for, and a matrix of all embeddings would be large."""
    z = torch.randn(100, DIM, requires_grad=True)
    pairs, _ = random_pairs(100, 100, 60)
    given = {"positives": pairs[:, :30], "negative_pairs": pairs[:, 30:]}
    module = InfoNCE().eval()  # no check reads values
    (expected,) = gradients(module(z, **given), [z])
    reading = mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError)
    with in_chunks(1000), reading:
        with pytest.raises(AssertionError):  # on a CPU chunks depend on how many pairs there are
            module(z, **given)
        with as_on(False):
            loss = module(z, **given)
            assert largest_tensor(lambda: loss.backward()) <= z.numel()
    torch.testing.assert_close(z.grad, expected)


def views_of(num, dtype=torch.float64):
    return torch.randn(2, num, DIM, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_chunks_make_and_keep_no_matrix_of_all_pairs(name, temperature):
    options = {"engine": "chunks", "temperature": temperature, "reduction": "mean"}
    views = views_of(400, torch.float32)
    with in_chunks(1 << 14):  # of 640,000 pairs
        assert largest_tensor(lambda: loss_of(name, views, **options).backward()) < 400 * 64
        _, kept = kept_for_backward(lambda: loss_of(name, views, **options))
    assert kept < 400 * 200


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_chunk_leaves_no_tensor_behind(name, reduction):
    """A small one keeps the matrices that the chunk frees apart, and the process grows."""
    views, most = views_of(40, torch.float32), []
    for size in (1600, 400):  # four times as many chunks
        with in_chunks(size), AliveTensors() as alive:
            loss_of(name, views, engine="chunks", reduction=reduction).sum().backward()
        most.append(alive.most)
    assert most[1] <= most[0] + 2


@pytest.mark.parametrize("name", ["InfoNCE", "SupCon", "positives", "score_mod", "given negatives"])
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("chunk", [1 << 19, 200])
def test_a_backward_within_autocast_has_full_precision(name, readable, chunk):
    views, found = views_of(12, torch.float32), []
    for enabled in (False, True):
        with as_on(readable), in_chunks(chunk):
            loss = loss_of(name, views, reduction="none").sum()
            with torch.autocast(views.device.type, torch.bfloat16, enabled=enabled):
                found += gradients(loss, [views])
    assert torch.equal(*found)


def test_embeddings_of_listed_pairs_are_gathered_in_parts():
    z = torch.randn(100, 64, requires_grad=True)
    pairs, _ = random_pairs(100, 100, 40_000)
    loss = InfoNCE()
    given = {"positives": pairs[:, :50], "negative_pairs": pairs}
    (expected,) = gradients(loss(z, **given), [z])
    with in_chunks(1 << 14):
        assert largest_tensor(lambda: loss(z, **given).backward()) < pairs.numel() + 100
    torch.testing.assert_close(z.grad, expected)


@pytest.mark.parametrize("name", ["InfoNCE", "sets with labels", "positives and labels", "memory"])
def test_first_and_second_derivatives_of_dense(name):
    """The losses here have weights that do not depend on the views: weights are constants."""
    value = functools.partial(loss_of, name, engine="dense", reduction="mean")
    assert torch.autograd.gradcheck(value, views_of(4))
    assert torch.autograd.gradgradcheck(value, views_of(4))
    value = function_of(name, 4, engine="dense", reduction="mean")
    hessian = torch.func.hessian(value)(views_of(4).detach()).view(32, 32)
    torch.testing.assert_close(hessian, hessian.T)


@pytest.mark.filterwarnings("ignore:pgcl_losses")
@pytest.mark.parametrize("over_positives", ["mean", "supcon", "sum"])
@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]])
def test_second_derivatives_without_negatives_or_positives(over_positives, labels):
    z, labels = torch.randn(5, DIM, dtype=torch.float64, requires_grad=True), torch.tensor(labels)
    loss = functools.partial(InfoNCE(over_positives=over_positives, engine="dense"), labels=labels)
    assert torch.autograd.gradgradcheck(loss, z)


@pytest.mark.parametrize("name", ["InfoNCE", "SupCon", "given negatives"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_chunks_are_differentiable_once(name, reduction):
    views = views_of(6)
    loss = loss_of(name, views, engine="chunks", reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="differentiable once: engine='dense', in one"):
        torch.autograd.grad(loss, views, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["InfoNCE", "positives and labels", "memory"])
def test_two_losses_may_be_alive_at_once(name, reduction):
    """Also on several threads: chunks share no memory between calls."""
    options = {"engine": "chunks", "reduction": reduction}

    def gradient_of(seed):
        views = torch.randn(2, 30, DIM, generator=of_seed(seed), requires_grad=True)
        loss = loss_of(name, views, **options).sum()
        return loss, views

    expected = [gradients(loss, [views]) for loss, views in map(gradient_of, range(4))]
    with in_chunks(100):
        alive = [gradient_of(seed) for seed in range(4)]
        ours = [gradients(loss, [views]) for loss, views in reversed(alive)]
        torch.testing.assert_close(ours[::-1], expected)
        device = torch.get_default_device()
        with ThreadPoolExecutor(4, initializer=torch.set_default_device, initargs=[device]) as pool:
            ours = list(pool.map(lambda seed: gradients(*alone(*gradient_of(seed))), range(4)))
        torch.testing.assert_close(ours, expected)


def alone(loss, views):
    return loss, [views]


def test_inference_mode_before_training():
    loss, views = InfoNCE(temperature=torch.nn.Parameter(torch.tensor(0.2))), views_of(6)
    expected = gradients(loss(*views), [views])
    with torch.inference_mode():
        assert not loss(*views).requires_grad
        fixed = torch.tensor(0.2)  # a tensor that autograd must not keep
    torch.testing.assert_close(gradients(loss(*views), [views]), expected)
    loss.temperature = fixed
    torch.testing.assert_close(gradients(loss(*views), [views]), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hard_negatives_of_the_largest_hardness_in_float32(engine, reduction):
    for temperature in (0.05, 0.2, 1.0):
        views = torch.randn(2, 40, DIM, requires_grad=True)
        options = {"hardness": 100.0, "temperature": temperature, "reduction": reduction}
        loss = InfoNCE(engine=engine, **options)
        exact = views.detach().double().requires_grad_()
        (ours,) = gradients(loss(*views).sum(), [views])
        (expected,) = gradients(loss(*exact).sum(), [exact])
        assert (ours - expected).norm() < 5e-3 * expected.norm()


def test_weights_that_change_before_the_backward(engine):
    """A caller may write the next weights, pairs and labels into the same tensors."""
    z = torch.randn(8, DIM, dtype=torch.float64, requires_grad=True)
    loss = InfoNCE(reduction="none", engine=engine)
    given = {"labels": torch.arange(8) // 2, "positives": torch.tensor([[0, 1], [3, 4]])}
    given["positive_weights"] = torch.tensor([0.5, 2.0], dtype=torch.float64)
    first, second = (loss(z, **given).sum() for _ in range(2))
    expected = gradients(first, [z])
    for tensor in given.values():
        tensor += 1
    torch.testing.assert_close(gradients(second, [z]), expected)
