"""Sums of rows: factors of any size, no denormal numbers, no needless work, and small batches."""

import functools

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import CUT, NOT_CUT
from helpers.losses import ARITHMETIC, DIM, gradients, loss_of
from helpers.marks import few_graphs
from torch.utils._python_dispatch import TorchDispatchMode

from pgcl_losses import InfoNCE

pytestmark = few_graphs
in_chunks_or_not = pytest.mark.parametrize(
    "engine", [NOT_CUT, CUT], ids=["not cut", "cut"], indirect=True
)


def aligned(num, dim=DIM, dtype=torch.float32):
    """Two views whose losses are near 0 at low temperatures."""
    first, noise = torch.randn(2, num, dim, dtype=dtype)
    return torch.stack([first, first + 0.2 * noise]).requires_grad_()


class Products(TorchDispatchMode):
    """Counts the denormal numbers that products of matrices read or write."""

    def __init__(self):
        super().__init__()
        self.num_products = self.num_denormal = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "addmm_", "baddbmm"):
            self.num_products += 1
            for x in (*args, result):
                if isinstance(x, torch.Tensor):
                    self.num_denormal += int((x.abs() < torch.finfo(x.dtype).tiny)[x != 0].sum())
        return result


@in_chunks_or_not
@pytest.mark.parametrize("name", ["InfoNCE", "cross", *ARITHMETIC])
@pytest.mark.parametrize("temperature", [0.01, 0.02])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_products_meet_no_denormal_numbers(name, engine, temperature, reduction):
    """A CPU multiplies them up to 25 times more slowly. Here all losses are near 0."""
    views = aligned(40)
    options = {"temperature": temperature, "engine": engine, "reduction": reduction}
    with Products() as products:
        if name == "cross":
            loss = InfoNCE(negatives="cross", **options)(*views)
        else:
            loss = loss_of(name, views, **options)
        loss.mean().backward()
    assert products.num_products > 0 or name == "given negatives"
    assert products.num_denormal == 0


@in_chunks_or_not
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_gradients_none_is_computed(engine, reduction):
    views, tau = aligned(6), torch.nn.Parameter(torch.tensor(0.5))
    loss = InfoNCE(engine=engine, reduction=reduction)
    with Products() as plain:
        loss(*views.detach())
    loss.temperature = tau  # learned, as in a validation of CLIP
    with Products() as without, torch.no_grad():
        loss(*views)
    assert without.num_products == plain.num_products > 0
    with Products() as with_gradient:
        loss(*views).sum().backward()
    assert with_gradient.num_products > plain.num_products


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("temperature", [0.01, 0.2])
@pytest.mark.parametrize("factor", [1e-20, 1e15])
def test_a_loss_that_is_scaled_has_the_scaled_gradient(name, engine, temperature, factor):
    """In float32, also where the derivatives are far below or above 1."""
    views = aligned(20)
    options = {"temperature": temperature, "engine": engine, "reduction": "none"}
    losses = loss_of(name, views, **options)
    (plain,) = gradients(losses.mean(), [views], retain_graph=True)
    (scaled,) = gradients(losses.mean() * factor, [views])
    close = {"rtol": 1e-4, "atol": 1e-5 * float(plain.abs().max())}
    torch.testing.assert_close(scaled / factor, plain, **close)


# Options that do not contradict each other.
FORMS = [
    {"over_positives": over_positives, "similarity": similarity, **more}
    for over_positives in ("mean", "supcon", "sum")
    for similarity in ("cosine", "dot")
    for more in ({}, {"hardness": 2.0}, {"debias": 0.1}, {"decoupled": True})
    if not ("debias" in more and similarity == "dot")
    and not ("decoupled" in more and over_positives == "supcon")
]


@in_chunks_or_not
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.05])
def test_what_is_left_out_of_a_softmax_is_below_rounding(options, temperature, engine):
    """In float32 beside float64, where other terms are left out."""
    views, labels = aligned(30), torch.arange(30) % 20
    loss_of_views = InfoNCE(**options, temperature=temperature, engine=engine)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = (
            (F.normalize(views, dim=-1) if options["similarity"] == "dot" else views)
            .detach()
            .to(dtype)
        )
        loss = loss_of_views(*leaves.requires_grad_(), labels=labels)
        results.append([loss.double(), *(d.double() for d in gradients(loss, [leaves]))])
    size = float(results[1][1].abs().max())
    near_its_bound = 2e-2 if "debias" in options else 3e-4  # where debiasing loses digits
    torch.testing.assert_close(*results, rtol=1e-3, atol=near_its_bound * size)


def many_gradients(loss, views):
    """Derivatives of the loss, and the gradients of all at once, which are those of each."""
    factors, options = torch.randn(3, *loss.shape, dtype=torch.float64), {"retain_graph": True}
    (batched,) = torch.autograd.grad(loss, views, factors, is_grads_batched=True, **options)
    plain = [torch.autograd.grad(loss, views, d, **options)[0] for d in factors]
    torch.testing.assert_close(batched, torch.stack(plain))
    return factors, batched


@in_chunks_or_not
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_many_gradients_at_once(name, engine, reduction):
    """`is_grads_batched` and `jacobian(vectorize=True)` run the backward under vmap."""
    views = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    value = functools.partial(loss_of, name, engine=engine, reduction=reduction)
    loss = value(views)
    factors, batched = many_gradients(loss, views)
    jacobian = torch.autograd.functional.jacobian(value, views, vectorize=True)
    torch.testing.assert_close(torch.tensordot(factors, jacobian, loss.dim()), batched)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_many_gradients_at_once_of_scores_that_are_replaced(engine, reduction):
    """The user's function returns scores that do not depend on its own."""
    views = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    loss = InfoNCE(score_mod=zero_scores, engine=engine, reduction=reduction)(*views)
    many_gradients(loss, views)


def zero_scores(scores, pair):
    return torch.zeros_like(scores)


@in_chunks_or_not
@pytest.mark.parametrize("name", ARITHMETIC)
def test_hooks_may_unpack_what_was_saved_in_another_layout(name, engine):
    views = torch.randn(2, 6, DIM, requires_grad=True)

    def transposed(x):
        return x.mT.contiguous().mT if x.dim() > 1 else x.clone()

    results = []
    for unpack in (torch.clone, transposed):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), unpack):
            loss = loss_of(name, views, engine=engine, reduction="none").sum()
        results.append(gradients(loss, [views]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ["InfoNCE", "hard and debiased", "SupCon", "given negatives"])
def test_a_backward_may_be_repeated(name, engine):
    views = torch.randn(2, 6, DIM, requires_grad=True)
    loss = loss_of(name, views, engine=engine, reduction="mean")
    first = gradients(loss, [views], retain_graph=True)
    torch.testing.assert_close(gradients(loss, [views]), first)


@pytest.mark.parametrize("name", ["InfoNCE", "cross", "SupCon", "given negatives"])
def test_a_batch_of_one_chunk_is_computed_at_once(name):
    """And listed negatives take the time of their pairs, not of a matrix that nobody needs.

    The gradient takes two more products, by queries and by keys, in the backward.
    """
    z = torch.randn(2, 3000 if name == "given negatives" else 400, DIM, requires_grad=True)
    given = {"negative_pairs": torch.stack([torch.arange(100), torch.arange(100) + 500])}
    given = given if name == "given negatives" else {}
    if name == "SupCon":
        given["labels"] = torch.arange(400) // 2
    loss_of_views = InfoNCE(negatives="cross" if name == "cross" else "all")
    is_list = name == "given negatives"
    with Products() as products:
        loss = loss_of_views(*z, **given)
        assert products.num_products == (0 if is_list else 1)
        loss.backward()
    assert products.num_products == (0 if is_list else 3)
