"""Partners: which keys are positives of a query, and how much each counts, as small tables."""

import pytest
import torch
from helpers.cases import as_on

from pgcl_losses.pairs.partners import find_partners
from pgcl_losses.pairs.rows import Listed, Pairs, all_rows

LABELS = torch.tensor([7, 7, 8, 7, 9, 8])
LISTED, _ = Listed.by_query(torch.tensor([0, 0, 3]), torch.tensor([4, 1, 5]))
OF_LISTED = torch.tensor([1.0, 2.0, 0.5])  # of (0, 4), (0, 1) and (3, 5)
# Of two sets of three embeddings: a row for each query, a number for each key. A weight is a
# positive that counts so much, "o" the query itself, which is no negative, and "." a negative.
TABLES = {
    "views": ({}, None, ["o..1..", ".o..1.", "..o..1", "1..o..", ".1..o.", "..1..o"]),
    "labels": (
        {"labels": LABELS},
        None,
        ["o1.1..", "1o.1..", "..o..1", "11.o..", "....o.", "..1..o"],
    ),
    "listed": (
        {"positives": LISTED},
        OF_LISTED,
        ["o2..1.", ".o....", "..o...", "...o.h", "....o.", ".....o"],
    ),
    "labels and a list, whose weights count": (
        {"labels": LABELS, "positives": LISTED},
        OF_LISTED,
        ["o2.11.", "1o.1..", "..o..1", "11.o.h", "....o.", "..1..o"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_the_positives_of_each_query(name, readable):
    options, weights, table = TABLES[name]
    pairs, signs = Pairs((3, 3), **options), {0.0: "o", 0.5: "h", 1.0: "1", 2.0: "2"}
    with as_on(readable):
        (rows,) = all_rows(pairs)
        partners = find_partners(pairs, rows, torch.zeros(6, 2), weights)
        # Each layout finds the scores of positives, and leaves partners out of the negatives.
        columns = partners.scores(torch.arange(36.0).view(6, 6)).long()
        left_out = partners.leave_out(torch.zeros(6, 6)) < -1
    of_positives = partners.positives
    counts = torch.ones(columns.shape) if of_positives.weights is None else of_positives.weights
    found = torch.zeros(36).index_put([columns.flatten()], counts.flatten(), accumulate=True)
    found = found.view(6, 6)
    assert not (found[~left_out] > 0).any()
    drawn = [
        "".join(signs[w] if out else "." for w, out in zip(*of_row, strict=True))
        for of_row in zip(found.tolist(), left_out.tolist(), strict=True)
    ]
    assert drawn == table
