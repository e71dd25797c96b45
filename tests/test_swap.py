"""docs/swap.md: scripts of the shapes that it is for, and its traps, are what the page says."""

import re
import warnings
from pathlib import Path

import pytest
import torch

from pgcl_losses import PGCLLoss, SinkhornPrototypes

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


@pytest.mark.parametrize("loop", ["model.embedding_dim", "model.projection(z1)", "g1=g1, g2=g2"])
def test_a_script_warms_up_once_and_prototypes_go_on_learning(loop, monkeypatch):
    """GraphCL's loop, that of GRACE by its authors, and PyGCL's, of eight steps each."""
    initialised = []

    def initialise_(prototypes, *given):
        initialised.append(initialise(prototypes, *given).weight.detach().clone())

    initialise = SinkhornPrototypes.initialise_
    monkeypatch.setattr(SinkhornPrototypes, "initialise_", initialise_)
    blocks = [block for block in BLOCKS if loop in block and block is not SHARED]
    names = names_after(*blocks)
    model = names.get("contrast_model") or names["model"]
    (pgcl,) = [module for module in model.modules() if isinstance(module, PGCLLoss)]
    assert pgcl.warm_up.step == pgcl.warmup_steps == 6
    (weight,) = initialised
    assert not torch.equal(weight, pgcl.prototypes.weight)
    held = {id(p) for group in names["optimizer"].param_groups for p in group["params"]}
    assert id(pgcl.prototypes.weight) in held


def test_the_head_inside_of_a_loss_learns_only_if_it_is_called_first():
    names = names_after(block_with("class Grace"))
    model, nodes = names["model"], names["nodes"]
    z1, z2 = model(nodes), model(nodes + 0.1)
    model.zero_grad()
    model.pgcl(z1, z2).backward()
    assert all(parameter.grad is None for parameter in model.head.parameters())
    model.pgcl(model.projection(z1.detach()), model.projection(z2.detach())).backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())


@pytest.mark.parametrize("section", ["GraphCL, JOAO, SimGRACE", "AD-GCL", "GRACE", "PyGCL"])
def test_a_diff_imports_what_it_adds(section):
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for diff in re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL):
        if names := set(re.findall(r"(?:PGCL\w*|InfoNCEContrast)Loss", diff)):
            (name,) = names
            assert re.search(rf"^\+from pgcl_losses[\w.]* import {name}$", diff, re.MULTILINE)


@pytest.mark.parametrize("attached", ["after loading", "before loading"])
def test_an_old_checkpoint_is_loaded_before_the_loss_is_attached(attached):
    block = block_with("1. load both")
    if attached == "before loading":
        lines = block.splitlines(keepends=True)
        (load,) = [i for i, line in enumerate(lines) if line.startswith("optimizer.load_state")]
        block = "".join([*lines[:load], *lines[load + 1 :], lines[load]])
        with pytest.raises(ValueError, match="different number of parameter groups"):
            names_after(block)
        return
    names = names_after(block)
    model = names["model"]
    x, x_aug = model(names["batch"]), model(names["batch_aug"])
    pgcl = model.pgcl
    step(names["optimizer"], pgcl(x, x_aug))
    assert pgcl.prototypes.initialised
    x, x_aug = model(names["batch"]), model(names["batch_aug"])
    assert moved(pgcl.prototypes, lambda: step(names["optimizer"], pgcl(x, x_aug)))
    # Built in the other order, model and optimizer take what is saved from now on.
    new = names["GraphCL"]()
    optimizer = torch.optim.Adam(new.parameters())
    new.pgcl = PGCLLoss(96, 21, warmup_steps=1)
    optimizer.add_param_group({"params": new.pgcl.parameters()})
    new.load_state_dict(model.state_dict())
    optimizer.load_state_dict(names["optimizer"].state_dict())


@pytest.mark.parametrize("added", [True, False])
def test_an_optimizer_from_before_the_swap_leaves_the_prototypes(added):
    block = block_with("model.pgcl = PGCLLoss(dim=96)\noptimizer.add_param_group")
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

    def __init__(self, loss_fn, nodes):
        self.loss_fn, self.nodes = loss_fn, nodes

    def train(self, encoder, batches, optimizer, epochs):
        encoder.train()  # once
        for _ in range(epochs):
            epoch_loss = 0.0
            for views in batches:
                optimizer.zero_grad()
                zs = [encoder(view) for view in views]
                if self.nodes:
                    batch = torch.zeros(len(zs[0]), dtype=torch.long)
                    loss = self.loss_fn(zs_g=None, zs_n=zs, batch=batch, neg_by_crpt=False, tau=0.5)
                else:
                    loss = self.loss_fn(zs, neg_by_crpt=False, tau=0.5)
                loss.backward()
                optimizer.step()
                epoch_loss += loss
            yield encoder, epoch_loss

    def evaluate(self, encoder, batches, epochs, p_optim=torch.optim.Adam):
        """As DIG's evaluators, which make the optimizer, and measure after each epoch."""
        optimizer = p_optim(encoder.parameters(), lr=1e-3, weight_decay=0)
        for trained, _ in self.train(encoder, batches, optimizer, epochs):
            trained.eval()


def dig_objective(**options):
    make = names_after(block_with("class PGCLObjective"))["PGCLObjective"]
    torch.manual_seed(0)
    return make(PGCLLoss(8, num_prototypes=3, **options))


@pytest.mark.parametrize("nodes", [False, True])
def test_dig(nodes):
    objective = dig_objective(warmup_steps=1)
    expected = PGCLLoss(8, 3, warmup_steps=1)
    expected.load_state_dict(objective.pgcl.state_dict())
    encoder = torch.nn.Linear(4, 8)
    batches = torch.randn(2, 2, 5, 4)
    with torch.no_grad():
        first = expected.eval()(*(encoder(view) for view in batches[0]))
    optimizer = torch.optim.Adam([*encoder.parameters(), *objective.parameters()], lr=1e-3)

    ((_, total),) = Dig(objective, nodes).train(encoder, batches[:1], optimizer, 1)
    torch.testing.assert_close(total.detach(), first)
    assert objective.pgcl.prototypes.initialised

    def train():
        ((_, total),) = Dig(objective, nodes).train(encoder, batches, optimizer, 1)
        assert total < 1e9  # how DIG looks for its best epoch

    assert moved(objective.pgcl.prototypes, train)
    with pytest.raises(AssertionError, match="graphs or nodes"):
        objective([batches[0, 0]] * 2, zs_n=[batches[0, 0]] * 2)


def test_digs_evaluator_of_graphs_takes_a_function_that_adds_the_prototypes():
    names = names_after(block_with("class PGCLObjective"), block_with("def with_prototypes"))
    encoder, objective = torch.nn.Linear(4, 96), names["objective"]
    views = torch.randn(1, 2, 30, 4)

    def evaluate(epochs):
        Dig(objective, False).evaluate(encoder, views, epochs, p_optim=names["with_prototypes"])

    evaluate(objective.pgcl.warmup_steps)
    assert moved(objective.pgcl.prototypes, lambda: evaluate(3))


def test_digs_evaluator_of_nodes_leaves_the_encoder_in_eval_mode():
    objective, encoder = dig_objective(warmup_steps=9), torch.nn.Linear(4, 8)
    encoder.pgcl = objective
    views = torch.randn(1, 2, 5, 4)
    Dig(objective, True).evaluate(encoder, views, 3)
    assert not encoder.training
    assert objective.pgcl.warm_up.step == 3  # in eval() mode it would stay at 1


def test_a_short_training_by_digs_evaluator_warns_of_prototypes_that_it_leaves():
    objective, encoder = dig_objective(warmup_steps=1), torch.nn.Linear(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Dig(objective, False).evaluate(encoder, torch.randn(1, 2, 5, 4), 20)
    (warning,) = caught
    assert "the prototypes have not moved in 16 training forwards" in str(warning.message)
    assert warning.filename == "docs/swap.md"  # the objective is the user's own code
