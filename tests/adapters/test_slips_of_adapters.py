"""Each mistake is an error on one line, which names the argument and says what came."""

import pytest
import torch
from helpers.batches import ring
from helpers.marks import assert_error

# Errors, calls, and the names and values that their messages have.
SLIPS = [
    (ValueError, "NodeDrop(1.1)", "p must", "from 0 to 1", "got 1.1"),
    (ValueError, "EdgePerturb(float('nan'))", "p must", "from 0 to 1", "nan"),
    (ValueError, "AttributeMask('half')", "p must", "'half'"),
    (
        ValueError,
        "AttributeMask(fill_value=0.5).mask(torch.arange(6))",
        "fill_value",
        "int64",
        "0.5",
    ),
    (ValueError, "RandomChoice([])", "transforms", "at least one", "[]"),
    (ValueError, "RandomChoice([NodeDrop(), None])", "transforms", "callable", "NodeDrop(p=0.2), "),
    *(
        (TypeError, f"{kind}()(torch.ones(2))", "must be a", "got Tensor")
        for kind in ("NodeDrop", "Subgraph", "EdgePerturb", "AttributeMask")
    ),
    (TypeError, "NodeDrop()(apart(batch))", "must be a", "got list"),
]


@pytest.mark.parametrize(("error", "call", "words"), [(*row[:2], row[2:]) for row in SLIPS])
def test_an_error_on_one_line_that_names_what_is_wrong(framework, error, call, words):
    names = {**vars(framework.adapter), **vars(framework), "torch": torch}
    names["batch"] = framework.batch_of([ring(9)] * 3)
    assert_error(error, call, words, names)
