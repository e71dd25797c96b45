"""docs/swap.md: each trap is what the page says."""

import re
from pathlib import Path

import pytest
import torch

from pgcl_losses import PGCLLoss

# What Lightning and the dependencies of PyGCL warn of.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*does not have many workers"
)

PAGE = (Path(__file__).parents[1] / "docs" / "swap.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SHARED = BLOCKS[0]


def names_after(*blocks):
    names = {"__name__": "swap"}
    for block in (SHARED, *blocks):
        exec(compile(block, "docs/swap.md", "exec"), names)
    return names


def block_with(text):
    (block,) = [block for block in BLOCKS if text in block]
    return block


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def moved(prototypes, of_step):
    before = prototypes.weight.detach().clone()
    of_step()
    return not torch.equal(before, prototypes.weight)


@pytest.mark.parametrize("added", [True, False])
def test_an_optimizer_from_before_the_swap_leaves_the_prototypes(added):
    block = block_with("add_param_group")
    if not added:
        block = re.sub(r"optimizer\.add_param_group.*\n", "", block)
    names = names_after(block)
    model = names["model"]
    x, x_aug = model(names["batch"]), model(names["batch_aug"])
    pgcl = model.pgcl
    assert moved(pgcl.prototypes, lambda: step(names["optimizer"], pgcl(x, x_aug))) == added


def test_a_missing_row_is_an_error():
    message = r"z2 has shape (63, 96) but z1 has (64, 96): row i of every view must be graph i"
    with pytest.raises(ValueError, match=re.escape(message)):
        PGCLLoss(96)(torch.randn(64, 96), torch.randn(63, 96))
    assert message in PAGE.replace("\n", " ")


def test_pooling_without_size_drops_a_graph_and_the_model_says_so():
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import global_add_pool

    from pgcl_losses.adapters.pyg import ContrastiveModel, NodeDrop

    class Encoder(torch.nn.Module):
        def forward(self, x, edge_index, batch):
            return global_add_pool(x, batch)

    edges = torch.tensor([[0], [1]])
    batch = Batch.from_data_list([Data(x=torch.randn(2, 8), edge_index=edges) for _ in range(4)])
    model = ContrastiveModel(Encoder(), NodeDrop(0.0), NodeDrop(1.0), PGCLLoss(8))
    with pytest.raises(ValueError, match=r"pool with size=batch\.num_graphs"):
        model(batch)


def test_climbing_leaves_gradient_that_only_the_models_zero_grad_takes_away():
    block = block_with("view_learner = ")
    climbing, _ = block.split("model.train()")
    names = names_after(climbing)
    model = names["model"]
    weight = model.pgcl.prototypes.weight
    assert weight.grad.abs().sum() > 0
    held = {id(p) for group in names["view_optimizer"].param_groups for p in group["params"]}
    assert id(weight) not in held
    model.zero_grad()
    assert weight.grad is None


class Dig:
    """Makes the calls of DIG's `Contrastive`: graphs by position, nodes by keyword."""

    def __init__(self, loss_fn):
        self.loss_fn = loss_fn

    def train(self, encoder, batches, optimizer, nodes):
        epoch_loss = 0.0
        for views in batches:
            optimizer.zero_grad()
            zs = [encoder(view) for view in views]
            if nodes:
                batch = torch.zeros(len(zs[0]), dtype=torch.long)
                loss = self.loss_fn(zs_g=None, zs_n=zs, batch=batch, neg_by_crpt=False, tau=0.5)
            else:
                loss = self.loss_fn(zs, neg_by_crpt=False, tau=0.5)
            loss.backward()
            optimizer.step()
            epoch_loss += loss
        yield encoder, epoch_loss


@pytest.mark.parametrize("nodes", [False, True])
def test_dig(nodes):
    objective = names_after(block_with("class PGCLObjective"))["PGCLObjective"](8, num_prototypes=3)
    expected = PGCLLoss(8, 3)
    expected.load_state_dict(objective.pgcl.state_dict())
    encoder = torch.nn.Linear(4, 8)
    batches = torch.randn(2, 2, 5, 4)
    with torch.no_grad():
        first = expected.eval()(*(encoder(view) for view in batches[0]))
    optimizer = torch.optim.Adam([*encoder.parameters(), *objective.parameters()], lr=1e-9)

    def train():
        ((_, total),) = Dig(objective).train(encoder, batches[:1], optimizer, nodes)
        torch.testing.assert_close(total.detach(), first)
        ((_, total),) = Dig(objective).train(encoder, batches, optimizer, nodes)
        assert total < 1e9  # how DIG looks for its best epoch

    assert moved(objective.pgcl.prototypes, train)
    with pytest.raises(AssertionError, match="graphs or nodes"):
        objective([batches[0, 0]] * 2, zs_n=[batches[0, 0]] * 2)
