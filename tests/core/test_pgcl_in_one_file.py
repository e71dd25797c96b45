"""PGCL in plain torch, an example: its values and gradients are those of the library."""

import inspect
import re
import runpy

import pytest
import torch
from helpers.losses import gradients
from helpers.marks import few_graphs
from helpers.scripts import ROOT
from hypothesis import assume, given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE, sinkhorn

PATH = ROOT / "examples" / "pgcl_in_one_file.py"
plain = runpy.run_path(str(PATH))  # its functions; it trains as a script only


@st.composite
def problems(draw):
    """Two views around the prototypes, closer to them with less noise; all have a gradient."""
    num_graphs, dim = draw(st.integers(1, 12)), draw(st.integers(2, 6))
    num_prototypes = draw(st.integers(1, 7))
    noise, seed = draw(st.sampled_from([0.1, 1.0, 10.0])), draw(st.integers(0, 10**6))
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    prototypes = normal(num_prototypes, dim)
    near = prototypes[torch.randint(num_prototypes, (num_graphs,), generator=random)]
    views = [near + noise * normal(num_graphs, dim) for _ in range(2)]
    return [x.requires_grad_() for x in (*views, prototypes)]


temperatures = st.sampled_from([0.05, 0.2, 1.0])
balances = st.tuples(st.sampled_from([0.02, 0.05, 0.5]), st.integers(1, 7))


def assert_same_with_gradients(loss, expected, inputs, inputs_of_expected=None):
    assert loss.isfinite()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    theirs = gradients(expected, inputs_of_expected or inputs)
    torch.testing.assert_close(gradients(loss, inputs), theirs, rtol=1e-8, atol=1e-10)


@few_graphs
@given(problems(), temperatures, balances, st.sampled_from([0.0, 1.0, 6.0]))
def test_pgcl(problem, temperature, balance, consistency_weight):
    z1, z2, prototypes = problem
    for z in (z1, z2) if len(prototypes) > 1 else ():
        log_q = plain["assign"](z, prototypes, temperature, *balance)[1].log()
        # To log q the library adds 1e-4 cosines / epsilon, which decide between near ties.
        gaps = log_q.sort(1).values.diff()[:, -1]
        assume((gaps > 3e-4 / balance[0]).all())
    given_to_both = {
        "temperature": temperature,
        "epsilon": balance[0],
        "iterations": balance[1],
        "consistency_weight": consistency_weight,
    }
    library = PGCLLoss(z1.shape[1], len(prototypes), **given_to_both).double()
    library.prototypes.weight.data = prototypes.detach()
    loss, expected = plain["pgcl"](*problem, **given_to_both), library(z1, z2)
    assert_same_with_gradients(loss, expected, problem, [z1, z2, library.prototypes.weight])


@given(problems(), temperatures)
def test_info_nce(problem, temperature):
    *views, _ = problem
    loss = plain["info_nce"](*views, temperature)
    assert_same_with_gradients(loss, InfoNCE(temperature=temperature)(*views), views)


@given(problems(), temperatures, st.data())
def test_reweighted_contrast(problem, temperature, data):
    """Of any clusters, balanced or not: all graphs may be in one of them."""
    *views, prototypes = problem
    cluster = st.integers(0, data.draw(st.integers(1, len(prototypes))) - 1)
    size = 2 * len(views[0])
    clusters = torch.tensor(data.draw(st.lists(cluster, min_size=size, max_size=size)))
    weights = plain["weights_of_negatives"](clusters, prototypes)
    loss = plain["info_nce"](*views, temperature, weights)
    contrast = PrototypeReweightedNCE(temperature=temperature)
    expected = contrast(*views, clusters=clusters.chunk(2), prototypes=prototypes)
    assert_same_with_gradients(loss, expected, views)


@given(problems(), balances)
def test_sinkhorn(problem, balance):
    z, _, prototypes = problem
    scores = z @ prototypes.T
    q, (epsilon, iterations) = plain["sinkhorn"](scores, *balance), balance
    assert not q.requires_grad
    expected = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
    torch.testing.assert_close(q, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("num_graphs", "num_prototypes"), [(1, 1), (1, 4), (6, 1)])
def test_without_negatives_the_contrast_is_0(num_graphs, num_prototypes):
    """One graph, or one prototype and thereby one cluster."""
    views = list(torch.randn(2, num_graphs, 3, dtype=torch.float64, requires_grad=True).unbind())
    prototypes = torch.randn(num_prototypes, 3, dtype=torch.float64, requires_grad=True)
    loss = plain["pgcl"](*views, prototypes, consistency_weight=0.0)
    assert loss.item() == 0
    for gradient in gradients(loss, [*views, prototypes]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_defaults_are_those_of_the_library():
    options = inspect.signature(plain["pgcl"]).parameters
    defaults = {x.name: x.default for x in options.values() if x.default is not x.empty}
    library = inspect.signature(PGCLLoss.__init__).parameters
    assert defaults == {name: library[name].default for name in defaults}
    assert inspect.signature(plain["info_nce"]).parameters["temperature"].default == 1.0


def test_it_is_short_and_needs_torch_alone():
    text = PATH.read_text()
    assert text.count("\n") <= 120
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"argparse", "torch"}
