"""What many files share: parameters, filters of warnings, and checks of errors."""

import pytest
import torch
from hypothesis import settings

NEGATIVES = ("all", "cross")
negatives_of = pytest.mark.parametrize("negatives", NEGATIVES)
# The loss warns of batches with fewer graphs than prototypes.
few_graphs = pytest.mark.filterwarnings("ignore:pgcl_losses")
# torch.compile uses deprecated functions, and warns that Python 3.13.0 is slow.
compiling = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning"
)
HAS_ONE_GRAPH = torch.__version__ >= "2.9"
one_graph = pytest.mark.skipif(
    not HAS_ONE_GRAPH, reason="torch before 2.9 cannot compile a loss into one graph"
)


def device_type():
    """Where tests make their tensors: by --device, which is read after this file."""
    return torch.get_default_device().type


def examples(count):
    """Random examples of a test: as many times more as the profile in conftest.py has more."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


def slips(error, rows):
    """Parameters ``error, call, words`` of rows (call, *words); the words name the test."""
    name = error.__name__
    return [
        pytest.param(error, call, words, id=f"{name}: {', '.join(words)}") for call, *words in rows
    ]


def assert_error(error, call, words):
    """The call raises this error, on one line, which has all words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
