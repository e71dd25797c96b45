"""Half precision, autocast with a GradScaler, and embeddings and temperatures at their limits."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import CUT, NOT_CUT
from helpers.losses import ARITHMETIC, DIM, gradients, loss_of
from helpers.marks import device_type, few_graphs
from torch import nn

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE

pytestmark = few_graphs
HALF = [torch.float16, torch.bfloat16]
every_loss = pytest.mark.parametrize("name", ARITHMETIC)


def loss_and_gradients(loss, views, dtype=None, **options):
    """In float64, of a name or a function; the gradient has the dtype of the embeddings."""
    loss_of_views = partial(loss_of, loss) if isinstance(loss, str) else loss
    leaves = [view.detach().to(dtype or view.dtype).requires_grad_() for view in views]
    loss = loss_of_views(leaves, **options)
    d_leaves = gradients(loss.mean(), leaves)
    assert loss.dtype == (torch.float64 if leaves[0].dtype == torch.float64 else torch.float32)
    assert all(d.isfinite().all() and d.dtype == leaves[0].dtype for d in d_leaves)
    return loss.double(), [d.double() for d in d_leaves]


@every_loss
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("temperature", [0.003, 0.01, 0.2])
def test_lower_precision_agrees_with_float64(name, engine, dtype, temperature):
    views = torch.randn(2, 40, DIM).to(dtype)
    options = {"temperature": temperature, "engine": engine, "reduction": "none"}
    losses, d_views = loss_and_gradients(name, views, **options)
    exact, d_exact = loss_and_gradients(name, views, torch.float64, **options)
    torch.testing.assert_close(losses, exact, rtol=1e-3, atol=1e-3)
    tolerance = 4 * torch.finfo(dtype).eps + 1e-3
    torch.testing.assert_close(d_views, d_exact, rtol=tolerance, atol=tolerance)


@every_loss
@pytest.mark.parametrize("temperature", [1e-30, 1e-20, 1e-8, 1e9, 1e30])
def test_extreme_temperatures(name, engine, temperature):
    views = torch.randn(2, 40, DIM)
    loss, _ = loss_and_gradients(name, views, temperature=temperature, engine=engine)
    exact, _ = loss_and_gradients(name, views, torch.float64, temperature=temperature)
    torch.testing.assert_close(loss, exact, rtol=1e-3, atol=1e-6)


@every_loss
@pytest.mark.parametrize("engine", [NOT_CUT, CUT], ids=["not cut", "cut"], indirect=True)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_lowers_no_precision(name, engine, dtype, reduction):
    """Of no loss, and of no backward of a contrast that runs inside."""
    views, results = torch.randn(2, 12, DIM, requires_grad=True), []
    for enabled in (False, True):
        with torch.autocast(device_type(), dtype=dtype, enabled=enabled):
            loss = loss_of(name, views, engine=engine, reduction=reduction).sum()
            is_contrast = name not in ("weighted by samples", "heads with a memory")
            inside = gradients(loss, [views], retain_graph=True) if is_contrast else []
        results.append([loss, *inside, *gradients(loss, [views])])
    torch.testing.assert_close(*results, rtol=0, atol=0)


z = F.normalize(torch.arange(1.0, 1 + 12 * DIM).sin().view(2, 6, DIM), dim=-1)
DEGENERATE = {
    "one graph": z[:, :1],
    "zeros": z * 0,
    "some zeros": z * torch.arange(6).sign()[:, None],
    "tiny": 1e-18 * z,
    "tiny and long": z * torch.tensor([1e-18, 1e18]).view(2, 1, 1),
    "identical embeddings": z[:1, :1].expand(2, 6, DIM),
    "identical views": z[:1].expand(2, 6, DIM),
    "opposed views": torch.stack([z[0], -z[0]]),
}


@every_loss
@pytest.mark.parametrize("views", DEGENERATE.values(), ids=[*DEGENERATE])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_degenerate_views_give_finite_losses_and_gradients(name, engine, views, temperature):
    if name == "dot products" and views.abs().max() > 1e15:
        views = views.sign() * views.abs().clamp_max(1e15)  # float32 has no larger products
    loss, _ = loss_and_gradients(name, views, temperature=temperature, engine=engine)
    assert loss.isfinite().all()


@every_loss
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_give_nan(name, engine, bad):
    views = z.clone()
    views[0, 3, 1] = bad
    assert loss_of(name, views, engine=engine, reduction="mean").isnan()


def with_outliers(views, of_outliers, **options):
    """The first graph, of which these embeddings are in a cluster of their own."""
    clusters = torch.zeros(2, views[0].shape[0], dtype=torch.long)
    clusters[:of_outliers, 0] = 1
    prototypes = torch.eye(3).to(views[0])[:2]
    return PrototypeReweightedNCE(**options)(*views, clusters=clusters, prototypes=prototypes)


@pytest.mark.parametrize("temperature", [0.002, 0.01, 0.02])
def test_tiny_weights_count_at_low_temperatures(engine, temperature):
    # One outlier has a weight of e^-128, and is the only negative of the others.
    views = F.normalize(torch.randn(2, 128, 3) + torch.tensor([2.0, -2.0]).view(2, 1, 1), dim=2)
    options = {"temperature": temperature, "engine": engine, "reduction": "none"}
    narrow, wide = (with_outliers(of, 1, **options) for of in (views, views.double()))
    assert wide.max() > 0.3 / temperature
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num", [10, 700])
@pytest.mark.parametrize("angle", [0.5, 0.55, 0.6])
def test_sums_that_underflow_in_float32_are_not_empty(num, angle):
    # The only negative of most embeddings is far from them and has a small weight.
    def point(at):
        return torch.tensor([math.cos(at), math.sin(at), 0.0])

    views = torch.stack([point(0), point(math.pi)]).unsqueeze(1).repeat(1, num, 1)
    views[:, 0] = point(math.pi / 2 + angle)
    results = []
    for engine in ("chunks", "dense"):
        leaf = views.clone().requires_grad_()
        options = {"temperature": 0.0101, "engine": engine, "reduction": "none"}
        losses = with_outliers(leaf, 2, **options)
        results.append([losses, *gradients(losses.sum(), [leaf])])
    torch.testing.assert_close(*results, rtol=1e-3, atol=0.05)  # of gradients of 84


@pytest.mark.parametrize(("num", "temperature"), [(53, 0.026), (72, 0.05), (86, 0.2)])
def test_sums_that_are_denormal_have_finite_gradients(engine, num, temperature):
    """Most embeddings have one negative, of a tiny weight and on the other side."""
    views = torch.tensor([1.0, 0.0, 0.0]) + 0.05 * torch.randn(2, num, 3)
    views[:, 0] = torch.tensor([-1.0, 0.0, 0.0])
    options = {"temperature": temperature, "engine": engine, "of_outliers": 1}
    results = [
        loss_and_gradients(with_outliers, views, dtype, **options)
        for dtype in (torch.float32, torch.float64)
    ]
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("length", "upstream", "options"),
    [
        (1e18, 1.0, {"similarity": "dot", "temperature": 0.3}),
        (1.0, 1e22, {"temperature": 0.01}),
        (1.0, 1e22, {"temperature": 0.3}),
        (1e18, 1e18, {"temperature": 0.3}),
    ],
)
def test_large_embeddings_and_gradients_stay_finite(reduction, length, upstream, options, engine):
    """Also the gradient by a temperature that is learned."""
    views, results = length * z, []
    for dtype in (torch.float32, torch.float64):
        leaf = views.to(dtype).requires_grad_()
        tau = nn.Parameter(torch.tensor(options["temperature"], dtype=dtype))
        given = {**options, "temperature": tau, "reduction": reduction, "engine": engine}
        loss = upstream * InfoNCE(**given)(*leaf).sum()
        results.append([x.double() for x in gradients(loss, [leaf, tau])])
    for ours, exact in zip(*results, strict=True):
        size = float(exact.abs().max())
        torch.testing.assert_close(ours / size, exact / size, rtol=1e-3, atol=1e-3)


SCALED = {
    "InfoNCE": lambda: InfoNCE(memory_size=30, dim=DIM, temperature=0.05),
    "PGCL": lambda: PGCLLoss(DIM, 3, memory_size=30, queue_size=16, freeze_steps=2),
}


@pytest.mark.parametrize("make", SCALED.values(), ids=[*SCALED])
def test_a_grad_scaler_backs_off_until_gradients_are_finite(make):
    """Of embeddings in float16, whose gradient overflows first; the loss stays finite."""
    encoder, loss = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, DIM)), make()
    optimizer = torch.optim.Adam([*encoder.parameters(), *loss.parameters()], lr=1e-2)
    scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**40)
    x, losses = torch.randn(16, 6), []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast(device_type(), dtype=torch.float16):
            views = [encoder(x + 0.1 * torch.randn(16, 6)) for _ in range(2)]
            losses.append(loss(*views))
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.stack(losses).isfinite().all()
    assert scaler.get_scale() < 2.0**40
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("temperature", [0.0115, 0.0249, 0.0251])
def test_sums_near_the_largest_exponent_are_finite(temperature):
    """Of identical embeddings, whose sums are the largest: log(1 + 78) at any temperature."""
    views = torch.ones(2, 40, DIM)
    loss, _ = loss_and_gradients("InfoNCE", views, temperature=temperature)
    assert loss.item() == pytest.approx(math.log(79), rel=1e-5)


@pytest.mark.parametrize("over_positives", ["mean", "supcon", "sum"])
def test_nan_in_a_positive_gives_nan(engine, over_positives):
    """Its query has no other positive, and listed negatives without a NaN."""
    views = z.clone()
    views[1, 0, 0] = math.nan
    options = {"queries": "first", "reduction": "none"}
    loss = InfoNCE(over_positives=over_positives, engine=engine, **options)
    losses = loss(*views, negative_pairs=torch.tensor([[0, 1], [2, 2]]))
    assert losses.isnan().all()


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {"positives": [[0, 1], [1, 2]], "negative_pairs": [[0, 1], [3, 4]]}),
        ({"memory_size": 4, "dim": DIM, "negatives": "memory"}, {"positives": [[0], [1]]}),
    ],
)
def test_nan_in_an_embedding_that_is_in_no_pair_gives_nan(engine, options, given):
    """Otherwise only its gradient would be NaN, and nobody would notice."""
    first, second = z.clone()
    second[5] = math.nan
    loss = InfoNCE(queries="first", engine=engine, **options)
    if options:
        loss.remember(z[0, :4])
    given = {name: torch.tensor(pairs) for name, pairs in given.items()}
    assert loss(first, second, **given).isnan()


@pytest.mark.parametrize("options", [{}, {"debias": 0.1}, {"hardness": 1.0}])
def test_nan_in_a_query_without_a_positive_gives_nan(engine, options):
    """No other query is compared with it, but its gradient would spoil theirs."""
    z1, z2 = z[0].clone(), z[1]
    z1[5] = math.nan
    labels = torch.tensor([0, 1, 2, 3, 4, 9]), torch.arange(6)
    loss = InfoNCE(negatives="cross", queries="first", engine=engine, **options)
    assert loss(z1, z2, labels=labels).isnan()


def test_infinite_dot_products_give_nan_and_no_loss_of_0(engine):
    """Also where the product with an infinite embedding is -inf, which would be negligible."""
    views = z.clone()
    views[1, 3, 0] = math.inf
    loss = InfoNCE(similarity="dot", reduction="none", engine=engine)
    losses = loss(*views)
    assert losses.isnan().all()  # each query is compared with it
