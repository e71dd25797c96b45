"""Prototypes, and the assignments of embeddings: predicted (Eq. 4) and balanced (Eq. 7 to 11)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgcl_losses.base import checks as check
from pgcl_losses.base.distributed import described
from pgcl_losses.base.module import LossModule, called_by_all
from pgcl_losses.base.normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.base.options import Group, Heads, Positive, Scale, Size, Temperature, checked
from pgcl_losses.clusters.kmeans import spherical_kmeans
from pgcl_losses.clusters.sinkhorn import (
    NOT_IN_USE,
    balance,
    largest,
    log_sizes,
)
from pgcl_losses.pairs.batch import Assignments, Batch, batch_argument
from pgcl_losses.pairs.given import Given
from pgcl_losses.pairs.memory import Ring
from pgcl_losses.watch import Watch


class Prototypes(Protocol):
    """What a module must have that takes the place of ``prototypes`` in :class:`PGCLLoss`.

    :class:`SinkhornPrototypes` is such a module. A module of your own need not inherit from it:
    ``pgcl.prototypes = module`` is enough.
    """

    heads: tuple[int, ...]
    """The number of prototypes of each head, ``(K,)`` for a single head."""
    weight: Tensor
    """The prototypes ``[K, D]`` of all heads: a parameter, or a buffer that ``advance`` moves."""
    temperature: float | Tensor
    """tau of the prediction, which an assignment to ``pgcl.temperature`` sets."""

    def __call__(self, batch: Batch, /) -> Batch:
        """Return the batch with all fields from ``prototypes`` to ``heads``, by `_replace`."""

    def check(self, views: tuple[Any, ...], /) -> None:
        """Raise an error if views ``[N, D]`` cannot be assigned to these prototypes.

        It is called before processes exchange data, so that an error on one of them is an error on
        all. The loss has already compared dimension, device and dtype with ``weight``.
        """

    def advance(self, batch: Batch, /) -> None:
        """Change buffers after a training forward, such as a queue or a moving average.

        Every process gets the embeddings of all processes, and must come to the same buffers. The
        backward follows: where it needs a buffer that this method changes, compute the loss with a
        copy.
        """


class SinkhornPrototypes(LossModule):
    r"""Learned prototypes (the centres of clusters), and the assignment of embeddings to them.

    Use it by itself to cluster embeddings, or to compose PGCL by hand with
    :class:`PrototypeReweightedNCE` and :class:`ConsistencyLoss`; :class:`PGCLLoss` has one inside.
    It returns :class:`Assignments`, which have for each view

    - the prediction :math:`p = softmax(s / \tau)`, where s are the cosines of an embedding and the
      prototypes, or with ``balance_predictions`` one that is balanced within each view;
    - the target q: Sinkhorn-Knopp on :math:`e^{s / \epsilon}` balances the clusters within each
      view, see :func:`sinkhorn`;
    - the cluster: the prototype with the largest q.

    Args:
        dim, num_prototypes, temperature, epsilon: as in :class:`PGCLLoss`.
        iterations, queue_size, queue_views, freeze_steps: as in :class:`PGCLLoss`.
        balance_predictions: as in :class:`PGCLLoss`.
        gather, process_group: as in :class:`InfoNCE`.

    The queue changes only in ``train()`` mode with gradients enabled, and so does ``step``, which
    counts training forwards if ``freeze_steps`` is above 0. A batch with NaN or inf changes
    neither. With a queue or ``freeze_steps``, use activation checkpointing on the encoder only.

    Shape:
        - views: ``[N, D]`` each, with norms up to 1e18; row i of each view is graph i
        - sizes: ``[K]``
        - output: :class:`Assignments`, a sequence with an :class:`Assignment` for each view
        - weight: the prototypes ``[K, D]``, a parameter. The prototypes of several heads follow
          each other

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

    dim: int
    num_prototypes: int | Sequence[int]
    temperature: float | Tensor
    epsilon: float
    iterations: int
    queue_size: int
    queue_views: int
    freeze_steps: int
    balance_predictions: bool
    fixed = frozenset({"dim", "num_prototypes", "heads", "queue_size", "queue_views"})

    @checked
    def __init__(
        self,
        dim: Positive,
        num_prototypes: Heads = 10,
        *,
        temperature: Temperature = 0.5,
        epsilon: Scale = 0.05,
        iterations: Positive = 3,
        queue_size: Size = 0,
        queue_views: Positive = 2,
        freeze_steps: Size = 0,
        balance_predictions: bool = False,
        gather: bool = True,
        process_group: Group = None,
    ) -> None:
        super().__init__()
        self.set_options(locals())
        sizes = self.num_prototypes  # one number, or one for each head
        self.heads = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        self.step: Tensor
        self.queue: Ring | None  # [V, Q, D] past embeddings of each view
        self.weight = nn.Parameter(torch.empty(sum(self.heads), self.dim))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        if len(self.heads) > 1:
            # This tensor is empty, but has a shape: a checkpoint of other heads with the same K in
            # all does not fit it, so load_state_dict raises an error.
            self.register_buffer("head_sizes", torch.empty(0, *self.heads))
        self.register_buffer("queue", None)
        if self.queue_size > 0:
            self.queue = Ring(self.queue_views, self.queue_size, self.dim)
        self._watch = Watch()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the prototypes at random (He et al.), empty the queue, and reset the step."""
        nn.init.kaiming_normal_(self.weight)
        for buffer in self.buffers():
            buffer.zero_()

    @overload
    def forward(self, *views: Tensor, sizes: Tensor | None = None) -> Assignments: ...
    @overload
    def forward(self, *views: Batch, sizes: Tensor | None = None) -> Batch: ...
    @called_by_all("forward")
    def forward(self, *views: Tensor | Batch, sizes: Tensor | None = None) -> Assignments | Batch:
        """Assign the embeddings of each view to the prototypes. Each view is balanced by itself.

        Given a :class:`~pgcl_losses.Batch`, return the batch with the assignment of all its
        embeddings.

        Args:
            views (Tensor): one or more views ``[N, D]``, by position.
            sizes (Tensor): the relative sizes of the clusters in this call, ``[K]``: numbers, or
                bools which say which prototypes are in use. Targets are balanced to these sizes,
                and no embedding is assigned to a prototype of size 0, nor predicts one. By default
                all clusters have the same size. Sizes are constants for the gradient.
        """
        batch = batch_argument(self, views)
        if batch is not None:  # the module that made the batch has checked it, and calls `advance`
            return self._assigned(batch._replace(sizes=sizes))

        def check_inputs() -> dict[str, object]:
            check.loss_views(views, 1)
            z1: Any = views[0]  # a Tensor, as there is no batch
            check.prototypes("weight", self.weight, "z1", z1, type(self).__name__)
            self.check(views)
            if sizes is not None:
                self.check_sizes(sizes, z1)
            return {"sizes": check.claim_of(sizes)}

        processes = self.check_on_all("forward", views, check_inputs)
        dtype = computing_dtype(self.weight, *views)
        batch = Batch.from_views(views, processes, Given(), dtype=dtype)._replace(sizes=sizes)
        batch = self._assigned(batch, views)
        if self.moves_state(batch.embeddings):
            self.advance(batch)
        return Assignments(batch)

    if TYPE_CHECKING:
        __call__ = forward

    def check(self, views: tuple[Any, ...]) -> None:
        """Check that the temperature and the queue fit the views."""
        check.temperature(self.temperature, views[0])
        if self.queue_size > 0 and len(views) != self.queue_views:
            raise ValueError(
                f"views must be {self.queue_views} when queue_size > 0, but got {len(views)}: the "
                f"queue keeps past embeddings of each view; make it with queue_views={len(views)}"
            )

    def check_sizes(self, sizes: Tensor, z1: Tensor) -> None:
        """Check the sizes of clusters that a call gives."""
        check.sizes("sizes", sizes, self.heads, "z1", z1)
        if self.queue_size > 0:
            raise ValueError(
                "sizes cannot be combined with a queue, whose embeddings come from calls with "
                "other sizes: make the prototypes with queue_size=0"
            )

    def assign(self, z: Tensor, *, sizes: Tensor | None = None) -> Tensor:
        """Find the nearest prototype of each embedding, without balancing: ``[N, D] -> [N]``.

        With ``sizes`` ``[K]``, prototypes of size 0 are left out.

        Use this for inference, where the cluster of an embedding must not depend on the rest of the
        batch. With several heads, return the nearest prototype of each head: ``[N, H]``. The call
        synchronises with the device.
        """
        check.matrices([("z", z)])
        check.prototypes("weight", self.weight, "z", z, type(self).__name__)
        check.finite("z", z)
        dtype = computing_dtype(self.weight, z)
        with torch.no_grad(), full_precision(z.device):
            cosines = unit_vectors(z, dtype) @ self._unit_prototypes(dtype).T
            if sizes is not None:
                check.sizes("sizes", sizes, self.heads, "z", z)
                cosines = cosines.masked_fill(sizes <= 0, NOT_IN_USE)
            nearest = self._by_head(partial(torch.argmax, dim=-1, keepdim=True), cosines)
        return nearest if len(self.heads) > 1 else nearest.squeeze(-1)

    @torch.no_grad()
    @called_by_all("start_from_")
    def start_from_(self, embeddings: Tensor) -> "SinkhornPrototypes":
        """Initialise the prototypes from embeddings ``[N, D]``, by k-means with cosines.

        Call this before training, or between two steps after some epochs of :class:`InfoNCE`, with
        the embeddings of one or many batches; with FSDP2, call it before ``fully_shard``. With
        several processes, all of them must call it, each with its own embeddings.

        The method changes the prototypes in place: it keeps the length of each prototype, and the
        embeddings in the queue. If the embeddings have fewer different directions than there are
        prototypes, the remaining prototypes do not change. Random numbers come from torch's
        generator on the CPU: use ``torch.manual_seed``. The call synchronises with the device.
        """
        # This call makes the prototypes the same on all processes.
        call = "start_from_", (embeddings,), lambda: self._check_start(embeddings)
        processes = self.check_on_all(*call, compare_state=False)
        with full_precision(embeddings.device):
            dtype = computing_dtype(self.weight, embeddings)
            units, weight = processes.gather(unit_vectors(embeddings, dtype)), self.weight.to(dtype)
            heads = weight.split_with_sizes(self.heads)
            directions = torch.cat([spherical_kmeans(units, head) for head in heads])
            lengths = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
            new = (directions * torch.where(lengths > 0, lengths, 1)).to(dtype)
            # All ranks compute the result, so that all raise the same errors. Rank 0's result is
            # taken.
            new = processes.add(new if processes.rank == 0 else new.zero_(), "the prototypes")
        self.weight.copy_(new)
        return self

    def _check_start(self, embeddings: Tensor) -> dict[str, object]:
        check.matrix("embeddings", embeddings, "[N, D]")
        check.prototypes("weight", self.weight, "embeddings", embeddings, type(self).__name__)
        check.finite("embeddings", embeddings)
        if not isinstance(self.weight, nn.Parameter):
            raise TypeError("weight is computed from others: call start_from_ before weight_norm")
        return {"weight": described(self.weight)}

    def _assigned(self, batch: Batch, views: Sequence[object] = ()) -> Batch:
        """Add the prototypes, and log p, q and the clusters of all embeddings, to the batch.

        ``views``: what a user has called this module with, which is checked for silent failures.
        """
        processes, embeddings = batch.processes, batch.embeddings
        with full_precision(embeddings.device):
            prototypes = processes.average_gradient(self._unit_prototypes(embeddings.dtype))
            temperature = processes.temperature(self.temperature, embeddings.dtype)
            in_use = None if batch.sizes is None else batch.sizes > 0
            bias = None if in_use is None else log_sizes(in_use, embeddings.dtype)
            # [M, K] the cosines / temperature, or NOT_IN_USE
            logits = F.linear(embeddings, prototypes / temperature, bias)
            log_probs = self._log_predictions(batch.views(logits), batch.sizes)
            with torch.no_grad():
                # In forward mode, detaching also removes the tangents. No gradient needs the logits
                # any more, and a new matrix would take a tenth of the time.
                scale = temperature / self.epsilon
                if in_use is not None:  # a CPU computes e^NOT_IN_USE ten times more slowly than e^0
                    scale = scale * in_use.to(logits.dtype)
                exponents = logits.detach().mul_(scale)
                rows = prototypes.detach() / self.epsilon
                targets = self._targets(batch.views(exponents), rows, batch.sizes).flatten(0, 1)
                clusters = self._clusters(targets, exponents)  # [M, H]
                if batch.memory is not None:
                    clusters = torch.cat([clusters, self._clusters_of_memory(batch, rows)])
        batch = batch._replace(
            prototypes=prototypes,
            log_probs=log_probs.flatten(0, 1),
            targets=targets,
            clusters=clusters,
            heads=self.heads,
        )
        if self._watch.counts(self, batch, log_probs.requires_grad):
            self._watch.check_views(views)
            self._watch.check_clusters(batch, self.weight, self.queue_size, self.freeze_steps)
        return batch

    def _log_predictions(self, logits: Tensor, sizes: Tensor | None) -> Tensor:
        """Compute log p (Eq. 4) from cosines / temperature ``[V, N, K]``."""
        if self.balance_predictions:
            logits = logits.log_softmax(1)
            if sizes is not None:
                logits = logits + log_sizes(sizes, logits.dtype)
        return self._by_head(partial(torch.log_softmax, dim=-1), logits)

    def _targets(self, exponents: Tensor, rows: Tensor, sizes: Tensor | None) -> Tensor:
        """Compute q (Eq. 7 to 11), balanced within each view, from s / epsilon ``[V, N, K]``.

        ``rows``: the prototypes ``[K, D]``, divided by epsilon.
        """
        if self.queue is None:
            return self._balanced(exponents, sizes)
        # The past embeddings help to balance. Only the targets of this batch are kept.
        num_graphs = exponents.shape[1]
        past = self.queue.embeddings.to(rows.dtype) @ rows.T  # [V, Q, K]
        filled = self.queue.filled(num_graphs)  # [N + Q]
        return self._balanced(torch.cat([exponents, past], dim=1), sizes, filled)[:, :num_graphs]

    def _balanced(
        self, exponents: Tensor, sizes: Tensor | None, filled: Tensor | None = None
    ) -> Tensor:
        """Balance the clusters of each head: q from s / epsilon ``[..., N, K]``."""
        balanced = partial(balance, epsilon=self.epsilon, iterations=self.iterations, filled=filled)
        return self._by_head(balanced, *[x for x in (exponents, sizes) if x is not None])

    def _clusters(self, q: Tensor, exponents: Tensor) -> Tensor:
        """Find the prototype with the largest q in each head, ``[M, K] -> [M, H]``.

        The exponents s / epsilon are overwritten.
        """
        return self._by_head(partial(largest, epsilon=self.epsilon), q, exponents)

    def _clusters_of_memory(self, batch: Batch, rows: Tensor) -> Tensor:
        """Find the clusters ``[B, H]`` of past embeddings, which are balanced like a view."""
        memory, filled = batch.memory, batch.pairs.filled
        assert memory is not None
        assert filled is not None
        exponents = memory @ rows.T  # [B, K]
        q = self._balanced(exponents, None, filled[len(batch.embeddings) :])
        return self._clusters(q, exponents)

    def _by_head(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Apply a function to the columns ``[..., K_h]`` of each head, and join the results."""
        if len(self.heads) == 1:
            return function(*values)
        by_head = zip(*[x.split_with_sizes(self.heads, -1) for x in values], strict=True)
        return torch.cat([function(*parts) for parts in by_head], -1)

    def _unit_prototypes(self, dtype: torch.dtype) -> Tensor:
        """The unit prototypes ``[K, D]``. While prototypes are frozen, their gradient is zero."""
        weight: Tensor = self.weight
        if self.freeze_steps > 0:
            weight = torch.where(self.step < self.freeze_steps, weight.detach(), weight)
        return unit_vectors(weight, dtype)

    def advance(self, batch: Batch) -> None:
        """Count a training forward, and store its embeddings in the queue.

        A batch with NaN or inf changes nothing.
        """
        if self.freeze_steps > 0:
            self.step.add_(batch.is_finite())
        if self.queue is not None:  # flipped: the first graph is overwritten last
            self.queue.store(batch.views(batch.embeddings).flip(1), batch.is_finite())
