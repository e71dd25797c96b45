import pytest
from helpers.cases import CUT, DENSE, NOT_CUT, in_chunks


@pytest.fixture(params=[DENSE, NOT_CUT, CUT], ids=["dense", "not cut", "cut"])
def engine(request):
    """The option `engine`, for each way to compute a loss; small batches are cut in one of them."""
    with in_chunks(request.param.chunk):
        yield request.param.engine
