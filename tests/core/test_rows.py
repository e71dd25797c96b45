"""Rows: with which keys a query is compared, as small tables."""

import pytest
import torch

from pgcl_losses.base.distributed import Span
from pgcl_losses.pairs.rows import Pairs, all_rows

# Set 1 has the positions 0 and 1, set 2 the positions 2 and 3, set 3 the positions 4 and 5, and a
# memory of three embeddings follows. x: the key counts, -: it is a column that does not count, no
# sign: it is no column.
MEMORY = torch.zeros(3, 2)
LISTED = torch.tensor([[0], [2]])
TABLES = {
    "all": ({}, {(0, 6): "xxxxxx"}),
    "all, with a memory": ({"memory": MEMORY}, {(0, 6): "xxxxxxxxx"}),
    "cross": (
        {"negatives": "cross"},
        {(0, 2): "  xxxx", (2, 4): "xx  xx", (4, 6): "xxxx  "},
    ),
    "cross, with a memory": (
        {"negatives": "cross", "memory": MEMORY},
        {(0, 2): "  xxxxxxx", (2, 4): "xx  xxxxx", (4, 6): "xxxx  xxx"},
    ),
    "cross, listed negatives": (
        {"negatives": "cross", "negative_pairs": LISTED},
        {(0, 2): "--xxxx", (2, 4): "xx--xx", (4, 6): "xxxx--"},
    ),
    "first queries": ({"first_queries": True}, {(0, 2): "xxxxxx"}),
    "first queries, cross": (
        {"first_queries": True, "negatives": "cross"},
        {(0, 2): "  xxxx"},
    ),
}


def drawn(rows, count):
    """The table of some rows, a sign for each position."""
    signs = [" "] * count
    for start, stop in rows.keys:
        signs[start:stop] = "x" * (stop - start)
    if rows.masked is not None:
        start, stop = rows.masked
        signs[start:stop] = "-" * (stop - start)
    return "".join(signs)


@pytest.mark.parametrize("name", TABLES)
def test_the_keys_of_each_query(name):
    options, table = TABLES[name]
    pairs = Pairs((2, 2, 2), **options)
    rows, count = all_rows(pairs), 6 + pairs.num_past()
    assert {tuple(some.queries): drawn(some, count) for some in rows} == table
    for some in rows:
        columns = [p for p in range(count) if drawn(some, count)[p] != " "]
        assert some.shape() == (some.queries.stop - some.queries.start, len(columns))
        found = some.column(torch.tensor(columns)[torch.tensor(columns) < 6]).tolist()
        assert found == [*range(len(found))]
        values = torch.arange(count)
        assert some.pick(values)[1].tolist() == columns


def test_a_process_has_the_rows_of_its_own_queries():
    own = [Span(1, 2), Span(2, 2), Span(4, 6)]  # of each set
    rows = all_rows(Pairs((2, 2, 2), "cross"), own)
    assert [(tuple(x.queries), drawn(x, 6)) for x in rows] == [
        ((1, 2), "  xxxx"),
        ((4, 6), "xxxx  "),
    ]
