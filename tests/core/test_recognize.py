"""`recognize` names losses of scripts and their mutants, and no other function."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import formulas
from helpers.marks import assert_error
from pytorch_metric_learning.losses import SupConLoss
from torch import arange, nn

from pgcl_losses import InfoNCE, recognize
from pgcl_losses.presets import PRESETS


def unit(z):
    return F.normalize(z)


def float32(z1, z2):
    return formulas.graphcl(z1.float(), z2.float(), 0.2)


def moco(q, k):
    """Its `2 * tau`, with keys of another encoder."""
    logits = unit(q) @ unit(k.detach()).T / 0.07
    return 2 * 0.07 * F.cross_entropy(logits, arange(len(q)))


def info_nce(options, call="(z1, z2)"):
    return f"InfoNCE({options}){call}"


CROSS, FIRST = 'negatives="cross"', 'negatives="cross", queries="first"'
# Functions of two views, the line that they are, and one of the names.
EXACT = {
    "GraphCL": (
        lambda a, b: formulas.graphcl(a, b, 0.2),
        info_nce(f"temperature=0.2, {FIRST}, decoupled=True"),
        "GraphCL",
    ),
    "AD-GCL": (
        lambda a, b: formulas.adgcl(a, b, 0.3),
        info_nce(f"temperature=0.3, {CROSS}, decoupled=True"),
        "AD-GCL",
    ),
    "GRACE": (lambda a, b: formulas.grace(a, b, 0.4), info_nce("temperature=0.4"), "GRACE"),
    "GRACE, a sum": (
        lambda a, b: formulas.grace(a, b, 0.4, mean=False),
        f"0.5 * {info_nce('temperature=0.4, reduction=' + chr(34) + 'sum' + chr(34))}",
        "GRACE",
    ),
    "MolCLR": (lambda a, b: formulas.molclr(a, b, 0.1), info_nce("temperature=0.1"), "MolCLR"),
    "HCL": (
        lambda a, b: formulas.hcl(a, b, torch.tensor(0.5)),
        info_nce("temperature=0.5, hardness=1.0, debias=0.1"),
        "HCL",
    ),
    "GCC": (
        lambda a, b: formulas.gcc(a, b, 0.07),
        info_nce(f"temperature=0.07, {FIRST}"),
        "SELFRec",
    ),
    "CLIP": (
        lambda a, b: formulas.clip(a, b, 0.07),
        info_nce(f"temperature=0.07, {CROSS}"),
        "CLIP",
    ),
    "TriCL": (
        lambda a, b: formulas.tricl(a, b, 0.5),
        info_nce(f"temperature=0.5, {CROSS}"),
        "TriCL",
    ),
    "DCL": (
        lambda a, b: formulas.dcl(a, b, 0.1),
        f"2 * {info_nce('temperature=0.1, decoupled=True')}",
        "",
    ),
    "dot products": (
        lambda a, b: formulas.gcc(a, b, 1.0, formulas.dots),
        info_nce(f'temperature=1.0, {FIRST}, similarity="dot"'),
        "",
    ),
    "float32": (float32, info_nce(f"temperature=0.2, {FIRST}, decoupled=True"), "GraphCL"),
    "MoCo": (
        moco,
        f"0.14 * {info_nce(f'temperature=0.07, {FIRST}', '(z1, z2.detach())')}",
        "SELFRec",
    ),
    "a factor by N, and a constant": (
        lambda a, b: 3 * len(a) ** 0.5 * formulas.gcc(a, b, 0.2) - 7,
        f"len(z1) ** 0.5 * 3 * {info_nce(f'temperature=0.2, {FIRST}')} - 7",
        "SELFRec",
    ),
    "the other dimension": (
        lambda a, b: F.cross_entropy((unit(a) @ unit(b).T).T / 0.2, arange(len(a))),
        info_nce(f"temperature=0.2, {FIRST}", "(z2, z1)"),
        "SELFRec",
    ),
    "a bound of mutual information": (
        lambda a, b: -formulas.grace(a, b, 0.4),
        f"-{info_nce('temperature=0.4')}",
        "GRACE",
    ),
    **{
        f"a temperature of {tau}": (
            lambda a, b, tau=tau: formulas.gcc(a, b, tau) + formulas.gcc(b, a, tau),
            f"2 * {info_nce(f'temperature={tau}, {CROSS}')}",
            "CLIP",
        )
        for tau in (0.001, 0.003, 0.005)
    },
    "unequal directions": (
        lambda a, b: 0.52 * formulas.gcc(a, b, 0.2) + 0.48 * formulas.gcc(b, a, 0.2),
        f"0.52 * {info_nce(f'temperature=0.2, {FIRST}')} + "
        f"0.48 * {info_nce(f'temperature=0.2, {FIRST}', '(z2, z1)')}",
        "",
    ),
}


@pytest.mark.parametrize(("function", "line", "name"), EXACT.values(), ids=EXACT)
def test_losses_of_scripts(function, line, name):
    found = recognize(function)
    assert (found.kind, found.line) == ("exact", line)
    assert name in found.names or name == ""
    assert found.differences == ()
    assert str(found).startswith(line)
    assert ("InfoNCE.like" in str(found)) == (name != "")


def assert_line_is(line, function):
    """The line has the function's value and gradient on a fresh batch."""
    views = torch.randn(2, 20, 8, dtype=torch.float64, requires_grad=True)
    expected = function(*views)
    value = eval(line, {"InfoNCE": InfoNCE, "z1": views[0], "z2": views[1]})
    torch.testing.assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(x, views)[0] for x in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["a factor by N, and a constant", "unequal directions", "MoCo"])
def test_the_line_is_the_loss(name):
    function, line, _ = EXACT[name]
    assert_line_is(line, function)


def test_a_name_comes_with_the_temperature_of_the_function():
    """PyGCL has 0.2, and GRACE's sum is not the mean of the table."""
    like = 'InfoNCE.like("PyGCL", temperature=0.07)'
    assert recognize(EXACT["CLIP"][0]).like == like
    assert f"CLIP, GraphGPT, MoleculeSTM: {like}" in str(recognize(EXACT["CLIP"][0]))
    found = recognize(EXACT["GRACE, a sum"][0])
    assert found.like == 'InfoNCE.like("SimCLR", temperature=0.4, reduction="sum")'
    assert eval(found.like).extra_repr() == "temperature=0.4, reduction='sum'"


def hardest(number):
    """Only so many negatives of each query count, as its hardest ones."""

    def function(a, b):
        scores, own = unit(a) @ unit(b).T / 0.2, torch.eye(len(a), dtype=torch.bool)
        negatives = scores[~own].view(len(a), -1).topk(min(number, len(a) - 1), 1).values
        logits = torch.cat([scores[own].unsqueeze(1), negatives], 1)
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))

    return function


def in_parts(a, b):
    parts = zip(a.split(64), b.split(64), strict=True)
    return sum(len(x) * formulas.gcc(x, y, 0.2) for x, y in parts) / len(a)


def without_similar(a, b):
    """Negatives that are almost the same are left out."""
    cosines = unit(a) @ unit(b).T
    mask = (cosines > 0.95) & ~torch.eye(len(a), dtype=torch.bool)
    return F.cross_entropy(cosines.masked_fill(mask, -math.inf) / 0.2, arange(len(a)))


def of_many_coordinates(a, b):
    """The embeddings do not span all coordinates, and the gradient must not leave the span."""
    return formulas.gcc(a, b, 0.2) + 0.2 * a[:, -1].mean()


def test_embeddings_of_a_large_dimension():
    assert recognize(EXACT["CLIP"][0], dim=512).kind == "exact"
    assert recognize(of_many_coordinates, dim=512).kind == "none"


FEW = {
    "16 hardest": hardest(16),
    "64 hardest": hardest(64),
    "parts of 64": in_parts,
    "without similar ones": without_similar,
}


@pytest.mark.parametrize("function", FEW.values(), ids=FEW)
def test_what_few_graphs_do_not_show(function):
    found = recognize(function)
    assert found.kind == "none"
    few = 'for few graphs it is InfoNCE(temperature=0.2, negatives="cross", queries="first")'
    assert f"{few}, but not for 100" in str(found)


ROWS = {
    name: preset
    for name, preset in PRESETS.items()
    if "view2" in preset.expression() and "labels" not in preset.expression()
}


@pytest.mark.parametrize("preset", ROWS.values(), ids=ROWS)
def test_rows_of_the_catalogue(preset):
    loss_of = InfoNCE(engine="dense", **preset.options)

    def function(view1, view2):
        return eval(preset.expression(), {"loss_of": loss_of, "view1": view1, "view2": view2})

    found = recognize(function)
    assert found.kind == "exact"
    assert_line_is(found.line, function)


# Functions with labels.
def supcon(z, labels):
    return SupConLoss(0.1)(z, labels)


def by_labels(**options):
    loss_of = InfoNCE(**{"temperature": 0.2, "engine": "dense", **options})
    return lambda z, labels: loss_of(z, labels=labels)


WITH_LABELS = {
    "SupCon": (supcon, 'temperature=0.1, over_positives="supcon"'),
    "mean": (by_labels(temperature=0.5), "temperature=0.5"),
    "sum": (by_labels(over_positives="sum"), 'temperature=0.2, over_positives="sum"'),
    "sum over queries": (by_labels(reduction="sum"), 'temperature=0.2, reduction="sum"'),
    "decoupled": (by_labels(decoupled=True), "temperature=0.2, decoupled=True"),
}


@pytest.mark.parametrize(("function", "options"), WITH_LABELS.values(), ids=WITH_LABELS)
def test_losses_with_labels(function, options):
    found = recognize(function, labels=True)
    assert (found.kind, found.line) == ("exact", f"InfoNCE({options})(z, labels=labels)")


def without_singletons(z, labels):
    """NaN where a label has one embedding."""
    same = (labels[:, None] == labels).double().fill_diagonal_(0)
    scores = formulas.cosines(z, z, 0.1)
    log_prob = scores - formulas.others(scores).logsumexp(1, keepdim=True)
    return -((log_prob * same).sum(1) / same.sum(1)).mean()


def test_a_loss_that_is_not_finite_for_a_class_of_one():
    found = recognize(without_singletons, labels=True)
    assert found.kind == "nearly"
    assert found.line == 'InfoNCE(temperature=0.1, over_positives="supcon")(z, labels=labels)'
    assert "two labels have one embedding" in str(found)


def supcon_without_similar(z, labels):
    """SupCon that leaves out negatives which are almost the same as the query."""
    cosines, same = unit(z) @ unit(z).T, labels[:, None] == labels
    eye = torch.eye(len(z), dtype=torch.bool)
    kept = (same | (cosines < 0.95)) & ~eye
    log_prob = cosines / 0.1 - (cosines / 0.1).masked_fill(~kept, -math.inf).logsumexp(1, True)
    has_positive = (same & ~eye).any(1)
    losses = -(log_prob * (same & ~eye)).sum(1) / (same & ~eye).sum(1).clamp_min(1)
    return losses[has_positive].mean()


def test_what_few_graphs_with_labels_do_not_show():
    found = recognize(supcon_without_similar, labels=True)
    assert found.kind == "none"
    assert "but not for 100" in str(found)


def slow_from(number, cases):
    """Parameters, of which the first ones run in the quick tests."""
    return [
        pytest.param(case, id=str(name), marks=[pytest.mark.slow] * (place >= number))
        for place, (name, case) in enumerate(cases.items())
    ]


# Hardness and debiasing, which have local minima.
HARD = {
    str(options): options
    for options in (
        {"hardness": 0.0, "debias": 0.3, "temperature": 0.5},
        {"hardness": 1.0, "similarity": "dot", "temperature": 2.0},
        {"hardness": 5.0, "temperature": 0.5},
        {"hardness": 0.1, "temperature": 0.5},
        {"hardness": 0.5, "debias": 0.05, "temperature": 0.5},
        {"hardness": 5.0, "debias": 0.3, "negatives": "cross", "temperature": 0.2},
        {"hardness": 0.0, "debias": 0.5, "temperature": 2.0},
        {"hardness": 2.0, "debias": 0.5, "negatives": "cross", "temperature": 0.2},
        {"hardness": 0.3, "similarity": "dot", "negatives": "cross", "temperature": 5.0},
        {"hardness": 1.0, "debias": 0.1, "decoupled": True, "temperature": 0.5},
        {"debias": 0.1, "decoupled": True, "negatives": "cross", "temperature": 0.5},
        {"hardness": 1.0, "decoupled": True, "temperature": 0.5},
    )
}


@pytest.mark.parametrize("options", slow_from(2, HARD))
def test_hard_and_debiased_losses(options):
    loss = InfoNCE(engine="dense", **options)
    found = recognize(lambda a, b: loss(a, b))
    assert found.kind == "exact"
    assert eval(found.line.removesuffix("(z1, z2)")).extra_repr() == InfoNCE(**options).extra_repr()


def in_logarithm(a, b):
    ratio = (unit(a) @ unit(b).T / 0.5).softmax(1).diag()
    return -torch.log(ratio + 1e-6).mean()


def in_denominator(epsilon):
    def function(a, b):
        sim = (unit(a) @ unit(b).T / 0.2).exp()
        return -torch.log(sim.diag() / (sim.sum(1) + epsilon)).mean()

    return function


def two_epsilons(one, other):
    def function(a, b):
        sim = (unit(a) @ unit(b).T / 0.5).exp()
        return -torch.log(sim.diag() / (sim.sum(1) + one) + other).mean()

    return function


def masked_by_a_product(a, b):
    """The mask makes scores of the diagonal 0, and e^0 = 1 stays in the denominator."""
    z = torch.cat([unit(a), unit(b)])
    others = (z @ z.T / 0.2 * (1 - torch.eye(len(z)))).exp().sum(1)
    return (others.log() - (unit(a) * unit(b)).sum(1).repeat(2) / 0.2).mean()


def by_norms(a, b):
    norms = torch.einsum("i,j->ij", a.norm(dim=1), b.norm(dim=1))
    return F.cross_entropy(a @ b.T / (norms + 1e-4) / 0.2, arange(len(a)))


def by_norm(a, b):
    x, y = (z / (z.norm(dim=1, keepdim=True) + 1e-4) for z in (a, b))
    return F.cross_entropy(x @ y.T / 0.2, arange(len(a)))


SMALL = "an epsilon, rounding, a small further term or another change"
OF_THE_BATCH = "it adds a number to the value that depends on the batch and has no gradient"
NEARLY = {
    "logarithm": (in_logarithm, "it adds 1e-06 within the logarithm"),
    "denominator": (in_denominator(1e-3), "it adds 0.001 to the denominator"),
    "a tenth": (in_denominator(0.1), "it adds 0.1 to the denominator"),
    "one": (in_denominator(1.0), "it adds 1 to the denominator"),
    "a product as a mask": (masked_by_a_product, "it adds 1 to the denominator"),
    "product of norms": (by_norms, SMALL),
    "norm": (by_norm, SMALL),
    "two epsilons": (two_epsilons(1e-4, 1e-7), SMALL),
    "three epsilons": (lambda a, b: two_epsilons(1e-4, 1e-7)(a + 1e-5, b + 1e-5), SMALL),
    "mutual information": (
        lambda a, b: math.log(len(a)) - formulas.gcc(a, b, 0.2),
        OF_THE_BATCH,
    ),
    "mean of keys": (
        lambda a, b: formulas.gcc(a, b, 0.2) - math.log(len(a)),
        OF_THE_BATCH,
    ),
    "smoothing": (
        lambda a, b: F.cross_entropy(
            unit(a) @ unit(b).T / 0.2, arange(len(a)), label_smoothing=1e-4
        ),
        SMALL,
    ),
    "lengths": (
        lambda a, b: formulas.graphcl(a, b, 0.2) + 5e-5 * a.square().sum(1).mean(),
        SMALL,
    ),
    "mean of negatives": (
        lambda a, b: formulas.graphcl(a, b, 0.2) - math.log(len(a) - 1),
        OF_THE_BATCH,
    ),
    "mean of hard negatives": (
        lambda a, b: formulas.hcl(a, b, torch.tensor(0.5)) - math.log(2 * len(a) - 2),
        OF_THE_BATCH,
    ),
}


@pytest.mark.parametrize(("function", "difference"), NEARLY.values(), ids=NEARLY)
def test_small_differences_are_named(function, difference):
    found = recognize(function)
    assert found.kind == "nearly"
    assert len(found.differences) == 1
    assert difference in found.differences[0]
    assert str(found) == f"{found.line}\nnearly:\n- {found.differences[0]}"
    assert found.line.count("InfoNCE") == 1
    assert found.line.endswith("(z1, z2)")


@pytest.mark.parametrize("temperature", [0.02, 0.05])
def test_float32_is_inexact_at_low_temperatures(temperature):
    found = recognize(lambda a, b: formulas.gcc(a.float(), b.float(), temperature))
    assert found.kind in ("exact", "nearly")
    assert found.line == info_nce(f"temperature={temperature}, {FIRST}")
    assert found.kind == "exact" or "rounding" in str(found)


def test_a_small_further_term_with_labels():
    found = recognize(lambda z, y: supcon(z, y) + 1e-5 * z.square().mean(), labels=True)
    assert found.kind == "nearly"
    assert "a small further term" in str(found)


def euclidean(a, b):
    return F.cross_entropy(-torch.cdist(a, b).square() / 2 / 0.2, arange(len(a)))


def without_the_query(a, b, itself=148.4131591025766, epsilon=0.0):
    """SGL takes e^(1 / tau) from the denominator, which may leave less than nothing: e^5 here."""
    within, between = ((a @ z.T / 0.2).exp() for z in (a, b))
    others = within.sum(1) + between.sum(1) - itself
    return -torch.log(between.diag() / (others + epsilon)).mean()


def one_is_not_normalised(a, b):
    return formulas.gcc(unit(a), b, 0.2, formulas.dots)


UNITS = {
    "Euclidean": (euclidean, f"temperature=0.2, {FIRST}"),
    "without the query": (without_the_query, 'temperature=0.2, queries="first"'),
    "one is not normalised": (one_is_not_normalised, f"temperature=0.2, {FIRST}"),
    "an epsilon, and exp(1 / tau) in float32": (
        lambda a, b: without_the_query(a, b, torch.tensor(1 / 0.2).exp(), 1e-8),
        'temperature=0.2, queries="first"',
    ),
    "lengths without gradient": (None, f"temperature=0.2, {FIRST}"),
}


@pytest.mark.parametrize(("function", "options"), UNITS.values(), ids=UNITS)
def test_losses_of_embeddings_of_length_1(function, options):
    found = recognize(function or without_gradient_of_lengths)
    assert (found.kind, found.line) == ("unit", info_nce(options))
    assert "what the function makes of lengths cannot be seen" in str(found)


def test_a_tiny_epsilon():
    """HCCF adds 1e-8 to each coordinate: error of the gradient is above rounding, and harmless."""
    found = recognize(lambda a, b: formulas.gcc(unit(a + 1e-8), unit(b + 1e-8), 1.0, formulas.dots))
    assert found.kind == "nearly"
    assert "an epsilon" in str(found)


def barlow(a, b):
    c = ((a - a.mean(0)) / a.std(0)).T @ ((b - b.mean(0)) / b.std(0)) / len(a)
    return (c - torch.eye(len(c))).square().sum()


def vicreg(a, b):
    cov = (a - a.mean(0)).T @ (a - a.mean(0)) / (len(a) - 1)
    return F.mse_loss(a, b) + F.relu(1 - a.std(0)).mean() + (cov - cov.diag().diag()).square().sum()


def jsd(a, b):
    scores, own = unit(a) @ unit(b).T, torch.eye(len(a), dtype=torch.bool)
    return F.softplus(-scores[own]).mean() + F.softplus(scores[~own]).mean()


def siglip(a, b):
    scores, n = 10 * unit(a) @ unit(b).T - 10, len(a)
    return -F.logsigmoid(scores * (2 * torch.eye(n) - 1)).sum() / n


def triplet(a, b):
    return F.triplet_margin_loss(a, b, b.roll(1, 0))


def margin(a, b):
    scores = unit(a) @ unit(b).T
    return F.relu(0.5 + scores - scores.diag().unsqueeze(1)).mean()


def mmd(a, b):
    def kernel(x, y):
        return torch.exp(-torch.cdist(x, y).square() / 2).mean()

    return kernel(a, a.clone()) + kernel(b, b.clone()) - 2 * kernel(a, b)


def alignment_and_uniformity(a, b):
    pairs = torch.pdist(unit(a)).square().mul(-2).exp().mean().log()
    return (unit(a) - unit(b)).square().sum(1).mean() + pairs


def swav(a, b):
    weight = torch.linspace(-1, 1, 3 * a.shape[1], dtype=a.dtype).sin().view(3, -1)
    return formulas.swav([unit(z) @ unit(weight).T for z in (a, b)], 0.1)


def of_both(combine):
    return lambda a, b: combine(formulas.gcc(a, b, 0.2), formulas.gcc(b, a, 0.2))


# What changes from batch to batch, and so agrees with a loss of ours in each of them.
CHANGING = {
    "maximum": of_both(torch.maximum),
    "minimum": of_both(torch.minimum),
    "square": of_both(lambda x, y: (x + y).square()),
    "by its own value": of_both(lambda x, y: (x + y) / (x + y).detach()),
    "by the dimension": lambda a, b: formulas.gcc(a, b, a.shape[1] ** 0.5, formulas.dots),
    "by N - 1": lambda a, b: formulas.grace(a, b, 0.4) / (len(a) - 1),
    "by the parity": lambda a, b: formulas.gcc(*((a, b) if len(a) % 2 else (b, a)), 0.2),
    "a detached norm": lambda a, b: formulas.gcc(a, b, 0.2) + a.norm().detach(),
}


@pytest.mark.parametrize("function", slow_from(4, CHANGING))
def test_what_changes_from_batch_to_batch_is_none(function):
    assert recognize(function).kind == "none"


def mean_over_all(z, labels):
    """Queries without positives count as 0 in the mean."""
    same = (labels[:, None] == labels).double().fill_diagonal_(0)
    others = formulas.others(formulas.cosines(z, z, 0.1))
    log_prob = formulas.cosines(z, z, 0.1) - others.logsumexp(1, keepdim=True)
    return -((log_prob * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def sum_with_an_epsilon(epsilon, temperature):
    """A query without a positive has the constant -log(epsilon)."""

    def function(z, labels):
        others = 1 - torch.eye(len(z))
        weights = (unit(z) @ unit(z).T / temperature).exp() * others
        positives = (weights * (labels[:, None] == labels)).sum(1)
        return -(positives / weights.sum(1) + epsilon).log().mean()

    return function


@pytest.mark.parametrize(("epsilon", "temperature"), [(1e-8, 0.1), (1e-12, 0.5)])
def test_a_query_without_a_positive_may_have_a_constant(epsilon, temperature):
    found = recognize(sum_with_an_epsilon(epsilon, temperature), labels=True)
    assert found.kind == "nearly"
    options = f'temperature={temperature}, over_positives="sum"'
    assert found.line == f"InfoNCE({options})(z, labels=labels)"
    assert OF_THE_BATCH in str(found)


def test_another_mean_over_queries():
    """SupContrast has it since its commit 72fd989."""
    found = recognize(mean_over_all, labels=True)
    assert found.kind == "nearly"
    assert found.differences == ("a query without a positive is 0 in its mean",)
    assert found.line == 'InfoNCE(temperature=0.1, over_positives="supcon")(z, labels=labels)'


def in_place(a, b):
    return formulas.gcc(a.mul_(2), b, 0.2)


def without_gradient_of_lengths(a, b):
    with torch.no_grad():
        a.div_(a.norm(dim=1, keepdim=True))
    return F.cross_entropy(a @ unit(b).T / 0.2, arange(len(a)))


def test_functions_that_change_their_inputs():
    assert recognize(in_place).line == info_nce(f"temperature=0.2, {FIRST}")


def test_one_temperature_as_good_as_another_is_none():
    """The softmax of these dot products is 0 and 1."""
    found = recognize(lambda a, b: formulas.gcc(1e3 * a, 1e3 * b, 1.0, formulas.dots))
    assert found.kind == "none"
    assert "one temperature is as good as another" in str(found)


OTHERS = {
    "Barlow Twins": barlow,
    "VICReg": vicreg,
    "JSD": jsd,
    "SigLIP": siglip,
    "triplet": triplet,
    "margin": margin,
    "BYOL": lambda a, b: 2 - 2 * F.cosine_similarity(a, b.detach()).mean(),
    "MMD": mmd,
    "SwAV": swav,
    "alignment and uniformity": alignment_and_uniformity,
    "an auxiliary term": lambda a, b: formulas.graphcl(a, b, 0.2) + 0.1 * jsd(a, b),
    "two temperatures": lambda a, b: formulas.gcc(a, b, 0.2) + formulas.gcc(b, a, 0.3),
}


@pytest.mark.parametrize("function", slow_from(4, OTHERS))
def test_other_functions_are_no_loss_of_ours(function):
    found = recognize(function)
    assert found.kind == "none"
    assert str(found).startswith("no loss of this package")


def not_masked(a, b):
    within, between = (unit(a) @ unit(z).T / 0.4 for z in (a, b))
    return (torch.cat([within, between], 1).logsumexp(1) - between.diag()).mean()


def counts(times):
    """The positive counts so often in the denominator."""

    def function(a, b):
        sim = (unit(a) @ unit(b).T / 0.2).exp()
        return -torch.log(sim.diag() / (sim.sum(1) + (times - 1) * sim.diag())).mean()

    return function


def with_a_further_term(a, b):
    return formulas.graphcl(a, b, 0.2) + 0.01 * (unit(a) - unit(b)).norm(dim=1).mean()


def with_a_queue(a, b):
    queue = torch.linspace(-1, 1, 6 * 30).double().sin().view(6, 30)
    x, y = unit(a), unit(b)
    logits = torch.cat([(x * y).sum(1, keepdim=True), x @ queue], 1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def of_queries(a, b, tau):
    return F.cross_entropy(unit(a) @ unit(b).T / tau, arange(len(a)), reduction="none")


# What changes a loss only where the views of a graph are far apart.
CLAMPED = {
    "losses": lambda a, b: of_queries(a, b, 0.1).clamp(max=10).mean(),
    "probabilities": lambda a, b: -(-of_queries(a, b, 0.05)).exp().clamp(min=1e-8).log().mean(),
    "positives": lambda a, b: (of_queries(a, b, 0.2) * (F.cosine_similarity(a, b) > 0.3)).mean(),
}


@pytest.mark.parametrize("function", CLAMPED.values(), ids=CLAMPED)
def test_a_clamp_is_seen(function):
    assert recognize(function).kind == "none"


class WithArguments(nn.Module):
    """A module of a script: its options, and a layer that has no shape yet."""

    def __init__(self):
        super().__init__()
        self.args, self.keywords, self.lazy = object(), ["a"], nn.LazyLinear(4)

    def forward(self, a, b):
        return formulas.gcc(a, b, 0.2)


def test_a_module_may_have_any_attributes():
    assert recognize(WithArguments()).kind == "exact"


class Queue(nn.Module):
    """It takes in the keys of each call, and lies at the same place after two calls of one size."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("keys", torch.eye(size, 6, dtype=torch.float64) + 0.1)
        self.at = 0

    def forward(self, a, b):
        x, y = unit(a), unit(b)
        logits = torch.cat([(x * y).sum(1, keepdim=True), x @ unit(self.keys).T], 1) / 0.2
        place = (self.at + arange(len(y))) % len(self.keys)
        self.keys, self.at = self.keys.index_copy(0, place, y.detach()), self.at + len(y)
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


def clamped(a, b):
    scores = (unit(a) @ unit(b).T).clamp(min=0) / 0.5
    return F.cross_entropy(scores, arange(len(a)))


class Counting:
    """A temperature that falls from call to call."""

    calls = 0

    def __call__(self, a, b):
        self.calls += 1
        return formulas.gcc(a, b, 0.5 - 0.01 * self.calls)


def on_a_ring(a, b):
    """Neighbours in the batch count less, and a flip of the batch changes nothing."""
    i = arange(len(a))
    apart = (i[:, None] - i).abs()
    scores = unit(a) @ unit(b).T / 0.2
    near = torch.minimum(apart, len(a) - apart).double()
    return ((scores - near).logsumexp(1) - scores.diag()).mean()


def detached_weights(a, b):
    scores = unit(a) @ unit(b).T / 0.2
    losses = F.cross_entropy(scores, arange(len(a)), reduction="none")
    return (losses * scores.detach().softmax(1).diag()).mean()


FACTS = {
    "three times": (counts(3), "the positive is 3 times in the denominator"),
    "half": (counts(0.5), "the positive is 0.5 times in the denominator"),
    "a further term": (with_a_further_term, "it has a further term"),
    "queue": (with_a_queue, "keys of its own such as a queue"),
    "state": (Counting(), "it keeps a state"),
    "a queue that grows": (Queue(18), "it keeps a state"),
    "clamped": (clamped, "or it changes the scores, as by a clamp"),
    "no negatives": (
        lambda a, b: 2 - 2 * F.cosine_similarity(a, b).mean(),
        "it has no negatives",
    ),
    "by N / (N - 1)": (
        lambda a, b: len(a) / (len(a) - 1) * formulas.grace(a, b, 0.4),
        "up to that it is InfoNCE(temperature=0.4)",
    ),
    "ring": (on_a_ring, "depends on the order of the graphs"),
    "weights": (detached_weights, "its gradient is not the derivative of its value"),
    "head": (
        lambda a, b: formulas.gcc(*(F.pad(z, (0, 1)).cumsum(1) for z in (a, b)), 0.2),
        "a layer such as a projection head",
    ),
    "random": (lambda a, b: formulas.gcc(F.dropout(a, 0.1), b, 0.2), "it is random"),
    "order": (triplet, "depends on the order of the graphs"),
    "centred": (barlow, "centres the embeddings"),
    "distances": (mmd, "it has distances, or"),
    "columns": (barlow, "it compares columns"),
    "clusters": (lambda a, b: formulas.grace(a.T, b.T, 0.5), "it compares columns"),
    "flat": (
        lambda a, b: formulas.gcc(a, b, 1e9),
        "one temperature is as good as another: its softmax is flat, or 0 and 1",
    ),
    "a sum without negatives": (
        lambda a, b: 2 - 2 * F.cosine_similarity(a, b).sum(),
        "it has no negatives",
    ),
    "lengths": (triplet, "depends on the lengths of embeddings"),
    "not finite": (
        lambda a, b: formulas.gcc(a, b, 0.2) / (len(a) - 8),
        "not finite on a batch of 8",
    ),
    "diagonal": (not_masked, "each embedding is its own negative: the diagonal is not masked"),
    "twice": (
        lambda a, b: (
            -torch.log(
                (s := (unit(a) @ unit(b).T / 0.2).exp()).diag() / (s.sum(1) + s.diag())
            ).mean()
        ),
        "the positive is 2 times in the denominator",
    ),
    "half precision": (
        lambda a, b: formulas.gcc(a.bfloat16(), b.bfloat16(), 0.2),
        "a part is detached, or it rounds to half precision",
    ),
    "a part is detached": (
        lambda a, b: -((unit(a) @ unit(b).T).log_softmax(1).diag() * (a * b).sum(1).detach()).sum(),
        "its gradient is not the derivative of its value",
    ),
    "no gradient": (lambda a, b: 0 * a.sum() + 0 * b.sum(), "its gradient is 0"),
    "one view": (lambda a, b: a.norm(dim=1).var(), "one of its views has no gradient"),
}


@pytest.mark.parametrize(("function", "fact"), FACTS.values(), ids=FACTS)
def test_facts_about_other_functions(function, fact):
    dim = 6 if fact.startswith("keys") or isinstance(function, nn.Module) else None
    found = recognize(function, dim=dim)
    assert found.kind == "none"
    assert fact in str(found)
    assert ("nearest" in str(found)) <= (found.error < 0.1)


def mutant(seed):
    """A contrastive loss with random changes, and the kind of answer it should have."""
    choose = random.Random(seed)
    similarity = choose.choice(["cosine", "cosine", "cosine", "dot"])
    tau = choose.choice([0.05, 0.07, 0.1, 0.2, 0.5, 1.0]) * (1 if similarity == "cosine" else 5)
    within, positives = choose.random() < 0.5, choose.choice([1, 1, 1, 0, 2])
    itself = within and choose.random() < 0.2
    ways = choose.choice([(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.3, 0.7)])
    factor, power = choose.choice([1.0, 1.0, 2.0, 0.14]), choose.choice([0, 0, 1, 0.5])
    constant, detach = choose.choice([0.0, 0.0, 3.0]), choose.random() < 0.2
    forgets, other_tau = choose.random() < 0.1, choose.choice([1.0] * 9 + [1.5])
    transposed = choose.random() < 0.1

    def one_way(x, y, tau):
        if similarity == "cosine":
            x, y = unit(x), y if forgets else unit(y)
        cross, eye = (x @ y.T / tau).exp(), torch.eye(len(x))
        cross = cross.T if transposed else cross
        total = (cross * (1 - eye)).sum(1) + positives * cross.diag()
        if within:
            own = y if transposed else x
            total = total + ((own @ own.T / tau).exp() * (1 - eye * (not itself))).sum(1)
        return -(cross.diag() / total).log().mean()

    def function(z1, z2):
        z2 = z2.detach() if detach else z2
        value = ways[0] * one_way(z1, z2, tau) + ways[1] * one_way(z2, z1, tau * other_tau)
        return factor * len(z1) ** power * value + constant

    is_ours = positives < 2 and not itself and (other_tau == 1 or 0 in ways)
    kind = "none" if not is_ours else "unit" if forgets and similarity == "cosine" else "exact"
    return function, kind


def check_mutant(seed):
    function, kind = mutant(seed)
    found = recognize(function)
    if found.kind == "nearly":  # where it hardly matters how often the positive counts
        assert found.differences == ("the positive is 2 times in the denominator",)
        assert kind == "none"
        return
    assert found.kind == kind, found
    if kind == "exact":
        assert_line_is(found.line, function)
    elif kind == "unit":
        assert_line_is(found.line, lambda a, b: function(unit(a), unit(b)))


@pytest.mark.parametrize("seed", slow_from(6, {seed: seed for seed in range(60)}))
def test_mutants(seed):
    check_mutant(seed)


def failing(module):
    def function(z1, z2):
        module.eval()
        module.loss(z1.detach(), z2.detach()).backward()
        return module.loss(z1, z2)

    return function


def test_nothing_is_changed():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

        def loss(self, z1, z2):
            torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
            return formulas.gcc(self.head(z1), self.head(z2), 0.2)

    module = Module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    with torch.no_grad():
        for function in (module.loss, lambda z1, z2: module.loss(z1, z2), failing(module)):
            assert recognize(function, dim=6).kind == "none"  # a head is not part of a loss
        assert not torch.is_grad_enabled()
    assert (torch.rand(1), random.random(), np.random.rand()) == expected  # noqa: NPY002
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.training


def supcon_of_labels(features, labels):
    return SupConLoss(0.1)(features, labels)


def of_64_graphs(z1, z2):
    return F.cross_entropy(unit(z1) @ unit(z2).T, arange(64))


def needs_cuda():
    raise RuntimeError("Found no NVIDIA driver on your system")


def test_torch_has_its_threads_afterwards():
    before = torch.get_num_threads()
    assert recognize(lambda a, b: torch.get_num_threads() * a.sum() + b.sum()).kind == "none"
    assert torch.get_num_threads() == before


def test_what_cannot_be_called():
    assert_error(TypeError, lambda: recognize(lambda z: z.sum()), ["two views", "wrap it"])
    assert_error(TypeError, lambda: recognize(lambda a, b: a @ b.T), ["(9, 9)", ".mean()"])
    assert_error(TypeError, lambda: recognize(lambda a, b: 3.0), ["scalar", "float"])
    assert_error(TypeError, lambda: recognize(lambda a, b: (a.sum(), b)), ["a tuple", "[0]"])
    assert_error(TypeError, lambda: recognize(supcon_of_labels), ["is labels", "labels=True"])
    assert_error(TypeError, lambda: recognize(lambda z, y: z[y].sum()), ["labels=True"])
    assert_error(TypeError, lambda: recognize(of_64_graphs), ["must take 8 to 100 rows"])
    assert_error(TypeError, lambda: recognize(lambda a, b: needs_cuda()), ["z1.device"])
    assert_error(TypeError, lambda: recognize(lambda a, b: a.sum().detach()), ["detached"])
    fixed = nn.Linear(6, 6).double()
    assert_error(TypeError, lambda: recognize(lambda a, b: (fixed(a) - b).sum()), ["dim="])
    assert_error(TypeError, lambda: recognize(lambda a, b: a.numpy()), ["numpy", "wrap it"])


def test_an_unknown_name_hints_at_recognize():
    assert_error(ValueError, lambda: InfoNCE.like("no such script"), ["recognize(your_loss)"])
