"""What many files share: parameters, filters of warnings, and the check of an error."""

import pytest
import torch

NEGATIVES = ("all", "cross")
engines = pytest.mark.parametrize("engine", ["dense", "chunks"])
negatives_of = pytest.mark.parametrize("negatives", NEGATIVES)
# The loss warns of batches with fewer graphs than prototypes.
few_graphs = pytest.mark.filterwarnings("ignore:PGCLLoss")
# torch.compile uses deprecated functions, and warns that Python 3.13.0 is slow.
compiling = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning"
)
HAS_ONE_GRAPH = torch.__version__ >= "2.9"
one_graph = pytest.mark.skipif(
    not HAS_ONE_GRAPH, reason="torch before 2.9 cannot compile a loss into one graph"
)


def assert_error(error, call, words, names):
    """Of a call that has these names: an error on one line, with all words."""
    with pytest.raises(error) as caught:
        eval(call, names)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
