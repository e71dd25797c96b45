"""Each mistake is an error on one line, which names the argument and says what came."""

import pytest
import torch
from helpers.batches import ring
from helpers.marks import assert_error, slips

# Calls with what the adapter `a` has, and the names and values that their messages have.
VALUE_ERRORS = [
    (lambda a: a.NodeDrop(1.1), "p must", "from 0 to 1", "got 1.1"),
    (lambda a: a.EdgePerturb(torch.nan), "p must", "from 0 to 1", "nan"),
    (lambda a: a.AttributeMask("half"), "p must", "'half'"),
    (lambda a: a.NodeDrop(True), "p must", "got True"),
    (lambda a: a.AttributeMask(fill_value=0.5).mask(torch.arange(6)), "fill_value", "int64", "0.5"),
    (lambda a: a.RandomChoice([]), "transforms", "at least one", "[]"),
    (
        lambda a: a.RandomChoice([a.NodeDrop(), None]),
        "transforms",
        "callable",
        "NodeDrop(p=0.2), ",
    ),
]


@pytest.mark.parametrize(("error", "call", "words"), slips(ValueError, VALUE_ERRORS))
def test_an_error_on_one_line_that_names_what_is_wrong(framework, error, call, words):
    assert_error(error, lambda: call(framework.adapter), words)


@pytest.mark.parametrize(
    "kind", ["NodeDrop", "Subgraph", "EdgeDrop", "EdgePerturb", "AttributeMask", "FeatureMask"]
)
def test_an_augmentation_of_a_tensor(framework, kind):
    augment = getattr(framework.adapter, kind)()
    assert_error(TypeError, lambda: augment(torch.ones(2)), ["must be a", "got Tensor"])


def test_an_augmentation_of_a_list_of_graphs(framework):
    graphs = framework.apart(framework.batch_of([ring(9)] * 3))
    augment = framework.adapter.NodeDrop()
    assert_error(TypeError, lambda: augment(graphs), ["must be a", "got list"])
