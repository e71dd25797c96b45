"""The losses of all queries, and their gradient, in parts that fit into memory.

`blocks` sums over negatives, `positives` over positives, and a form (`forms.py`) makes the losses
of both.
"""

import torch
from torch import Tensor

from pgcl_losses.distributed import Processes
from pgcl_losses.engine.blocks import Blocks
from pgcl_losses.engine.listed import ListedNegatives
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.engine.positives import Positives
from pgcl_losses.forms import Form, Mean


def reduced(losses: Mean, reduction: str) -> tuple[Tensor, Tensor | float]:
    """The mean or sum of the losses of queries that have positives, and its derivatives."""
    if reduction == "sum":
        return losses.values.sum(), 1.0
    if losses.exist is None:
        num_queries = losses.values.shape[0]
        return losses.values.sum() / num_queries, 1 / num_queries
    count = losses.exist.sum().clamp_min(1)
    return losses.values.sum() / count, losses.exist.to(losses.values) / count


class Losses:
    """The losses of all queries, and the gradient of a weighted sum of them."""

    def __init__(
        self,
        pairs: Pairs,
        temperature: float | Tensor,
        form: Form,
        processes: Processes,
        share_memory: bool = True,
    ) -> None:
        self.pairs, self.order = pairs.sorted_by_item()
        self.temperature, self.form, self.processes = temperature, form, processes
        # The weights e^(beta s / tau) of hard negatives make their scores (1 + beta) s / tau.
        self.negatives = self._negatives(temperature / (1 + pairs.hardness), share_memory)
        self.positives = Positives(self.pairs, temperature, processes)

    def _negatives(
        self, temperature: float | Tensor, share_memory: bool = False
    ) -> Blocks | ListedNegatives:
        ranks = self.processes.rank, self.processes.num_ranks()
        if self.pairs.negative_pairs is not None:
            return ListedNegatives(self.pairs, temperature, *ranks)
        # Without the positive in the denominator, the smallest weights count.
        has_weights = self.pairs.weights is not None or self.pairs.pair_weight is not None
        exact = self.form.decoupled and has_weights
        return Blocks(self.pairs, temperature, *ranks, share_memory, exact)

    def loss(self, reduction: str, with_gradient: bool) -> Tensor:
        """The mean or sum of the losses, or all of them in the caller's order, ``[Q]``."""
        losses = self._compute(with_gradient)
        if reduction == "none":
            return self._unsorted(losses.values)
        loss, self.d_losses = reduced(losses, reduction)
        return loss

    def _compute(self, with_gradient: bool) -> Mean:
        """In the order of the sorted pairs."""
        processes, hardness = self.processes, self.pairs.hardness
        sums = self.negatives.log_sums(with_gradient, self.form.debias > 0 or hardness > 0)
        log_s = processes.add_logs(sums.log_s)
        self.log_sums = [(self.negatives, log_s)]
        log_count = None
        if sums.counts is not None:
            log_count = processes.add(sums.counts, "the number of negatives").log()
        if sums.log_totals is not None:  # a mean weight of 1 over all embeddings
            log_s = log_s + (self.pairs.num_samples().log() - processes.add_logs(sums.log_totals))
        if hardness > 0 and log_count is not None:  # and over the negatives
            of_weights = self._negatives(self.temperature / hardness)
            log_totals = processes.add_logs(of_weights.log_sums(with_gradient).log_s)
            self.log_sums.append((of_weights, log_totals))
            log_s = log_s + (log_count - log_totals.masked_fill(log_totals == -torch.inf, 0.0))
        losses, self.grads = self.form(log_s, self.positives, self.temperature, log_count)
        return losses

    def gradient(
        self, d_losses: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """By embeddings ``[M, D]``, a temperature ``[]``, and weights of pairs ``[P]``.

        ``d_losses``: the derivatives by all losses ``[Q]``, if they were not reduced.
        """
        if d_losses is not None and self.order is not None:
            d_losses = d_losses[self.order[: len(d_losses)]]
        grads = self.grads(self.d_losses if d_losses is None else d_losses)
        z, temperature = self.pairs.embeddings, self.temperature
        negatives, log_s = self.log_sums[0]
        d_z, of_memory = negatives.gradient(log_s, grads.log_s)
        for of_weights, log_totals in self.log_sums[1:]:
            d_by_weights, memory_by_weights = of_weights.gradient(log_totals, -grads.log_s)
            d_z += d_by_weights
            if of_memory is not None and memory_by_weights is not None:
                of_memory = of_memory + memory_by_weights
        d_weights, d_temperature = self.positives.add_gradient(d_z, grads.means), None
        if isinstance(temperature, Tensor):
            # Losses depend on (z_i . z_j) / tau; both i and j have their part of the gradient.
            d_temperature = (z * d_z).sum() / (-2 * temperature)
            if of_memory is not None:
                d_temperature -= (z[: len(of_memory)] * of_memory).sum() / temperature
            if grads.temperature is not None and self.processes.rank == 0:
                d_temperature += grads.temperature
        if of_memory is not None:
            d_z[: len(of_memory)] += of_memory
        return self._unsorted(d_z), d_temperature, d_weights

    def _unsorted(self, values: Tensor) -> Tensor:
        """In the caller's order, those of queries ``[Q]`` or of all embeddings ``[M, ...]``."""
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(0, self.order[: values.shape[0]], values)
