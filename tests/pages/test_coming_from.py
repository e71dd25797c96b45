"""docs/coming_from.md: the calls of other libraries have the values of our calls, as the page says.

The calls are read from the page's tables, and run as they are written there. Where lightly or
info-nce-pytorch is not installed, the formula of its code stands in for it, in plain torch.
"""

import importlib
import re
from importlib.util import find_spec

import pytest
import pytorch_metric_learning.losses as metric_losses
import torch
import torch.nn.functional as F
from helpers import formulas
from helpers.formulas import cosines, dcl, grace, moco
from helpers.losses import gradients
from helpers.scripts import ROOT
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.reducers import PerAnchorReducer

from pgcl_losses import InfoNCE, PGCLLoss

PAGE = (ROOT / "docs/coming_from.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])
K, V = 6, 3  # prototypes, views


class NTXentLoss:
    """lightly's, with its memory bank."""

    def __init__(self, temperature=0.5, memory_bank_size=None):
        self.temperature, self.bank = temperature, None
        if memory_bank_size:
            self.bank = F.normalize(torch.randn(memory_bank_size, dtype=torch.float64))

    def __call__(self, out0, out1):
        if self.bank is None:
            return grace(out0, out1, self.temperature)
        loss = moco(out0, out1, self.bank, self.temperature)
        self.bank = torch.cat([self.bank[len(out1) :], F.normalize(out1.detach())])
        return loss


def dcl_loss(temperature=0.1):
    """lightly's `DCLLoss`, the mean of both directions."""
    return lambda out0, out1: dcl(out0, out1, temperature) / 2


def swav_loss(temperature=0.1):
    """lightly's `SwaVLoss` of two crops in high resolution."""
    return lambda scores, _: formulas.swav(scores, temperature)


def info_nce(query, key, negatives=None, temperature=0.1, reduction="mean", negative_mode=""):
    """info-nce-pytorch's."""
    logits, target = cosines(query, key, temperature), torch.arange(len(query))
    if negatives is not None:
        query, negatives = F.normalize(query), F.normalize(negatives, dim=-1)
        paired = "nd, nmd -> nm" if negative_mode == "paired" else "nd, md -> nm"
        negatives = torch.einsum(paired, query, negatives) / temperature
        logits, target = torch.cat([logits.diag().unsqueeze(1), negatives], 1), 0 * target
    return F.cross_entropy(logits, target, reduction=reduction)


def supcon_of_supcontrast(temperature=0.07, contrast_mode="all", base_temperature=0.07):
    """SupContrast's `SupConLoss`."""

    def loss(features, labels=None, mask=None):
        num, views, _ = features.shape
        if mask is None:
            labels = torch.arange(num) if labels is None else labels
            mask = labels[:, None] == labels
        z, mask = torch.cat(features.unbind(1)), mask.repeat(views, views)
        losses = formulas.supcontrast(z, mask, temperature, base_temperature)
        return losses[:num].mean() if contrast_mode == "one" else losses.mean()

    return loss


def supcontrast_since_72fd989(features, labels, temperature=0.07):
    """As the code of SupContrast is now: a query without positives has loss 0 in the mean."""
    z, mask = torch.cat(features.unbind(1)), labels[:, None] == labels
    mask = mask.repeat(2, 2).double().fill_diagonal_(0)[: len(z), : len(z)]
    logits = z @ z.T / temperature
    others = logits.masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    log_prob = logits - others.logsumexp(1, keepdim=True)
    count = mask.sum(1)
    return -((mask * log_prob).sum(1) / torch.where(count < 1e-6, 1, count)).mean()


def test_queries_without_positives_in_supcontrast():
    features = F.normalize(torch.randn(6, 1, 5, dtype=torch.float64), dim=2)
    labels = torch.tensor([0, 1, 1, 2, 2, 2])  # the first has no positive
    z = features.squeeze(1)
    loss_of = InfoNCE(temperature=0.07, over_positives="supcon", reduction="sum")
    expected = supcontrast_since_72fd989(features, labels)
    torch.testing.assert_close(loss_of(z, labels=labels) / 6, expected)


LIGHTLY = {"NTXentLoss": NTXentLoss, "DCLLoss": dcl_loss, "SwaVLoss": swav_loss}


def names_of(library):
    """The names of a library that its calls use."""
    if library == "pytorch-metric-learning":
        reductions = {"PerAnchorReducer": PerAnchorReducer}
        return {**vars(metric_losses), **reductions, "DotProductSimilarity": DotProductSimilarity}
    if library == "PyGCL":
        models = importlib.import_module("GCL.models")
        losses = importlib.import_module("GCL.losses")
        return {"L": losses, "DualBranchContrast": models.DualBranchContrast}
    if library == "SupContrast":
        return {"SupConLoss": supcon_of_supcontrast}
    module = {"lightly": "lightly.loss", "info-nce-pytorch": "info_nce"}[library]
    if find_spec(module.partition(".")[0]):
        return vars(importlib.import_module(module))
    return LIGHTLY if library == "lightly" else {"info_nce": info_nce}


def given(library):
    """The names of the page, with tensors in float64, and the tensors that have gradients."""
    names = {}
    for text in (SECTIONS["The calls"], SECTIONS[library]):
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block, names)
    n, dim = names["N"], names["D"]
    shapes = (n, dim), (n, dim), (names["M"], dim), (n, names["M"], dim), (n, V, dim)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    z1, z2, keys, own_keys, features = leaves
    table = torch.randn(K, dim, dtype=torch.float64)
    mask = (torch.rand(n, n) < 0.3) | torch.eye(n, dtype=torch.bool)

    def pgcl(*sizes, **options):
        loss = PGCLLoss(*sizes, **options).double()
        loss.prototypes.load_state_dict({"weight": table}, strict=False)
        return loss

    names |= {"z1": z1, "z2": z2, "z": torch.cat([z1, z2]), "keys": keys, "own_keys": own_keys}
    names |= {"features": F.normalize(features, dim=2), "mask": mask, "V": V, "K": K}
    names |= {"scores": [cosines(z, table, 1) for z in (z1, z2)], "PGCLLoss": pgcl}
    names |= {"labels1": torch.arange(n) % 3, "labels2": torch.arange(n) % 4}
    names |= {"pos_mask": mask.double()}
    names["neg_mask"] = (torch.rand(n, n) < 0.6) * (1 - names["pos_mask"])
    names |= dict(zip(("a1", "p"), torch.tensor([[0, 1, 2], [3, 4, 5]]), strict=True))
    names |= dict(zip(("a2", "n"), torch.tensor([[0, 0, 1, 2], [6, 7, 8, 9]]), strict=True))
    return names, leaves


def rows_of(library):
    """Their call, our call, and what the page says of the values."""
    for line in re.findall(r"^\| `(.+) \|$", SECTIONS[library], re.M):
        theirs, ours, value = line.split(" | ")
        yield library, theirs.partition("`")[0], ours.strip("`"), value


LIBRARIES = [library for library in SECTIONS if library != "The calls"]
ROWS = [row for library in LIBRARIES for row in rows_of(library)]
(BANK,) = [row for row in ROWS if "memory_bank_size" in row[1]]
CALLS = [row for row in ROWS if row != BANK]
SAME = torch.arange(8) % 4  # one tensor for both
CONDITIONS = {  # what the page says must hold, and inputs for which it does not
    "all labels are equally frequent": {"labels": (torch.arange(16) % 4).clamp(max=2)},
    "each label occurs twice or more": {"labels": torch.arange(16).clamp(min=4)},
    "there are two labels or more": {"labels": torch.zeros(16, dtype=torch.long)},
    "all anchors have equally many positives": {"a1": torch.tensor([0, 1, 1])},
    "`labels2` is not the very tensor `labels1`": dict.fromkeys(("labels1", "labels2"), SAME),
}


def params(rows):
    marks = {"PyGCL": [pytest.mark.pygcl]}
    return [
        pytest.param(*row, marks=marks.get(row[0], []), id=f"{row[0]}-{row[1]}") for row in rows
    ]


def test_the_tables_are_read():
    assert len(LIBRARIES) == 6  # of DIG a diff alone, in test_diffs.py
    assert len(ROWS) > 20
    assert {value.partition(", if ")[2] for *_, value in CALLS} - {""} == CONDITIONS.keys()


@pytest.mark.parametrize(("library", "theirs", "ours", "value"), params(CALLS))
def test_a_call_has_the_value_that_the_page_says(library, theirs, ours, value):
    names, leaves = given(library)
    expected, loss = eval(theirs, {**names, **names_of(library)}), eval(ours, names)
    assert value.startswith("equal")
    torch.testing.assert_close(loss, expected.view_as(loss))
    options = {"retain_graph": True, "materialize_grads": True}  # both normalise `features`
    of_both = [torch.autograd.grad(x.sum(), leaves, **options) for x in (loss, expected)]
    torch.testing.assert_close(*of_both)


@pytest.mark.parametrize(
    ("library", "theirs", "ours", "value"), params(row for row in CALLS if ", if " in row[3])
)
def test_a_condition_is_needed(library, theirs, ours, value):
    names, _ = given(library)
    names |= CONDITIONS[value.partition(", if ")[2]]
    expected, loss = eval(theirs, {**names, **names_of(library)}), eval(ours, names)
    assert abs(loss - expected) > 0.01


def test_the_memory_bank_of_lightly():
    library, theirs, ours, _ = BANK
    names, _ = given(library)
    their_loss = eval(theirs, {**names, **names_of(library)})
    loss = eval(ours, names).double()
    if isinstance(their_loss, torch.nn.Module):
        their_loss.double()
    loss.remember(getattr(their_loss, "memory_bank", their_loss).bank)
    for _ in range(4):
        q, k = (torch.randn(8, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
        expected, value = their_loss(q, k.detach()), loss(q, k.detach())
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)  # the bank was in float32
        torch.testing.assert_close(gradients(value, [q]), gradients(expected, [q]))
        loss.remember(k.detach())
