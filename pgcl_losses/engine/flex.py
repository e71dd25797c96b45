"""The sums by FlexAttention: log S_i is the log-sum-exp of attention from queries to keys.

Its gradient is what attention returns:
- to query i: d_i sum_j p_ij z_j, the output of that attention with the keys as values;
- to key j: sum_i p_ij d_i z_i, that of attention from keys to queries with scores - log S_i.

No backward pass of FlexAttention is needed, and tests of the gradient run on a CPU.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from pgcl_losses.engine.pairs import LOG2_E, Pairs, Sums, Table

_LARGEST_DIM = 256  # of a kernel
_CPU_UP_TO = 8192  # embeddings: without a compiler, one matrix of all scores

Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (cosine / tau, query, key)


class Flex:
    """The sums over all keys for one process's portion of the queries."""

    def __init__(
        self, pairs: Pairs, temperature: float | Tensor, rank: int = 0, num_ranks: int = 1
    ) -> None:
        pairs.check_weights("flex", Table)
        _check(pairs)
        self.pairs, self.temperature, self.left_out = pairs, temperature, pairs.left_out()
        self.embeddings = pairs.embeddings.detach()
        count = pairs.num_queries()
        self.own = slice(*[count * edge // num_ranks for edge in (rank, rank + 1)])
        self.tables: list[tuple[Tensor, Tensor]] = []
        if isinstance(pairs.weights, Table):
            of_heads = zip(pairs.weights.scaled(logs=True), pairs.weights.clusters.T, strict=True)
            self.tables = [(table, clusters) for (_, table), clusters in of_heads]
        if pairs.pair_weight is not None:
            self.numbers = pairs.pair_weight.numbers(LOG2_E / temperature)

    def log_sums(self, with_gradient: bool) -> Sums:
        means, log_sums = self._attend_to_all(self._score)
        log_totals = None
        if self.pairs.pair_weight is not None:
            log_present = self.left_out.log_present
            _, log_totals = self._attend_to_all(
                lambda s, i, j: self._pair_weight(s, i) + log_present[j]
            )
        return Sums(log_sums, log_totals, (means,))

    def gradient(
        self, log_s: Tensor, d_log_s: Tensor, kept: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        (means,), start = kept, self.own.start
        assert means is not None
        queries, none = self.embeddings[self.own], log_s == -math.inf
        shift = log_s.masked_fill(none, math.inf)
        d = d_log_s.masked_fill(none, 0.0)[self.own].unsqueeze(1)

        def of_key(s: Tensor, j: Tensor, i: Tensor) -> Tensor:
            return self._score(s, i + start, j) - shift[i + start]

        # Of all keys, those of the batch have a gradient.
        of_keys, logs = _attend(self.embeddings, queries, d * queries, of_key, self.temperature)
        d_embeddings = of_keys * logs.exp().unsqueeze(1)
        d_embeddings[self.own] += d * means
        d_embeddings /= self.temperature
        if not isinstance(self.temperature, Tensor):
            return d_embeddings, None
        return d_embeddings, (queries * d * means).sum() / -self.temperature.square()

    def _attend_to_all(self, score: Score) -> tuple[Tensor, Tensor]:
        """Means of the keys for the queries of the portion, and log-sum-exps among all ``[Q]``."""
        queries, keys = self.embeddings[self.own], self.pairs.keys().detach()

        def of_query(s: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score(s, i + self.own.start, j)

        means, logs = _attend(queries, keys, keys, of_query, self.temperature)
        of_all = logs.new_full((self.pairs.num_queries(),), -math.inf)
        of_all[self.own] = logs
        return means, of_all

    def _score(self, s: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """log W + s / tau of query i and key j, -inf where it is no negative."""
        total = s + self._pair_weight(s, i) + self.left_out.log_present[j]
        if self.tables:
            logs = [table[clusters[i], clusters[j]] for table, clusters in self.tables]
            by_cluster = logs[0]
            for of_head in logs[1:]:
                peak = torch.maximum(by_cluster, of_head).clamp_min(torch.finfo(s.dtype).min)
                terms = (by_cluster - peak).exp2() + (of_head - peak).exp2()
                by_cluster = peak + terms.log2()
            total = total + by_cluster / LOG2_E
        return torch.where(self.left_out.mask(i, j), -math.inf, total)

    def _pair_weight(self, s: Tensor, i: Tensor) -> Tensor:
        """Its logarithm, of cosine / tau and query."""
        if self.pairs.pair_weight is None:
            return torch.zeros_like(s)
        numbers = [of_all[i] for of_all in self.numbers]
        return self.pairs.pair_weight.formula(s * LOG2_E, *numbers) / LOG2_E


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, score: Score, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Attention ``[Q, D]`` and the log-sum-exp of its scores ``[Q]``; 0 and -inf without keys."""
    if len(queries) == 0 or len(keys) == 0:
        return torch.zeros_like(queries), queries.new_full((len(queries),), -math.inf)
    dim = values.shape[1]
    width = max(16, 1 << (dim - 1).bit_length())  # kernels need powers of 2
    matrices = [F.pad(x, (0, width - dim))[None, None] for x in (queries, keys, values)]
    out, aux = _kernel(queries.device.type)(
        matrices[0] / temperature,
        *matrices[1:],
        score_mod=lambda s, b, h, i, j: score(s, i, j),
        scale=1.0,
        return_aux=AuxRequest(lse=True),
    )
    logs = aux.lse[0, 0]
    return torch.where((logs == -math.inf).unsqueeze(1), 0.0, out[0, 0, :, :dim]), logs


@functools.cache
def _kernel(device_type: str) -> Any:
    if device_type == "cpu":
        return flex_attention
    return torch.compile(flex_attention, dynamic=True)


def _check(pairs: Pairs) -> None:
    embeddings = pairs.embeddings
    count, dim = len(embeddings) + pairs.num_past(), embeddings.shape[1]
    problem = ""
    if pairs.listed is not None:
        problem = "no positives by index"
    elif dim > _LARGEST_DIM:
        problem = f"embeddings of a dimension up to {_LARGEST_DIM}, but got {dim}"
    elif embeddings.device.type == "cpu" and count > _CPU_UP_TO:
        problem = f"at most {_CPU_UP_TO} embeddings on a CPU, but got {count}"
    elif embeddings.device.type != "cpu" and embeddings.dtype != torch.float32:
        problem = f"float32 on {embeddings.device}, but got {embeddings.dtype}"
    if problem:
        raise ValueError(f"engine='flex' takes {problem}: choose engine='blocks'")
