"""Prototypes, and the assignment of samples to them: predicted and balanced."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pgcl_losses._checks import (
    check_count,
    check_prototypes,
    check_scale,
    check_views,
)
from pgcl_losses.rows import computing_dtype, full_precision, unit_rows
from pgcl_losses.sinkhorn import balance


class Assignment(NamedTuple):
    """How the samples of one view belong to the prototypes."""

    log_probs: Tensor  # [N, K] log p, the prediction, with gradient
    targets: Tensor  # [N, K] q, the balanced assignment, without
    clusters: Tensor  # [N] argmax_k q


def split_views(stacked: Assignment) -> tuple[Assignment, ...]:
    """``[V, N, ...]`` -> an assignment for each view."""
    log_probs, targets, clusters = stacked
    return tuple([Assignment(log_probs[v], targets[v], clusters[v]) for v in range(len(targets))])


class SinkhornPrototypes(nn.Module):
    r"""Learned prototypes; assigns samples to them by cosine, predicted and balanced.

    Prediction: :math:`p = softmax(s / \tau)` with s the cosines of rows and prototypes. Target: q,
    Sinkhorn-Knopp on :math:`e^{s / \epsilon}` within each view. Cluster: the largest q of a row.

    Args:
        dim: width of the rows, D.
        num_prototypes: how many of them, K.
        temperature: tau of the prediction.
        epsilon, iterations: of :func:`~pgcl_losses.sinkhorn`.
        queue_size: past rows per view that join the Sinkhorn problem, to balance small batches.
            Slots that are not yet filled take no part.
        freeze_steps: for so many training forwards the prototypes receive zero gradient. What an
            optimizer adds to it (``Adam(weight_decay=...)``) moves them all the same.

    The queue and the count of training forwards move only in ``train()`` mode with gradients
    enabled, and not on a batch with NaN or inf in it. Activation checkpointing runs a second
    training forward: with a queue or freezing, checkpoint the encoder and not this module.

    Shape:
        - views: ``[N, D]`` each; row i of every view is graph i, of any length up to 1e18
        - output: an :class:`Assignment` per view
        - weight: ``[K, D]``

    Examples:
        >>> import torch
        >>> from pgcl_losses import SinkhornPrototypes
        >>> _ = torch.manual_seed(0)
        >>> prototypes = SinkhornPrototypes(dim=16, num_prototypes=4)
        >>> first, second = prototypes(torch.randn(8, 16), torch.randn(8, 16))
        >>> first.log_probs.shape, first.clusters.shape
        (torch.Size([8, 4]), torch.Size([8]))
        >>> prototypes.assign(torch.randn(3, 16)).shape
        torch.Size([3])

    """

    weight: nn.Parameter
    step: Tensor
    queue: Tensor | None
    queue_filled: Tensor | None

    def __init__(
        self,
        dim: int,
        num_prototypes: int = 10,
        *,
        temperature: float = 0.2,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        freeze_steps: int = 0,
    ) -> None:
        super().__init__()
        self.dim = check_count("dim", dim, minimum=1)
        self.num_prototypes = check_count("num_prototypes", num_prototypes, minimum=1)
        self.temperature = check_scale("temperature", temperature)
        self.epsilon = check_scale("epsilon", epsilon)
        self.iterations = check_count("iterations", iterations, minimum=1)
        self.queue_size = check_count("queue_size", queue_size, minimum=0)
        self.freeze_steps = check_count("freeze_steps", freeze_steps, minimum=0)

        self.weight = nn.Parameter(torch.empty(self.num_prototypes, self.dim))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", None)
        self.register_buffer("queue_filled", None)
        if self.queue_size > 0:
            self.queue = torch.zeros(2, self.queue_size, self.dim)  # [V, Q, D] newest first
            self.queue_filled = torch.zeros((), dtype=torch.long)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, num_prototypes={self.num_prototypes}, "
            f"temperature={self.temperature}, epsilon={self.epsilon}, "
            f"iterations={self.iterations}, queue_size={self.queue_size}, "
            f"freeze_steps={self.freeze_steps}"
        )

    def forward(self, *views: Tensor) -> tuple[Assignment, ...]:
        """Assign the rows of every view, each view balanced by itself."""
        if not views:
            raise TypeError("views must be one or more Tensors of shape [N, D], but none came")
        check_views([(f"views[{v}]", view) for v, view in enumerate(views)])
        check_prototypes("weight", self.weight, "views[0]", views[0])
        dtype = computing_dtype(self.weight, views[0])
        with full_precision(views[0].device):
            rows = unit_rows(torch.stack(views), dtype)
            stacked = self.assign_views(rows, self.unit_prototypes(dtype))
        return split_views(stacked)

    def assign(self, z: Tensor) -> Tensor:
        """The nearest prototype of each row, ``[N, D] -> [N]``: for inference, no balancing."""
        check_views([("z", z)])
        check_prototypes("weight", self.weight, "z", z)
        dtype = computing_dtype(self.weight, z)
        with torch.no_grad(), full_precision(z.device):
            return (unit_rows(z, dtype) @ self.unit_prototypes(dtype).T).argmax(1)

    @torch.no_grad()
    def normalize_(self) -> "SinkhornPrototypes":
        """Renormalise the prototypes to unit length, in place."""
        self.weight.copy_(unit_rows(self.weight, computing_dtype(self.weight)))
        return self

    def unit_prototypes(self, dtype: torch.dtype) -> Tensor:
        """The prototypes as unit rows ``[K, D]``, cut off from the gradient while frozen."""
        weight: Tensor = self.weight
        if self.freeze_steps > 0:
            weight = torch.where(self.step < self.freeze_steps, weight.detach(), weight)
        return unit_rows(weight, dtype)

    def assign_views(self, rows: Tensor, prototypes: Tensor) -> Assignment:
        """One stacked assignment ``[V, N, ...]`` from unit rows ``[V, N, D]``."""
        scores = rows @ prototypes.T  # [V, N, K]
        log_probs = torch.log_softmax(scores / self.temperature, dim=-1)
        learning = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            targets = self._balanced(scores, prototypes)
            if learning:
                self._advance(rows, targets)
            return Assignment(log_probs, targets, targets.argmax(-1))

    def _balanced(self, scores: Tensor, prototypes: Tensor) -> Tensor:
        if self.queue is None or self.queue_filled is None:
            return balance(scores, self.epsilon, self.iterations)
        num_views, num_rows, _ = scores.shape
        if num_views != len(self.queue):
            raise ValueError(
                f"views must be {len(self.queue)} when queue_size > 0 (the queue keeps past rows "
                f"for each view), but {num_views} came"
            )
        past = self.queue.to(scores.dtype) @ prototypes.T  # [V, Q, K]
        slots = torch.arange(-num_rows, self.queue_size, device=scores.device)
        present = (slots < self.queue_filled).to(scores.dtype).unsqueeze(1)  # [N + Q, 1]
        both = torch.cat([scores, past], dim=1)
        return balance(both, self.epsilon, self.iterations, present)[:, :num_rows]

    def _advance(self, rows: Tensor, targets: Tensor) -> None:
        """Count the batch and queue its rows, unless there is a NaN or inf in it."""
        # A NaN or inf in a view spoils the peaks of its columns and so all of its targets.
        total = targets[:, 0, 0].sum()
        finite = total == total
        self.step += finite
        if self.queue is not None and self.queue_filled is not None:
            newest_first = torch.cat([rows.to(self.queue.dtype), self.queue], dim=1)
            self.queue.copy_(torch.where(finite, newest_first[:, : self.queue_size], self.queue))
            self.queue_filled += finite * rows.shape[1]
            self.queue_filled.clamp_(max=self.queue_size)
