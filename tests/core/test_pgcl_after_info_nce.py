"""InfoNCE first, PGCL later, as the page shows it: across the switch, and on two processes."""

import copy
from functools import partial

import pytest
import torch
from helpers.marks import compiling, one_graph
from helpers.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import InfoNCE, PGCLLoss

DIM, EPOCHS = 6, 4


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.encoder = torch.nn.Linear(5, DIM)
        self.info_nce = InfoNCE(gather=options.get("gather", True))
        self.pgcl = PGCLLoss(DIM, 4, **options)

    def forward(self, x1, x2, warm):
        return (self.info_nce if warm else self.pgcl)(self.encoder(x1), self.encoder(x2))


def made(**options):
    torch.manual_seed(0)
    model = Model(**options).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def views_of(epoch):
    random = torch.Generator().manual_seed(epoch)
    return torch.randn(2, 12, 5, dtype=torch.float64, generator=random)


def train(model, optimizer, epochs, views=views_of, switch=EPOCHS // 2):
    losses = []
    for epoch in epochs:
        loss = model(*views(epoch), warm=epoch < switch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("options", [{}, {"memory_size": 8}, {"queue_size": 6}])
@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_checkpoint_of_either_phase_resumes(options, saved_after):
    model, optimizer = made(**options)
    prototypes = model.pgcl.prototypes.weight.detach().clone()
    expected = train(model, optimizer, range(saved_after))
    assert torch.equal(model.pgcl.prototypes.weight, prototypes) == (saved_after <= EPOCHS // 2)
    state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    expected += train(model, optimizer, range(saved_after, EPOCHS))
    resumed, again = made(**options)
    resumed.load_state_dict(state[0])
    again.load_state_dict(state[1])
    found = train(resumed, again, range(saved_after, EPOCHS))
    assert torch.equal(torch.stack(found), torch.stack(expected[saved_after:]))
    assert not torch.equal(model.pgcl.prototypes.weight, prototypes)


def trains_as_one_process(rank, num_ranks):
    whole, of_whole = made(gather=False)
    model, optimizer = made()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    train(wrapped, optimizer, range(EPOCHS), lambda epoch: views_of(epoch).chunk(2, 1)[rank])
    train(whole, of_whole, range(EPOCHS))
    torch.testing.assert_close([*model.parameters()], [*whole.parameters()], rtol=1e-6, atol=1e-8)


def test_two_processes_train_as_one():
    on_ranks(trains_as_one_process, 2)


class ByHand(Model):
    """The recipe with the three modules."""

    def forward(self, x1, x2, warm):
        z1, z2 = self.encoder(x1), self.encoder(x2)
        if warm:
            return self.info_nce(z1, z2)
        a = self.pgcl.prototypes(z1, z2)
        weight = self.pgcl.consistency_weight
        return self.pgcl.contrast(z1, z2, a) + weight * self.pgcl.consistency(a)


def test_by_hand_it_trains_alike():
    models = []
    for kind in (Model, ByHand):
        torch.manual_seed(0)
        model = kind().double()
        train(model, torch.optim.Adam(model.parameters(), lr=0.05), range(EPOCHS))
        models.append(model.state_dict())
    torch.testing.assert_close(*models)


def test_under_autocast_both_phases_have_the_loss_of_the_embeddings():
    """And a finite gradient, of the prototypes from the switch on."""
    model, _ = made()
    model.float()
    views = views_of(0).float()
    for warm in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*views, warm=warm)
            z = [model.encoder(x).detach() for x in views]
        assert z[0].dtype == torch.bfloat16
        loss_of = model.info_nce if warm else model.pgcl
        torch.testing.assert_close(loss, loss_of(*(x.float() for x in z)))
        model.zero_grad()
        loss.backward()
        assert model.encoder.weight.grad.isfinite().all()
        assert (model.pgcl.prototypes.weight.grad is None) == warm


@pytest.mark.slow
@one_graph
@compiling
def test_compiled_it_trains_alike():
    torch.compiler.reset()
    models = []
    for wrap in (lambda model: model, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        model, optimizer = made()
        train(wrap(model), optimizer, range(EPOCHS))
        models.append(model.state_dict())
    torch.testing.assert_close(*models)


def test_no_warning_before_or_after_the_switch():
    train(*made(), range(60), switch=30)


def test_prototypes_that_the_optimizer_does_not_have_are_seen_after_the_switch():
    model, _ = made()
    of_encoder = torch.optim.Adam(model.encoder.parameters())
    with pytest.warns(UserWarning, match="the prototypes have not moved"):
        train(model, of_encoder, range(60), switch=30)
