"""PGCL (Eq. 15): the reweighted contrast + lambda * the consistency, with its prototypes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgcl_losses.base import checks as check
from pgcl_losses.base.module import LossModule, called_by_all
from pgcl_losses.base.normalize import computing_dtype
from pgcl_losses.base.options import COMMON, Size, Weight, checked
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE, Weighting
from pgcl_losses.diagnostics import mean_cosine
from pgcl_losses.info_nce import WeightedInfoNCE
from pgcl_losses.pairs.batch import (
    Assignments,
    Batch,
    Negatives,
    OverPositives,
    PGCLTerms,
    Queries,
    Reduction,
)
from pgcl_losses.pairs.given import Given, Labels
from pgcl_losses.pairs.loss import Engine
from pgcl_losses.pairs.memory import LossWithMemory, Memory
from pgcl_losses.pairs.rows import Pairs
from pgcl_losses.pairs.score_mod import ScoreMod
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.watch import Watch


class PGCLLoss(LossWithMemory):
    r"""PGCL, equation 15: a contrast whose negatives are weighted by cluster, plus a consistency.

    Use it in place of :class:`InfoNCE` for two or more augmented views of the same graphs. The loss
    learns prototypes, the centres of K clusters, together with the encoder. It is the sum of

    - the contrast (:class:`PrototypeReweightedNCE`): InfoNCE without negatives from the query's own
      cluster, in which the distance of the prototypes gives a weight to every other negative;
    - :math:`\lambda` times the consistency (:class:`ConsistencyLoss`): each view predicts the
      balanced cluster assignment of the other view.

    The prototypes are parameters of the loss: give ``pgcl.parameters()`` to the optimizer, together
    with the encoder's.

    Args:
        dim (int): the embedding dimension D.
        num_prototypes (int or sequence of int): the number of prototypes K, or several numbers, one
            for each head. A head is a set of prototypes with a balanced assignment of its own.
        consistency_weight (float): lambda, the weight of the consistency; the paper has 6. With 0,
            the module ``consistency`` is not called, and the prototypes are frozen, as by
            ``freeze_steps``.
        contrast_weight (float): the weight of the contrast. With 0, the module ``contrast`` is not
            called.
        temperature (float or Tensor): tau of both the contrast and the prediction, as in
            :class:`InfoNCE`; the paper has 0.2.
        epsilon (float): the sharpness of the balanced targets. A smaller value is closer to hard
            clusters.
        iterations (int): the number of Sinkhorn-Knopp iterations. With more iterations, the
            clusters are balanced more exactly.
        queue_size (int): how many past embeddings of each view help to balance small batches.
        queue_views (int): the number of views for which the queue keeps embeddings.
        memory_size (int): how many embeddings of past batches serve as further negatives, see
            :meth:`remember`. They are assigned to the present prototypes, balanced apart from the
            batch, and weighted like all other negatives. A memory that is smaller than a batch
            keeps the last rows of the concatenated views, which are mostly rows of the last view.
            With a memory, use activation checkpointing on the encoder only.
        freeze_steps (int): for how many training forwards the prototypes are frozen: their gradient
            is zero, but weight decay still moves them.
        balance_predictions (bool): whether the predictions of each view are balanced over the
            prototypes by one Sinkhorn step, as the targets are by ``iterations`` steps without
            gradient. Set it for an encoder whose embeddings begin in almost one direction, such as
            a GCN on the nodes of one graph. The paper has False (Eq. 4).
        weighting (str): what the weight of a negative depends on: ``"prototype"``, the distance
            between the prototypes of both clusters; ``"sample"``, the distance between both
            embeddings; or ``"uniform"``, nothing: all weights are 1.
        exclude_same_cluster (bool): whether to leave graphs of the query's own cluster out of its
            negatives, as they are likely to be false negatives.
        negatives, queries, over_positives, decoupled: as in :class:`InfoNCE`.
        score_mod: as in :class:`InfoNCE`; the weights by cluster are added to what it returns.
        reduction, engine, gather, process_group: as in :class:`InfoNCE`.

    Options may be assigned at any time. Assign the options of a module to the module, as in
    ``pgcl.contrast.decoupled = True``; ``pgcl.temperature = 0.1`` sets the temperature of both
    contrast and prediction. You may replace the modules ``prototypes``, ``contrast`` and
    ``consistency`` by modules of your own. The loss calls ``prototypes``, which must have what
    :class:`Prototypes` says, with a :class:`Batch`, and the two other
    modules with the batch that ``prototypes`` returns.

    ``labels``, ``positives`` and ``metadata`` are as in :class:`InfoNCE`. They change the contrast
    only.

    With several processes, all of them must call the loss and backward equally often. Some of them
    may have an empty batch.

    The loss warns of silent failures, such as prototypes that no optimizer moves, NaN, or collapsed
    embeddings. Each warning appears once, and not in compiled or CUDA graphs.
    ``warnings.filterwarnings("ignore", "pgcl_losses")`` silences them.

    Shape:
        - views: two or more, ``[N, D]`` each, with norms up to 1e18; row i of each view is graph i
        - labels: ``[N]`` int64
        - sizes: ``[K]``
        - output: a scalar, or ``[V * N]`` with ``reduction="none"`` for V views

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

    consistency_weight: float
    contrast_weight: float
    fixed = frozenset({"memory_size"})

    own_options = ("consistency_weight", "contrast_weight", "memory_size", *COMMON)

    @checked
    def __init__(
        self,
        dim: int,
        num_prototypes: int | Sequence[int] = 10,
        *,
        consistency_weight: Weight = 0.3,
        contrast_weight: Weight = 1.0,
        temperature: float | Tensor = 0.5,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        queue_views: int = 2,
        memory_size: Size = 0,
        freeze_steps: int = 0,
        balance_predictions: bool = False,
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        negatives: Negatives = "all",
        queries: Queries = "all",
        over_positives: OverPositives = "mean",
        decoupled: bool = False,
        score_mod: ScoreMod | None = None,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        given = locals()
        super().__init__()
        self.set_options(given)

        def options_of(module: type[LossModule]) -> dict[str, Any]:
            return {name: given[name] for name in module.options}

        self.prototypes = SinkhornPrototypes(**options_of(SinkhornPrototypes))
        self.contrast = PrototypeReweightedNCE(**options_of(PrototypeReweightedNCE))
        self.consistency = ConsistencyLoss(**options_of(ConsistencyLoss))
        self.register_buffer("memory", None)  # keys of a module None would be ignored
        if self.memory_size > 0:
            self.memory = Memory(self.memory_size, dim)
        self._watch = Watch()
        self._check_contrast()

    @property
    def temperature(self) -> float | Tensor:
        """tau of the contrast. Assigning it also sets tau of the prediction."""
        return self.contrast.temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        _ = self.temperature  # an error if the contrast has none
        self.contrast.temperature = self.prototypes.temperature = value

    def state_dict(
        self, *args: Any, prefix: str = "", keep_vars: bool = False, **given: Any
    ) -> Any:
        """Return the state, in which no two tensors share memory, as safetensors wants it.

        A learned temperature is one Parameter of two modules, and has a name in each.
        """
        state = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **given)
        name = f"{prefix}contrast.temperature"
        if name in state and not keep_vars:
            state[name] = state[name].clone()
        return state

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a learned temperature as one Parameter, which ``assign=True`` assigns to both."""
        names = [f"{prefix}{module}.temperature" for module in ("prototypes", "contrast")]
        given = [x for name in names if isinstance(x := state.get(name), Tensor)]
        if self._shares_temperature() and given:
            one = nn.Parameter(given[-1], requires_grad=False)
            state.update(dict.fromkeys(names, one))
        super()._load_from_state_dict(state, prefix, *args)

    def _apply(self, *args: Any, **kwargs: Any) -> "PGCLLoss":
        """Convert as any module; ``to_empty`` makes a new Parameter in each of the modules."""
        is_shared = self._shares_temperature()
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch has no type there
        if is_shared:
            self.contrast.temperature = self.prototypes.temperature
        return self

    def _shares_temperature(self) -> bool:
        """Whether the contrast and the prototypes have one learned temperature."""
        tau = getattr(self.contrast, "temperature", None)
        other = getattr(self.prototypes, "temperature", None)
        return isinstance(tau, nn.Parameter) and tau is other

    @called_by_all("forward")
    def forward(
        self,
        *views: Tensor,
        labels: Labels | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
        metadata: Labels | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of two or more views ``[N, D]``, given by position.

        ``labels``, ``positives``, ``positive_weights`` and ``metadata`` are as in :class:`InfoNCE`,
        ``sizes`` ``[K]`` of clusters as in :class:`SinkhornPrototypes`.
        """
        return self._compute(views, Given(labels, positives, positive_weights, metadata), sizes)[0]

    if TYPE_CHECKING:
        __call__ = forward

    @called_by_all("forward")
    def terms(
        self,
        *views: Tensor,
        labels: Labels | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
        metadata: Labels | None = None,
        sizes: Tensor | None = None,
    ) -> PGCLTerms:
        """Compute the loss together with its two terms and the assignments, to log them.

        Call this in place of the loss, not in addition to it: in ``train()`` mode it is a training
        forward, which also counts ``freeze_steps`` and stores embeddings in the queue and the
        memory.
        """
        given = Given(labels, positives, positive_weights, metadata)
        loss, contrast, consistency, batch = self._compute(views, given, sizes)
        cosine = mean_cosine(batch.embeddings.detach())
        # The memory already holds this batch, so it must not be seen again.
        alone = Batch(batch.embeddings, batch.processes, Pairs(batch.pairs.lengths))
        assigned = Assignments(alone.assigned_as(batch))
        return PGCLTerms(loss, contrast, consistency, assigned, cosine)

    def batch_of(
        self, views: tuple[Any, ...], *, sizes: Tensor | None = None, **call: Any
    ) -> Batch:
        """Check what the loss is called with, and make a batch of it, with its assignments."""
        given = Given(**call)
        processes = self.check_on_all("forward", views, lambda: self._check(views, given, sizes))
        dtype = computing_dtype(views[0], self.prototypes.weight)
        batch = self.with_memory(Batch.from_views(views, processes, given, dtype=dtype))
        return self.prototypes(batch) if sizes is None else self.prototypes(batch, sizes=sizes)

    def _compute(
        self, views: tuple[Tensor, ...], given: Given, sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """Compute the loss, its contrast and its consistency; also return the batch."""
        batch = self.batch_of(views, sizes=sizes, **given._asdict())
        z = batch.embeddings
        loss = contrast = consistency = z.new_zeros(())
        # In forward mode, a Python number times a float32 scalar would have a tangent in float64.
        if self.contrast_weight > 0:
            contrast = self.contrast(batch)
            loss = torch.add(loss, contrast, alpha=self.contrast_weight)
        if self.consistency_weight > 0:
            consistency = self.consistency(batch)
            loss = torch.add(loss, consistency, alpha=self.consistency_weight)
        if self.contrast_weight == 0 or self.consistency_weight == 0:
            loss = self._with_all_gradients(loss, z)
        if self.moves_state(z):  # state changes only here
            self.prototypes.advance(batch)
            if self.memory is not None:
                self.memory.store_batch(batch, manually=False)
        if self._watch.counts(self, batch, loss.requires_grad):
            self._watch.check_embeddings(batch, views)
        return loss, contrast, consistency, batch

    def _with_all_gradients(self, loss: Tensor, embeddings: Tensor) -> Tensor:
        """Give a gradient of zeros to embeddings and parameters that the loss does not depend on.

        DistributedDataParallel needs the gradient of every parameter.
        """
        for tensor in (embeddings, *self.parameters()):
            loss = loss + tensor.flatten()[:0].sum().to(loss)
        return loss

    def _check(
        self, views: tuple[Any, ...], given: Given, sizes: Tensor | None
    ) -> dict[str, object]:
        owner, contrast = type(self).__name__, self.contrast
        check.loss_views(views, 2)
        check.prototypes("prototypes.weight", self.prototypes.weight, "z1", views[0], owner)
        self.prototypes.check(views)
        if sizes is not None:
            self._check_sizes(sizes, views[0])
        negatives, queries, has_score_mod = "all", "all", True  # of a contrast of the user's own
        if isinstance(contrast, WeightedInfoNCE):
            check.temperature(contrast.temperature, views[0])
            negatives, queries = contrast.negatives, contrast.queries
            has_score_mod = contrast.score_mod is not None
        claims = given.check(views, negatives, queries, has_score_mod)
        if queries == "first" and self.contrast_weight > 0 and self.consistency_weight > 0:
            consistency = self.consistency
            if isinstance(consistency, ConsistencyLoss) and consistency.reduction != "mean":
                raise ValueError(
                    f"reduction={consistency.reduction!r} with queries='first' would add the "
                    "contrast of the first view to the consistency of all views: choose 'mean'"
                )
        self._check_contrast()
        return claims | {"sizes": check.claim_of(sizes)}

    def _check_sizes(self, sizes: Tensor, z1: Tensor) -> None:
        prototypes: Any = self.prototypes
        if not hasattr(prototypes, "check_sizes"):
            raise TypeError(
                f"sizes are given, but prototypes is a {type(prototypes).__name__}, which takes "
                "none: give it check_sizes(sizes, z1), and its call an argument sizes="
            )
        prototypes.check_sizes(sizes, z1)
        if self.memory is not None:
            raise ValueError(
                "sizes cannot be combined with a memory, whose embeddings come from calls with "
                "other sizes: make the loss with memory_size=0"
            )

    def _check_contrast(self) -> None:
        if isinstance(self.contrast, WeightedInfoNCE):
            check.negatives_of_memory(self.contrast.negatives, self.memory_size)
