"""Silent failures of a training: one warning reports each of them, and names the fix.

Each module watches what it knows: the contrasts the embeddings that they are called with and their
own value, `SinkhornPrototypes` the clusters. So a contrast and its prototypes warn by hand as they
do within PGCLLoss, which checks the embeddings of its views itself.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from pgcl_losses.base.modes import can_be_read, is_batched, is_eager
from pgcl_losses.base.normalize import unit_vectors
from pgcl_losses.base.warnings import warn
from pgcl_losses.consistency import consistency_ratio
from pgcl_losses.diagnostics import mean_cosine
from pgcl_losses.pairs.batch import Batch

# For how many training forwards a check waits. Gradients are rarely accumulated over more batches
# than this, and a short training has hardly more steps.
_PATIENCE = 16
_EVERY = 20  # of this many training forwards, the first three are checked
_SMALL = 8  # a last batch is small if it has no more than this part of the other batches
_FULL = 2  # so many batches of one size come before it; with one, two loaders may take turns

IsBad = Callable[..., bool]  # takes the values of a check; returns whether they are bad

_TEXTS = {
    "gradient": f"the embeddings had no gradient in {_PATIENCE} training forwards, so the encoder "
    "does not learn: take it out of torch.no_grad() and its embeddings out of detach(). If "
    'prototypes or temperature alone are to learn: warnings.filterwarnings("ignore", "pgcl_losses: '
    'the embeddings had no gradient")',
    "views": "two views are one tensor, so every query is its own positive: augment and encode "
    "twice",
    "last": "a batch of {} comes among batches of {}, and its step counts as much as any "
    "other, which costs accuracy: give the loader drop_last=True, or make batches of equal size",
    "size": "{} graphs of a batch and {} of the queue are balanced over {} prototypes, which is "
    "too many: use fewer prototypes or larger batches",
    "finite": "the embeddings hold NaN or inf: check the input of the encoder and its gradients",
    "zero": "the contrast is 0, as no query has both positives and negatives: use larger batches, "
    "memory_size or more than one prototype; give one label to all embeddings of a graph or class, "
    "and another label to others. If all embeddings are in one cluster, normalise in the encoder",
    "far": "the contrast is 0 and teaches nothing, as the positives of all queries are far above "
    "their negatives: use a higher temperature, or cosines in place of dot products",
    "motion": f"the prototypes have not moved in {_PATIENCE} training forwards: does the optimizer "
    "have them? Adam([*encoder.parameters(), *pgcl.parameters()]), or *prototypes.parameters(). If "
    "you set their gradient to None to freeze them: give freeze_steps",
    "collapse": "the embeddings are collapsed: their mean cosine is {:.2f} and does not fall, and "
    "no prototype tells them apart (the consistency is {:.0%} of log K). Train with InfoNCE first, "
    "and then with PGCL; or initialise the prototypes from embeddings, before training, by "
    "start_from_(embeddings), or set balance_predictions=True",
}


class Watch:
    """Checks the training forwards of one module, without synchronising with a device."""

    def __init__(self) -> None:
        self.steps = 0
        self.sizes: deque[int] = deque(maxlen=_FULL + 1)  # of the latest batches, in graphs
        self.last_batches: Counter[tuple[int, int]] = Counter()  # by their size and of the others
        self.start: tuple[int, Tensor] | None = None  # step and directions of prototypes, [K, D]
        self.gradients = 0  # how many backwards have reached the prototypes, up to _PATIENCE
        self.pushed: Tensor | None = None  # [] the sum of the absolute values of these gradients
        self.is_motion_known = False
        self.first_cosine = math.nan  # the mean cosine when it was first measured
        self.is_zero = False  # whether the contrast was 0 when it was last checked
        self.bad_in_a_row: Counter[str] = Counter()
        self.reported: set[str] = set()
        self.pending: list[tuple[str, int, IsBad, Tensor, torch.cuda.Event | None]] = []

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()  # a copy starts counting anew

    def counts(self, module: nn.Module, batch: Batch, learns: bool) -> bool:
        """Count a forward of the module if it is a training forward, and say whether it is one.

        ``learns``: whether anything may get a gradient. All processes count and check, and not only
        rank 0: where warnings are errors, all must fail, or the others would wait for ever.
        """
        if not (module.training and learns and is_eager(batch.embeddings)):
            return False
        self.steps += 1
        self._read_pending()
        return True

    def is_due(self) -> bool:
        """Whether this training forward is one of those whose values are checked."""
        return 0 < self.steps % _EVERY < 4

    def check_embeddings(self, batch: Batch, views: Sequence[object] = ()) -> None:
        """Check the embeddings of a training forward, and the views or sets that they come from."""
        self._check("gradient", _PATIENCE, not batch.embeddings.requires_grad)
        sizes, size = self.sizes, batch.processes.lengths()[0]
        if sizes and _SMALL * sizes[-1] <= size:
            *before, small = sizes
            if before == [size] * _FULL:  # a new epoch has begun
                self.last_batches[small, size] += 1  # by chance it is not the same twice
                self._check("last", 1, self.last_batches[small, size] > 1, small, size)
        sizes.append(size)
        if self.is_due():
            self.check_views(views)
            total = batch.embeddings.detach().sum()
            self._measure("finite", 1, lambda total: not math.isfinite(total), total)

    def check_views(self, views: Sequence[object]) -> None:
        """Check whether two of the views or sets that a module is called with are one tensor."""
        if self.is_due():
            self._check("views", 3, len(set(map(id, views))) < len(views))

    def check_contrast(self, contrast: Tensor, num_compared: Callable[[], Tensor]) -> None:
        """Check the value of a contrast. The last batch of an epoch may be small, and give 0.

        ``num_compared``: counts the queries ``[]`` that have both positives and negatives, which
        takes as long as the contrast. It is asked for the reason only where the contrast was 0.
        """
        if not self.is_due():
            return
        total = contrast.detach().abs().sum()
        if self.is_zero:
            values = total, num_compared().to(total)
            self._measure("zero", 2, lambda total, number: total == number == 0, *values)
            self._measure("far", 2, lambda total, number: total == 0 < number, *values)
        self._measure("value", 1, self._remember_zero, total)

    def _remember_zero(self, total: float) -> bool:
        self.is_zero = total == 0
        return False  # the reason is not known yet

    def check_clusters(
        self, batch: Batch, weight: Tensor, queue_size: int, freeze_steps: int
    ) -> None:
        """Check a batch that prototypes of some ``weight`` ``[K, D]`` and options have assigned."""
        if batch.prototypes is None or batch.log_probs is None or batch.targets is None:
            return
        num_graphs, in_use = batch.processes.lengths()[0], batch.num_in_use()
        largest = max(batch.heads)
        if isinstance(in_use, list):  # numbers on a GPU are not read
            is_readable = can_be_read(in_use[0])
            largest = max(int(number) for number in in_use) if is_readable else 0
        # A single prototype cannot learn.
        if not self.is_motion_known and batch.prototypes.requires_grad and largest > 1:
            if self.gradients < _PATIENCE:
                batch.prototypes.register_hook(self._count_gradient)  # type: ignore[no-untyped-call]  # torch has no type there
            self._check_motion(weight, freeze_steps)
        if not self.is_due():
            return
        is_small = 1 < num_graphs < largest - queue_size
        self._check("size", 3, is_small, num_graphs, queue_size, largest)
        if num_graphs >= largest > 1 and batch.clusters is not None:
            with torch.no_grad():
                log_probs, targets = batch.views(batch.log_probs), batch.views(batch.targets)
                ratio = consistency_ratio(log_probs, targets, in_use)
                # Where all embeddings are in one cluster, the contrast is 0, which is reported.
                several = (batch.clusters != batch.clusters[:1]).any()
                pushed = ratio.new_zeros(()) if self.pushed is None else self.pushed.to(ratio)
                values = mean_cosine(batch.embeddings.detach()), ratio, several, pushed
                self._measure("collapse", 3, self._is_collapsed, *values)

    def _is_collapsed(self, cosine: float, ratio: float, several: float, pushed: float) -> bool:
        """Whether embeddings lie in one direction, and have not left it since the first check.

        In many good trainings embeddings begin like this, while the prototypes are still random.
        """
        if self.steps < _EVERY:
            self.first_cosine = cosine if math.isnan(self.first_cosine) else self.first_cosine
            return False
        stays = cosine >= self.first_cosine - 1e-3
        return stays and cosine > 0.9 and ratio > 0.95 and several > 0 and pushed > 0

    @unserializable_hook  # type: ignore[untyped-decorator]  # so that a pickle of its tensor is silent
    def _count_gradient(self, d_prototypes: Tensor) -> None:
        if is_batched(d_prototypes):  # outside of vmap it means nothing
            return
        self.gradients += 1
        pushed = d_prototypes.detach().abs().sum()
        self.pushed = pushed if self.pushed is None else pushed + self.pushed.to(pushed)

    @torch.no_grad()
    def _check_motion(self, weight: Tensor, freeze_steps: int) -> None:
        """Check once whether the optimizer moves prototypes to which backwards gave gradients.

        Without a consistency they get no gradient, or zeros, and rightly never move.
        """
        if self.start is None:
            self.start = self.steps, unit_vectors(weight, torch.float32)
        first, start = self.start
        is_time = self.steps - first >= _PATIENCE + freeze_steps
        if is_time and self.gradients >= _PATIENCE and self.pushed is not None:
            self.is_motion_known, self.start = True, None
            directions = unit_vectors(weight, torch.float32)
            moved = (directions - start.to(directions.device)).abs().max()
            self._measure("motion", 1, _has_not_moved, moved, self.pushed)

    def _check(self, name: str, patience: int, is_bad: bool, *values: object) -> None:
        """Warn, once only, if a check was bad ``patience`` times in a row."""
        self.bad_in_a_row[name] = self.bad_in_a_row[name] + 1 if is_bad else 0
        if self.bad_in_a_row[name] >= patience and name not in self.reported:
            self.reported.add(name)
            warn(_TEXTS[name].format(*values))

    def _measure(self, name: str, patience: int, is_bad: IsBad, *values: Tensor) -> None:
        """Check values ``[]`` on a device, after they have been copied to the host."""
        copied, arrived = torch.stack(values).to("cpu", non_blocking=True), None
        if values[0].is_cuda:
            arrived = torch.cuda.current_stream(values[0].device).record_event()
        self.pending.append((name, patience, is_bad, copied, arrived))
        self._read_pending()

    def _read_pending(self) -> None:
        """Check the values that have arrived on the host, in order, without waiting."""
        while self.pending:
            name, patience, is_bad, copied, arrived = self.pending[0]
            if arrived is not None and not arrived.query():  # type: ignore[no-untyped-call]  # torch has no type there
                return
            del self.pending[0]
            values = copied.tolist()
            self._check(name, patience, is_bad(*values), *values)


def _has_not_moved(moved: float, pushed: float) -> bool:
    return moved < 1e-6 and pushed > 0
