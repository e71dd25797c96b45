"""PGCL, the whole (Eq. 15): reweighted contrast + lambda * consistency, with its prototypes.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses._checks import (
    check_choice,
    check_count,
    check_prototypes,
    check_scale,
    check_views,
    check_weight,
)
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import mean_cosine
from pgcl_losses._warnings import Watch, can_look
from pgcl_losses.batch import AssignedBatch, Assignment, Batch, Negatives, batch_of
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE, Weighting
from pgcl_losses.engine import Engine, check_engine
from pgcl_losses.info_nce import NEGATIVES, check_view_count
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.reduction import Reduction

Self = TypeVar("Self", bound="PGCLLoss")


class PGCLTerms(NamedTuple):
    """The loss and what it is made of."""

    loss: Tensor
    contrast: Tensor
    consistency: Tensor
    assignments: tuple[Assignment, ...]
    mean_cosine: Tensor  # of two rows


def _of_parts(name: str) -> Any:
    """An option that parts have: read from them, and assigned to all of them."""

    def parts(self: "PGCLLoss") -> list[LossModule]:
        having = [part for part in self._parts() if name in part.options]
        if not having:
            raise ValueError(f"no part of this PGCLLoss has an option {name}")
        return having

    def read(self: "PGCLLoss") -> Any:
        values = {type(part).__name__: getattr(part, name) for part in parts(self)}
        if len(set(values.values())) > 1:
            raise ValueError(f"{name} differs from part to part: {values}")
        return next(iter(values.values()))

    def assign(self: "PGCLLoss", value: Any) -> None:
        for part in parts(self):
            setattr(part, name, value)

    return property(read, assign)


class PGCLLoss(LossModule):
    r"""The whole of PGCL: reweighted contrast + :math:`\lambda` consistency, with its prototypes.

    The prototypes are parameters of this module: give them to the optimizer, beside the encoder's.

    Args:
        dim (int): width of the rows, D.
        num_prototypes (int or sequence of int): how many of them, K; or several numbers, one for
            each head. Heads are sets of prototypes that are balanced by themselves.
        consistency_weight (float): lambda, the weight of the consistency; 0 leaves the contrast
            alone.
        contrast_weight (float): weight of the contrast; 0 leaves the consistency alone.
        temperature (float): tau of both the contrast and the prediction. Smaller is sharper.
        epsilon (float): sharpness of the balanced targets. Smaller is nearer to one prototype each.
        iterations (int): steps of Sinkhorn-Knopp. More of them balance more exactly.
        queue_size (int): how many past rows of each view help to balance the batch. For batches
            with few rows for each prototype; 0 is no queue.
        queue_views (int): of how many views the queue keeps rows.
        freeze_steps (int): for so many training forwards the prototypes receive zero gradient;
            weight decay moves them all the same.
        lead_steps (int): for so many training forwards the prototypes learn alone: the rows learn
            by InfoNCE, and nothing else moves them.
        weighting (str): what a negative's weight is made of. ``"prototype"``: the distance of the
            two clusters' prototypes; ``"sample"``: that of the two rows; ``"uniform"``: all are 1.
        exclude_same_cluster (bool): whether rows of the query's own cluster are no negatives.
        negative_ranks ((int, int) or None): take negatives only from the clusters at the places
            first to end - 1 of the query's own assignment, best first and from 0. ``(2, 8)`` is
            the default of the published code; None takes them from all.
        soft_clusters (bool): whether a row belongs to every cluster, by its balanced target, or to
            the best one alone.
        negatives (str): ``"all"`` takes negatives from all views, ``"cross"`` from the other views
            alone.
        reduction (str): ``"mean"``, ``"sum"``, or ``"none"`` for one value per row (V * N, view 1
            first).
        engine (str): how the pairs are computed, with the same result. ``"dense"``: as one matrix;
            ``"streaming"``: by blocks, for batches of any size; ``"triton"``: by fused kernels on
            CUDA; ``"auto"`` chooses by size and device. :class:`PrototypeReweightedNCE` has more.
        gather (bool): with several processes, one loss over the batches of all of them: it, and
            the mean over processes of its gradients, are those of one process on the whole batch
            (``reduction="none"`` gives each the values of its own rows). ``gather=False`` gives
            each process the loss of its own batch.
        process_group (ProcessGroup or None): the processes meant by ``gather``; None is all of
            them.

    Options may be assigned at any time: ``pgcl.temperature = 0.1`` reaches all parts that have it.
    The parts, ``prototypes``, ``contrast`` and ``consistency``, may be replaced by subclasses of
    yours; each is called with a :class:`Batch`, or with the
    :class:`AssignedBatch` that ``prototypes`` makes of it.

    With several processes every one has to call the loss, and its backward, the same number of
    times; a batch may be empty on some of them. The loss is then differentiable once.

    Warns, once each, of prototypes that no optimizer moves, of an encoder without gradient, of
    batches smaller than K, of one cluster that has nearly all rows, and of rows in one direction
    that no prototype tells apart; not in compiled graphs and CUDA graphs, where no Python runs.
    To silence: ``warnings.filterwarnings("ignore", "PGCLLoss")``.

    Shape:
        - views: two or more, ``[N, D]`` each; row i of every view is graph i, of any length up to
          1e18
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
        "consistency_weight": check_weight,
        "contrast_weight": check_weight,
    }

    consistency_weight: float
    contrast_weight: float

    dim = _of_parts("dim")
    num_prototypes = _of_parts("num_prototypes")
    temperature = _of_parts("temperature")
    epsilon = _of_parts("epsilon")
    iterations = _of_parts("iterations")
    queue_size = _of_parts("queue_size")
    queue_views = _of_parts("queue_views")
    freeze_steps = _of_parts("freeze_steps")
    lead_steps = _of_parts("lead_steps")
    weighting = _of_parts("weighting")
    exclude_same_cluster = _of_parts("exclude_same_cluster")
    negative_ranks = _of_parts("negative_ranks")
    soft_clusters = _of_parts("soft_clusters")
    negatives = _of_parts("negatives")
    reduction = _of_parts("reduction")
    engine = _of_parts("engine")

    def __init__(
        self,
        dim: int,
        num_prototypes: int | Sequence[int] = 10,
        *,
        consistency_weight: float = 6.0,
        contrast_weight: float = 1.0,
        temperature: float = 0.2,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        queue_views: int = 2,
        freeze_steps: int = 0,
        lead_steps: int = 0,
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
        self.consistency_weight = consistency_weight
        self.contrast_weight = contrast_weight
        self.prototypes = SinkhornPrototypes(
            dim,
            num_prototypes,
            temperature=temperature,
            epsilon=epsilon,
            iterations=iterations,
            queue_size=queue_size,
            queue_views=queue_views,
            freeze_steps=freeze_steps,
            lead_steps=lead_steps,
        )
        self.contrast = PrototypeReweightedNCE(
            temperature=temperature,
            weighting=weighting,
            exclude_same_cluster=exclude_same_cluster,
            negative_ranks=negative_ranks,
            soft_clusters=soft_clusters,
            negatives=negatives,
            reduction=reduction,
            engine=engine,
        )
        self.consistency = ConsistencyLoss(reduction=reduction)
        self.gather = gather
        self.process_group = process_group
        self._watch = Watch()
        self._check_window()

    @classmethod
    def recommended(
        cls: type[Self],
        dim: int,
        *,
        batch_size: int,
        steps: int,
        temperature: float = 0.2,
        **options: Any,
    ) -> Self:
        """The setting that did less harm than the paper's, and more good: PGCL at the end of a run.

        For three quarters of the run the encoder learns by InfoNCE. Then start the prototypes from
        its rows, and PGCL goes on from there. There is a prototype for every three rows of the
        batch, 2 at least and 1000 at most. The temperature of the prediction is 0.2 at most, and
        lambda is 1, or 0.2 / tau where tau is above 0.2: so the consistency pulls no harder than
        the contrast.

        If tau is above 0.2, the parts have temperatures of their own, ``pgcl.contrast.temperature``
        and ``pgcl.prototypes.temperature``; ``pgcl.temperature = ...`` sets both.

        Args:
            dim: width of the rows, D.
            batch_size: rows of a view in one step; of all processes together, or of this one with
                ``gather=False``.
            steps: training forwards of the whole run.
            temperature: tau of the contrast.
            options: all others of :class:`PGCLLoss`; they go before what is set here.

        Examples:
            >>> import torch
            >>> from pgcl_losses import PGCLLoss
            >>> _ = torch.manual_seed(0)
            >>> graphs, encoder = torch.randn(64, 32), torch.nn.Linear(32, 16)
            >>> pgcl = PGCLLoss.recommended(dim=16, batch_size=64, steps=8)
            >>> optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()])
            >>> for step in range(8):
            ...     if step == pgcl.lead_steps:
            ...         _ = pgcl.prototypes.start_from_(encoder(graphs))  # rows of many batches
            ...     views = (encoder(graphs + 0.1 * torch.randn(64, 32)) for _ in range(2))
            ...     optimizer.zero_grad()
            ...     pgcl(*views).backward()
            ...     optimizer.step()
            >>> pgcl.num_prototypes, pgcl.lead_steps
            (21, 6)

        """
        check_count("batch_size", batch_size, minimum=1)
        check_count("steps", steps, minimum=1)
        check_scale("temperature", temperature)
        chosen: dict[str, Any] = {
            "num_prototypes": max(2, min(1000, batch_size // 3)),
            "consistency_weight": min(1.0, 0.2 / temperature),
            "lead_steps": min(round(0.75 * steps), steps - 1),
        }
        pgcl = cls(dim, temperature=temperature, **(chosen | options))
        pgcl.prototypes.temperature = min(temperature, 0.2)
        return pgcl

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.shared:
            for part in self._parts():
                setattr(part, name, value)

    def forward(
        self, *views: Tensor, negatives: Negatives | None = None, **others: NoReturn
    ) -> Tensor:
        """The loss; ``negatives`` is for this call alone, instead of the option of that name."""
        if others:  # there is no other name; they are taken for the sake of a helpful error
            raise TypeError(_wrong_names(others, self.dim))
        return self.untraced(self._compute)(views, negatives)[0]

    if TYPE_CHECKING:
        __call__ = forward

    def terms(self, *views: Tensor, negatives: Negatives | None = None) -> PGCLTerms:
        """The loss with its two terms and the assignments, for logging."""
        loss, contrast, consistency, batch = self.untraced(self._compute)(views, negatives)
        cosine = mean_cosine(batch.embeddings.detach())
        return PGCLTerms(loss, contrast, consistency, batch.own_assignments(), cosine)

    def _compute(
        self, views: tuple[Tensor, ...], negatives: Negatives | None
    ) -> tuple[Tensor, Tensor, Tensor, AssignedBatch]:
        """The loss, its contrast and its consistency, and the batch."""
        batch: AssignedBatch = self.prototypes(self._batch(views, negatives))
        contrast = self.contrast(batch)
        consistency = self.consistency(batch)
        if self.training and batch.ranks.rank == 0 and can_look(batch.embeddings):
            self._watch.look(
                self.prototypes,
                batch,
                learning=self.consistency_weight > 0,
                excluding=self.contrast_weight > 0 and self._excludes_clusters(),
            )
        weighted = contrast if self.contrast_weight == 1 else self.contrast_weight * contrast
        loss = torch.add(weighted, consistency, alpha=self.consistency_weight)
        return loss, contrast, consistency, batch

    def _batch(self, views: tuple[Tensor, ...], negatives: Negatives | None) -> Batch:
        """The unit embeddings of all views, of this process or of all."""
        check = partial(self._check, views, negatives)
        this_call = {} if negatives is None else {"contrast.negatives": negatives}
        ranks = self.agree(check, views, lambda: {**self.prototypes.state(), **this_call})
        return batch_of(ranks, views, self.prototypes.weight)._replace(negatives=negatives)

    def _check(
        self, views: tuple[Tensor, ...], negatives: Negatives | None, may_lack_rows: bool
    ) -> None:
        check_view_count(views)
        check_views([(f"z{v}", z) for v, z in enumerate(views, 1)], may_lack_rows=may_lack_rows)
        weight = self.prototypes.weight
        check_prototypes("prototypes.weight", weight, "z1", views[0], type(self).__name__)
        self.prototypes.check_call(len(views))
        self._check_window()
        if negatives is not None:
            check_choice("negatives", negatives, NEGATIVES)
        check_engine(getattr(self.contrast, "engine", "auto"), views[0])

    def _check_window(self) -> None:
        if isinstance(self.contrast, PrototypeReweightedNCE):
            self.contrast.check_window(self.prototypes.heads)

    def _excludes_clusters(self) -> bool:
        """Whether a cluster as a whole is left out."""
        contrast = self.contrast
        if not isinstance(contrast, PrototypeReweightedNCE):
            return False
        return contrast.exclude_same_cluster and not contrast.soft_clusters

    def _parts(self) -> list[LossModule]:
        return [part for part in self.children() if isinstance(part, LossModule)]

    def facts(self) -> dict[str, Any]:
        own = super().facts()
        for name, part in self.named_children():
            facts = part.facts() if isinstance(part, LossModule) else {"type": type(part).__name__}
            own |= {f"{name}.{fact}": value for fact, value in facts.items()}
        return own


def _wrong_names(names: Iterable[str], dim: int) -> str:
    """What to say of a call with arguments by these names."""
    got = f"PGCLLoss takes views without names, and negatives=, but got {', '.join(names)}"
    if "pos_mask" not in names:
        return got
    return (
        f"{got}: for the contrast models of PyGCL make PGCLContrastLoss(dim={dim}), of "
        "pgcl_losses.adapters.pygcl, in its place"
    )
