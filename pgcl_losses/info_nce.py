"""InfoNCE (Eq. 3), and its base class, which also allows weights for negatives.

`pairs/forms.py` has the formula of a query's loss, `pairs/partners.py` and `pairs/negatives.py` say
which keys are its positives and its negatives.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.module import LossModule, called_by_all
from pgcl_losses.base.normalize import finite_or_nan, full_precision
from pgcl_losses.base.options import (
    Debias,
    Dimension,
    Group,
    Hardness,
    Size,
    Temperature,
    checked,
)
from pgcl_losses.pairs.batch import (
    Batch,
    Negatives,
    OverPositives,
    Queries,
    Reduction,
    batch_argument,
)
from pgcl_losses.pairs.forms import Form
from pgcl_losses.pairs.given import Given, Labels
from pgcl_losses.pairs.loss import Engine, loss_of_pairs, num_compared
from pgcl_losses.pairs.memory import LossWithMemory, Memory
from pgcl_losses.pairs.rows import Inputs, Pairs
from pgcl_losses.pairs.score_mod import Function, ScoreMod
from pgcl_losses.presets import PRESETS, as_written, find_preset
from pgcl_losses.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none; torch requires the package


class WeightedInfoNCE(LossModule):
    """The base class of InfoNCE and of PGCL's contrast: each negative may have a weight."""

    temperature: float | Tensor
    negatives: Negatives
    queries: Queries
    over_positives: OverPositives
    decoupled: bool
    score_mod: ScoreMod | None
    reduction: Reduction
    engine: Engine

    def set_options(self, given: Mapping[str, Any]) -> None:
        super().set_options(given)
        self.check_options()
        self._watch = Watch()

    def pairs_of(self, batch: Batch, *, debias: float = 0.0, **more: Any) -> Pairs:
        """Say which pairs of a batch count. Subclasses add how much, as ``more`` fields."""
        return batch.pairs._replace(
            negatives=self.negatives,
            first_queries=self.queries == "first",
            score_mod=self.score_mod,
            learns=torch.is_grad_enabled(),
            form=Form(self.over_positives, self.decoupled, debias),
            **more,
        )

    def pairs_and_inputs(self, batch: Batch) -> tuple[Pairs, Inputs]:
        """Check the options, and separate what is constant from what has a gradient."""
        check.negatives_of_memory(self.negatives, 0 if batch.memory is None else 1)
        self.check_options()
        pairs = self.pairs_of(batch)
        if pairs.score_mod is not None:
            others: dict[str, Any] = {"hardness": pairs.hardness or None}
            others |= {"debias": pairs.form.debias or None, "memory_size": pairs.memory}
            others["negative_pairs"] = pairs.negative_pairs
            for name in [name for name, other in others.items() if other is not None]:
                why = "it can weigh and leave out negatives itself, but only those of the batch"
                raise ValueError(f"score_mod and {name} cannot be combined, choose one: {why}")
        z = batch.embeddings
        temperature = batch.processes.temperature(self.temperature, z.dtype)
        return pairs, Inputs(z, temperature, batch.positive_weights)

    def loss_of_batch(self, batch: Batch) -> Tensor:
        """Compute the loss of a batch, which has what the weights of negatives depend on.

        The module that made the batch has checked its embeddings for silent failures.
        """
        return self._loss_and_whether_it_trains(batch)[0]

    def loss_of_views(self, batch: Batch, views: Sequence[object]) -> Tensor:
        """Compute the loss of the batch of ``views``, which this loss has been called with.

        Its embeddings are checked for silent failures.
        """
        loss, trains = self._loss_and_whether_it_trains(batch)
        if trains:
            self._watch.check_embeddings(batch, views)
        return loss

    def _loss_and_whether_it_trains(self, batch: Batch) -> tuple[Tensor, bool]:
        with full_precision(batch.embeddings.device):
            pairs, inputs = self.pairs_and_inputs(batch)
            loss = loss_of_pairs(pairs, inputs, self.reduction, self.engine, batch.processes)
        prototypes = batch.prototypes  # learn beside this loss, which may have no gradient
        learn = torch.is_grad_enabled() and prototypes is not None and prototypes.requires_grad
        trains = self._watch.counts(self, batch, loss.requires_grad or learn)
        if trains:
            count = partial(num_compared, pairs, inputs, self.engine, batch.processes)
            self._watch.check_contrast(loss, count)
        return loss, trains

    def check_options(self) -> None:
        """Raise an error for options that contradict each other."""
        if self.decoupled and self.over_positives == "supcon":
            fix = "choose 'mean' or 'sum', or decoupled=False"
            raise ValueError(f"over_positives='supcon' has positives in each denominator: {fix}")


class InfoNCE(WeightedInfoNCE, LossWithMemory):
    r"""InfoNCE (NT-Xent): pulls positives together and pushes all other embeddings apart.

    Use it for two or more views of the same graphs, for embeddings with class labels, or for listed
    pairs of embeddings. It takes batches of any size, and with several processes it is exact. The
    loss is the mean over all queries i, and over the positives p of each query, of

    .. math:: -\log \frac{e^{s_{ip} / \tau}}{e^{s_{ip} / \tau} + \sum_j e^{s_{ij} / \tau}}

    where s is the cosine of two embeddings, and j runs over the negatives of i: the embeddings of
    other graphs, or with other labels. Two views of N graphs make 2N queries with one positive
    each.

    With other options it is the loss of many published scripts, such as GraphCL, GRACE,
    MoCo, CLIP or SupCon: :meth:`like` makes them by name.

    Args:
        temperature (float or Tensor): tau, which divides the scores s. With a smaller tau the most
            similar negatives count more. To learn it, give a ``torch.nn.Parameter`` of shape
            ``()``. It must stay above 0, which is checked only if it is on a CPU.
        negatives (str): which embeddings are negatives: ``"all"`` takes them from all views, and
            ``"cross"`` from the views other than the query's, both of them also from the memory;
            ``"memory"`` takes them from the memory only.
        queries (str): whether ``"all"`` embeddings are queries, or only the embeddings of the
            ``"first"`` view (or set). The other views remain keys.
        over_positives (str): how several positives of a query count. With x = s / tau, S the sum of
            :math:`e^x` over negatives and E the sum over positives, ``"mean"`` is the mean over
            positives of :math:`\log(1 + S / e^{x_p})`, as above; ``"supcon"`` is
            :math:`\log(S + E)` minus the mean of :math:`x_p`; ``"sum"`` is :math:`\log(1 + S / E)`.
        decoupled (bool): whether to leave positives out of the denominator. The loss may then be
            negative, and it is 0 for a query without negatives. It cannot be combined with
            ``"supcon"``.
        score_mod (callable or None): a function of yours that leaves out, weighs or shifts
            negatives. ``score_mod(scores, pair)`` gets the scores :math:`s / \tau` of some queries
            with their keys, ``[I, K]``, and returns the scores with which the keys count as
            negatives, ``-inf`` for a key that does not count. ``pair.query`` and ``pair.key`` are
            the ``metadata`` of queries ``[I, 1, ...]`` and of keys ``[1, K, ...]``,
            ``pair.temperature`` is tau, and ``pair.is_negative`` ``[I, K]`` says which keys are
            negatives. The guide "Weigh or mask negatives" (docs/negatives.md) has examples and
            rules. It cannot be combined with ``hardness``, ``debias``, a memory or
            ``negative_pairs``.
        similarity (str): the score s: ``"cosine"``, or ``"dot"`` for dot products of embeddings
            that are not normalised. Dot products divided by tau must be finite in float32.
        memory_size (int): how many embeddings of past batches serve as further negatives, see
            :meth:`remember`. A memory that is smaller than a batch keeps the last rows of the
            concatenated views, which are mostly rows of the last view. With a memory, use
            activation checkpointing on the encoder only.
        dim (int or None): the embedding dimension D, which a memory needs.
        hardness (float): beta of Robinson et al. (ICLR 2021), up to 100. A negative has the weight
            :math:`e^{\beta s_{ij} / \tau}`, scaled to a mean of 1. This weight has a gradient.
        debias (float): tau+ of Chuang et al. (2020), the probability that a negative is of the
            query's class. The loss subtracts from the sum over negatives what such negatives add to
            it.
        reduction (str): ``"mean"``, ``"sum"``, or ``"none"`` for one value per query, view 1 first.
        engine (str): how the pairs are computed; the result is the same. ``"chunks"`` compares some
            queries at a time with all embeddings, unless the batch is small: its memory grows
            linearly with the batch size, and the loss can be differentiated once. ``"dense"``
            computes one matrix of all pairs in plain torch, in one process: it can be
            differentiated any number of times, also by ``torch.func`` and in forward mode, and
            ``torch.compile(fullgraph=True)`` traces it. ``"fused"`` is chunks with Triton kernels,
            on a GPU. ``"auto"`` chooses chunks, fused for large batches on an H100 or H200, or
            dense where a transform or a compiler needs it.
        gather (bool): whether several processes compute one loss together. Its value, and the mean
            over processes of its gradient, are then the same as in one process that has the whole
            batch. (With ``reduction="none"`` each process gets the values of its own embeddings.)
        process_group (ProcessGroup or None): the processes that compute one loss; None means all.

    ``labels`` hold an integer for each embedding. Embeddings with the same label are positives of
    each other, and embeddings with other labels are negatives. Without ``labels`` and
    ``positives``, row i of every view is graph i. A query without a positive has loss 0 and is left
    out of the mean. Embeddings in the memory that have the query's label are neither positives nor
    negatives. Give each embedding whose class is unknown a label of its own, not -1 or -100.

    ``positives`` are pairs (query, key), as an ``edge_index`` of positions in the concatenated
    sets. The key is a positive of the query, but the query is not a positive of the key unless the
    reverse pair is listed. The pairs replace the rule "row i of every view is graph i"; give
    ``labels`` as well to have both. Each pair counts by its weight in ``positive_weights``, 0 or
    from 1e-30 to 1e20. Positives by label have weight 1, and the weights of a pair that is listed
    twice are added. A pair with weight 0 is left out: it is neither a positive nor a negative.

    ``negative_pairs`` are pairs of the same kind, and replace all other negatives. A pair that is
    listed twice counts twice, and a pair counts even if it is also a positive. With several
    processes, each process lists pairs of its own embeddings. The positions are checked only if
    they are on a CPU.

    ``metadata`` are what ``score_mod`` may know of each embedding, such as the slide or the time of
    its graph: ``[N, ...]`` of any dtype, for each set or one tensor for all sets.

    The loss warns of silent failures, as :class:`PGCLLoss` does.

    Shape:
        - views: two or more, ``[N, D]`` each, with norms up to 1e18. With labels or positives they
          are sets of any lengths; one set is enough unless the negatives come from other sets
        - labels: ``[N]`` int64 for each set, as ``(u, v)`` for two sets, or one tensor for all sets
        - positives, negative_pairs: ``[2, P]`` int64; positive_weights: ``[P]``
        - metadata: ``[N, ...]`` for each set, or one tensor for all sets
        - output: a scalar, or with ``reduction="none"`` one loss for each query

    Examples:
        >>> import torch
        >>> from pgcl_losses import InfoNCE
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> InfoNCE()(z1, z2)
        tensor(0.7588)
        >>> captions = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> labels = torch.tensor([0, 1]), torch.tensor([0, 1, 1])  # of images, of captions
        >>> InfoNCE(negatives="cross")(z1, captions, labels=labels)
        tensor(0.4558)
        >>> InfoNCE(over_positives="supcon")(captions, labels=torch.tensor([0, 1, 1]))
        tensor(0.4846)
        >>> edges = torch.tensor([[0, 1], [1, 0]])  # nodes 0 and 1 are positives of each other
        >>> InfoNCE()(captions, positives=edges)
        tensor(0.6178)
        >>> def of_the_same_slide(scores, pair):
        ...     return scores.masked_fill(pair.query != pair.key, -torch.inf)
        >>> slides = torch.tensor([1.0, 2.0])
        >>> InfoNCE(score_mod=of_the_same_slide)(z1, z2, metadata=slides)
        tensor(0.)
        >>> sampled = torch.tensor([[0, 1], [2, 2]])  # node 2 is a negative of both
        >>> InfoNCE()(captions, positives=edges, negative_pairs=sampled)
        tensor(0.6178)

    """

    dim: int | None
    similarity: Literal["cosine", "dot"]
    hardness: float
    debias: float
    fixed = frozenset({"memory_size", "dim", "similarity"})  # the memory is made for them

    @checked
    def __init__(
        self,
        *,
        temperature: Temperature = 1.0,
        negatives: Negatives = "all",
        queries: Queries = "all",
        over_positives: OverPositives = "mean",
        decoupled: bool = False,
        score_mod: Function = None,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        memory_size: Size = 0,
        dim: Dimension = None,
        similarity: Literal["cosine", "dot"] = "cosine",
        hardness: Hardness = 0.0,
        debias: Debias = 0.0,
        gather: bool = True,
        process_group: Group = None,
    ) -> None:
        super().__init__()
        self.set_options(locals())
        if self.memory_size > 0 and self.dim is None:
            raise TypeError(f"memory_size={self.memory_size} needs the embedding dimension, dim=")
        if self.memory_size == 0 and self.dim is not None:
            raise ValueError(f"dim={self.dim} is for a memory, but memory_size is 0: leave dim out")
        check.negatives_of_memory(self.negatives, self.memory_size)
        # None is registered as a buffer: load_state_dict ignores the keys of a module that is None.
        self.register_buffer("memory", None)
        if self.dim is not None and self.memory_size > 0:
            self.memory = Memory(self.memory_size, self.dim)

    @called_by_all("forward")
    def forward(
        self,
        *views: Tensor | Batch,
        labels: Labels | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
        metadata: Labels | None = None,
        negative_pairs: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of views, of sets with labels or positives, or of a :class:`Batch`.

        Args:
            views (Tensor): two or more views ``[N, D]``, or sets of embeddings, by position.
            labels (Tensor or sequence of Tensor): which embeddings are positives of each other,
                ``[N]`` for each set.
            positives (Tensor): pairs (query, key) ``[2, P]`` in which the key is a positive of the
                query.
            positive_weights (Tensor): how much each pair of ``positives`` counts, ``[P]``; by
                default 1.
            metadata (Tensor or sequence of Tensor): what ``score_mod`` may know of each embedding,
                ``[N, ...]`` for each set.
            negative_pairs (Tensor): pairs (query, key) ``[2, P]`` that replace all other negatives.
        """
        given = Given(labels, positives, positive_weights, metadata, negative_pairs)
        batch = batch_argument(self, views, given)
        if batch is not None:
            if self.memory is not None or self.similarity != "cosine":
                own = "a memory and a similarity of its own"
                raise TypeError(f"a batch has {own}: call this InfoNCE with tensors")
            return self.loss_of_batch(batch)
        batch = self._batch(views, given)
        loss = self.loss_of_views(batch, views)
        if self.memory is not None and self.moves_state(batch.embeddings):
            self.memory.store_batch(batch, manually=False)
        return loss

    if TYPE_CHECKING:
        __call__ = forward

    def batch_of(self, views: Sequence[Any], **call: Any) -> Batch:
        """Check what the loss is called with, and make a batch of it."""
        return self._batch(views, Given(**call))

    def _batch(self, views: Sequence[Any], given: Given) -> Batch:
        processes = self.check_on_all("forward", views, lambda: self._check(views, given))
        is_cosine = self.similarity == "cosine"
        now = is_cosine and self.memory_size > 0  # without a memory, `Inputs.normalized` does it
        later = is_cosine and not now
        batch = Batch.from_views(views, processes, given, normalize=now, later=later)
        if not is_cosine:
            batch = batch._replace(embeddings=finite_or_nan(batch.embeddings))
        return self.with_memory(batch)

    def pairs_of(self, batch: Batch, **more: Any) -> Pairs:
        return super().pairs_of(batch, hardness=self.hardness, debias=self.debias, **more)

    @classmethod
    def like(cls, name: str, **options: Any) -> "Self":
        """Make the loss of a published script, by the name of the script.

        The options of the loss are chosen so that it has the value of the script's own loss, with
        the script's default temperature. The catalogue (docs/catalogue.md) says which function of
        the script the loss replaces, and how to call it if not with two views. If the script's
        value takes more than one call of a loss, or a factor, ``like`` raises an error that shows
        the line to write.

        Args:
            name (str): such as ``"GraphCL"``; case, hyphens and spaces do not matter. :meth:`names`
                lists all names.
            options: options of :class:`InfoNCE`, such as another ``temperature``. They override the
                options of the script.

        Examples:
            >>> from pgcl_losses import InfoNCE
            >>> loss_of = InfoNCE.like("AD-GCL", temperature=0.1)
            >>> loss_of.temperature, loss_of.negatives, loss_of.queries, loss_of.decoupled
            (0.1, 'cross', 'all', True)

        """
        name, preset = find_preset(name)
        options = {**preset.options, **options}
        if preset.value:
            raise ValueError(
                f"the loss of {name} is more than one call of InfoNCE: write {preset.value}, with "
                f"loss_of = InfoNCE({as_written(options)})"
            )
        return cls(**options)

    @staticmethod
    def names() -> list[str]:
        """List the names of all scripts whose loss :meth:`like` makes."""
        return [name for name, preset in PRESETS.items() if not preset.value]

    def check_options(self) -> None:
        super().check_options()
        if self.debias > 0 and self.similarity == "dot":
            raise ValueError(f"debias={self.debias} needs cosines, but similarity is 'dot'")

    def _check(self, views: Any, given: Given) -> dict[str, object]:
        within = self.negatives == "all"
        differ = given.labels is not None or given.positives is not None
        why = "" if differ else ", or one with labels= or positives="
        if not within:
            why = f", as negatives={self.negatives!r}"
        check.loss_views(views, 1 if within and differ else 2, differ, why)
        claims = given.check(views, self.negatives, self.queries, self.score_mod is not None)
        if given.negative_pairs is not None and self.memory is not None:
            fix = f"memory_size must be 0, but got {self.memory_size}"
            raise ValueError(f"negative_pairs replace all other negatives: {fix}")
        check.temperature(self.temperature, views[0])
        if self.memory is not None:
            self.memory.check("z1", views[0])
        return claims
