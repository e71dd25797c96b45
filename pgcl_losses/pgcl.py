"""PGCL (Eq. 15): reweighted contrast + lambda * consistency, with its prototypes.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses import _checks as check
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import mean_cosine
from pgcl_losses.batch import (
    Assignment,
    Batch,
    Items,
    Negatives,
    Queries,
    Reduction,
    Related,
    batch_of,
)
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE, Weighting
from pgcl_losses.engine.contrast import Engine
from pgcl_losses.memory import LossWithMemory, Memory
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.watch import Step, Watch


class PGCLTerms(NamedTuple):
    """The loss, its two terms and the assignments."""

    loss: Tensor
    contrast: Tensor
    consistency: Tensor
    assignments: tuple[Assignment, ...]  # of each view
    mean_cosine: Tensor  # of two embeddings

    def __repr__(self) -> str:
        terms = [(name, x) for name, x in self._asdict().items() if isinstance(x, Tensor)]
        shown = [f"{name}={[*x.shape] if x.dim() else x.detach()!r}" for name, x in terms]
        return f"PGCLTerms({', '.join(shown)}, assignments of {len(self.assignments)} views)"


class PGCLLoss(LossWithMemory):
    r"""PGCL: reweighted contrast + :math:`\lambda` consistency, with its prototypes.

    The prototypes are parameters of this module: give them to the optimizer, beside the encoder's.

    Args:
        dim (int): embedding dimension, D.
        num_prototypes (int or sequence of int): how many prototypes, K; or several numbers, one for
            each head. Each head is a set of prototypes that is balanced by itself.
        consistency_weight (float): lambda, the weight of the consistency. With 0, ``consistency``
            is not called. Made with 0, the prototypes need no gradient, so that weight decay does
            not move them; if 0 is assigned later, their gradient is zero.
        contrast_weight (float): weight of the contrast. With 0, ``contrast`` is not called.
        temperature (float or Tensor): tau of both the contrast and the prediction, as in
            :class:`InfoNCE`.
        epsilon (float): sharpness of the balanced targets. Smaller is closer to hard clusters.
        iterations (int): steps of Sinkhorn-Knopp. More of them balance more exactly.
        queue_size (int): how many past embeddings of each view help to balance small batches.
        queue_views (int): how many views the queue keeps embeddings of.
        memory_size (int): how many embeddings of past batches are further negatives, see
            :meth:`remember`. They are assigned to the present prototypes, balanced by themselves,
            and weigh like all others. Use activation checkpointing on the encoder alone.
        freeze_steps (int): number of training forwards with frozen prototypes: their gradient is
            zero. Weight decay still moves them.
        weighting (str): what the weight of a negative depends on. ``"prototype"``: the distance of
            the two clusters' prototypes; ``"sample"``: that of the two embeddings; ``"uniform"``:
            all weights are 1.
        exclude_same_cluster (bool): whether graphs of the query's own cluster are left out of its
            negatives.
        negative_ranks ((int, int) or None): take negatives only from the clusters at the positions
            first to end - 1 of the query's own assignment, best first; ``(2, 8)`` in the published
            code.
        soft_clusters (bool): whether an embedding belongs to every cluster, by its balanced target,
            or to the best one alone. The weight of a pair is then its mean over both targets.
        negatives, queries, decoupled, reduction, engine, gather, process_group: as in
            :class:`InfoNCE`.

    Options may be assigned at any time: ``pgcl.temperature = 0.1`` reaches all modules that have
    it. The modules, ``prototypes``, ``contrast`` and ``consistency``, may be replaced by subclasses
    of yours. ``prototypes`` is called with a :class:`Batch`, the others with what it returns.

    ``items`` and ``positives`` change the contrast alone, as they do :class:`InfoNCE`:
    graphs of one item are positives of each other and never negatives.

    With several processes every one has to call the loss, and its backward, the same number of
    times; a batch may be empty on some of them. The loss is then differentiable once.

    Warns, once each, of silent failures, such as prototypes that no optimizer moves, an encoder
    without gradient, NaN, batches smaller than K, or collapsed embeddings; not in compiled and CUDA
    graphs. ``warnings.filterwarnings("ignore", "PGCLLoss")`` silences it.

    Shape:
        - views: two or more, ``[N, D]`` each; row i of every view is graph i, with a norm of at
          most 1e18
        - items: ``[N]`` int64
        - output: scalar, or ``[V * N]`` for ``reduction="none"``

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

    options: ClassVar[dict[str, Check]] = {
        "consistency_weight": check.weight,
        "contrast_weight": check.weight,
        "memory_size": partial(check.count, minimum=0),
    }
    fixed = frozenset({"memory_size"})

    prototypes: SinkhornPrototypes
    contrast: PrototypeReweightedNCE
    consistency: ConsistencyLoss
    consistency_weight: float
    contrast_weight: float
    memory_size: int

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
        decoupled: bool = False,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.prototypes = SinkhornPrototypes.of_options(locals())
        self.contrast = PrototypeReweightedNCE.of_options(locals())
        self.consistency = ConsistencyLoss.of_options(locals())
        self._assign_options(locals())
        if self.consistency_weight == 0:
            # Weight decay would move them by zeros. (If assigned later, DDP expects a gradient.)
            self.prototypes.weight.requires_grad_(False)
        self.register_buffer("memory", None)  # of a module that is None, torch would drop keys
        if self.memory_size > 0:
            self.memory = Memory(self.memory_size, dim)
        self._watch = Watch("PGCLLoss")
        self._check_window()

    if TYPE_CHECKING:  # the options of the modules

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        before, modules = self.__dict__.get(name), self._modules_with(name)
        for module in modules:
            setattr(module, name, value)
        if not modules or name in self.shared:
            super().__setattr__(name, value)
        if name == "consistency_weight" and before == 0 and value > 0:
            self.prototypes.weight.requires_grad_(True)

    def _modules_with(self, name: str) -> list[LossModule]:
        """The modules that have an option of that name."""
        having = [module for module in self._loss_modules() if name in module.all_options()]
        return [] if name in self.options else having

    def all_options(self) -> list[str]:
        of_modules = [name for module in self._loss_modules() for name in module.all_options()]
        return list(dict.fromkeys([*self.options, *of_modules]))

    def forward(
        self,
        *views: Tensor,
        items: Items | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
    ) -> Tensor:
        """The loss."""
        related = Related(items, positives, positive_weights)
        return self.traceable(self._compute, views)(views, related)[0]

    if TYPE_CHECKING:
        __call__ = forward

    def terms(
        self,
        *views: Tensor,
        items: Items | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
    ) -> PGCLTerms:
        """The loss with its two terms and the assignments, for logging."""
        related = Related(items, positives, positive_weights)
        compute = self.traceable(self._compute, views)
        loss, contrast, consistency, batch = compute(views, related)
        cosine = mean_cosine(batch.embeddings.detach())
        return PGCLTerms(loss, contrast, consistency, batch.assignments(), cosine)

    def _compute(
        self, views: tuple[Tensor, ...], related: Related
    ) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """The loss, its contrast and its consistency, and the batch."""
        batch = self._batch(views, related)
        learns = self.consistency_weight > 0 or self.contrast_weight == 0
        if learns:
            batch = self.prototypes(batch)
            consistency = self.consistency(batch)
        else:  # backward has nothing to do for the prediction
            embeddings = batch.embeddings
            batch = self.prototypes(batch._replace(embeddings=embeddings.detach()))
            batch = batch._replace(embeddings=embeddings)
        if self.contrast_weight == 0:
            contrast = torch.zeros_like(consistency)
        else:
            contrast = self.contrast(batch)
        loss = contrast if self.contrast_weight == 1 else self.contrast_weight * contrast
        if learns:
            loss = torch.add(loss, consistency, alpha=self.consistency_weight)
        else:  # a gradient of zeros, as DDP needs it
            consistency = torch.zeros_like(contrast)
            for parameter in self.parameters():
                loss = loss + parameter.flatten()[:0].sum().to(loss)
        if self.moves_state(batch.embeddings):  # and here alone
            self.prototypes.advance(batch)
            self.remember_batch(batch)
        if self._watch.is_due(self, loss, batch):
            learns, contrasts = self.consistency_weight > 0, self.contrast_weight > 0
            excludes = contrasts and self.excludes_clusters()
            options = self.prototypes, learns, contrasts, excludes
            self._watch.look(Step(views, batch, contrast, *options))
        return loss, contrast, consistency, batch

    def _batch(self, views: tuple[Tensor, ...], related: Related) -> Batch:
        """The unit embeddings of all views, of this process or of all."""
        processes = self.agree(
            "forward",
            partial(self._check, views, related),
            views,
            lambda: {**self.memory_facts(related), **self.prototypes.state()},
        )
        weight = self.prototypes.weight
        return self.with_memory(batch_of(processes, views, weight, related=related))

    def _check(self, views: tuple[Tensor, ...], related: Related, may_be_empty: bool) -> None:
        check.loss_views(views, None, 2, may_be_empty)
        for module in (self.prototypes, self.contrast):  # a module of yours may have none
            temperature = getattr(module, "temperature", 1.0)
            check.temperature_value("temperature", temperature, views[0])
        if related.items is not None:
            check.items(related.items, views)
        queries = getattr(self.contrast, "queries", "all")
        check.positives(*related[1:], views, queries)
        both = self.consistency_weight > 0 and self.contrast_weight > 0
        if both and queries == "first" and self.consistency.reduction == "none":
            raise ValueError(
                "reduction='none' with queries='first' has a contrast for each embedding of the "
                "first view, but a consistency for those of all: choose 'mean' or 'sum'"
            )
        weight = self.prototypes.weight
        check.prototypes("prototypes.weight", weight, "z1", views[0], type(self).__name__)
        self.prototypes.check_call(len(views))
        self._check_window()

    def _check_window(self) -> None:
        if isinstance(self.contrast, PrototypeReweightedNCE):
            self.contrast.check_window(self.prototypes.heads)

    def excludes_clusters(self) -> bool:
        """Whether embeddings of one cluster are no negatives."""
        contrast = self.contrast
        if not isinstance(contrast, PrototypeReweightedNCE):
            return False
        return contrast.exclude_same_cluster and not contrast.soft_clusters

    def _loss_modules(self) -> list[LossModule]:
        modules = self.__dict__.get("_modules", {}).values()  # none before torch's constructor
        return [module for module in modules if isinstance(module, LossModule)]

    def facts(self) -> dict[str, Any]:
        own = super().facts()
        for name, module in self.named_children():
            facts = {"type": type(module).__name__}
            facts |= module.facts() if isinstance(module, LossModule) else {}
            own |= {f"{name}.{fact}": value for fact, value in facts.items()}
        return own


def _option_of_modules(name: str) -> property:
    def value(self: PGCLLoss) -> Any:
        values = {type(x).__name__: getattr(x, name) for x in self._modules_with(name)}
        if not values:
            raise AttributeError(f"no module of this {type(self).__name__} has an option {name}")
        first, *others = values.values()
        if any(other is not first and other != first for other in others):
            raise ValueError(f"{name} differs from module to module: {values}")
        return first

    return property(value)


for _class in (SinkhornPrototypes, PrototypeReweightedNCE, ConsistencyLoss):
    for _name in _class.options:
        setattr(PGCLLoss, _name, _option_of_modules(_name))
