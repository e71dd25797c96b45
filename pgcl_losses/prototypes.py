"""Prototypes, and the assignments of embeddings: predicted (Eq. 4) and balanced (Eq. 7 to 11)."""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from pgcl_losses import _checks as check
from pgcl_losses._module import LossModule, called_by_all
from pgcl_losses._normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses._options import Heads, Positive, Scale, Size, Temperature, with_options
from pgcl_losses.batch import Assignment, Batch, batch_argument
from pgcl_losses.distributed import described
from pgcl_losses.kmeans import spherical_kmeans
from pgcl_losses.memory import Ring
from pgcl_losses.sinkhorn import balance, probabilities, rank_clusters


@with_options
class SinkhornPrototypes(LossModule):
    r"""Learned prototypes, to which embeddings are assigned by cosine: predicted and balanced.

    The prediction is :math:`p = softmax(s / \tau)`, with s the cosines of an embedding and the
    prototypes. The target q is Sinkhorn-Knopp on :math:`e^{s / \epsilon}` within each view. The
    cluster of an embedding is the prototype with the largest q.

    Args:
        options: as in :class:`PGCLLoss`, by the same names.

    The queue, and ``step``, which counts training forwards while ``freeze_steps`` is above 0,
    change only in ``train()`` mode with gradients enabled, and not with a batch that has NaN or inf
    in it. With one of the two, use activation checkpointing on the encoder only.

    Shape:
        - views: ``[N, D]`` each, with norms up to 1e18; row i of each view is graph i
        - output: an :class:`Assignment` for each view
        - weight: ``[K, D]``. The prototypes of several heads follow each other

    Examples:
        >>> import torch
        >>> from pgcl_losses import SinkhornPrototypes
        >>> _ = torch.manual_seed(0)
        >>> prototypes = SinkhornPrototypes(dim=16, num_prototypes=4)
        >>> first, second = prototypes(torch.randn(8, 16), torch.randn(8, 16))
        >>> first.log_probs.shape, first.clusters.shape
        (torch.Size([8, 4]), torch.Size([8]))
        >>> (view,) = SinkhornPrototypes(dim=16, num_prototypes=(4, 6))(torch.randn(8, 16))
        >>> view.clusters.shape, [q.shape for q in view.targets.split(view.heads, dim=1)]
        (torch.Size([8, 2]), [torch.Size([8, 4]), torch.Size([8, 6])])

    """

    dim: Positive = field(kw_only=False)
    num_prototypes: Heads = field(default=10, kw_only=False)
    temperature: Temperature = 0.2
    epsilon: Scale = 0.05
    iterations: Positive = 3
    queue_size: Size = 0
    queue_views: Positive = 2
    freeze_steps: Size = 0
    fixed = frozenset({"dim", "num_prototypes", "heads", "queue_size", "queue_views"})

    def __post_init__(self) -> None:
        sizes = self.num_prototypes  # of each head
        self.heads = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        self.step: Tensor
        self.queue: Ring | None  # [V, Q, D] past embeddings of each view
        self.weight = nn.Parameter(torch.empty(sum(self.heads), self.dim))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        if len(self.heads) > 1:
            # An empty tensor: by its shape, a checkpoint of other heads with this K does not load.
            self.register_buffer("head_sizes", torch.empty(0, *self.heads))
        self.register_buffer("queue", None)
        if self.queue_size > 0:
            self.queue = Ring(self.queue_views, self.queue_size, self.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight)
        for buffer in self.buffers():
            buffer.zero_()

    @overload
    def forward(self, *views: Tensor) -> tuple[Assignment, ...]: ...
    @overload
    def forward(self, *views: Batch) -> Batch: ...
    @called_by_all("forward")
    def forward(self, *views: Tensor | Batch) -> tuple[Assignment, ...] | Batch:
        """Assign the embeddings of every view. Each view is balanced by itself.

        Given a :class:`~pgcl_losses.Batch`, it returns the batch with all embeddings assigned.
        """
        batch = batch_argument(views)
        if batch is not None:  # whoever made the batch calls `advance`
            return self._assigned(batch)
        with self.agreement("forward", views) as agreed:
            self.check(views, 1, type(self).__name__)
        dtype = computing_dtype(self.weight, *views)
        batch = self._assigned(Batch.from_views(views, agreed.processes, dtype=dtype))
        if self.moves_state(batch.embeddings):
            self.advance(batch)
        return batch.assignments()

    if TYPE_CHECKING:
        __call__ = forward

    def check(self, views: tuple[Any, ...], fewest: int, owner: str) -> None:
        """Check that views can be assigned, by this module or within the loss that owns it."""
        check.loss_views(views, fewest)
        check.prototypes("prototypes.weight", self.weight, "z1", views[0], owner)
        check.temperature(self.temperature, views[0])
        if self.queue_size > 0 and len(views) != self.queue_views:
            raise ValueError(
                f"views must be {self.queue_views} when queue_size > 0, but got {len(views)}: the "
                f"queue keeps past embeddings of each view; make it with queue_views={len(views)}"
            )

    def assign(self, z: Tensor) -> Tensor:
        """The nearest prototype of each embedding, ``[N, D] -> [N]``, without balancing.

        This is for inference. With several heads, it is the nearest of each head: ``[N, H]``.
        """
        check.matrices([("z", z)])
        check.prototypes("weight", self.weight, "z", z, type(self).__name__)
        dtype = computing_dtype(self.weight, z)
        with torch.no_grad(), full_precision(z.device):
            scores = unit_vectors(z, dtype) @ self._unit_prototypes(dtype).T
            nearest: Tensor = self._by_head(partial(torch.argmax, dim=-1, keepdim=True), scores)
        return nearest if len(self.heads) > 1 else nearest.squeeze(-1)

    @called_by_all("start_from_")
    @torch.no_grad()
    def start_from_(self, embeddings: Tensor) -> "SinkhornPrototypes":
        """Initialise the prototypes in place from embeddings ``[N, D]``, by k-means with cosines.

        Call this before training, or between two steps after some epochs of :class:`InfoNCE`, with
        the embeddings of a batch or of many batches, and before ``fully_shard``. With several
        processes, all of them call it, each with its own embeddings.

        Random numbers come from torch's generator on the CPU: use ``torch.manual_seed``. If there
        are fewer different directions than prototypes, the remaining prototypes do not move. The
        prototypes keep their lengths, and the queue keeps its embeddings. This call waits for the
        device.
        """
        with self.agreement("start_from_", (embeddings,)) as agreed:
            agreed.state = {}  # afterwards all processes have the same prototypes
            agreed.claims["weight"] = described(self.weight)
            self._check_start(embeddings)
        processes = agreed.processes
        with full_precision(embeddings.device):
            dtype = computing_dtype(self.weight, embeddings)
            units, weight = processes.gather(unit_vectors(embeddings, dtype)), self.weight.to(dtype)
            heads = weight.split_with_sizes(self.heads)
            directions = torch.cat([spherical_kmeans(units, head) for head in heads])
            lengths = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
            new = (directions * torch.where(lengths > 0, lengths, 1)).to(dtype)
            # All ranks compute, so that all have the same errors; the first rank's result counts.
            new = processes.add(new if processes.rank == 0 else new.zero_(), "the prototypes")
        self.weight.copy_(new)
        return self

    def _check_start(self, embeddings: Tensor) -> None:
        check.matrix("embeddings", embeddings, "[N, D]")
        check.prototypes("weight", self.weight, "embeddings", embeddings, type(self).__name__)
        if not embeddings.isfinite().all():
            raise ValueError("embeddings must be finite, but there is a NaN or an inf among them")
        if not isinstance(self.weight, nn.Parameter):
            raise TypeError("weight is computed from others: call start_from_ before weight_norm")

    def _assigned(self, batch: Batch) -> Batch:
        """Add the prototypes, log p, q and the clusters of all embeddings to the batch."""
        processes, embeddings = batch.processes, batch.embeddings
        with full_precision(embeddings.device):
            prototypes = processes.average_gradient(self._unit_prototypes(embeddings.dtype))
            temperature = processes.temperature(self.temperature, embeddings.dtype)
            scores = embeddings @ prototypes.T  # [M, K]
            log_probs = self._by_head(partial(torch.log_softmax, dim=-1), scores / temperature)
            with torch.no_grad():
                # Detached tensors have no tangent either, in forward mode.
                cosines, columns = batch.views(scores.detach()), prototypes.detach().T
                num_graphs, filled = cosines.shape[1], None
                if self.queue is not None:  # it helps to balance, and is dropped again
                    past = self.queue.embeddings.to(cosines.dtype) @ columns  # [V, Q, K]
                    cosines = torch.cat([cosines, past], dim=1)
                    filled = self.queue.filled(num_graphs).unsqueeze(1)  # [N + Q, 1]
                log_q = self._by_head(self._balanced(filled), cosines)
                log_q, cosines = (x[:, :num_graphs].flatten(0, 1) for x in (log_q, cosines))
                targets = probabilities(log_q)  # [M, K]
                if batch.memory is not None and batch.filled is not None:  # balanced as a view is
                    filled = batch.filled[len(embeddings) :].unsqueeze(1)  # [B, 1]
                    past = batch.memory @ columns  # [B, K]
                    log_q_past = self._by_head(self._balanced(filled), past)
                    log_q = torch.cat([log_q, log_q_past])
                    targets = torch.cat([targets, probabilities(log_q_past) * filled])
                    cosines = torch.cat([cosines, past])
                ranking = rank_clusters(log_q, cosines, self.epsilon)  # [M + B, K]
        return batch._replace(
            prototypes=prototypes,
            log_probs=log_probs,
            targets=targets,
            clusters=self._by_head(partial(torch.argmax, dim=-1, keepdim=True), ranking),
            heads=self.heads,
            ranking=ranking,
        )

    def _balanced(self, filled: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Sinkhorn-Knopp with the options of this module."""
        return partial(balance, epsilon=self.epsilon, iterations=self.iterations, filled=filled)

    def _by_head(self, function: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """Apply a function to the columns ``[..., K]`` of each head, and join the results."""
        if len(self.heads) == 1:
            return function(scores)
        return torch.cat([function(x) for x in scores.split_with_sizes(self.heads, -1)], -1)

    def _unit_prototypes(self, dtype: torch.dtype) -> Tensor:
        """The prototypes at unit length ``[K, D]``, without gradient while they are frozen."""
        weight: Tensor = self.weight
        if self.freeze_steps > 0:
            weight = torch.where(self.step < self.freeze_steps, weight.detach(), weight)
        return unit_vectors(weight, dtype)

    @torch.no_grad()
    def advance(self, batch: Batch) -> None:
        """Count a training forward and queue its embeddings, unless one has NaN or inf in it."""
        if self.freeze_steps > 0:
            self.step.add_(batch.is_finite())
        if self.queue is not None:  # flipped: the first graph is the last to be overwritten
            self.queue.store(batch.views(batch.embeddings).flip(1), batch.is_finite())
