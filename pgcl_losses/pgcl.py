"""PGCL (Eq. 15): the reweighted contrast + lambda * the consistency, with its prototypes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses import _checks as check
from pgcl_losses._module import LossModule, called_by_all
from pgcl_losses._normalize import computing_dtype, mean_cosine
from pgcl_losses._options import Size, Weight, with_options
from pgcl_losses.batch import (
    Batch,
    Labels,
    Negatives,
    OverPositives,
    PGCLTerms,
    Queries,
    Reduction,
)
from pgcl_losses.chunks import Engine
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE, Weighting
from pgcl_losses.memory import LossWithMemory, Memory
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.watch import Watch


@with_options
class PGCLLoss(LossWithMemory):
    r"""PGCL: the reweighted contrast + :math:`\lambda` times the consistency, with prototypes.

    The prototypes are parameters: give them to the optimizer, together with the encoder's.

    Args:
        dim (int): the embedding dimension D.
        num_prototypes (int or sequence of int): the number of prototypes K, or several numbers, one
            for each head. Each head is a set of prototypes that is balanced by itself.
        consistency_weight (float): lambda, the weight of the consistency. With 0, ``consistency``
            is not called, and the prototypes are frozen, as by ``freeze_steps``.
        contrast_weight (float): the weight of the contrast. With 0, ``contrast`` is not called.
        temperature (float or Tensor): tau of both the contrast and the prediction, as in
            :class:`InfoNCE`.
        epsilon (float): the sharpness of the balanced targets. A smaller value is closer to hard
            clusters.
        iterations (int): the number of Sinkhorn-Knopp iterations. More of them balance more
            exactly.
        queue_size (int): how many past embeddings of each view help to balance small batches.
        queue_views (int): the number of views of which the queue keeps embeddings.
        memory_size (int): how many embeddings of past batches are further negatives, see
            :meth:`remember`. They are assigned to the present prototypes, balanced by themselves,
            and weigh like all other negatives. A memory that is smaller than a batch keeps the last
            rows of the concatenated views, that is mostly of the last view. Use activation
            checkpointing on the encoder only.
        freeze_steps (int): the number of training forwards with frozen prototypes: their gradient
            is zero. Weight decay still moves them.
        weighting (str): what the weight of a negative depends on: ``"prototype"``, the distance of
            the prototypes of both clusters; ``"sample"``, the distance of both embeddings; or
            ``"uniform"``, nothing: all weights are 1.
        exclude_same_cluster (bool): whether graphs of the query's own cluster are left out of its
            negatives.
        negative_ranks ((int, int) or None): takes negatives only from the clusters at positions
            first to end - 1 of the query's assignment, best first. The published code has
            ``(2, 8)``.
        soft_clusters (bool): whether an embedding belongs to every cluster, by its balanced target,
            or only to the best one. The weight of a pair is then the mean over both targets.
        negatives, queries, over_positives, decoupled, reduction, engine, gather, process_group: as
            in :class:`InfoNCE`.

    Options may be assigned at any time. The options of a module are assigned to the module, as in
    ``pgcl.contrast.decoupled = True``; ``pgcl.temperature = 0.1`` sets the temperature of contrast
    and prediction. You may replace the modules ``prototypes``, ``contrast`` and ``consistency`` by
    subclasses of yours. ``prototypes`` is called with a :class:`Batch`, and the other modules with
    the batch that it returns.

    ``labels`` and ``positives`` are as in :class:`InfoNCE`, and change the contrast only.

    With several processes, all of them call the loss and backward equally often. Some of them may
    have an empty batch.

    The loss warns once each of silent failures, such as prototypes that no optimizer moves, NaN, or
    collapsed embeddings, but not in compiled and CUDA graphs.
    ``warnings.filterwarnings("ignore", "PGCLLoss")`` silences it.

    Shape:
        - views: two or more, ``[N, D]`` each, with norms up to 1e18; row i of each view is graph i
        - labels: ``[N]`` int64
        - output: a scalar, or ``[V * N]`` with ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import PGCLLoss
        >>> _ = torch.manual_seed(0)
        >>> pgcl = PGCLLoss(dim=16, num_prototypes=4)
        >>> z1 = torch.randn(8, 16, requires_grad=True)
        >>> loss = pgcl(z1, z1.detach() + 0.1 * torch.randn(8, 16))
        >>> loss.backward()
        >>> z1.grad.shape, pgcl.prototypes.weight.grad.shape
        (torch.Size([8, 16]), torch.Size([4, 16]))

    """

    consistency_weight: Weight
    contrast_weight: Weight
    memory_size: Size
    fixed = frozenset({"memory_size"})

    def __init__(
        self,
        dim: int,
        num_prototypes: int | Sequence[int] = 10,
        *,
        consistency_weight: float = 6.0,
        contrast_weight: float = 1.0,
        temperature: float | Tensor = 0.2,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        queue_views: int = 2,
        memory_size: int = 0,
        freeze_steps: int = 0,
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        negative_ranks: tuple[int, int] | None = None,
        soft_clusters: bool = False,
        negatives: Negatives = "all",
        queries: Queries = "all",
        over_positives: OverPositives = "mean",
        decoupled: bool = False,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        given = locals()
        for name in type(self).options:
            setattr(self, name, given[name])

        def options_of(module: type[LossModule]) -> dict[str, Any]:
            return {name: given[name] for name in module.options}

        self.prototypes = SinkhornPrototypes(**options_of(SinkhornPrototypes))
        self.contrast = PrototypeReweightedNCE(**options_of(PrototypeReweightedNCE))
        self.consistency = ConsistencyLoss(**options_of(ConsistencyLoss))
        self.register_buffer("memory", None)  # of a module that is None, torch would drop keys
        if self.memory_size > 0:
            self.memory = Memory(self.memory_size, dim)
        self._watch = Watch("PGCLLoss")
        self._check_contrast()

    @property
    def temperature(self) -> float | Tensor:
        """tau of the contrast. Assigning it sets tau of the prediction as well."""
        return self.contrast.temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        for module in (self.prototypes, self.contrast):
            if hasattr(module, "temperature"):  # a module of the user's may have none
                module.temperature = value

    @called_by_all("forward")
    def forward(
        self,
        *views: Tensor,
        labels: Labels | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss."""
        return self._compute(views, labels, positives, positive_weights)[0]

    if TYPE_CHECKING:
        __call__ = forward

    @called_by_all("forward")
    def terms(
        self,
        *views: Tensor,
        labels: Labels | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
    ) -> PGCLTerms:
        """Compute the loss with its two terms and the assignments, to log them.

        This is a training forward: call it in place of the loss, not beside it.
        """
        given = labels, positives, positive_weights
        loss, contrast, consistency, batch = self._compute(views, *given)
        cosine = mean_cosine(batch.embeddings.detach())
        return PGCLTerms(loss, contrast, consistency, batch.assignments(), cosine)

    def _compute(
        self, views: tuple[Tensor, ...], *given: Any
    ) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """Compute the loss, its contrast and its consistency, and the batch."""
        with self.agreement("forward", views) as agreed:
            agreed.claims |= self._check(views, *given)
        dtype = computing_dtype(views[0], self.prototypes.weight)
        batch = Batch.from_views(views, agreed.processes, *given, dtype=dtype)
        batch = self.prototypes(self.with_memory(batch))
        zero = batch.embeddings.new_zeros(())
        contrast = self.contrast(batch) if self.contrast_weight > 0 else zero
        consistency = self.consistency(batch) if self.consistency_weight > 0 else zero
        loss = self.contrast_weight * contrast
        loss = torch.add(loss, consistency, alpha=self.consistency_weight)
        if self.contrast_weight == 0 or self.consistency_weight == 0:
            loss = self._with_all_gradients(loss, batch.embeddings)
        if self.moves_state(batch.embeddings):  # state moves here alone
            self.prototypes.advance(batch)
            if self.memory is not None:
                self.memory.store_batch(batch, manually=False)
        if self._watch.is_due(self, loss, batch):
            checked = contrast if self.contrast_weight > 0 else None
            learning = self.prototypes if self.consistency_weight > 0 else None
            self._watch.look(views, batch, checked, learning)
        return loss, contrast, consistency, batch

    def _with_all_gradients(self, loss: Tensor, embeddings: Tensor) -> Tensor:
        """Give what the loss does not depend on a gradient of zeros, as DDP needs one."""
        for tensor in (embeddings, *self.parameters()):
            loss = loss + tensor.flatten()[:0].sum().to(loss)
        return loss

    def _check(
        self, views: tuple[Any, ...], labels: Any, positives: Any, weights: Any
    ) -> dict[str, object]:
        self.prototypes.check(views, 2, type(self).__name__)
        # A module of the user's may have none of these options.
        check.temperature(getattr(self.contrast, "temperature", 1.0), views[0])
        queries = getattr(self.contrast, "queries", "all")
        reduction = getattr(self.consistency, "reduction", "mean")
        claims = check.partners(views, queries, labels, positives, weights)
        both = self.consistency_weight > 0 and self.contrast_weight > 0
        if both and queries == "first" and reduction != "mean":
            raise ValueError(
                f"reduction={reduction!r} with queries='first' has the contrast of the first view, "
                "but the consistency of all: choose 'mean'"
            )
        self._check_contrast()
        return claims

    def _check_contrast(self) -> None:
        contrast = self.contrast
        check.negatives_of_memory(getattr(contrast, "negatives", "all"), self.memory_size)
        if isinstance(contrast, PrototypeReweightedNCE) and contrast.negative_ranks is not None:
            contrast.check_window(self.prototypes.heads)
