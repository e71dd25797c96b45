"""PGCL, the whole: reweighted contrast + lambda * consistency, with its prototypes."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgcl_losses._checks import (
    check_flag,
    check_process_group,
    check_prototypes,
    check_views,
    check_weight,
)
from pgcl_losses._watch import Watch, can_look
from pgcl_losses.consistency import ConsistencyLoss, swapped_cross_entropy
from pgcl_losses.contrast import PrototypeReweightedNCE
from pgcl_losses.engine import check_engine
from pgcl_losses.gather import Ranks, agree, count_ranks
from pgcl_losses.prototypes import Assignment, SinkhornPrototypes, split_views
from pgcl_losses.rows import computing_dtype, full_precision, unit_rows


class PGCLTerms(NamedTuple):
    """The loss and what it is made of."""

    loss: Tensor
    contrast: Tensor
    consistency: Tensor
    assignments: tuple[Assignment, ...]


class PGCLLoss(nn.Module):
    r"""The whole of PGCL: reweighted contrast + :math:`\lambda` consistency, with its prototypes.

    The prototypes are parameters of this module: give them to the optimizer, beside the encoder's.

    Args:
        dim: width of the rows, D.
        num_prototypes: how many of them, K.
        consistency_weight: lambda; 0 leaves the contrast alone.
        contrast_weight: 0 leaves the consistency alone.
        temperature: tau of both the contrast and the prediction.
        epsilon, iterations, queue_size, freeze_steps: see :class:`SinkhornPrototypes`.
        weighting, exclude_same_cluster, negatives, engine: see :class:`PrototypeReweightedNCE`.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value per row (2N, view 1 first).
        gather: with several processes, one loss over the batches of all of them: its mean over
            processes, and the mean of its gradients, are those of one process on the whole batch.
            ``gather=False`` gives each process the loss of its own batch.
        process_group: the processes meant by ``gather``; all of them by default.

    With several processes every one has to call the loss, and its backward, the same number of
    times; a batch may be empty on some of them. The loss is then differentiable once.

    Warns, once each, of prototypes that no optimizer moves, of batches smaller than K, and of one
    cluster that has nearly all rows; not in compiled graphs and CUDA graphs, where Python does not
    come by. To silence: ``warnings.filterwarnings("ignore", "PGCLLoss")``.

    Shape:
        - z1, z2: ``[N, D]``; row i of both is graph i, of any length up to 1e18
        - output: scalar, or ``[2N]`` for ``reduction="none"``

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

    def __init__(
        self,
        dim: int,
        num_prototypes: int = 10,
        *,
        consistency_weight: float = 6.0,
        contrast_weight: float = 1.0,
        temperature: float = 0.2,
        epsilon: float = 0.05,
        iterations: int = 3,
        queue_size: int = 0,
        freeze_steps: int = 0,
        weighting: str = "prototype",
        exclude_same_cluster: bool = True,
        negatives: str = "all",
        reduction: str = "mean",
        engine: str = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.gather = check_flag("gather", gather)
        check_process_group("process_group", process_group)
        self.process_group = process_group
        self.consistency_weight = check_weight("consistency_weight", consistency_weight)
        self.contrast_weight = check_weight("contrast_weight", contrast_weight)
        self.prototypes = SinkhornPrototypes(
            dim,
            num_prototypes,
            temperature=temperature,
            epsilon=epsilon,
            iterations=iterations,
            queue_size=queue_size,
            freeze_steps=freeze_steps,
        )
        self.contrast = PrototypeReweightedNCE(
            temperature=temperature,
            weighting=weighting,
            exclude_same_cluster=exclude_same_cluster,
            negatives=negatives,
            reduction=reduction,
            engine=engine,
        )
        self.consistency = ConsistencyLoss(reduction=reduction)
        self._watch = Watch()

    def extra_repr(self) -> str:
        return (
            f"consistency_weight={self.consistency_weight}, "
            f"contrast_weight={self.contrast_weight}, gather={self.gather}"
        )

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return self.terms(z1, z2).loss

    def terms(self, z1: Tensor, z2: Tensor) -> PGCLTerms:
        """The loss with its two terms and the assignments, for logging."""
        if not self.gather or count_ranks(self.process_group) == 1:
            self._check(z1, z2)
            return self._terms_among(Ranks((len(z1),)), z1, z2)
        terms = self._terms_of_batch
        if torch.compiler.is_compiling():
            # Collectives are not to be traced, nor is what would be traced anew for each number of
            # rows on each rank. As a decorator this imports the whole compiler with the package.
            terms = torch.compiler.disable(terms)  # type: ignore[no-untyped-call]  # torch's gap
        return terms(z1, z2)

    def _terms_of_batch(self, z1: Tensor, z2: Tensor) -> PGCLTerms:
        return self._terms_among(self._agreed_ranks(z1, z2), z1, z2)

    def _terms_among(self, ranks: Ranks, z1: Tensor, z2: Tensor) -> PGCLTerms:
        dtype = computing_dtype(z1, self.prototypes.weight)
        with full_precision(z1.device):
            rows = ranks.gather(unit_rows(torch.cat([z1, z2]), dtype).view(2, *z1.shape))
            prototypes = ranks.average_gradient(self.prototypes.unit_prototypes(dtype))
            of_all = self.prototypes.assign_views(rows, prototypes)  # [2, N, ...]
            if self.training and ranks.rank == 0 and can_look(rows):
                self._watch.look(
                    self.prototypes,
                    of_all.clusters,
                    learning=self.consistency_weight > 0,
                    excluding=self.contrast_weight > 0 and self.contrast.exclude_same_cluster,
                )
            contrast = self.contrast.per_query(
                rows.flatten(0, 1), of_all.clusters.flatten(), prototypes, ranks.mine()
            )
            stacked = Assignment(*map(ranks.own, of_all))  # [2, n, ...]
            consistency = swapped_cross_entropy(stacked.log_probs, stacked.targets).flatten()
            contrast = ranks.reduce(contrast, self.contrast.reduction)
            consistency = ranks.reduce(consistency, self.consistency.reduction)
            loss = torch.add(
                self.contrast_weight * contrast, consistency, alpha=self.consistency_weight
            )
        return PGCLTerms(loss, contrast, consistency, split_views(stacked))

    def _agreed_ranks(self, z1: Tensor, z2: Tensor) -> Ranks:
        """Those who share the batch: all of them get the same error or none gets one."""
        weight = self.prototypes.weight
        problem = None
        try:
            self._check(z1, z2, may_lack_rows=True)
        except (TypeError, ValueError, ImportError) as error:
            problem = error
        facts = {type(part).__name__: repr(part) for part in self.children()}
        facts["PGCLLoss"] = f"PGCLLoss({self.extra_repr()})"
        facts["mode"] = f"training={self.training}, gradients={torch.is_grad_enabled()}"
        facts["prototypes"] = f"{weight.dtype} with requires_grad={weight.requires_grad}"
        num_rows = 0
        if problem is None:
            num_rows = len(z1)
            learns = z1.requires_grad or z2.requires_grad
            facts["rows"] = f"{z1.dtype} with requires_grad={learns}"
        # NCCL sends nothing from a CPU, where half of a wrong input may be.
        devices = [t.device for t in (weight, z1) if isinstance(t, Tensor)]
        device = max(devices, key=lambda device: device.type != "cpu")
        state = [weight, *self.prototypes.buffers()]
        return agree(num_rows, facts, problem, state, device, self.process_group)

    def _check(self, z1: Tensor, z2: Tensor, may_lack_rows: bool = False) -> None:
        check_views([("z1", z1), ("z2", z2)], may_lack_rows=may_lack_rows)
        check_prototypes("prototypes.weight", self.prototypes.weight, "z1", z1)
        check_engine(self.contrast.engine, z1)
