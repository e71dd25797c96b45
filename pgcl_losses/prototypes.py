"""Prototypes, and the assignment of samples to them: predicted (Eq. 4) and balanced (Eq. 7 to 11).

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgcl_losses import _checks as check
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.batch import (
    AnyBatch,
    AssignedBatch,
    Assignment,
    Batch,
    Remembered,
    batch_of,
    given_batch,
)
from pgcl_losses.kmeans import draw, spherical_kmeans
from pgcl_losses.ranks import Ranks
from pgcl_losses.sinkhorn import balance


class SinkhornPrototypes(LossModule):
    r"""Learned prototypes; assigns embeddings to them by cosine, predicted and balanced.

    Prediction: :math:`p = softmax(s / \tau)` with s the cosines of embeddings and prototypes.
    Target: q, Sinkhorn-Knopp on :math:`e^{s / \epsilon}` within each view. Cluster: the largest q.

    Args:
        options: as in :class:`PGCLLoss`, by the same names.

    ``step`` counts training forwards while ``freeze_steps`` is above 0. ``step`` and the queue
    change only in ``train()`` mode with gradients enabled, and not on a batch with NaN or inf in
    it. Without freezing and queue a forward changes no state. Activation checkpointing runs a
    second training forward: with one of the two, checkpoint the encoder and not this module.

    Shape:
        - views: ``[N, D]`` each; row i of every view is graph i, with a norm of at most 1e18
        - output: an :class:`Assignment` per view
        - weight: ``[K, D]``. Several heads follow each other: K is the sum of theirs, and a
          checkpoint does not store where each head begins

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

    options: ClassVar[dict[str, Check]] = {
        "dim": partial(check.count, minimum=1),
        "num_prototypes": check.heads,
        "temperature": check.temperature,
        "epsilon": check.scale,
        "iterations": partial(check.count, minimum=1),
        "queue_size": partial(check.count, minimum=0),
        "queue_views": partial(check.count, minimum=1),
        "freeze_steps": partial(check.count, minimum=0),
    }
    fixed = frozenset({"dim", "num_prototypes", "queue_size", "queue_views"})

    dim: int
    num_prototypes: int | Sequence[int]  # a whole number, or a tuple of two or more
    temperature: float | Tensor
    epsilon: float
    iterations: int
    queue_size: int
    queue_views: int
    freeze_steps: int
    weight: nn.Parameter
    step: Tensor
    initialised: Tensor  # whether the prototypes are, from embeddings
    queue: Tensor | None
    queue_filled: Tensor | None
    heads: tuple[int, ...]  # how many prototypes each head has

    def __init__(
        self,
        dim: int,
        num_prototypes: int | Sequence[int] = 10,
        *,
        temperature: float | Tensor = 0.2,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        queue_views: int = 2,
        freeze_steps: int = 0,
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._assign_options(locals())
        sizes = self.num_prototypes
        self.heads = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        self.weight = nn.Parameter(torch.empty(sum(self.heads), self.dim))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("initialised", torch.zeros((), dtype=torch.bool))
        self.register_buffer("queue", None)
        self.register_buffer("queue_filled", None)
        if self.queue_size > 0:
            # [V, Q, D] newest first
            self.queue = torch.zeros(self.queue_views, self.queue_size, self.dim)
            self.queue_filled = torch.zeros((), dtype=torch.long)
        self.reset_parameters()
        self.check_call(self.queue_views)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight)
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and hasattr(value, "full_tensor"):
            # FSDP2's own parameter. It is another Tensor in each forward, and after it may be a
            # DTensor of another mesh until backward.
            known = self.__dict__.get("_sharded")
            if known is None or value.device_mesh == known.device_mesh:
                self.__dict__["_sharded"] = value  # beside the parameters
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        state_dict.setdefault(prefix + "initialised", torch.zeros_like(self.initialised))  # 0.2
        super()._load_from_state_dict(state_dict, prefix, *others)

    @overload
    def forward(self, *views: Tensor) -> tuple[Assignment, ...]: ...
    @overload
    def forward(self, *views: AnyBatch) -> AssignedBatch: ...
    def forward(self, *views: Tensor | AnyBatch) -> tuple[Assignment, ...] | AssignedBatch:
        """Assign the embeddings of every view, each view balanced by itself.

        Given a batch, it assigns all samples and returns an :class:`AssignedBatch`.
        """
        return self.untraced(self._forward)(views)

    if TYPE_CHECKING:
        __call__ = forward

    def _forward(
        self, views: tuple[Tensor | AnyBatch, ...]
    ) -> tuple[Assignment, ...] | AssignedBatch:
        batch = given_batch(views)
        if batch is None:
            return self._assigned(self._batch(views)).own_assignments()
        return self._assigned(batch)

    def _batch(self, views: tuple[Any, ...]) -> Batch:
        ranks = self.agree("forward", partial(self._check, views), views, self.state)
        return batch_of(ranks, views, self.weight)

    def _check(self, views: tuple[Any, ...], may_be_empty: bool) -> None:
        if not views:
            raise TypeError("views must be one or more Tensors of shape [N, D], but got none")
        named = [(f"views[{v}]", view) for v, view in enumerate(views)]
        check.views(named, may_be_empty=may_be_empty)
        self._check_dim("views[0]", views[0])
        check.temperature_value("temperature", self.temperature, views[0])
        self.check_call(len(views))

    def _check_dim(self, name: str, z: Tensor) -> None:
        check.prototypes("weight", self.weight, name, z, type(self).__name__)

    def check_call(self, num_views: int) -> None:
        """An error for options that do not go together, or not with this number of views."""
        if self.queue_size > 0 and num_views != self.queue_views:
            raise ValueError(
                f"views must be {self.queue_views} when queue_size > 0, but got {num_views}: the "
                f"queue keeps past embeddings of each view; make it with queue_views={num_views}"
            )

    def state(self) -> dict[str, Tensor]:
        """The tensors that must be the same in all processes."""
        return {"weight": self.weight, **dict(self.named_buffers())}

    def assign(self, z: Tensor) -> Tensor:
        """The nearest prototype of each embedding, ``[N, D] -> [N]``: for inference, no balancing.

        With several heads, one of each head: ``[N, H]``.
        """
        check.views([("z", z)])
        self._check_dim("z", z)
        dtype = computing_dtype(self.weight, z)
        with torch.no_grad(), full_precision(z.device):
            scores = unit_vectors(z, dtype) @ self._unit_prototypes(dtype).T
            nearest = self._nearest(scores)
        return nearest if len(self.heads) > 1 else nearest.squeeze(-1)

    @torch.no_grad()
    def start_from_(self, embeddings: Tensor) -> "SinkhornPrototypes":
        """Initialise the prototypes, in place, from embeddings ``[N, D]``: k-means by cosine.

        Prototypes are random at first, and in many dimensions a random direction is near no
        embedding. Call this before training with the embeddings of a first batch, or of many. The
        end of the ``warmup_steps`` of :class:`PGCLLoss` does the same by itself, unless this was
        called before. With several processes, all of them call it, each with embeddings of its own,
        and all get the prototypes that the first one computes.

        Random numbers come from torch's generator on the CPU: use ``torch.manual_seed``. If there
        are fewer different directions than prototypes, the remaining prototypes do not move.
        Prototypes keep their lengths. The queue keeps its embeddings, which are compared with the
        new prototypes from now on. This call waits for the device.
        """
        facts = {"weight": str(self.weight.dtype)}
        check_given = partial(self._check_start, embeddings)
        ranks = self.agree("start_from_", check_given, (embeddings,), lambda: facts)
        with full_precision(embeddings.device):
            units = unit_vectors(embeddings, computing_dtype(self.weight, embeddings))
            return self.initialise_(ranks.gather(units.unsqueeze(0))[0], ranks)

    @torch.no_grad()
    def initialise_(
        self, embeddings: Tensor, ranks: Ranks, generator: torch.Generator | None = None
    ) -> "SinkhornPrototypes":
        """Initialise the prototypes from the embeddings ``[M, D]`` of all processes."""
        # All ranks draw, so that their generators stay in the same state.
        draws = [draw(size, generator) for size in self.heads]
        with full_precision(embeddings.device):
            weight = self.weight.to(computing_dtype(self.weight, embeddings))
            if ranks.rank == 0:
                of_heads = zip(weight.split_with_sizes(self.heads), draws, strict=True)
                new = torch.cat([spherical_kmeans(embeddings, *of_head) for of_head in of_heads])
                lengths = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
                weight = (new * torch.where(lengths > 0, lengths, 1)).to(weight.dtype)
            else:
                weight = torch.zeros_like(weight)
            weight = ranks.add(weight, "the initial prototypes")
        self.write_(weight)
        self.initialised.fill_(True)
        return self

    @torch.no_grad()
    def write_(self, weight: Tensor) -> None:
        """Write all prototypes ``[K, D]``: also in a forward of a module that FSDP2 shards."""
        self.weight.copy_(weight)
        sharded = self.__dict__.get("_sharded")
        if sharded is not None:
            from torch.distributed.tensor import distribute_tensor

            new = distribute_tensor(weight, sharded.device_mesh, sharded.placements)
            sharded.to_local().copy_(new.to_local())

    def _check_start(self, embeddings: Tensor, may_be_empty: bool) -> None:
        check.matrix("embeddings", embeddings, "[N, D]", may_be_empty)
        self._check_dim("embeddings", embeddings)
        if not embeddings.isfinite().all():
            raise ValueError("embeddings must be finite, but there is a NaN or an inf among them")

    @torch.no_grad()
    def normalize_(self) -> "SinkhornPrototypes":
        """Renormalise the prototypes to unit length, in place."""
        self.weight.copy_(unit_vectors(self.weight, computing_dtype(self.weight)))
        return self

    def _assigned(self, batch: AnyBatch) -> AssignedBatch:
        """The batch with its prototypes, log p, q and clusters."""
        embeddings = batch.embeddings  # [V, N, D]
        with full_precision(embeddings.device):
            prototypes = batch.ranks.average_gradient(self._unit_prototypes(embeddings.dtype))
            temperature = batch.ranks.temperature(self.temperature, embeddings.dtype)
            logits = _logits(embeddings, prototypes, temperature)  # [V, N, K]
            log_probs = self._by_head(partial(torch.log_softmax, dim=-1), logits)
            learning = self.training and torch.is_grad_enabled()
            with torch.no_grad():
                targets = self._balanced(logits.detach(), prototypes.detach())
                if learning:
                    self._advance(embeddings, targets)
                clusters = self._nearest(targets)
                memory = self._assigned_memory(batch.memory, prototypes.detach())
        return AssignedBatch(
            batch.ranks,
            embeddings,
            prototypes=prototypes,
            log_probs=log_probs,
            targets=targets,
            clusters=clusters,
            heads=self.heads,
            items=batch.items,
            memory=memory,
        )

    def _assigned_memory(self, memory: Remembered | None, prototypes: Tensor) -> Remembered | None:
        """A memory is balanced by itself, as a view is."""
        if memory is None:
            return None
        present = None if memory.present is None else memory.present.unsqueeze(1)
        targets = self._balance(memory.embeddings @ prototypes.T, 1.0, present)
        if present is not None:
            targets.masked_fill_(~present, 0.0)
        return memory._replace(targets=targets, clusters=self._nearest(targets))

    def _by_head(self, function: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
        """A function of the columns of each head ``[..., K]``, the results side by side."""
        if len(self.heads) == 1:
            return function(scores)
        return torch.cat(
            [function(of_head) for of_head in scores.split_with_sizes(self.heads, -1)], -1
        )

    def _nearest(self, scores: Tensor) -> Tensor:
        """The largest column of each head, counted from 0: ``[..., K] -> [..., H]``."""
        return self._by_head(partial(torch.argmax, dim=-1, keepdim=True), scores)

    def _unit_prototypes(self, dtype: torch.dtype) -> Tensor:
        """The prototypes at unit length ``[K, D]``, without gradient while frozen."""
        weight: Tensor = self.weight
        if self.freeze_steps > 0:
            weight = torch.where(self.step < self.freeze_steps, weight.detach(), weight)
        return unit_vectors(weight, dtype)

    def _balanced(self, logits: Tensor, prototypes: Tensor) -> Tensor:
        """Targets from scores / temperature; scores are cosines."""
        scale = self.temperature
        if isinstance(scale, Tensor):
            logits, scale = logits * scale.detach(), 1.0
        if self.queue is None or self.queue_filled is None:
            return self._balance(logits, scale)
        num_graphs = logits.shape[1]
        past = _logits(self.queue.to(logits.dtype), prototypes, scale)  # [V, Q, K]
        slots = torch.arange(-num_graphs, self.queue_size, device=logits.device)
        present = (slots < self.queue_filled).unsqueeze(1)  # [N + Q, 1]
        return self._balance(torch.cat([logits, past], dim=1), scale, present)[:, :num_graphs]

    def _balance(self, scores: Tensor, scale: float, present: Tensor | None = None) -> Tensor:
        """Targets from cosines / scale, ``[..., K]``, each head by itself."""
        return self._by_head(
            lambda of_head: balance(
                of_head, self.epsilon / scale, self.iterations, present, largest=1 / scale
            ),
            scores,
        )

    def _advance(self, embeddings: Tensor, targets: Tensor) -> None:
        """Count the batch and queue its embeddings, unless there is a NaN or inf in it."""
        if self.queue is None and self.freeze_steps == 0:
            return
        # A NaN or inf in a view spoils sums over its columns and so all of its targets.
        total = targets.sum()
        finite = total == total
        if self.freeze_steps > 0:
            self.step.add_(finite)
        if self.queue is not None and self.queue_filled is not None:
            newest_first = torch.cat([embeddings.to(self.queue.dtype), self.queue], dim=1)
            self.queue.copy_(torch.where(finite, newest_first[:, : self.queue_size], self.queue))
            self.queue_filled.add_(finite * embeddings.shape[1]).clamp_(max=self.queue_size)


def _logits(embeddings: Tensor, prototypes: Tensor, temperature: float | Tensor) -> Tensor:
    """Scores / temperature: ``[V, N, D]`` and ``[K, D]`` -> ``[V, N, K]``."""
    return embeddings @ (prototypes / temperature).T  # fewer numbers to divide than scores
