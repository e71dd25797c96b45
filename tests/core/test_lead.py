"""While prototypes learn alone, rows learn from InfoNCE; then from the whole."""

import copy
import io

import pytest
import torch
from helpers.cases import EVERY_MODE, FAMILY
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss

DIM = 4
MEMBERS = [{"num_prototypes": 4}, *FAMILY]


def views_of(num_views=2, num_rows=6):
    return torch.randn(num_views, num_rows, DIM, dtype=torch.float64)


def pgcl_of(**options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, **options).double()


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs, retain_graph=True, materialize_grads=True)


@given(
    member=st.sampled_from(MEMBERS),
    mode=st.sampled_from(EVERY_MODE),
    num_views=st.integers(2, 3),
    engine=st.sampled_from(["dense", "streaming"]),
)
def test_rows_learn_from_info_nce_and_prototypes_from_the_consistency(
    member, mode, num_views, engine
):
    options = {**mode, **member, "engine": engine}
    views = views_of(num_views).requires_grad_()
    info_nce = InfoNCE(negatives=mode["negatives"])(*views)
    plain, leading = pgcl_of(**options), pgcl_of(**options, lead_steps=2)
    for _ in range(2):
        terms, expected = leading.terms(*views), plain.terms(*views)
        torch.testing.assert_close(terms.contrast, info_nce)
        torch.testing.assert_close(terms.consistency, expected.consistency)
        (ours,) = gradients(terms.loss, views)
        torch.testing.assert_close(ours, gradients(info_nce, views)[0])
        (ours,) = gradients(terms.loss, leading.prototypes.weight)
        (of_whole,) = gradients(6 * expected.consistency, plain.prototypes.weight)
        torch.testing.assert_close(ours, of_whole)
    terms, expected = leading.terms(*views), plain.terms(*views)
    torch.testing.assert_close(terms[:3], expected[:3])
    torch.testing.assert_close(gradients(terms.loss, views), gradients(expected.loss, views))


def test_only_training_forwards_count():
    pgcl, views = pgcl_of(lead_steps=1), views_of()
    with torch.no_grad():
        pgcl(*views)
    pgcl.eval()
    pgcl(*views.clone().requires_grad_())
    torch.testing.assert_close(pgcl.terms(*views).contrast, InfoNCE()(*views))
    pgcl.train()
    pgcl(*views.clone().requires_grad_())
    torch.testing.assert_close(pgcl.terms(*views).loss, pgcl_of()(*views))


def test_may_be_assigned_at_any_time():
    pgcl, views = pgcl_of(), views_of().requires_grad_()
    pgcl(*views)
    pgcl.lead_steps = 5
    assert pgcl.lead_steps == pgcl.prototypes.lead_steps == 5
    torch.testing.assert_close(pgcl.terms(*views).contrast, InfoNCE()(*views))


def train(encoder, pgcl, optimizer, steps, generator):
    for _ in range(steps):
        rows = torch.randn(2, 8, 3, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        pgcl(*encoder(rows)).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 pickles
def test_a_checkpoint_in_the_middle_goes_on_bit_for_bit():
    def make():
        torch.manual_seed(0)
        encoder = torch.nn.Linear(3, DIM).double()
        pgcl = PGCLLoss(DIM, (3, 4), lead_steps=4, queue_size=4).double()
        modules = torch.nn.ModuleList([encoder, pgcl])
        return modules, torch.optim.Adam(modules.parameters(), lr=0.05)

    whole, optimizer = make()
    generator = torch.Generator().manual_seed(5)
    train(*whole, optimizer, 3, generator)
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict(), generator.get_state()], file)
    train(*whole, optimizer, 4, generator)

    file.seek(0)
    state, of_optimizer, of_generator = torch.load(file, weights_only=False)
    resumed, optimizer = make()
    resumed.load_state_dict(state)
    optimizer.load_state_dict(of_optimizer)
    generator.set_state(of_generator)
    train(*resumed, optimizer, 4, generator)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("options", MEMBERS, ids=str)
def test_one_compiled_graph_leads_and_follows(options):
    torch.compiler.reset()
    eager = pgcl_of(**options, lead_steps=2, weighting="prototype")
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend=counting)
    for _ in range(4):
        views = [view.requires_grad_() for view in views_of()]
        torch.testing.assert_close(compiled(*views), eager(*views))
    assert len(graphs) == 1


def test_prototypes_start_anew_between_steps_of_a_compiled_graph():
    torch.compiler.reset()
    pgcl = pgcl_of(lead_steps=1)
    compiled = torch.compile(pgcl, fullgraph=True, backend="eager")
    for step in range(3):
        views = [view.requires_grad_() for view in views_of()]
        if step in (0, 1):
            pgcl.prototypes.start_from_(torch.cat(views))
        eager = copy.deepcopy(pgcl)
        torch.testing.assert_close(compiled(*views), eager(*views))
