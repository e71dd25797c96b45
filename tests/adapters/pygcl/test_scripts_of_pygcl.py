"""The GRACE and GraphCL scripts of PyGCL on small graphs: after two changed lines the training is
the same, step by step.
"""

import GCL.augmentors as A
import GCL.losses as L
import pytest
import torch
from GCL import models
from torch_geometric.nn import GCNConv, GINConv, global_add_pool

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters import pygcl

pytestmark = [
    pytest.mark.pygcl,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:'dropout_adj' is deprecated"
    ),
]
FEATURES, DIM = 8, 16


class Grace(torch.nn.Module):
    """Projections of the nodes in two views of one graph."""

    options = ("L2L", True)  # mode, intraview_negs

    def __init__(self):
        super().__init__()
        self.augment = A.Compose([A.EdgeRemoving(pe=0.3), A.FeatureMasking(pf=0.3)])
        self.conv = GCNConv(FEATURES, DIM)
        self.project = torch.nn.Sequential(torch.nn.ELU(), torch.nn.Linear(DIM, DIM))

    def forward(self, x, edge_index, batch):
        views = [self.augment(x, edge_index, None) for _ in range(2)]
        h1, h2 = [self.project(self.conv(*view)) for view in views]
        return {"h1": h1, "h2": h2}


class GraphCL(torch.nn.Module):
    """Projections of the graphs in a batch, and in a view of it."""

    options = ("G2G", False)

    def __init__(self):
        super().__init__()
        walks, drop = A.RWSampling(num_seeds=1000, walk_length=10), A.NodeDropping(pn=0.1)
        change = A.FeatureMasking(pf=0.1), A.EdgeRemoving(pe=0.1)
        self.augments = A.Identity(), A.RandomChoice([walks, drop, *change], 1)
        self.conv = GINConv(torch.nn.Linear(FEATURES, DIM))
        self.project = torch.nn.Linear(DIM, DIM)

    def forward(self, x, edge_index, batch):
        views = [augment(x, edge_index, None)[:2] for augment in self.augments]
        g1, g2 = [self.project(global_add_pool(self.conv(*view).relu(), batch)) for view in views]
        return {"g1": g1, "g2": g2, "batch": batch}


def losses_of_training(script, DualBranchContrast, loss, steps=10):
    """Train as the scripts do, with their optimizer; return the losses of all steps."""
    torch.manual_seed(0)
    x = torch.rand(60, FEATURES, dtype=torch.float64)
    batch = torch.arange(12).repeat_interleave(5)
    edge_index = torch.randint(5, (2, 200)) + 5 * torch.randint(12, (200,))
    encoder_model = script().double()
    contrast_model = DualBranchContrast(loss, *script.options)
    modules = torch.nn.ModuleList([encoder_model, contrast_model])
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = contrast_model(**encoder_model(x, edge_index, batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("script", [Grace, GraphCL])
def test_the_training_is_the_same(script):
    ours = losses_of_training(script, pygcl.DualBranchContrast, InfoNCE(temperature=0.2))
    theirs = losses_of_training(script, models.DualBranchContrast, L.InfoNCE(tau=0.2))
    torch.testing.assert_close(ours, theirs)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("script", [Grace, GraphCL])
def test_pgcl_trains(script):
    loss = PGCLLoss(DIM, num_prototypes=4)
    before = loss.prototypes.weight.detach().clone()
    losses = losses_of_training(script, pygcl.DualBranchContrast, loss, steps=20)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert not torch.equal(loss.prototypes.weight, before)
