"""Forms: the loss of a query from the sum over its negatives and its positives, by numbers."""

import math

import pytest
import torch

from pgcl_losses.pairs.forms import Compared, Form, Positives

S, A, B = 6.0, 2.0, 4.0  # the sum over negatives, and e^x of two positives
ONE = {
    "InfoNCE": (Form(), math.log((A + S) / A)),
    "decoupled": (Form(decoupled=True), math.log(S / A)),
    "SupCon": (Form("supcon"), math.log((S + A) / A)),
    "sum": (Form("sum"), math.log((S + A) / A)),
}
TWO = {
    "InfoNCE": (Form(), (math.log((A + S) / A) + math.log((B + S) / B)) / 2),
    "decoupled": (Form(decoupled=True), (math.log(S / A) + math.log(S / B)) / 2),
    "SupCon": (Form("supcon"), math.log(S + A + B) - (math.log(A) + math.log(B)) / 2),
    "sum": (Form("sum"), math.log((S + A + B) / (A + B))),
    "sum, decoupled": (Form("sum", decoupled=True), math.log(S / (A + B))),
}


def loss_of(form, positives, weights=None, total=S):
    """The loss of one query, whose positives are a matrix ``[1, P]`` and a list ``[p]``."""
    log_s, x = torch.tensor([total]).double().log(), torch.tensor([positives]).double().log()
    w = None if weights is None else torch.tensor([weights]).double()
    layouts = [(x, Positives(1, w))]
    flat = torch.ones_like(x[0]) if w is None else w[0]
    layouts.append((x[0], Positives(1, flat, torch.zeros(len(x[0]), dtype=torch.long))))
    results = [form.losses(log_s, x, of, 1.0, None)[0].item() for x, of in layouts]
    assert results[0] == pytest.approx(results[1])
    return results[0]


@pytest.mark.parametrize("name", ONE)
def test_one_positive(name):
    form, expected = ONE[name]
    assert loss_of(form, [A]) == pytest.approx(expected)


@pytest.mark.parametrize("name", TWO)
def test_two_positives(name):
    form, expected = TWO[name]
    assert loss_of(form, [A, B]) == pytest.approx(expected)
    assert loss_of(form, [A, B, 100.0], [1.0, 1.0, 0.0]) == pytest.approx(expected)  # padding


def test_weights_are_shares_of_a_mean_and_factors_of_a_sum():
    mean = (3 * math.log((A + S) / A) + math.log((B + S) / B)) / 4
    assert loss_of(Form(), [A, B], [3.0, 1.0]) == pytest.approx(mean)
    total = math.log((3 * A + B + S) / (3 * A + B))
    assert loss_of(Form("sum"), [A, B], [3.0, 1.0]) == pytest.approx(total)


@pytest.mark.parametrize("name", TWO)
def test_without_positives_or_negatives(name):
    form, _ = TWO[name]
    assert loss_of(form, [A, B], [0.0, 0.0]) == 0
    # SupCon compares the positives with each other.
    alone = math.log(A + B) - (math.log(A) + math.log(B)) / 2 if name == "SupCon" else 0
    assert loss_of(form, [A, B], None, 0.0) == pytest.approx(alone)


def test_debiasing_subtracts_what_false_negatives_add():
    """Three negatives with a sum of 6 and tau+ of 0.1, against one positive of 2."""
    log = [torch.tensor([value]).double().log() for value in (S, A, 3.0)]
    losses, _ = Form(debias=0.1).losses(log[0], log[1].view(1, 1), Positives(1, None), 1.0, log[2])
    corrected = 3 * max((S / 3 - 0.1 * A) / 0.9, math.exp(-1))
    assert losses.item() == pytest.approx(math.log((A + corrected) / A))


def test_compared_says_whether_a_query_has_both():
    assert loss_of(Compared(), [A, B]) == loss_of(Compared(), [A]) == 1
    assert loss_of(Compared(), [A, B], None, 0.0) == loss_of(Compared(), [A, B], [0.0, 0.0]) == 0
