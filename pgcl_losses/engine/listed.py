"""Pairs that a caller lists, by position: products, sums and gradient, in chunks of the list."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pgcl_losses.engine.blocks import Sums
from pgcl_losses.engine.pairs import Pairs, block_size

_CHUNK = 8  # blocks' embeddings: pairs whose embeddings are gathered at once stay in the cache


class Listed:
    """Queries and keys ``[P]`` among embeddings ``[M, D]``."""

    def __init__(self, z: Tensor, query: Tensor, key: Tensor) -> None:
        self.z, self.query, self.key = z, query, key

    def products(self) -> Tensor:
        """z_query . z_key, ``[P]``."""
        of_chunks = [torch.linalg.vecdot(self.z[i], self.z[j]) for _, i, j in self._chunks()]
        return torch.cat(of_chunks)

    def add_gradient(self, d_z: Tensor, d_products: Tensor) -> None:
        """Add that by embeddings."""
        for chunk, i, j in self._chunks():
            d_chunk = d_products[chunk].unsqueeze(1)
            d_z.index_add_(0, i, d_chunk * self.z[j]).index_add_(0, j, d_chunk * self.z[i])

    def log_sums(self, logits: Tensor, num_queries: int) -> Tensor:
        """The log-sum-exp of the logits ``[P]`` of each query, -inf without any: ``[Q]``."""
        none = logits.new_full((num_queries,), -torch.inf)
        peaks = none.scatter_reduce(0, self.query, logits, "amax")
        peaks.masked_fill_(peaks == -torch.inf, 0.0)
        powers = (logits - peaks[self.query]).exp_()
        return torch.zeros_like(peaks).index_add_(0, self.query, powers).log_().add_(peaks)

    def _chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        size = _CHUNK * block_size(self.z.device)
        for start in range(0, max(1, len(self.query)), size):
            chunk = slice(start, start + size)
            yield chunk, self.query[chunk], self.key[chunk]


class ListedNegatives:
    """log S of all queries over negatives that a caller lists, and its gradient, as `Blocks`.

    Of several processes, each takes every n-th pair.
    """

    def __init__(
        self, pairs: Pairs, temperature: float | Tensor, rank: int, num_ranks: int
    ) -> None:
        assert pairs.negative_pairs is not None
        # A copy for a later backward, before which a sampler may write its next pairs.
        own = pairs.negative_pairs[:, rank::num_ranks].clone()
        self.listed = Listed(pairs.embeddings, *own)
        self.temperature, self.num_queries = temperature, pairs.num_queries()
        self.logits = self.listed.products() / temperature  # [P]

    def log_sums(self, with_gradient: bool = False, count: bool = False) -> Sums:
        log_s = self.listed.log_sums(self.logits, self.num_queries)
        ones = torch.ones_like(self.logits)
        return Sums(log_s, None, torch.zeros_like(log_s).index_add_(0, self.listed.query, ones))

    def gradient(self, log_s: Tensor, d_log_s: Tensor) -> tuple[Tensor, None]:
        query, d_z = self.listed.query, torch.zeros_like(self.listed.z)
        fractions = (self.logits - log_s[query]).exp_()
        self.listed.add_gradient(d_z, fractions * (d_log_s / self.temperature)[query])
        return d_z, None
