"""Which negatives do the work: how hard a loss pushes each of them away, added up by groups."""

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.arguments import check_arguments
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.contrast import PrototypeReweightedNCE
from pgcl_losses.info_nce import InfoNCE, WeightedInfoNCE
from pgcl_losses.pairs.batch import Batch, of_all_sets
from pgcl_losses.pairs.chunks import cut
from pgcl_losses.pairs.given import Labels, of_sets
from pgcl_losses.pairs.lists import losses_of_lists, plain_products, products_in_parts
from pgcl_losses.pairs.partners import find_partners, lowest
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows, all_rows
from pgcl_losses.pairs.sums import derivatives_by_scores, separated, sum_up
from pgcl_losses.pgcl import PGCLLoss

TEMPERATURES = (0.1, 0.2, 0.5, 1.0, 2.0)
_WITHIN, _GROUP = 2, 3  # the places of the totals of two groups of pairs
_NUM_BINS = 20
# So many queries, evenly spaced, tell of other temperatures and of cosines, which take most time.
_MOST_QUERIES = 2048


class Repulsion(NamedTuple):
    """How the push of a loss spreads over its negatives: the result of :func:`repulsion`.

    A share is a fraction of the push that all negatives of all queries get together. It is NaN
    without negatives, without classes, and if pushes and pulls of negatives cancel out. What is
    left out within or between classes is NaN where no negative lies there.

    Example:
        >>> report = repulsion(InfoNCE(), torch.randn(64, 8), torch.randn(64, 8))
        >>> report.hardest.shape, report.by_cosine.shape
        (torch.Size([10, 2]), torch.Size([20]))
    """

    loss: str
    num_embeddings: int
    num_classes: int
    of_negatives: float  # which fraction of the negatives have the query's class
    within: float  # the share of these negatives
    unknown: float  # the share of pairs of unknown classes: past embeddings, classes below 0
    plain_within: float  # `within` of the same loss without weights and masks
    left_out_within: float  # of its push within classes, the fraction on pairs that are left out
    left_out_between: float  # the same between classes
    pulled: float  # the sum of pushes below 0, as a fraction of the sum of all others
    by_temperature: dict[float, float]  # `within` at other temperatures, on the same embeddings
    by_cosine: Tensor  # [20] the shares by the cosine of a pair, from -1 to 1; [0] of dot products
    # [k, 2] the pairs (query, key) that are pushed hardest, as positions in the concatenated views
    hardest: Tensor
    scores: Tensor  # [k] their cosines (or dot products)

    def numbers(self) -> dict[str, float]:
        """Return the numbers to log."""
        numbers = {name: x for name, x in self._asdict().items() if isinstance(x, float)}
        return numbers | {f"within at {tau:g}": x for tau, x in self.by_temperature.items()}

    def __str__(self) -> str:
        text = f"{self.loss}, {self.num_embeddings} embeddings"
        if self.num_classes == 0:
            return f"{text}\nNo class is known: look at `hardest` and `by_cosine`."
        text += f" in {self.num_classes} {'class' if self.num_classes == 1 else 'classes'}\n"
        if math.isnan(self.within):
            return text + "no negatives, or no net push"
        text += f"{self.of_negatives:.0%} of the negatives have the query's class, and get "
        text += f"{self.within:.0%} of the push.\n"
        left_out = {"within": self.left_out_within, "between": self.left_out_between}
        if any(fraction > 0 for fraction in left_out.values()):
            parts = (f"{x:.0%} {name} classes" for name, x in left_out.items() if x == x)  # no NaN
            text += f"Without weights and masks they get {self.plain_within:.0%}. Of that push the "
            text += f"loss leaves out\n{' and '.join(parts)}.\n"
        if self.unknown > 0:
            text += f"{self.unknown:.0%} of the push is on pairs of unknown classes.\n"
        if self.pulled > 0:
            text += f"Some negatives are pulled, by {self.pulled:.0%} of the push on others.\n"
        text += "temperature" + "".join(f"{tau:>7g}" for tau in self.by_temperature)
        shares = "".join(f"{share:>7.0%}" for share in self.by_temperature.values())
        return f"{text}\nof the push{shares}"


class _Rows:
    """Some queries with all their keys."""

    def __init__(self, pairs: Pairs, inputs: Inputs, rows: Rows) -> None:
        queries, keys = rows.embeddings(pairs, inputs.z)
        self.rows, self.scores = rows, queries @ torch.cat(keys).T  # [I, K]
        self.partners = find_partners(pairs, rows, inputs.z, inputs.positive_weights)

    def pick(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pick the values of queries ``[I, 1]`` and of keys ``[K]``."""
        of_queries, of_keys = self.rows.pick(values)
        return of_queries.unsqueeze(1), of_keys

    def are_negatives(self, pairs: Pairs, tau: float) -> Tensor:
        """Which keys are negatives, bool ``[I, K]``; none of a query without positives."""
        x, w = self.scores / tau, self.partners.positives.weights
        _, logits, _ = separated(pairs, self.rows, x, x, self.partners, tau)
        are_negatives = logits > lowest(logits.dtype) / 2
        if w is not None:
            are_negatives &= (self.partners.positives.sum(w) > 0).unsqueeze(1)
        return are_negatives

    def push(self, pairs: Pairs, tau: float) -> Tensor:
        """The derivatives of losses by the scores / temperature of negatives, ``[I, K]``."""
        x = self.scores / tau
        (x, log_s, log_count), powers = sum_up(pairs, self.rows, x, self.partners, tau)
        with torch.enable_grad():
            log_s = log_s.requires_grad_()
            losses, _ = pairs.form.losses(log_s, x, self.partners.positives, tau, log_count)
            (d_log_s,) = torch.autograd.grad(losses.sum(), log_s)
        given = pairs, self.rows, self.partners, powers, d_log_s, None, 1.0
        return derivatives_by_scores(*given, may_overwrite=True)[0]


class _List:
    """The listed negatives of all queries."""

    def __init__(self, pairs: Pairs, inputs: Inputs) -> None:
        assert pairs.negative_pairs is not None
        self.inputs, (self.query, self.key) = inputs, pairs.negative_pairs
        self.scores = products_in_parts(inputs.z, self.query, self.key).unsqueeze(1)  # [P, 1]

    def pick(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pick the values of the query and of the key of each pair, ``[P, 1]``."""
        return values[self.query].unsqueeze(1), values[self.key].unsqueeze(1)

    def are_negatives(self, pairs: Pairs, tau: float) -> Tensor:
        """Which pairs belong to a query with positives, bool ``[P, 1]``."""
        exist = self._losses(pairs, tau, self.scores.squeeze(1))[1]
        return exist.index_select(0, self.query).unsqueeze(1)

    def push(self, pairs: Pairs, tau: float) -> Tensor:
        """The derivatives of losses by the scores / temperature of pairs, ``[P, 1]``."""
        with torch.enable_grad():
            scores = self.scores.squeeze(1).detach().requires_grad_()
            losses, _ = self._losses(pairs, tau, scores)
            (d,) = torch.autograd.grad(losses.sum(), scores)
        return (d * tau).unsqueeze(1)

    def _losses(self, pairs: Pairs, tau: float, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The losses ``[Q]`` for scores ``[P]`` of the pairs, and which queries have positives."""

        def products(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return scores if j is self.key else plain_products(z, i, j)

        inputs = self.inputs._replace(temperature=tau)
        results = losses_of_lists(pairs, inputs, all_rows(pairs), products)
        exist = [torch.ones_like(x, dtype=torch.bool) if e is None else e for x, e in results]
        return torch.cat([losses for losses, _ in results]), torch.cat(exist)


def repulsion(
    loss: InfoNCE | PrototypeReweightedNCE | PGCLLoss,
    *views: Tensor,
    classes: Labels | None = None,
    num_hardest: int = 10,
    **call: Any,
) -> Repulsion:
    r"""Measure which negatives a loss pushes away, and how many of them are false.

    The push of negative j on query i is the derivative of the loss of i by the score
    :math:`s_{ij} / \tau`. Negatives of the query's own class are false negatives. If they get much
    more of the push than they are many, a higher temperature or a mask may help.

    The call is for looking, not for training: it changes no state, draws no random numbers and
    keeps no graph. With several processes it looks at the batch of this process. It takes two to
    three times as long as a step of the loss, and its memory grows linearly with the batch.

    Args:
        loss: an :class:`InfoNCE`, a :class:`PrototypeReweightedNCE` or a :class:`PGCLLoss`.
        views (Tensor): what the loss is called with by position.
        classes (Tensor or sequence of Tensor or None): the class of each embedding, ``[N]`` int64
            for all views or for each set. The loss does not see it. A class below 0 is unknown.
        num_hardest (int): how many of the pairs that are pushed hardest to return.
        call: what the loss is called with by name, such as ``labels=`` or ``metadata=``.

    Examples:
        >>> import torch
        >>> from pgcl_losses import InfoNCE, repulsion
        >>> _ = torch.manual_seed(0)
        >>> classes = torch.arange(300) % 5
        >>> centres = torch.randn(5, 16)[classes]
        >>> z1, z2 = (centres + 1.2 * torch.randn(300, 16) for _ in range(2))
        >>> print(repulsion(InfoNCE(temperature=0.2), z1, z2, classes=classes))
        InfoNCE(temperature=0.2), 600 embeddings in 5 classes
        20% of the negatives have the query's class, and get 59% of the push.
        temperature    0.1    0.2    0.5      1      2
        of the push    78%    59%    36%    27%    23%

    """
    contrast = loss.contrast if isinstance(loss, PGCLLoss) else loss
    if not isinstance(contrast, WeightedInfoNCE):
        expected = "an InfoNCE, a PrototypeReweightedNCE or a PGCLLoss with such a contrast"
        raise TypeError(f"loss must be {expected}, but got {type(contrast).__name__}")
    if isinstance(loss, PGCLLoss) and loss.contrast_weight == 0:
        raise ValueError("contrast_weight is 0, so the loss pushes no negatives")
    check_arguments(f"a call of {type(loss).__name__}", inspect.unwrap(type(loss).forward), call)
    alone = copy.copy(loss)  # with the same parameters and buffers, in this process
    alone.gather = False
    with torch.no_grad(), full_precision(views[0].device):
        batch: Batch = alone.batch_of(views, **call)
        pairs, inputs = contrast.pairs_and_inputs(batch)
        pairs = pairs._replace(learns=True)
        is_unit = getattr(contrast, "similarity", "cosine") == "cosine"
        inputs = inputs.normalized(pairs)
        del batch  # the embeddings as they came
        inputs = inputs._replace(z=inputs.z.detach(), temperature=float(inputs.temperature))
        of_class = _classes(pairs, views, classes, inputs.z.device)
        return _measure(contrast, pairs, inputs, of_class, num_hardest, is_unit)


def _classes(
    pairs: Pairs, views: tuple[Any, ...], classes: Labels | None, device: torch.device
) -> Tensor:
    """The class of each embedding and of past embeddings ``[M + B]``; -1 if it is unknown."""
    num_past = 0 if pairs.memory is None else len(pairs.memory)
    unknown = torch.full((pairs.num_embeddings() + num_past,), -1, device=device)
    if classes is None:
        return unknown
    for of_set in of_sets("classes", classes, views, "[N]"):
        check.clusters(*of_set)
    return torch.cat([of_all_sets(classes, len(views)), unknown[pairs.num_embeddings() :]])


def _parts(pairs: Pairs, inputs: Inputs) -> Iterator[_Rows | _List]:
    """Chunks of rows, or the listed negatives."""
    if pairs.negative_pairs is not None:
        yield _List(pairs, inputs)
        return
    for chunk in cut(pairs, all_rows(pairs), inputs.z):
        yield _Rows(pairs, inputs, chunk)


def _hardest(part: _Rows | _List, push: Tensor, positions: Tensor, num: int) -> list[Tensor]:
    """Return the largest of pushes ``[I, K]``, their scores, and their pairs ``[k, 2]``."""
    rows = push.amax(1).topk(min(num, len(push))).indices  # each of the k largest is in one of them
    largest, flat = push[rows].flatten().topk(min(num, rows.numel() * push.shape[1]))
    row, column = rows[flat // push.shape[1]], flat % push.shape[1]
    ends = [x.expand_as(push)[row, column] for x in part.pick(positions)]
    return [largest, part.scores[row, column], torch.stack(ends, dim=1)]


def _measure(
    loss: WeightedInfoNCE,
    pairs: Pairs,
    inputs: Inputs,
    of_class: Tensor,
    num_hardest: int,
    is_unit: bool,
) -> Repulsion:
    """Add up the pushes of all negatives, by groups."""
    tau, z, form = inputs.temperature, inputs.z, pairs.form._replace(debias=0.0)
    plain = pairs._replace(
        cluster_weights=None, cosine_weights=None, score_mod=None, hardness=0.0, form=form
    )
    can_pull = pairs.score_mod is not None or max(pairs.hardness, pairs.form.debias) > 0
    is_plain = pairs.cluster_weights is None and pairs.cosine_weights is None and not can_pull
    # Totals by name: of all pairs, of values below 0, within classes, and of one other group. No
    # total is a difference of others: where a group has no pairs, it would be what was rounded.
    totals = defaultdict[Any, Tensor](lambda: z.new_zeros(4, dtype=torch.float64))
    nothing = z.new_zeros(())
    has_unknown = bool((of_class < 0).any())
    by_cosine = z.new_zeros(_NUM_BINS if is_unit else 0)
    hardest = [z.new_zeros(0), z.new_zeros(0), of_class.new_zeros(0, 2)]
    positions = torch.arange(len(of_class), device=z.device)
    for number, part in enumerate(_parts(pairs, inputs)):
        query, key = part.pick(of_class)
        is_within = (query.where(query >= 0, -2) == key).to(z.dtype).flatten()
        is_between, is_unknown = 1 - is_within, None
        if has_unknown:
            is_unknown = ((query < 0) | (key < 0)).to(z.dtype).flatten()
            is_between -= is_unknown

        def add(
            name: Any, values: Tensor, group: Tensor | None = None, is_within: Tensor = is_within
        ) -> Tensor:
            """Add values to their totals; ``group`` says which pairs are in the other group."""
            flat = values.flatten()
            below_0 = flat.clamp_max(0.0).sum() if can_pull else nothing
            of_group = nothing if group is None else flat.dot(group)
            totals[name] += torch.stack([flat.sum(), below_0, flat.dot(is_within), of_group])
            return values

        push = add("loss", part.push(pairs, tau), is_unknown)
        are_negatives = part.are_negatives(pairs, tau)
        add("negatives", are_negatives.to(z.dtype))
        plain_push = push if is_plain else part.push(plain, tau)
        add("plain", plain_push, is_between)
        if not is_plain:
            add("left out", plain_push.masked_fill_(are_negatives, 0.0), is_between)
        if number % (1 + len(z) // _MOST_QUERIES) == 0:
            for other in TEMPERATURES:
                add(other, part.push(pairs, other))
            if is_unit:
                bins = ((part.scores + 1) * (_NUM_BINS / 2)).long().clamp_(0, _NUM_BINS - 1)
                by_cosine.index_add_(0, bins.flatten(), push.flatten())
        both = zip(hardest, _hardest(part, push, positions, num_hardest), strict=True)
        joined = [torch.cat(x) for x in both]
        order = joined[0].argsort(descending=True)[:num_hardest]
        hardest = [x[order[joined[0][order] > 0]] for x in joined]

    num_classes = len(torch.unique(of_class[of_class >= 0]))

    def share(name: Any, group: int = _WITHIN) -> float:
        """Divide the total of a group by that of all pairs; NaN if pushes and pulls cancel out."""
        every, below_0 = totals[name][:2].tolist()
        is_net = every > 1e-5 * (every - 2 * below_0)
        return float(totals[name][group]) / every if is_net and num_classes > 0 else math.nan

    every, below_0 = totals["loss"][:2].tolist()
    left_out = totals["left out"] / totals["plain"]
    return Repulsion(
        loss=f"{type(loss).__name__}({loss.extra_repr()})",
        num_embeddings=len(z),
        num_classes=num_classes,
        of_negatives=share("negatives"),
        within=share("loss"),
        unknown=share("loss", _GROUP),
        plain_within=share("plain"),
        left_out_within=float(left_out[_WITHIN]),
        left_out_between=float(left_out[_GROUP]),
        pulled=abs(below_0) / (every - below_0) if every > below_0 else 0.0,
        by_temperature={other: share(other) for other in TEMPERATURES},
        by_cosine=by_cosine / by_cosine.sum(),
        hardest=hardest[2],
        scores=hardest[1],
    )
