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
from pgcl_losses._modes import has_numbers
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import mean_cosine
from pgcl_losses._warnings import Watch
from pgcl_losses.batch import (
    AnyBatch,
    AssignedBatch,
    Assignment,
    Batch,
    Items,
    Negatives,
    Reduction,
    batch_of,
)
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE, Weighting
from pgcl_losses.engine.dispatch import Engine, choice_facts
from pgcl_losses.info_nce import check_loss_views
from pgcl_losses.memory import LossWithMemory, Memory
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.warm_up import WarmUp


class PGCLTerms(NamedTuple):
    """The loss, its two terms and the assignments.

    In the warm-up the contrast is the loss, the consistency is zero and there are no assignments.
    """

    loss: Tensor
    contrast: Tensor
    consistency: Tensor
    assignments: tuple[Assignment, ...]  # of each view
    mean_cosine: Tensor  # of two embeddings


def _of_modules(name: str) -> Any:
    """An option of the modules: read from those that have it, and assigned to all of them."""

    def modules(self: "PGCLLoss") -> list[LossModule]:
        having = [module for module in self._loss_modules() if name in module.options]
        if not having:
            raise ValueError(f"no module of this PGCLLoss has an option {name}")
        return having

    def read(self: "PGCLLoss") -> Any:
        values = {type(module).__name__: getattr(module, name) for module in modules(self)}
        if len(set(values.values())) > 1:
            raise ValueError(f"{name} differs from module to module: {values}")
        return next(iter(values.values()))

    def assign(self: "PGCLLoss", value: Any) -> None:
        for module in modules(self):
            setattr(module, name, value)

    return property(read, assign)


class PGCLLoss(LossWithMemory):
    r"""PGCL: reweighted contrast + :math:`\lambda` consistency, with its prototypes.

    The prototypes are parameters of this module: give them to the optimizer, beside the encoder's.

    Args:
        dim (int): embedding dimension, D.
        num_prototypes (int or sequence of int): how many prototypes, K; or several numbers, one for
            each head. Each head is a set of prototypes that is balanced by itself.
        consistency_weight (float): lambda, the weight of the consistency. 0 leaves the contrast
            alone: ``consistency`` is not called. Made with 0, the prototypes need no gradient, so
            that weight decay does not move them; if 0 is assigned later, their gradient is zero.
        contrast_weight (float): weight of the contrast. 0 leaves the consistency alone: no pair is
            computed, ``contrast`` is not called (its hooks do not fire), and the contrast of
            :meth:`terms` is zero, with the shape of ``reduction``. In the warm-up it is not used.
        temperature (float or Tensor): tau of both the contrast and the prediction. Smaller is
            sharper. A tensor of shape ``()``, such as an ``nn.Parameter``, gets a gradient. It must
            stay above 0; this is checked on a CPU alone.
        epsilon (float): sharpness of the balanced targets. Smaller is nearer to one prototype each.
        iterations (int): steps of Sinkhorn-Knopp. More of them balance more exactly.
        queue_size (int): how many past embeddings of each view help to balance the batch. For
            batches with few graphs for each prototype; 0 is no queue.
        queue_views (int): how many views the queue keeps embeddings of.
        memory_size (int): how many embeddings of past batches are further negatives, see
            :meth:`remember`. They are assigned to the present prototypes, balanced by themselves,
            and weigh like all others. Activation checkpointing runs a second training forward:
            with a memory, checkpoint the encoder and not the loss.
        freeze_steps (int): for so many training forwards the prototypes are frozen: their gradient
            is zero. Weight decay still moves them.
        warmup_steps (int): for so many training forwards, the warm-up, the loss is InfoNCE. At its
            end the prototypes are initialised by k-means of embeddings that ``warm_up`` has kept of
            the last batches, unless you have called ``prototypes.start_from_``. ``freeze_steps``
            count from there on. A batch with NaN or inf does not count. Activation checkpointing of
            the loss fails at the end: checkpoint the encoder alone. Wrapped by ``torch.compile``,
            the loss breaks the graph until the warm-up is over; a CUDA graph can be captured from
            then on.
        weighting (str): what the weight of a negative depends on. ``"prototype"``: the distance of
            the two clusters' prototypes; ``"sample"``: that of the two embeddings; ``"uniform"``:
            all weights are 1.
        exclude_same_cluster (bool): whether graphs of the query's own cluster are left out of its
            negatives.
        negative_ranks ((int, int) or None): take negatives only from the clusters at the positions
            first to end - 1 of the query's own assignment, best first and from 0. ``(2, 8)`` is
            the default of the published code; None takes them from all.
        soft_clusters (bool): whether an embedding belongs to every cluster, by its balanced target,
            or to the best one alone. The weight of a pair is then its mean over both targets, and
            leaving out the query's own cluster lowers it by the probability that both are in one.
        negatives (str): ``"all"`` takes negatives from all views, ``"cross"`` from the other views
            alone.
        reduction (str): ``"mean"``, ``"sum"``, or ``"none"`` for one value per embedding (V * N,
            view 1 first).
        engine (str): how the pairs are computed, with the same result. ``"dense"``: as one matrix,
            in one process; ``"streaming"``: by blocks, for batches of any size; ``"triton"``: by
            fused kernels on CUDA (correct in Triton's interpreter, not yet run on a GPU).
            ``"auto"`` takes dense for small batches; for large ones it takes triton on CUDA, if its
            kernels pass a self-test before their first use, and streaming elsewhere. All but dense
            are differentiable once.
        gather (bool): with several processes, one loss over the batches of all of them: it, and
            the mean over processes of its gradients, are those of one process on the whole batch
            (``reduction="none"`` gives each process the values of its own embeddings).
            ``gather=False`` gives each process the loss of its own batch.
        process_group (ProcessGroup or None): the processes meant by ``gather``; None is all of
            them.

    Options may be assigned at any time: ``pgcl.temperature = 0.1`` reaches all modules that have
    it. The modules, ``prototypes``, ``contrast`` and ``consistency``, may be replaced by subclasses
    of yours. ``prototypes`` is called with a :class:`Batch`, the others with the
    :class:`AssignedBatch` that it makes of it.

    ``items`` ``[N]`` numbers what each graph shows, if several graphs of a batch may show the same:
    graphs of one item are positives of each other and never negatives. They change the contrast
    alone.

    With several processes every one has to call the loss, and its backward, the same number of
    times; a batch may be empty on some of them. The loss is then differentiable once.

    Warns, once each, of prototypes that no optimizer moves, of an encoder without gradient, of
    batches smaller than K, of one cluster that has nearly all graphs, of collapsed embeddings, of
    training in ``eval()`` mode and of a warm-up that is never over; not in compiled and CUDA
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
        "warmup_steps": partial(check.count, minimum=0),
    }
    fixed = frozenset({"memory_size", "warmup_steps"})

    consistency_weight: float
    contrast_weight: float
    memory_size: int
    warmup_steps: int

    dim = _of_modules("dim")
    num_prototypes = _of_modules("num_prototypes")
    temperature = _of_modules("temperature")
    epsilon = _of_modules("epsilon")
    iterations = _of_modules("iterations")
    queue_size = _of_modules("queue_size")
    queue_views = _of_modules("queue_views")
    freeze_steps = _of_modules("freeze_steps")
    weighting = _of_modules("weighting")
    exclude_same_cluster = _of_modules("exclude_same_cluster")
    negative_ranks = _of_modules("negative_ranks")
    soft_clusters = _of_modules("soft_clusters")
    negatives = _of_modules("negatives")
    reduction = _of_modules("reduction")
    engine = _of_modules("engine")

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
        warmup_steps: int = 0,
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        negative_ranks: tuple[int, int] | None = None,
        soft_clusters: bool = False,
        negatives: Negatives = "all",
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
            # Only the consistency has a gradient for the prototypes, and weight decay would move
            # them by a gradient of zeros. (Assigned later, 0 has one: DDP expects it then.)
            self.prototypes.weight.requires_grad_(False)
        self.memory = Memory(self.memory_size, dim) if self.memory_size > 0 else None
        self.warm_up: WarmUp | None = None
        if self.warmup_steps > 0:
            self.warm_up = WarmUp(self.warmup_steps, sum(self.prototypes.heads), dim)
            self.register_load_state_dict_post_hook(_read_warm_up)  # type: ignore[no-untyped-call]  # torch has no type there
        self._watch = Watch()
        self._check_window()

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in self.shared:
            for module in self._loss_modules():
                setattr(module, name, value)
        if name == "consistency_weight" and before == 0 and value > 0:
            self.prototypes.weight.requires_grad_(True)

    def forward(self, *views: Tensor, items: Items | None = None) -> Tensor:
        """The loss."""
        return self.untraced(self._compute)(views, items)[0]

    if TYPE_CHECKING:
        __call__ = forward

    def terms(self, *views: Tensor, items: Items | None = None) -> PGCLTerms:
        """The loss with its two terms and the assignments, for logging."""
        loss, contrast, consistency, batch = self.untraced(self._compute)(views, items)
        cosine = mean_cosine(batch.embeddings.detach())
        return PGCLTerms(loss, contrast, consistency, batch.own_assignments(), cosine)

    def _compute(
        self, views: tuple[Tensor, ...], items: Items | None
    ) -> tuple[Tensor, Tensor, Tensor, AnyBatch]:
        """The loss, its contrast and its consistency, and the batch."""
        given = self._batch(views, items)
        batch: AnyBatch = given
        learning, warm_up = self.training and torch.is_grad_enabled(), self.warm_up
        if warm_up is not None and warm_up.goes_on(self.prototypes, given.ranks, learning):
            loss = contrast = self._with_zeros(self.contrast.info_nce(given))
            consistency = torch.zeros_like(loss)
        else:
            warm_up = None
            loss, contrast, consistency, batch = self._terms(given)
        if learning and self.memory is not None:
            items = None if given.items is None else given.items.flatten()
            self.memory.follow(given.embeddings.flatten(0, 1), items)
        if learning and warm_up is not None:
            warm_up.keep(given.embeddings, given.ranks)
            warm_up.goes_on(self.prototypes, given.ranks, learning)
        if given.ranks.rank == 0 and has_numbers(given.embeddings):
            self._look(loss, batch, learning)
        return loss, contrast, consistency, batch

    def _terms(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, AssignedBatch]:
        """What :meth:`_compute` returns, after the warm-up."""
        predicting = self.consistency_weight > 0 or self.contrast_weight == 0
        if predicting:
            assigned: AssignedBatch = self.prototypes(batch)
            consistency = self.consistency(assigned)
        else:  # backward has nothing to do for the prediction
            embeddings = batch.embeddings
            assigned = self.prototypes(batch._replace(embeddings=embeddings.detach()))
            assigned = assigned._replace(embeddings=embeddings)
        if self.contrast_weight == 0:
            contrast = torch.zeros_like(consistency)
        else:
            contrast = self.contrast(assigned)
        weighted = contrast if self.contrast_weight == 1 else self.contrast_weight * contrast
        if not predicting:
            return self._with_zeros(weighted), contrast, torch.zeros_like(contrast), assigned
        loss = torch.add(weighted, consistency, alpha=self.consistency_weight)
        return loss, contrast, consistency, assigned

    def _with_zeros(self, loss: Tensor) -> Tensor:
        """The loss; parameters that it does not use get a gradient of zeros, as DDP needs it."""
        for parameter in self.parameters():
            loss = loss + parameter.flatten()[:0].sum().to(loss)
        return loss

    def _look(self, loss: Tensor, batch: AnyBatch, learning: bool) -> None:
        """Look for silent failures."""
        if learning:
            after = isinstance(batch, AssignedBatch)
            predicting = after and self.consistency_weight > 0
            excluding = after and self.contrast_weight > 0 and self._excludes_clusters()
            self._watch.look(self.prototypes, batch, predicting, excluding)
        elif loss.requires_grad and not self.training:
            unchanged = {
                "the warm-up": self.warm_up is not None and not self.warm_up.over,
                "the memory": self.memory is not None,
                "the queue": self.prototypes.queue_size > 0,
            }
            if any(unchanged.values()):
                names = [name for name, is_used in unchanged.items() if is_used]
                self._watch.look_in_eval(loss, " and ".join(names))

    def _batch(self, views: tuple[Tensor, ...], items: Items | None = None) -> Batch:
        """The unit embeddings of all views, of this process or of all."""
        ranks = self.agree(
            "forward",
            partial(self._check, views, items),
            views,
            lambda: {
                **self.memory_facts(items),
                **self.prototypes.state(),
                **({} if self.warm_up is None else {"warm-up step": self.warm_up.step}),
                **choice_facts(self._engine(), views[0]),
            },
        )
        batch = batch_of(ranks, views, self.prototypes.weight, items=items)
        if self.memory is None:
            return batch
        return batch._replace(memory=self.memory.contents(batch.embeddings))

    def _check(self, views: tuple[Tensor, ...], items: Items | None, may_be_empty: bool) -> None:
        of_prediction = self.prototypes.temperature
        temperatures = of_prediction, getattr(self.contrast, "temperature", of_prediction)
        check_loss_views(views, None, self._engine(), temperatures, self.memory, 2, may_be_empty)
        if items is not None:
            check.items(items, views)
        weight = self.prototypes.weight
        check.prototypes("prototypes.weight", weight, "z1", views[0], type(self).__name__)
        self.prototypes.check_call(len(views))
        self._check_window()
        if self.warm_up is not None and not self.warm_up.over:
            self.warm_up.check(views[0].device)
            if not hasattr(self.contrast, "info_nce"):
                raise TypeError(
                    f"warmup_steps is {self.warmup_steps}, but contrast is a "
                    f"{type(self.contrast).__name__} without a method info_nce(batch), which the "
                    "warm-up calls: inherit it from PrototypeReweightedNCE, or write one"
                )

    def _engine(self) -> str:
        engine: str = getattr(self.contrast, "engine", "auto")  # a module of yours may have none
        return engine

    def _check_window(self) -> None:
        if isinstance(self.contrast, PrototypeReweightedNCE):
            self.contrast.check_window(self.prototypes.heads)

    def _excludes_clusters(self) -> bool:
        """Whether all embeddings of a cluster are left out."""
        contrast = self.contrast
        if not isinstance(contrast, PrototypeReweightedNCE):
            return False
        return contrast.exclude_same_cluster and not contrast.soft_clusters

    def why_untraced(self) -> str:
        if self.warm_up is not None and not self.warm_up.over:
            return (
                "the warm-up runs in Python: compile without fullgraph=True, or after the warm-up"
            )
        return super().why_untraced()

    def _loss_modules(self) -> list[LossModule]:
        return [module for module in self.children() if isinstance(module, LossModule)]

    def facts(self) -> dict[str, Any]:
        own = super().facts()
        for name, module in self.named_children():
            facts = {"type": type(module).__name__}
            facts |= module.facts() if isinstance(module, LossModule) else {}
            own |= {f"{name}.{fact}": value for fact, value in facts.items()}
        return own


def _read_warm_up(pgcl: PGCLLoss, _: object) -> None:
    """After a checkpoint was loaded."""
    if pgcl.warm_up is not None:
        pgcl.warm_up.read(pgcl.prototypes.initialised)
