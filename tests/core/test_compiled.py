"""Every loss compiles to one graph, and takes torch.func and meta tensors."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from helpers.losses import LOSSES, gradients, gradients_of, model_of, portions_of
from helpers.marks import HAS_ONE_GRAPH, compiling, few_graphs, one_graph
from torch.utils._pytree import tree_map

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.contrast import WEIGHTINGS

pytestmark = few_graphs
every_loss = pytest.mark.parametrize("name", LOSSES)
# Graphs of these are compiled for batches of any size.
GROWING = ("hard", "sets with labels", "queue and memory")


def problem_of(name):
    """A model, and its batches of two sets."""
    make, inputs = LOSSES[name]
    batches = [
        portions_of([[num], [num - 3 if "sets" in inputs else num]], inputs, seed)[0]
        for seed, num in enumerate((7, 7, 9) if name in GROWING else (7, 7))
    ]
    return model_of(make), batches


@pytest.mark.slow
@one_graph
@compiling
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in LOSSES), ("PGCL", "inductor"), ("memory", "inductor")],
)
def test_one_graph_has_the_eager_values_gradients_and_state(name, backend):
    torch.compiler.reset()
    eager, batches = problem_of(name)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for batch in batches:
        losses = [model(*batch.sets, **batch.given) for model in (eager, compiled)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.sum().backward()
        torch.testing.assert_close(gradients_of(twin), gradients_of(eager))
    torch.testing.assert_close(twin.state_dict(), eager.state_dict())


@one_graph
@compiling
@pytest.mark.parametrize(
    "make",
    [partial(InfoNCE, hardness=0.5), pytest.param(partial(PGCLLoss, 4, 3), marks=pytest.mark.slow)],
)
def test_graphs_take_batches_and_options_that_change(make):
    torch.compiler.reset()
    eager = make()
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for step, num in enumerate((9, 7, 6, 8, 10, 15, 20, 24, 31, 40)):
        compiled.temperature = eager.temperature = (0.5, 0.5, 0.3, 0.2)[step % 4]
        views = [torch.randn(num, 4, requires_grad=True) for _ in range(2)]
        losses = [model(*views) for model in (eager, compiled)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, views) for loss in losses))


@one_graph
@compiling
def test_weights_of_positives_have_their_gradient_in_a_compiled_graph():
    torch.compiler.reset()
    eager = InfoNCE(temperature=torch.nn.Parameter(torch.tensor(0.3)), over_positives="sum")
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    z, labels = torch.randn(8, 4, requires_grad=True), torch.arange(8) // 2
    weights = torch.tensor([1.0, 0.0, 0.3, 2.0], requires_grad=True)
    pairs = torch.tensor([[0, 0, 3, 5], [2, 5, 1, 4]])
    results = []
    for loss_of in (eager, compiled):
        loss = loss_of(z, labels=labels, positives=pairs, positive_weights=weights)
        results.append([loss, *gradients(loss, [z, weights, loss_of.temperature])])
    torch.testing.assert_close(*results)


@compiling
def test_a_compiled_loss_has_the_eager_value_and_an_old_torch_says_why_it_is_not_one_graph():
    torch.compiler.reset()
    views = [torch.randn(8, 4, requires_grad=True) for _ in range(2)]
    losses = [loss_of(*views) for loss_of in (InfoNCE(), torch.compile(InfoNCE(), backend="eager"))]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, views) for loss in losses))
    torch.compiler.reset()
    says_why = pytest.raises(RuntimeError, match="before_torch_2_9")
    with nullcontext() if HAS_ONE_GRAPH else says_why:
        torch.compile(InfoNCE(), backend="eager", fullgraph=True)(*views)


@every_loss
def test_functional_transforms_have_the_gradient_and_move_no_state(name):
    model, (batch, *_) = problem_of(name)
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())

    def loss_of(parameters):
        return torch.func.functional_call(model, parameters, batch.sets, batch.given).sum()

    tangents = {key: torch.randn_like(value) for key, value in parameters.items()}
    ours = torch.func.grad(loss_of)(parameters)
    _, slope = torch.func.jvp(loss_of, (parameters,), (tangents,))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model(*batch.sets, **batch.given).sum().backward()
    expected = {
        key: torch.zeros_like(value) if value.grad is None else value.grad
        for key, value in parameters.items()
    }
    torch.testing.assert_close(ours, expected)
    total = sum((expected[key] * tangents[key]).sum() for key in parameters)
    torch.testing.assert_close(slope, total)


@pytest.mark.parametrize("options", [{}, {"contrast_weight": 2.0}, {"consistency_weight": 0.0}])
def test_the_tangent_of_a_float32_loss_is_float32(options):
    views, pgcl = torch.randn(2, 6, 3), PGCLLoss(3, 2, **options)
    loss, tangent = torch.func.jvp(lambda z: pgcl(*z), (views,), (views,))
    assert loss.dtype == tangent.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own vmap
@pytest.mark.parametrize(
    "make",
    [
        partial(PGCLLoss, 3, 5),
        partial(PGCLLoss, 3, (5, 2)),
        partial(PGCLLoss, 3, 5, weighting="sample"),
        partial(InfoNCE, hardness=0.5, debias=0.1),
    ],
)
def test_vmap_of_a_gradient(make):
    """For losses of many batches at once."""
    loss, batches = make(), torch.randn(3, 2, 6, 3)
    of_batch = torch.func.grad(lambda views: loss(*views))
    expected = torch.stack([of_batch(batch) for batch in batches])
    torch.testing.assert_close(torch.func.vmap(of_batch)(batches), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("exclude_same_cluster", [True, False])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("many", ["prototypes", "clusters"])
def test_vmap_over_prototypes_or_clusters_of_embeddings_that_all_share(
    many, weighting, exclude_same_cluster
):
    contrast = PrototypeReweightedNCE(
        weighting=weighting, exclude_same_cluster=exclude_same_cluster
    )
    views = torch.randn(2, 7, 3, dtype=torch.float64)
    stacks = {
        "prototypes": torch.randn(5, 4, 3, dtype=torch.float64),
        "clusters": torch.randint(4, (5, 2, 7)),
    }

    def of_one(views, one):
        given = {name: one if name == many else stack[0] for name, stack in stacks.items()}
        return contrast(*views, **given | {"clusters": tuple(given["clusters"])})

    for function in (of_one, torch.func.grad(of_one)):
        found = torch.vmap(function, in_dims=(None, 0))(views, stacks[many])
        expected = torch.stack([function(views, one) for one in stacks[many]])
        torch.testing.assert_close(found, expected)


@every_loss
def test_shapes_can_be_traced_without_data(name):
    model, batches = problem_of(name)
    shape = model(*batches[0].sets, **batches[0].given).shape
    model.to("meta")
    for batch in batches[:2]:
        sets, given = tree_map(lambda x: x.to("meta"), (batch.sets, batch.given))
        loss = model(*sets, **given)
        loss.sum().backward()
        assert loss.shape == shape
