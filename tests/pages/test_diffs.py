"""The diffs of README.md and of docs/: a script keeps its own loss, and prototypes learn."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers.formulas import grace, graphcl
from helpers.scripts import ROOT

from pgcl_losses import InfoNCE

# What the dependencies of PyGCL warn of.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def blocks_of(page, language="python"):
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


CHUNKS = blocks_of("docs/swap.md")
DIFFS = [*blocks_of("docs/swap.md", "diff"), *blocks_of("docs/coming_from.md", "diff")]
PGCL = blocks_of("docs/pgcl.md")


def the_one(blocks, text):
    (block,) = [block for block in blocks if text in block]
    return block


VIEWS = the_one(CHUNKS, "view2 = view1 + 0.1")


def names_after(*blocks, **names):
    names = {"__name__": "swap", **names}
    for block in blocks:
        exec(compile(block, "page", "exec"), names)
    return names


def after(diff, **names):
    """The names of a script after it was changed by a diff, which is run."""
    lines = [line for line in diff.splitlines() if line[0] != "-" and line.strip() != "..."]
    return names_after(VIEWS, "\n".join(line[1:] for line in lines), **names)


def test_the_optimizer_of_a_script_moves_the_prototypes():
    names = names_after(PGCL[0], the_one(PGCL, "warm=epoch < epochs // 2"))
    weight = names["model"].pgcl.prototypes.weight
    assert names["optimizer"].state[weight]["exp_avg"].any()
    assert names["optimizer"].state[weight]["step"] == 16  # of 32: not in the warm-up


@pytest.mark.parametrize("block", ["1. load both", '\noptimizer.add_param_group({"params": pgcl'])
def test_an_optimizer_takes_the_prototypes_later(block):
    names = names_after(*PGCL[: PGCL.index(the_one(PGCL, block)) + 1])
    encoder = names["model" if "load both" in block else "encoder"]
    pgcl, optimizer = getattr(encoder, "pgcl", names["pgcl"]), names["optimizer"]
    before = pgcl.prototypes.weight.detach().clone()
    pgcl(*map(encoder, torch.randn(2, 64, 32))).backward()
    optimizer.step()
    assert not torch.equal(pgcl.prototypes.weight, before)


class Model(torch.nn.Module):
    """A script's model: its own loss is not to be called after a swap."""

    def __init__(self, *_):
        super().__init__()
        self.projection, self.embedding_dim = torch.nn.Linear(96, 96), 96

    def loss_cal(self, x, x_aug):
        raise AssertionError("the script's own loss")


def embeddings():
    return tuple(torch.randn(64, 96, requires_grad=True) for _ in range(2))


def given_by_a_script(x, x_aug):
    names = {"x": x, "x_aug": x_aug, "z1": x, "z2": x_aug, "tau": 0.4, "dim": 96}
    names |= {"num_hidden": 96, "learning_rate": 1e-3, "weight_decay": 0.0, "lr": 1e-3}
    names |= dict.fromkeys(("encoder", "num_proj_hidden"))
    names["args"] = SimpleNamespace(hidden_dim=32, num_gc_layers=3)
    models = dict.fromkeys(("Model", "GraphCL", "simclr"), Model)
    return names | models | {"model": Model(), "device": "cpu"}


@pytest.mark.parametrize(
    ("page", "own_loss", "line", "tau"),
    [
        ("docs/swap.md", graphcl, "-loss = model.loss_cal", 0.2),
        ("docs/swap.md", grace, "model.projection(z1)", 0.4),
    ],
)
def test_a_diff_keeps_the_value_and_the_gradient_of_the_scripts_loss(page, own_loss, line, tau):
    x, x_aug = leaves = embeddings()
    names = after(the_one(blocks_of(page, "diff"), line), **given_by_a_script(x, x_aug))
    loss, head = names["loss"], names["model"].projection
    views = leaves
    if own_loss is grace:
        views, leaves = map(head, leaves), [*leaves, *head.parameters()]
    expected = own_loss(*views, tau)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, leaves) for value in (loss, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("README.md", "-loss = model.loss_cal"),
        ("docs/pgcl.md", "-loss = model.loss_cal"),
        ("docs/pgcl.md", "-loss = model.loss(z1, z2, batch_size=0)"),
    ],
)
def test_a_diff_trains_by_pgcl(page, line):
    """The optimizer that the script makes afterwards has the prototypes."""
    x, x_aug = embeddings()
    diff = the_one(blocks_of(page, "diff"), line)
    first = after(diff, **given_by_a_script(x, x_aug), epoch=10, epochs=20)
    if "info_nce" in diff:  # the warm-up
        torch.testing.assert_close(first["loss"], InfoNCE()(x, x_aug))
    names = after(diff, **given_by_a_script(x, x_aug), epoch=11, epochs=20)
    model, views = names["model"], (x, x_aug)
    pgcl = model.pgcl
    if "projection" in diff:
        views = map(model.projection, views)
    torch.testing.assert_close(names["loss"], pgcl.eval()(*views))
    names["loss"].backward()
    optimizer = names.get("optimizer") or torch.optim.Adam(model.parameters())
    before = pgcl.prototypes.weight.detach().clone()
    optimizer.step()
    assert x.grad.any()
    assert not torch.equal(pgcl.prototypes.weight, before)


@pytest.mark.parametrize("num_views", [2, 3])
def test_the_diff_of_dig(num_views):
    """Its `NCE_loss` adds up the pairs of views."""
    names = after(the_one(DIFFS, "graphcl.loss_fn"), GraphCL=lambda **_: SimpleNamespace(tau=0.3))
    zs = [*embeddings(), *embeddings()][:num_views]
    pairs = [(a, b) for n, a in enumerate(zs) for b in zs[n + 1 :]]
    expected = sum(graphcl(*pair, 0.3) for pair in pairs)
    torch.testing.assert_close(names["graphcl"].loss_fn(zs, sigma=None, tau=0.3), expected)


def test_the_diff_of_gcc_stores_keys():
    feat_q, feat_k = embeddings()
    opt = SimpleNamespace(nce_t=0.07, nce_k=200, hidden_size=96)
    diff = the_one(DIFFS, "MemoryMoCo").replace(".cuda(args.gpu)", "")
    names = after(diff, feat_q=feat_q, feat_k=feat_k.detach(), opt=opt, args=opt)
    stored = names["contrast"].memory.embeddings[:64]
    torch.testing.assert_close(stored, torch.nn.functional.normalize(feat_k.detach()))


@pytest.mark.pygcl
def test_the_diff_of_pygcl():
    import GCL.losses as L
    from GCL.models import DualBranchContrast

    names = after(the_one(DIFFS, "DualBranchContrast("), device="cpu")
    own = DualBranchContrast(L.InfoNCE(tau=0.2), "L2L", intraview_negs=True)
    x, x_aug = embeddings()
    torch.testing.assert_close(names["contrast_model"](x, x_aug), own(x, x_aug))
