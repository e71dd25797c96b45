"""InfoNCE between the views of each graph (Eq. 3), with a weight for each pair if wanted.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. The sums
over pairs are in `engine/`.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses._checks import check_choice, check_scale, check_views
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import (
    backward_alone,
    full_precision,
    on_cpu,
)
from pgcl_losses.batch import AnyBatch, Batch, Negatives, batch_of, given_batch
from pgcl_losses.engine import (
    ENGINE_CHOICES,
    Engine,
    Pairs,
    Weight,
    check_engine,
    log_weighted_sums,
)
from pgcl_losses.reduction import REDUCTIONS, Reduction, reduce

NEGATIVES = get_args(Negatives)

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0


class InfoNCE(LossModule):
    r"""InfoNCE (NT-Xent), at any batch size and exact on many processes.

    The mean over all 2N queries i of

    .. math:: -\log \frac{e^{s_{ii'} / \tau}}{e^{s_{ii'} / \tau} + \sum_j e^{s_{ij} / \tau}}

    with s the cosine of two rows, i' the positive, the other view of the query's graph, and j over
    the rows of all other graphs. With more than two views, the mean over a query's positives.

    Args:
        temperature: tau.
        negatives: ``"all"`` takes them from all views, ``"cross"`` only from the other views.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value per row (V * N, view 1 first).
        engine: how the pairs are computed; see :class:`PrototypeReweightedNCE`.
        gather, process_group: with several processes, the loss over the batches of all of them;
            see :class:`PGCLLoss`.

    Shape:
        - views: two or more, ``[N, D]`` each; row i of every view is graph i, with a norm of at
          most 1e18
        - output: scalar, or ``[V * N]`` for ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import InfoNCE
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> InfoNCE()(z1, z2)
        tensor(0.2133)

    """

    options: ClassVar[dict[str, Check]] = {
        "temperature": check_scale,
        "negatives": partial(check_choice, choices=NEGATIVES),
        "reduction": partial(check_choice, choices=REDUCTIONS),
        "engine": partial(check_choice, choices=ENGINE_CHOICES),
    }

    temperature: float
    negatives: Negatives
    reduction: Reduction
    engine: Engine

    def __init__(
        self,
        temperature: float = 0.2,
        negatives: Negatives = "all",
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        *,
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.negatives = negatives
        self.reduction = reduction
        self.engine = engine
        self.gather = gather
        self.process_group = process_group

    def forward(self, *views: Tensor | AnyBatch) -> Tensor:
        """The loss of two views or more, or of a batch of them."""
        return self.untraced(self._loss)(views)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, views: tuple[Tensor | AnyBatch, ...]) -> Tensor:
        batch = given_batch(views) or self._batch(views)
        return weighted_info_nce(
            batch, (), self.temperature, self.negatives, self.engine, self.reduction
        )

    def _batch(self, views: tuple[Any, ...]) -> Batch:
        ranks = self.agree(partial(self._check, views), views)
        return batch_of(ranks, views)

    def _check(self, views: tuple[Any, ...], may_lack_rows: bool) -> None:
        check_view_count(views)
        check_views([(f"z{v}", z) for v, z in enumerate(views, 1)], may_lack_rows=may_lack_rows)
        check_engine(self.engine, views[0])


def check_view_count(views: Sequence[object]) -> None:
    if len(views) < 2:
        listed = len(views) == 1 and isinstance(views[0], Sequence)
        raise TypeError(
            f"views must be two or more Tensors of shape [N, D], but got {len(views)}"
            + (", a list: unpack it, *views" if listed else "")
        )


def weighted_info_nce(
    batch: AnyBatch,
    weights: tuple[Weight, ...],
    temperature: float,
    negatives: Negatives,
    engine: Engine,
    reduction: Reduction,
) -> Tensor:
    """InfoNCE of a batch's rows ``[V, N, D]`` with weighted negatives.

    A query's loss is the mean over its positives, one in each other view.
    """
    rows = batch.embeddings
    num_views = len(rows)
    across_views = (batch.negatives or negatives) == "cross"
    with full_precision(rows.device):
        pairs = Pairs(rows.flatten(0, 1), num_views, across_views, weights)
        log_sums = log_weighted_sums(pairs, temperature, engine, batch.ranks).view(rows.shape[:2])
        of_positives = [
            _with_positive(log_sums, rows, temperature, shift) for shift in range(1, num_views)
        ]
        losses = of_positives[0] if num_views == 2 else torch.stack(of_positives).mean(0)
        return reduce(losses, reduction, batch.ranks)


def _with_positive(log_sums: Tensor, rows: Tensor, temperature: float, shift: int) -> Tensor:
    """-log( e^{s_ip / tau} / (e^{s_ip / tau} + S_i) ), with p ``shift`` views away: ``[V, N]``."""
    gaps: Any = _gaps
    if len(rows) == 2 and backward_alone() and not on_cpu(rows):
        gaps = _Gaps.apply
    return F.softplus(gaps(log_sums, rows, temperature, shift), threshold=_LINEAR_FROM)


def _gaps(log_sums: Tensor, rows: Tensor, temperature: float, shift: int) -> Tensor:
    """log S_i - s_ip / tau."""
    if len(rows) == 2:
        first, second = rows.unbind()
        positives = (first * second).sum(-1)  # [N] of both
    else:
        positives = (rows * rows.roll(shift, 0)).sum(-1)
    return torch.sub(log_sums, positives, alpha=1 / temperature)


class _Gaps(torch.autograd.Function):
    """`_gaps` of two views, its gradient in fewer steps, as a GPU wants."""

    @staticmethod
    def forward(ctx: Any, log_sums: Tensor, rows: Tensor, temperature: float, shift: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.temperature = temperature
        return _gaps(log_sums, rows, temperature, shift)

    @staticmethod
    def backward(ctx: Any, d_gaps: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        d_positives = d_gaps.sum(0) / -ctx.temperature  # [N]
        return d_gaps, rows.roll(1, 0) * d_positives.unsqueeze(1), None, None
