"""The contract between the mathematics and the engines: what every engine is given."""

from typing import NamedTuple

from torch import Tensor


class Table(NamedTuple):
    """Weights looked up by cluster: W_ij = exp(log_weights[rows[i], columns[j]])."""

    log_weights: Tensor  # [T, K] -inf leaves a pair out
    rows: Tensor  # [R] each query's row of the table
    columns: Tensor  # [C] each column's cluster


class Bells(NamedTuple):
    """Weights by the pair's own cosine: exp(-(s_ij - mean_i)^2 / (2 variance_i)).

    They are scaled to an average of 1 over the population.
    """

    mean: Tensor  # [R]
    variance: Tensor  # [R] infinite where every weight is 1
    population: Tensor  # [P, D] unit rows


class SameCluster(NamedTuple):
    """Pairs left out: those whose query and column are in one cluster."""

    rows: Tensor  # [R] each query's cluster
    columns: Tensor  # [C] each column's cluster


class Pairs(NamedTuple):
    """Queries, the columns they are held against, and how much each pair counts.

    An engine returns, for each query i and its positive column p at temperature t,

        -log( e^{s_ip / t} / ( e^{s_ip / t} + sum_j W_ij e^{s_ij / t} ) )

    with s the product of unit rows and j any column but p and the query's own. The gradient goes to
    `rows` and `columns`; the weights W are constants for it (and 1 where there are none).
    """

    rows: Tensor  # [R, D] unit queries
    columns: Tensor  # [C, D] unit samples
    positives: Tensor  # [R] the column of each query's other view
    own: Tensor | None = None  # [R] the column that is the query itself, where it is among them
    weights: Table | Bells | None = None
    left_out: SameCluster | None = None

    def of_queries(self, queries: slice) -> "Pairs":
        """Some of the queries against all columns."""
        weights, left_out = self.weights, self.left_out
        own = None if self.own is None else self.own[queries]
        if isinstance(weights, Table):
            weights = Table(weights.log_weights, weights.rows[queries], weights.columns)
        elif isinstance(weights, Bells):
            mean, variance, population = weights
            weights = Bells(mean[queries], variance[queries], population)
        if left_out is not None:
            left_out = SameCluster(left_out.rows[queries], left_out.columns)
        positives = self.positives[queries]
        return Pairs(self.rows[queries], self.columns, positives, own, weights, left_out)

    def against(self, columns: slice, positives: Tensor) -> "Pairs":
        """The queries against some other columns, in which each finds its positive."""
        weights, left_out = self.weights, self.left_out
        if isinstance(weights, Table):
            weights = Table(weights.log_weights, weights.rows, weights.columns[columns])
        if left_out is not None:
            left_out = SameCluster(left_out.rows, left_out.columns[columns])
        return Pairs(self.rows, self.columns[columns], positives, None, weights, left_out)
