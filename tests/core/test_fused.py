"""The kernels for a GPU agree with the oracle. On a CPU a process of its own interprets them."""

import copy
import functools
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.cases import Problem, for_oracle, in_chunks, upstream
from helpers.losses import gradients, of_seed
from helpers.marks import assert_error, device_type, examples, few_graphs
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.base.distributed import Processes
from pgcl_losses.pairs import loss
from pgcl_losses.pairs.forms import Form
from pgcl_losses.pairs.loss import loss_of_pairs
from pgcl_losses.pairs.rows import Inputs, Pairs
from pgcl_losses.pairs.weights import Table

IS_INTERPRETED = "TRITON_INTERPRET" in os.environ
needs_kernels = pytest.mark.skipif(
    device_type() != "cuda" and not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET"
)


@contextmanager
def counted():
    """A block that counts the runs of kernels, which take 16 keys at a time."""
    from pgcl_losses.pairs import fused

    spy = mock.Mock(side_effect=fused.KERNELS.sum_up)
    kernels = fused.KERNELS._replace(sum_up=spy)
    with mock.patch.multiple(fused, _NUM_KEYS=16, KERNELS=kernels):
        yield spy


@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED or device_type() != "cpu", reason="the kernels run here")
def test_the_kernels_are_interpreted_on_a_cpu():
    pytest.importorskip("triton", reason="needs Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "20 passed" in run.stdout, run.stdout


# Without negatives, numpy in Triton's interpreter warns of log 0, which is the -inf that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@st.composite
def views_and_tables(draw):
    """Views of any number of graphs, and maybe weights by clusters, of which some are 0."""
    generator = of_seed(draw(st.integers(0, 10**6)))
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)
    num, num_views, size = draw(st.integers(1, 12)), draw(st.integers(2, 4)), 5
    count, weights = num * num_views, None
    if draw(st.booleans()):
        table = random(size, size).masked_fill(random(size, size) < 0.5, 0.0).log()
        clusters = torch.randint(size, (count, 1), generator=generator)
        weights = Table((table,), clusters)
    negatives, first = draw(st.sampled_from(["all", "cross"])), draw(st.booleans())
    pairs = Pairs((num,) * num_views, negatives, first, cluster_weights=weights)
    return Problem(F.normalize(random(count, 3) - 0.5), pairs, None)


@needs_kernels
@examples(30)
@given(
    problem=views_and_tables(),
    temperature=st.sampled_from([0.01, 0.1, 2.0]),
    chunk=st.sampled_from([50, 400, 1 << 20]),
    learned=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    over_positives=st.sampled_from(["mean", "supcon", "sum"]),
    decoupled=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_losses_and_gradients(
    problem, temperature, chunk, learned, reduction, over_positives, decoupled, dtype
):
    """By embeddings and the temperature."""
    form = {"over_positives": over_positives}
    form["decoupled"] = decoupled and over_positives != "supcon"
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    z, pairs = problem.z.clone().requires_grad_(), problem.pairs
    losses, exist = oracle.info_nce(**for_oracle(problem, z, None), **form, temperature=tau)
    expected = {"mean": oracle.mean_of_queries(losses, exist), "sum": losses.sum(), "none": losses}
    d_expected = gradients(upstream(expected[reduction]) + 0 * z.sum(), [z, tau])
    own_z, own_tau = (x.detach().to(dtype).requires_grad_() for x in (z, tau))
    if pairs.cluster_weights is not None:
        tables = tuple(table.to(dtype) for table in pairs.cluster_weights.log_weights)
        pairs = pairs._replace(cluster_weights=pairs.cluster_weights._replace(log_weights=tables))
    with in_chunks(chunk), counted() as spy:
        ours = loss_of_pairs(
            pairs._replace(form=Form(**form)),
            Inputs(own_z, own_tau if learned else temperature, None),
            reduction,
            "fused",
            Processes([(length,) for length in pairs.lengths]),
        )
        inputs = [own_z, *[own_tau] * learned]
        gradient = gradients(upstream(ours) + 0 * own_z.sum(), inputs)
    assert spy.call_count > 0
    digits = 1e-8 if dtype == torch.float64 else 1e-4
    d_expected = d_expected[: len(inputs)]
    size = max(1.0, *(float(d.abs().max()) for d in d_expected))
    close = functools.partial(torch.testing.assert_close, check_dtype=False, rtol=digits)
    close(ours, expected[reduction], atol=digits)
    close(gradient, d_expected, atol=digits * size)


LOSSES = {
    "InfoNCE": functools.partial(InfoNCE, temperature=0.1),
    "cross": functools.partial(InfoNCE, negatives="cross", decoupled=True),
    "PGCL": functools.partial(PGCLLoss, 8, 6, reduction="none"),
    "PGCL, cross": functools.partial(PGCLLoss, 8, 3, negatives="cross", weighting="uniform"),
}
# Where pairs differ otherwise, plain torch computes them.
OTHERS = {
    "labels": (functools.partial(InfoNCE, hardness=0.0), {"labels": torch.arange(40) % 7}),
    "hard": (functools.partial(InfoNCE, hardness=1.0), {}),
    "debiased": (functools.partial(InfoNCE, debias=0.1), {}),
    "score_mod": (functools.partial(InfoNCE, score_mod=lambda scores, pair: scores - 1), {}),
    "memory": (functools.partial(InfoNCE, memory_size=9, dim=8), {}),
    "sample": (functools.partial(PGCLLoss, 8, 6, weighting="sample"), {}),
    "heads": (functools.partial(PGCLLoss, 8, (3, 4)), {}),
}
CASES = [(make, {}, True) for make in LOSSES.values()]
CASES += [(make, call, False) for make, call in OTHERS.values()]


@needs_kernels
@few_graphs
@pytest.mark.parametrize(("make", "call", "is_fused"), CASES, ids=[*LOSSES, *OTHERS])
def test_a_loss_is_that_of_chunks(make, call, is_fused):
    """Also under autocast, and for embeddings of lower precision."""
    loss, views = make(engine="fused"), torch.randn(2, 40, 8, requires_grad=True)
    twin = copy.deepcopy(loss)
    (twin.contrast if isinstance(twin, PGCLLoss) else twin).engine = "chunks"
    for dtype in (torch.float32, torch.bfloat16):
        given, results = views.to(dtype), []
        with in_chunks(300), counted() as spy:
            for each in (loss, twin):
                with torch.autocast(views.device.type, torch.bfloat16, dtype == torch.bfloat16):
                    value = each(*given, **call)
                results.append([value, *gradients(value.sum(), [views], retain_graph=True)])
        assert (spy.call_count > 0) == is_fused
        torch.testing.assert_close(*results)


def on_two_processes(rank, num_ranks):
    """Processes of four and of six graphs."""
    whole = torch.randn(2, 10, 8, dtype=torch.float64, generator=of_seed(0))
    own = slice(0, 4) if rank == 0 else slice(4, 10)
    for make in LOSSES.values():
        loss, of_all = make(engine="fused").double(), make(engine="chunks", gather=False).double()
        of_all.load_state_dict(loss.state_dict())
        views = whole.clone().requires_grad_()
        expected = of_all(*views).mean()
        (d_expected,) = gradients(expected, [views])
        mine = whole[:, own].clone().requires_grad_()
        with in_chunks(50), counted() as spy:
            value = loss(*mine)
            value = value.sum() * num_ranks / 20 if value.dim() else value
            (d_mine,) = gradients(value, [mine])
        assert spy.call_count > 0
        torch.testing.assert_close(d_mine, num_ranks * d_expected[:, own])


@pytest.mark.skipif(not IS_INTERPRETED, reason="there is one GPU at most")
def test_several_processes():
    on_ranks(on_two_processes, 2)


@needs_kernels
@pytest.mark.parametrize("size", [10.0, 1000.0])
def test_large_scores_lose_no_digits(size):
    """Dot products up to 4 million, all of which float32 has exactly."""
    view = torch.full((9, 4), size)
    view[:, 1] += torch.arange(9.0)
    options = {"temperature": 1.0, "similarity": "dot", "negatives": "cross"}
    results = []
    for engine, dtype in (("fused", torch.float32), ("dense", torch.float64)):
        views = [view.to(dtype, copy=True).requires_grad_() for _ in range(2)]
        results.append(gradients(InfoNCE(engine=engine, **options)(*views), views))
    torch.testing.assert_close(*results, check_dtype=False, rtol=1e-5, atol=1e-5 * size)


@needs_kernels
@pytest.mark.parametrize("number", [-1, 3, 1000])
def test_a_cluster_that_does_not_exist_is_never_read(number):
    """A number that Python reads is an error; on a GPU it makes the loss NaN."""
    clusters = torch.tensor([[0, 1, 2, number]]).T
    weights = Table((torch.zeros(3, 3),), clusters)
    z = F.normalize(torch.randn(4, 3))
    with counted() as spy:
        loss = loss_of_pairs(
            Pairs((2, 2), cluster_weights=weights),
            Inputs(z, 0.5, None),
            "mean",
            "fused",
            Processes([[2]] * 2),
        )
    assert spy.call_count == 1
    assert loss.isnan()


@needs_kernels
def test_nan_stays_nan_and_a_query_without_negatives_has_loss_0():
    loss = InfoNCE(engine="fused", reduction="none")
    views = torch.randn(2, 20, 8)
    views[1, 3] = torch.nan
    assert loss(*views).isnan().all()
    one = torch.randn(2, 1, 8, requires_grad=True)
    (gradient,) = gradients(loss(*one).sum(), [one])
    assert loss(*one).tolist() == [0.0, 0.0]
    assert gradient.count_nonzero() == 0


@needs_kernels
def test_the_default_takes_kernels_only_on_a_gpu():
    """And only for a batch that is cut."""
    views = torch.randn(2, 40, 8, requires_grad=True)
    for chunk, is_cut in ((300, True), (1 << 20, False)):
        with in_chunks(chunk), counted() as spy:
            gradients(InfoNCE()(*views), [views])
        is_on = views.is_cuda and torch.cuda.get_device_capability() == (9, 0)
        assert (spy.call_count > 0) == (is_cut and is_on)


@pytest.mark.skipif(device_type() == "cuda" or IS_INTERPRETED, reason="kernels run here")
def test_kernels_need_a_gpu():
    views = torch.randn(2, 5, 8)
    words = ["engine='fused'", "on a GPU", device_type(), "choose engine='auto'"]
    assert_error(ValueError, lambda: InfoNCE(engine="fused")(*views), words)


@pytest.mark.skipif(device_type() == "cuda" or IS_INTERPRETED, reason="kernels run here")
def test_where_no_kernel_can_be_compiled_a_warning_says_so_once():
    """On the kind of GPU on which kernels have run; on others there is nothing to warn of."""
    cpu, name = torch.device("cpu"), "get_device_capability"
    loss.kernels_run_on.cache_clear()
    with mock.patch.object(torch.cuda, name, return_value=(8, 0)):
        assert not loss.kernels_run_on(cpu)
    loss.kernels_run_on.cache_clear()
    with mock.patch.object(torch.cuda, name, return_value=(9, 0)):
        with pytest.warns(UserWarning, match="Triton compiles no kernels here"):
            assert not loss.kernels_run_on(cpu)
        assert not loss.kernels_run_on(cpu)
    loss.kernels_run_on.cache_clear()
