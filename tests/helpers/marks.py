"""Parameters and filters of warnings that many files share."""

import pytest

NEGATIVES = ("all", "cross")
engines = pytest.mark.parametrize("engine", ["dense", "blocks"])
negatives_of = pytest.mark.parametrize("negatives", NEGATIVES)
# The loss warns of batches with fewer graphs than prototypes.
few_graphs = pytest.mark.filterwarnings("ignore:PGCLLoss")
# torch.compile uses deprecated functions, and warns that Python 3.13.0 is slow.
compiling = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning"
)
