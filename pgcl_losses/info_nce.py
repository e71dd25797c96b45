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
from pgcl_losses._normalize import full_precision
from pgcl_losses.batch import (
    REDUCTIONS,
    AnyBatch,
    Batch,
    Negatives,
    Reduction,
    batch_of,
    given_batch,
)
from pgcl_losses.engine.contract import Factors, Pairs, PairWeight, Table, compared_sets
from pgcl_losses.engine.dispatch import (
    ENGINE_CHOICES,
    Engine,
    check_engine,
    choice_facts,
    log_weighted_sums,
)

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
        temperature, negatives, reduction, engine, gather, process_group: as in :class:`PGCLLoss`.

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
        self._assign_options(locals())

    def forward(self, *views: Tensor | AnyBatch) -> Tensor:
        """The loss of two views or more, or of a batch of them."""
        return self.untraced(self._loss)(views)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, views: tuple[Tensor | AnyBatch, ...]) -> Tensor:
        batch = given_batch(views) or self._batch(views)
        return weighted_info_nce(
            batch, self.temperature, self.negatives, self.engine, self.reduction
        )

    def _batch(self, views: tuple[Any, ...]) -> Batch:
        check = partial(check_loss_views, views, self.engine)
        ranks = self.agree(check, views, lambda: choice_facts(self.engine, views[0]))
        return batch_of(ranks, views)


def check_loss_views(views: Sequence[Any], engine: str, may_lack_rows: bool) -> None:
    """Views of the same graphs, two or more, that the engine can take."""
    if len(views) < 2:
        listed = len(views) == 1 and isinstance(views[0], Sequence)
        raise TypeError(
            f"views must be two or more Tensors of shape [N, D], but got {len(views)}"
            + (", a list: unpack it, *views" if listed else "")
        )
    check_views([(f"z{v}", z) for v, z in enumerate(views, 1)], may_lack_rows=may_lack_rows)
    check_engine(engine, views[0])


def weighted_info_nce(
    batch: AnyBatch,
    temperature: float,
    negatives: Negatives,
    engine: Engine,
    reduction: Reduction,
    by_cluster: Table | Factors | None = None,
    by_cosine: PairWeight | None = None,
) -> Tensor:
    """InfoNCE of a batch's embeddings ``[V, N, D]`` with weighted negatives.

    A query's loss is the mean over its positives, one in each other view.
    """
    embeddings = batch.embeddings
    num_views, num_items = embeddings.shape[:2]
    compared = compared_sets(num_views, negatives)
    with full_precision(embeddings.device):
        pairs = Pairs(
            embeddings.flatten(0, 1),
            (num_items,) * num_views,
            compared,
            by_cluster=by_cluster,
            by_cosine=by_cosine,
        )
        log_s = log_weighted_sums(pairs, temperature, engine, batch.ranks)
        log_s = log_s.view(num_views, num_items)
        of_positives = [
            _with_positive(log_s, embeddings, temperature, shift) for shift in range(1, num_views)
        ]
        losses = of_positives[0] if num_views == 2 else torch.stack(of_positives).mean(0)
        return batch.ranks.reduce(losses, reduction)


def _with_positive(log_s: Tensor, embeddings: Tensor, temperature: float, shift: int) -> Tensor:
    """-log( e^{s_ip / tau} / (e^{s_ip / tau} + S_i) ), with p ``shift`` views away: ``[V, N]``."""
    if len(embeddings) == 2:
        first, second = embeddings.unbind()
        positives = (first * second).sum(-1)  # [N] of both
    else:
        positives = (embeddings * embeddings.roll(shift, 0)).sum(-1)
    gaps = torch.sub(log_s, positives, alpha=1 / temperature)
    return F.softplus(gaps, threshold=_LINEAR_FROM)
