"""InfoNCE (Eq. 3), and its base class, whose negatives may have weights.

The formula of a query's loss is in `forms`; which keys are positives and negatives is in `rows`.
"""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pgcl_losses import _checks as check
from pgcl_losses._module import LossModule, called_by_all
from pgcl_losses._normalize import full_precision
from pgcl_losses._options import Debias, Dimension, Hardness, Size, Temperature, with_options
from pgcl_losses.batch import Batch, Labels, OverPositives, Queries, Reduction, batch_argument
from pgcl_losses.chunks import Engine, loss_of_pairs
from pgcl_losses.forms import Form
from pgcl_losses.memory import LossWithMemory, Memory
from pgcl_losses.presets import PRESETS, as_written, find_preset
from pgcl_losses.rows import Inputs, Listed, Pairs
from pgcl_losses.watch import Watch
from pgcl_losses.weights import Factors, Gaussian, Table

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none; torch requires the package

AnyNegatives = Literal["all", "cross", "memory"]


@with_options
class WeightedInfoNCE(LossModule):
    """InfoNCE of the sets of a batch, in which each negative may have a weight."""

    temperature: Temperature = 0.2
    negatives: AnyNegatives = "all"
    queries: Queries = "all"
    over_positives: OverPositives = "mean"
    decoupled: bool = False
    reduction: Reduction = "mean"
    engine: Engine = "auto"

    def loss_of_batch(
        self,
        batch: Batch,
        weights: Table | Factors | None = None,
        pair_weight: Gaussian | None = None,
        hardness: float = 0.0,
        debias: float = 0.0,
    ) -> Tensor:
        """Say which pairs count and how, and compute the loss."""
        processes = batch.processes
        check.negatives_of_memory(self.negatives, 0 if batch.memory is None else 1)
        if self.decoupled and self.over_positives == "supcon":
            fix = "choose 'mean' or 'sum', or decoupled=False"
            raise ValueError(f"over_positives='supcon' has positives in each denominator: {fix}")
        same_label = None
        if batch.labels is not None:
            labels = batch.labels[: len(batch.embeddings)]
            numbers = torch.arange(len(labels), device=labels.device)
            same_label, _ = Listed.by_query(labels, numbers)
        pairs = Pairs(
            processes.lengths(),
            self.negatives,
            first_queries=self.queries == "first",
            labels=batch.labels,
            same_label=same_label,
            positives=batch.positives,
            negative_pairs=batch.negative_pairs,
            memory=batch.memory,
            filled=batch.filled,
            weights=weights,
            pair_weight=pair_weight,
            hardness=hardness,
            form=Form(self.over_positives, self.decoupled, debias),
        )
        z = batch.embeddings
        with full_precision(z.device):
            temperature = processes.temperature(self.temperature, z.dtype)
            inputs = Inputs(z, temperature, batch.positive_weights)
            return loss_of_pairs(pairs, inputs, self.reduction, self.engine, processes)


@with_options
class InfoNCE(WeightedInfoNCE, LossWithMemory):
    r"""InfoNCE (NT-Xent), at any batch size and exact on many processes.

    It is the mean over all queries i, and over the positives p of each query, of

    .. math:: -\log \frac{e^{s_{ip} / \tau}}{e^{s_{ip} / \tau} + \sum_j e^{s_{ij} / \tau}}

    where s is the cosine of two embeddings, and j runs over the negatives of i: the embeddings of
    other labels. Two views of N graphs make 2N queries with one positive each.

    With other options it is the loss of more than thirty published scripts, such as GraphCL, GRACE,
    MoCo, CLIP or SupCon: :meth:`like` knows them by name.

    Args:
        temperature (float or Tensor): tau; smaller is sharper. A parameter of shape ``()`` gets a
            gradient, and must stay above 0: only on a CPU its value is checked.
        negatives (str): ``"all"`` takes negatives from all views, ``"cross"`` from the other views
            only, both of them also from the memory; ``"memory"`` takes them from the memory only.
        queries (str): whether ``"all"`` embeddings are queries, or those of the ``"first"`` view
            (or set) only. The other views remain keys.
        over_positives (str): how several positives of a query count. With x = s / tau, S the sum of
            :math:`e^x` over negatives and E the sum over positives, ``"mean"`` is the mean over
            positives of :math:`\log(1 + S / e^{x_p})`, as above; ``"supcon"`` is
            :math:`\log(S + E)` minus the mean of :math:`x_p`; ``"sum"`` is
            :math:`\log(1 + S / E)`.
        decoupled (bool): whether positives are left out of the denominator. Then the loss may be
            negative, and it is 0 for a query without negatives. Not with ``"supcon"``.
        similarity (str): s. ``"cosine"``, or ``"dot"`` for the products of the embeddings as they
            are, which must be finite in float32 when divided by tau.
        memory_size (int): how many embeddings of past batches are further negatives, see
            :meth:`remember`. A memory that is smaller than a batch keeps the last rows of the
            concatenated views, that is mostly of the last view. With a memory, use activation
            checkpointing on the encoder only.
        dim (int or None): the embedding dimension D, which a memory needs.
        hardness (float): beta of Robinson et al. (ICLR 2021), up to 100. A negative has the weight
            :math:`e^{\beta s_{ij} / \tau}`, scaled to a mean of 1. This weight has a gradient.
        debias (float): tau+ of Chuang et al. (2020), the probability that a negative is of the
            query's class. The sum over negatives is corrected by what such negatives add.
        reduction (str): ``"mean"``, ``"sum"``, or ``"none"`` for one value per query, view 1 first.
        engine (str): how the pairs are computed, with the same result. ``"chunks"`` computes the
            gradient with the loss, some queries at a time: memory is linear in the batch size, and
            the loss is differentiable once. ``"dense"`` computes one matrix of all pairs in plain
            torch, in one process: it is differentiable any number of times, also by ``torch.func``
            and in forward mode, and ``torch.compile(fullgraph=True)`` traces it. ``"auto"`` takes
            chunks, and dense where transforms or compilers need it.
        gather (bool): with several processes, whether they compute one loss: its value, and the
            mean over processes of its gradients, are those of one process on the whole batch
            (``reduction="none"`` gives each process the values of its own embeddings).
        process_group (ProcessGroup or None): the processes of one loss; None is all.

    ``labels``, an integer for each embedding, say which embeddings are positives of each other:
    embeddings with the same label. Without ``labels`` and ``positives``, row i of every view is one
    graph. A query without a positive has loss 0 and is left out of the mean. Embeddings of the
    query's label in the memory are no negatives. Give each embedding whose class is unknown a label
    of its own, not -1 or -100.

    ``positives`` are pairs (query, key), as an ``edge_index`` of positions in the concatenated
    sets: the key is a positive of the query, and not the other way round. They take the place of
    "row i of every view"; give ``labels`` as well to have both. Each pair counts by its
    ``positive_weights``, 0 or from 1e-30 to 1e20; positives by label weigh 1, and the weights of a
    pair that is listed twice add up. A pair of weight 0 is left out: it is no negative either.

    ``negative_pairs`` are pairs of the same kind. They are all negatives there are: a pair counts
    twice if it is listed twice, and even if it is a positive. With several processes, each lists
    pairs of its own embeddings. Values are checked on a CPU.

    It warns of silent failures as :class:`PGCLLoss` does.

    Shape:
        - views: two or more, ``[N, D]`` each, with norms up to 1e18. With labels or positives they
          are sets of any lengths, and may be a single one unless negatives come from other sets
        - labels: ``[N]`` int64 for each set, as ``(u, v)`` for two sets, or one tensor for all
        - positives, negative_pairs: ``[2, P]`` int64; positive_weights: ``[P]``
        - output: a scalar, or with ``reduction="none"`` one loss for each query

    Examples:
        >>> import torch
        >>> from pgcl_losses import InfoNCE
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> InfoNCE()(z1, z2)
        tensor(0.2133)
        >>> captions = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> labels = torch.tensor([0, 1]), torch.tensor([0, 1, 1])
        >>> InfoNCE(negatives="cross")(z1, captions, labels=labels)
        tensor(0.0944)
        >>> InfoNCE(over_positives="supcon")(captions, labels=torch.tensor([0, 1, 1]))
        tensor(0.1657)
        >>> edges = torch.tensor([[0, 1], [1, 0]])  # of a graph with these three nodes
        >>> InfoNCE()(captions, positives=edges)
        tensor(0.6809)
        >>> sampled = torch.tensor([[0, 1], [2, 2]])  # here all that there are
        >>> InfoNCE()(captions, positives=edges, negative_pairs=sampled)
        tensor(0.6809)

    """

    memory_size: Size = 0
    dim: Dimension = None
    similarity: Literal["cosine", "dot"] = "cosine"
    hardness: Hardness = 0.0
    debias: Debias = 0.0
    fixed = frozenset({"memory_size", "dim", "similarity"})  # a memory holds unit vectors or not

    def __post_init__(self) -> None:
        if self.memory_size > 0 and self.dim is None:
            raise TypeError(f"memory_size={self.memory_size} needs the embedding dimension, dim=")
        check.negatives_of_memory(self.negatives, self.memory_size)
        # A buffer, since load_state_dict would drop the keys of a module that is None.
        self.register_buffer("memory", None)
        if self.dim is not None and self.memory_size > 0:
            self.memory = Memory(self.memory_size, self.dim)
        self._watch = Watch("InfoNCE")

    @called_by_all("forward")
    def forward(
        self,
        *views: Tensor | Batch,
        labels: Labels | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
        negative_pairs: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of views, of sets with labels or positives, or of a batch."""
        given = labels, positives, positive_weights, negative_pairs
        batch, is_unit = batch_argument(views, given), self.similarity == "cosine"
        if batch is not None:
            if self.memory is not None or batch.is_unit != is_unit:
                own = "a memory and a similarity of its own"
                raise TypeError(f"a batch has {own}: call this InfoNCE with tensors")
            return self.loss_of_batch(batch, hardness=self.hardness, debias=self.debias)
        with self.agreement("forward", views) as agreed:
            agreed.claims |= self._check(views, *given)
        batch = Batch.from_views(views, agreed.processes, *given, is_unit=is_unit)
        batch = self.with_memory(batch)
        loss = self.loss_of_batch(batch, hardness=self.hardness, debias=self.debias)
        if self.memory is not None and self.moves_state(batch.embeddings):
            self.memory.store_batch(batch, manually=False)
        if self._watch.is_due(self, loss, batch):
            self._watch.look(views, batch, loss)
        return loss

    if TYPE_CHECKING:
        __call__ = forward

    @classmethod
    def like(cls, name: str, **options: Any) -> "Self":
        """Make the loss of a published script, by the name of the script.

        The loss has the options that give the value of the script's own loss, and the script's
        default temperature. The guide (docs/swap.md) says which function of the script it is, and
        how the loss is called if not with two views. Where the script's value is more than one call
        of a loss, such as a multiple of it, ``like`` raises an error that has the line to write.

        Args:
            name: such as ``"GraphCL"``; case, hyphens and spaces do not matter. :meth:`names` lists
                all names.
            options: options of :class:`InfoNCE`, in addition to those of the script or in place of
                them, such as another ``temperature``.

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
        """List the names of scripts that :meth:`like` makes the loss of."""
        return [name for name, preset in PRESETS.items() if not preset.value]

    def _check(
        self, views: Any, labels: Any, positives: Any, weights: Any, negative_pairs: Any
    ) -> dict[str, object]:
        within = self.negatives == "all"
        differ = labels is not None or positives is not None
        why = "" if differ else ", or one with labels= or positives="
        if not within:
            why = f", as negatives={self.negatives!r}"
        check.loss_views(views, 1 if within and differ else 2, differ, why)
        claims = check.partners(views, self.queries, labels, positives, weights)
        if negative_pairs is not None:
            if self.memory is not None:
                fix = f"memory_size must be 0, but got {self.memory_size}"
                raise ValueError(f"negative_pairs are all negatives there are: {fix}")
            check.pairs("negative_pairs", negative_pairs, views, self.queries)
        check.temperature(self.temperature, views[0])
        if self.memory is not None:
            self.memory.check("z1", views[0])
        if self.debias > 0 and self.similarity == "dot":
            raise ValueError(f"debias={self.debias} needs cosines, but similarity is 'dot'")
        return {**claims, "negative_pairs": negative_pairs is not None}
