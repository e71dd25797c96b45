"""docs/swap.md: the scripts that it shows, and those that its diffs lead to, do what it says."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import InfoNCE, PGCLLoss, SinkhornPrototypes, diagnostics

# What Lightning, the dependencies of PyGCL and PyG's sampler without pyg-lib warn of.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:Using 'NeighborSampler' without",
)

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


BLOCKS, DIFFS = blocks_of("swap.md"), blocks_of("swap.md", "diff")
TROUBLE = blocks_of("troubleshooting.md")
SHARED = BLOCKS[0]


def the_one(blocks, text):
    (block,) = [block for block in blocks if text in block]
    return block


def names_after(*blocks, **names):
    names = {"__name__": "swap", **names}
    for block in blocks:
        exec(compile(block, "docs/swap.md", "exec"), names)
    return names


def of_block(text, **replaced):
    block = the_one(BLOCKS, text)
    for old, new in replaced.values():
        assert old in block
        block = block.replace(old, new)
    return names_after(SHARED, block)


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def moved(prototypes, of_step):
    before = prototypes.weight.detach().clone()
    of_step()
    return not torch.equal(before, prototypes.weight)


def test_no_line_of_code_is_wider_than_a_browser_shows():
    assert max(len(line) for block in BLOCKS + DIFFS for line in block.splitlines()) <= 80


PGCL = {"pgcl": ("InfoNCE(temperature=0.2, **own)", "PGCLLoss(96, 50)")}
LOOPS = ["info_nce if epoch", "class GraphCL", "contrast_model(g1=", "lightning", "autocast"]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_optimizer_of_a_script_moves_the_prototypes(loop, monkeypatch):
    """As the page shows it for PGCL, or with PGCL in InfoNCE's place."""
    starts, start_from_ = [], SinkhornPrototypes.start_from_
    monkeypatch.setattr(
        SinkhornPrototypes, "start_from_", lambda *given: starts.append(start_from_(*given))
    )
    names = of_block(loop, **(PGCL if "PGCL" not in the_one(BLOCKS, loop) else {}))
    optimizer, model = names.get("optimizer"), names.get("modules", names.get("model"))
    if loop == "lightning":
        trainer = names["trainer"]
        (optimizer,), model = trainer.optimizers, trainer.lightning_module
        assert {"loss", "mean_cosine", "agreement"} <= set(trainer.callback_metrics)
    (pgcl,) = [module for module in model.modules() if isinstance(module, PGCLLoss)]
    assert optimizer.state[pgcl.prototypes.weight]["exp_avg"].any()
    assert starts == [pgcl.prototypes] * (loop == LOOPS[0])


def test_seed_nodes_come_first_and_stay_first_in_views():
    names = of_block("NeighborLoader")
    batch, size = names["batch"], names["batch"].batch_size
    assert torch.equal(batch.n_id[:size], batch.input_id)
    seeds = [names[z].detach()[:size] for z in ("z1", "z2")]
    torch.testing.assert_close(names["loss"].detach(), InfoNCE(temperature=0.4)(*seeds))
    assert size < len(names["z1"])
    assert {view.num_nodes for view in names["views"]} == {batch.num_nodes}


def after(diff, **names):
    """The names of a script after it was changed by a diff, which is run."""
    lines = [line for line in diff.splitlines() if line[0] != "-" and line.strip() != "..."]
    return names_after("\n".join(line[1:] for line in lines), **names)


def embeddings():
    return tuple(torch.randn(64, 96, requires_grad=True) for _ in range(2))


@pytest.mark.parametrize("pgcl", [False, True])
def test_the_diffs_of_graphcl(pgcl):
    x, x_aug = embeddings()
    given = {"x": x, "x_aug": x_aug, "torch": torch, "device": "cpu", "lr": 0.1}
    given["simclr"] = lambda *_: of_block("class GraphCL")["GraphCL"]()
    given["args"] = SimpleNamespace(hidden_dim=32, num_gc_layers=3)
    diff = the_one(DIFFS, "model.loss_cal")
    if pgcl:
        new = the_one(DIFFS, "-model.loss = InfoNCE(temperature=tau)")
        diff, count = re.subn(r"\+model.loss = InfoNCE\(\n.*\n\+\)\n", new, diff)
        assert count == 1
        given |= {"PGCLLoss": PGCLLoss, "dim": 96, "tau": 0.2}
    names = after(diff, **given)
    model = names["model"]
    names["loss"].backward()
    assert all(view.grad.abs().sum() > 0 for view in (x, x_aug))
    if pgcl:
        assert type(model.loss) is PGCLLoss
    else:
        sim = (torch.cosine_similarity(x[:, None], x_aug, dim=-1) / 0.2).exp()
        script = -(sim.diag() / (sim.sum(1) - sim.diag())).log().mean()
        torch.testing.assert_close(names["loss"], script)
    held = {id(p) for group in names["optimizer"].param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_the_diff_of_grace_trains_the_head():
    class Model(torch.nn.Module):
        def __init__(self, *_):
            super().__init__()
            self.projection = torch.nn.Linear(96, 96)

        def loss(self, z1, z2, batch_size):
            raise AssertionError("GRACE's own")

    z1, z2 = embeddings()
    sizes = dict.fromkeys(("encoder", "num_hidden", "num_proj_hidden"))
    diff = the_one(DIFFS, "model.projection(z1)")
    names = after(diff, Model=Model, z1=z1, z2=z2, tau=0.4, device="cpu", **sizes)
    names["loss"].backward()
    assert names["model"].projection.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["InfoNCEContrastLoss", "PGCLContrastLoss"])
def test_the_diffs_of_pygcl(name):
    contrast_model = of_block("contrast_model(g1=")["DualBranchContrast"]
    encoder = torch.nn.Linear(32, 96)
    given = {"DualBranchContrast": contrast_model, "device": "cpu", "encoder_model": encoder}
    given |= {"dim": 96, "torch": torch, "Adam": torch.optim.Adam}
    names = after(the_one(DIFFS, f"import {name}"), **given)
    x, x_aug = embeddings()
    names["contrast_model"](g1=x, g2=x_aug).backward()
    assert all(view.grad.abs().sum() > 0 for view in (x, x_aug))
    if name == "PGCLContrastLoss":
        held = {id(p) for group in names["optimizer"].param_groups for p in group["params"]}
        parameters = [*encoder.parameters(), *names["loss"].parameters()]
        assert held == {id(p) for p in parameters}
        assert len(parameters) == 3


def test_the_view_learner_of_adgcl_leaves_the_prototypes_alone():
    names = of_block("class GraphCL")
    model, views = names["GraphCL"](), (names["view1"], names["view2"])
    model.loss = PGCLLoss(96, 50)
    model.eval()
    (-model.loss(*map(model, views))).backward()  # warnings are errors here
    model.train()
    model.zero_grad()
    assert model.loss.prototypes.weight.grad is None
    model.loss(*map(model, views)).backward()
    assert model.loss.prototypes.weight.grad.any()


def on_a_rank(rank, num_ranks, options):
    """The numbers of a step of PGCL, and of InfoNCE, reached through DistributedDataParallel."""
    torch.manual_seed(0)
    model, views = torch.nn.Linear(32, 96), torch.randn(2, 65, 32)
    model.loss, model.pgcl = InfoNCE(temperature=0.2), PGCLLoss(96, **options)
    if num_ranks > 1:
        model = DistributedDataParallel(model)
        views = views[:, :40] if rank == 0 else views[:, 40:]
    holder = getattr(model, "module", model)
    embeddings = [model(view) for view in views]
    terms, info_nce = holder.pgcl.terms(*embeddings), holder.loss(*embeddings)
    (terms.loss + info_nce).backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return {"info_nce": info_nce.item(), **diagnostics(terms)}, gradients


def test_what_a_log_shows_on_several_processes():
    options = {"num_prototypes": 8, "consistency_weight": 1.0}
    whole, expected = on_a_rank(0, 1, options)
    ranks = on_ranks(on_a_rank, 2, options)
    for name in ("info_nce", "loss", "contrast", "consistency", "mean_cosine"):
        for numbers, _ in ranks:
            assert numbers[name] == pytest.approx(whole[name], rel=1e-5), name
    assert ranks[0][0]["entropy"] != ranks[1][0]["entropy"]
    for _, gradients in ranks:
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("attached", ["after loading", "before loading"])
def test_an_old_checkpoint_is_loaded_before_the_loss_is_attached(attached):
    block = the_one(TROUBLE, "1. load both")
    if attached == "before loading":
        lines = block.splitlines(keepends=True)
        (load,) = [i for i, line in enumerate(lines) if line.startswith("optimizer.load_state")]
        block = "".join([*lines[:load], *lines[load + 1 :], lines[load]])
        with pytest.raises(ValueError, match="different number of parameter groups"):
            names_after(TROUBLE[0], block)
        return
    names = names_after(TROUBLE[0], block)
    model, optimizer, views = names["model"], names["optimizer"], torch.randn(2, 64, 32)
    pgcl = model.pgcl
    assert moved(pgcl.prototypes, lambda: step(optimizer, pgcl(*map(model, views))))
    # Built in the other order, model and optimizer take what is saved from now on.
    new = torch.nn.Linear(32, 96)
    of_new = torch.optim.Adam(new.parameters())
    new.pgcl = PGCLLoss(96)
    of_new.add_param_group({"params": new.pgcl.parameters()})
    new.load_state_dict(model.state_dict())
    of_new.load_state_dict(optimizer.state_dict())
    # A model without PGCL leaves out the prototypes, and nothing else.
    plain = torch.nn.Linear(32, 96)
    left = plain.load_state_dict(model.state_dict(), strict=False)
    assert not left.missing_keys
    assert left.unexpected_keys
    assert all(name.startswith("pgcl.") for name in left.unexpected_keys)


@pytest.mark.parametrize("added", [True, False])
def test_an_optimizer_from_before_the_loss_leaves_the_prototypes(added):
    before = the_one(TROUBLE, "Adam([*encoder.parameters(), *pgcl.parameters()]")
    block = the_one(TROUBLE, '"params": pgcl.parameters()')
    if not added:
        block = re.sub(r"optimizer\.add_param_group.*\n", "", block)
    names = names_after(TROUBLE[0], before, block)
    pgcl, encoder, views = names["pgcl"], names["encoder"], torch.randn(2, 64, 32)
    learn = lambda: step(names["optimizer"], pgcl(*map(encoder, views)))  # noqa: E731
    assert moved(pgcl.prototypes, learn) == added


def test_a_missing_row_is_the_error_of_the_page():
    message = "z2 has shape (63, 96) but z1 has (64, 96)"
    with pytest.raises(ValueError, match=re.escape(message)):
        PGCLLoss(96)(torch.randn(64, 96), torch.randn(63, 96))
    assert message in (DOCS / "troubleshooting.md").read_text()


class Dig:
    """Makes the calls of DIG's `Contrastive`: graphs by position, nodes by keyword."""

    def __init__(self, nodes):
        self.nodes = nodes

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


class Evaluator:
    """As DIG's, which make the optimizer, and measure after each epoch."""

    def __init__(self, dataset, p_optim=torch.optim.Adam):
        self.p_optim = p_optim

    def evaluate(self, dig, encoder, batches, epochs):
        optimizer = self.p_optim(encoder.parameters(), lr=1e-3, weight_decay=0)
        for trained, _ in dig.train(encoder, batches, optimizer, epochs):
            trained.eval()


@pytest.fixture(params=[False, True], ids=["graphs", "nodes"])
def dig(request):
    """A script with DIG's loop after the diff for InfoNCE, and names of the page."""
    names = of_block("class Objective")
    given = {"GraphCL": lambda **_: Dig(request.param), "InfoNCE": InfoNCE}
    names |= given | {"encoder": torch.nn.Linear(32, 96), "batches": VIEWS.unsqueeze(0)}
    return after(the_one(DIFFS, "+graphcl.loss_fn = Objective(InfoNCE"), **names)


VIEWS = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))


def with_pgcl(names, evaluator):
    """After the diff for PGCL, in a script with one of the evaluators or none."""
    others = {"GraphUnsupervised", "NodeUnsupervised", "p_optim;"} - {evaluator}
    lines = the_one(DIFFS, "+graphcl.loss_fn = objective").splitlines()
    if evaluator != "NodeUnsupervised":
        others.add("encoder.loss")
    kept = [line for line in lines if not any(other in line for other in others)]
    assert len(kept) < len(lines)
    given = {"device": "cpu", "dataset": None, "Adam": torch.optim.Adam, str(evaluator): Evaluator}
    return after("\n".join(kept), **names | given)


def test_dig_with_info_nce(dig):
    encoder, (views,) = dig["encoder"], dig["batches"]
    expected = InfoNCE(temperature=0.5, **dig["own"])(*map(encoder, views)).detach()
    optimizer = torch.optim.Adam(encoder.parameters())
    ((_, total),) = dig["graphcl"].train(encoder, dig["batches"], optimizer, 1)
    torch.testing.assert_close(total.detach(), expected)
    with pytest.raises(AssertionError, match="graphs or nodes"):
        dig["graphcl"].loss_fn([views[0]] * 2, zs_n=[views[0]] * 2)


@pytest.mark.parametrize("evaluator", [None, "GraphUnsupervised", "NodeUnsupervised"])
def test_dig_with_pgcl(dig, evaluator):
    names = with_pgcl(dig, evaluator)
    encoder, graphcl, pgcl = names["encoder"], names["graphcl"], names["objective"].loss

    def train(epochs):
        if evaluator is None:
            list(graphcl.train(encoder, names["batches"], names["optimizer"], epochs))
        else:
            names["evaluator"].evaluate(graphcl, encoder, names["batches"], epochs)

    assert moved(pgcl.prototypes, lambda: train(2))
    assert encoder.training == (evaluator is None)


def test_an_evaluator_without_the_prototypes_is_reported(dig):
    dig["graphcl"].loss_fn = dig["objective"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Evaluator(None).evaluate(dig["graphcl"], dig["encoder"], dig["batches"], 21)
    (warning,) = caught
    assert "the prototypes have not moved in 16 training forwards" in str(warning.message)
    assert warning.filename == "docs/swap.md"  # the objective is the user's own code
