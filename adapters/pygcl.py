"""PGCL and InfoNCE as losses of PyGCL's contrast models::

    from pgcl_losses.adapters.pygcl import PGCLContrastLoss

    contrast_model = DualBranchContrast(PGCLContrastLoss(dim=64), mode="G2G", intraview_negs=True)
    optimizer = Adam([*encoder.parameters(), *contrast_model.parameters()], lr=0.01)

Give the optimizer the parameters of the contrast model as well, because the prototypes are among
them. PyGCL's own examples optimize the encoder alone. InfoNCE has no prototypes: it has a parameter
only if its temperature is one::

    contrast_model = DualBranchContrast(InfoNCEContrastLoss(temperature=0.2), mode="G2L")
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge

from pgcl_losses._module import LossModule, check_arguments
from pgcl_losses._normalize import unit_vectors
from pgcl_losses._warnings import NOT_THE_USER
from pgcl_losses.distributed import count_ranks
from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.pgcl import PGCLLoss

__all__ = ["InfoNCEContrastLoss", "PGCLContrastLoss"]

# PyGCL's contrast models call the loss. A warning should point to the line that calls them instead.
NOT_THE_USER.add("GCL")

_Options = ParamSpec("_Options")


def _with_signature_of(
    other: Callable[Concatenate[Any, _Options], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Options], None]]:
    """Decorate a constructor so that type checkers see the signature of another constructor."""
    return lambda constructor: constructor


class _Pair(NamedTuple):
    """The first of the two calls that a contrast model makes, and the loss of the second call."""

    views: tuple[Tensor, Tensor]  # the anchor and the other view of the first call, [N, D] each
    sources: tuple[Any, Any]  # where the gradient of each view goes, see `_source`
    state: list[Any]  # everything else that decides the losses, see `_state`
    # The first loss appends its gradient in backward. Backward frees the autograd graph, which both
    # losses share, so the second loss is of no use from then on.
    gradients: list[Tensor]
    second: Tensor  # the loss of the second call


class _ContrastLoss(nn.Module):
    """Base class of losses for contrast models, which call their loss once for each view.

    The first call has the views (1, 2), the second call (2, 1). The first call computes the losses
    of both calls, and the second call returns what the first one has computed. A memory or queue
    therefore stores each batch once.
    """

    _loss_class: type[LossModule]  # its options are the options of this class

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if cls.__module__ == __name__:  # a user's subclass may have other arguments
            check_arguments(cls.__name__, cls._loss_class.__init__, options, args)
        return super().__new__(cls)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        for name in ("negatives", "queries", "reduction"):
            if name in options:
                raise TypeError(f"{name} is up to the contrast model, but got {options[name]!r}")
        # isinstance(self, GCL.losses.Loss) becomes true without inheritance: the only method to
        # inherit from Loss is a __call__ that would bypass the hooks of nn.Module.
        _import_losses().Loss.register(type(self))
        self._pair: _Pair | None = None  # set by the first call for the second call

    @property
    def _loss(self) -> PGCLLoss | InfoNCE:
        return next(self.children())  # type: ignore[return-value]  # the only child

    def _paired_losses(
        self, anchor: Tensor, other: Tensor, self_negatives: bool
    ) -> Sequence[Tensor]:
        """Compute the losses of both calls for two views ``[N, D]`` of the same graphs or nodes.

        Embedding i of one view is the only positive of embedding i of the other view.
        ``self_negatives``: whether the contrast model makes each anchor a negative of itself.
        """
        raise NotImplementedError

    def _can_add_self_negatives(self) -> bool:
        """Return whether :meth:`_paired_losses` supports ``self_negatives``."""
        return True

    def _masked_loss(self, anchor: Tensor, sample: Tensor, *masks: Tensor | None) -> Tensor:
        """Compute the loss of one call, whose masks say what is a positive and what a negative."""
        raise NotImplementedError

    def forward(
        self,
        anchor: Tensor,
        sample: Tensor,
        pos_mask: Tensor | None = None,
        neg_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of one call; the docstring of the class lists the shapes."""
        problem = _problem(anchor, sample, pos_mask, neg_mask)
        intraview = _ends_with_anchors(sample, anchor)
        other = sample[: len(anchor)] if intraview else sample
        paired, self_negatives = False, False
        if not problem:
            paired, self_negatives = _is_paired(anchor, other, pos_mask, neg_mask, intraview)
        paired = paired and (not self_negatives or self._can_add_self_negatives())
        if self._loss.is_distributed():
            # All processes must compute the same kind of loss. A process with an empty batch has
            # no masks to decide by, so the decision is made together.
            flags = [bool(problem), not paired, intraview and len(anchor) > 0]
            reduced = torch.tensor(flags, device=anchor.device).int()
            distributed.all_reduce(reduced, distributed.ReduceOp.MAX, self._loss.process_group)
            any_problem, unpaired, intraview = map(bool, reduced.tolist())
            paired = not unpaired
            problem = problem or ("the masks of another rank are wrong" if any_problem else "")
        if problem:
            raise ValueError(problem)
        if not paired:
            return self._masked_loss(anchor, sample, pos_mask, neg_mask)
        contrast = getattr(self._loss, "contrast", self._loss)  # PGCLLoss has a module for it
        contrast.negatives = "all" if intraview else "cross"
        views, sources = (anchor, other), (_source(anchor), _source(sample, copied=intraview))
        pair, self._pair = self._pair, None
        state = self._state(views if pair is None else pair.views, self_negatives)
        # This call is the second one of a pair if it has the views of the first call in the other
        # order. With intraview_negs, `other` is a part of a concatenated copy, so the identity of
        # tensors does not tell. Two views are the same if their values are equal and their
        # gradients go to the same place. `_state` also notices a view that was changed in place.
        if (
            pair is not None
            and pair.sources == sources[::-1]
            and pair.state == state
            and not pair.gradients
            and all(map(_are_equal, pair.views, views[::-1]))
        ):
            return pair.second
        first, second = self._paired_losses(anchor, other, self_negatives)
        gradients: list[Tensor] = []
        if first.requires_grad:
            first.register_hook(gradients.append)  # type: ignore[no-untyped-call]  # torch has no type there
        self._pair = _Pair(views, sources, self._state(views, self_negatives), gradients, second)
        return first

    compute = forward  # the method that a GCL.losses.Loss must have

    def _state(self, views: Sequence[Tensor], self_negatives: bool) -> list[Any]:
        """Return everything that the losses of two views depend on, of the masks `self_negatives`.

        Tensors are represented by their identity and version instead of their values.
        """
        loss = self._loss
        training = [module.training for module in loss.modules()]
        values = [*loss.all_options().values(), loss.gather, loss.process_group, *training]
        values += [torch.is_grad_enabled(), self_negatives, *views, *loss.parameters()]
        values += loss.buffers()
        return [_version(value) if isinstance(value, Tensor) else value for value in values]

    def __getstate__(self) -> dict[str, Any]:
        # The losses of a pair belong to an autograd graph, which can be neither copied nor pickled.
        return {**self.__dict__, "_pair": None}


class PGCLContrastLoss(_ContrastLoss):
    """:class:`~pgcl_losses.PGCLLoss` as a loss of PyGCL's ``DualBranchContrast``.

    The mode is ``"G2G"`` or ``"L2L"``. A contrast model calls the loss once for each view and takes
    the mean of both values. Both calls return PGCL of the two views, which is computed once.

    With ``intraview_negs=True`` the contrast model takes negatives from both views, which is
    ``negatives="all"``; with ``False`` it takes them from the other view, which is
    ``negatives="cross"``. Each call sets this option of ``loss.pgcl.contrast``. An embedding is
    never its own negative.

    The loss is a module, so ``contrast_model.parameters()`` contains the prototypes. Give these
    parameters to the optimizer.

    Args:
        dim, num_prototypes: see :class:`~pgcl_losses.PGCLLoss`.
        options: the other options of :class:`~pgcl_losses.PGCLLoss`, by the same names, except
            ``negatives``, ``queries`` and ``reduction``.

    Shape:
        - anchor: one view, ``[N, D]``
        - sample: the other view ``[N, D]``; with ``intraview_negs`` the contrast model appends the
          anchors, ``[2N, D]``
        - pos_mask, neg_mask: ``[N, N]`` or ``[N, 2N]``, as the contrast model makes them without
          extra masks
        - output: scalar
    """

    _loss_class = PGCLLoss

    @_with_signature_of(PGCLLoss.__init__)
    def __init__(self, dim: int, num_prototypes: int | Sequence[int] = 10, **options: Any) -> None:
        super().__init__(options)
        self.pgcl = PGCLLoss(dim, num_prototypes, **options)

    def _paired_losses(
        self, anchor: Tensor, other: Tensor, self_negatives: bool
    ) -> Sequence[Tensor]:
        loss = self.pgcl(anchor, other)
        return loss, loss.clone()  # a clone, as the caller may change the first loss in place

    def _masked_loss(self, anchor: Tensor, sample: Tensor, *masks: Tensor | None) -> Tensor:
        counts = ["no" if mask is None else int(mask.count_nonzero()) for mask in masks]
        raise ValueError(
            "mode must be 'G2G' or 'L2L', without extra_pos_mask and extra_neg_mask: PGCL takes "
            "embedding i of the other view as the only positive of anchor i, with weight 1, and "
            f"all other embeddings as negatives, but got {len(anchor)} anchors, {len(sample)} "
            f"samples, {counts[0]} positives in pos_mask and {counts[1]} negatives in neg_mask. "
            "Call pgcl_losses.PGCLLoss with items or positives"
        )


class InfoNCEContrastLoss(_ContrastLoss):
    r""":class:`~pgcl_losses.InfoNCE` as a loss of PyGCL's contrast models, at any batch size.

    It serves all contrast models, in the modes ``"G2G"``, ``"L2L"`` and ``"G2L"``. A contrast model
    calls the loss once for each view and takes the mean of both values. Each call returns the mean
    over its anchors.

    With ``intraview_negs=True`` the contrast model takes negatives from both views, which is
    ``negatives="all"``; with ``False`` it takes them from the other view, which is
    ``negatives="cross"``. Each call sets this option of ``loss.info_nce``.

    In mode ``"G2L"`` the positives of a graph are its nodes. There and with ``extra_pos_mask`` or
    ``extra_neg_mask``, the masks alone say which pairs are positives and which are negatives. An
    anchor without positives is left out of the mean.

    If each anchor has one positive, of weight 1, values and gradients equal those of PyGCL's
    ``InfoNCE``. This includes ``intraview_negs=True``, with which the contrast model makes each
    anchor a negative of itself, unless the caller gives ``extra_neg_mask=torch.ones(N, 2 * N)``.
    With a memory, an anchor is never a negative of itself.

    If an anchor i has several positives p, its loss is the mean over them of
    :math:`-\log( e^{s_{ip} / \tau} / ( e^{s_{ip} / \tau} + \sum_j e^{s_{ij} / \tau} ) )`, where
    j runs over its negatives. PyGCL's ``InfoNCE`` has the other positives in the denominator as
    well. ``over_positives="supcon"`` does the same, and gives PyGCL's values.

    Args:
        options: the options of :class:`~pgcl_losses.InfoNCE`, by the same names, except
            ``negatives``, ``queries`` and ``reduction``. ``memory_size`` needs ``dim``, mode
            ``"G2G"`` or ``"L2L"``, and no extra masks.

    Shape:
        - anchor: ``[N, D]``
        - sample: ``[M, D]``; with ``intraview_negs`` the contrast model appends the anchors,
          ``[M + N, D]``
        - pos_mask, neg_mask: ``[N, M]`` or ``[N, M + N]``, of zeros and ones. A pair that is in
          neither mask is left out. Without ``neg_mask``, all embeddings but the anchor and its
          positives are negatives. Other values in ``pos_mask`` are weights of the positives, as
          ``positive_weights`` of :class:`~pgcl_losses.InfoNCE`. PyGCL's contrast models turn
          ``extra_pos_mask`` into zeros and ones, so weights need a direct call of the loss.
        - output: scalar
    """

    _loss_class = InfoNCE

    @_with_signature_of(InfoNCE.__init__)
    def __init__(self, **options: Any) -> None:
        super().__init__(options)
        self.info_nce = InfoNCE(**options)

    def _can_add_self_negatives(self) -> bool:
        # With a memory, anchors are never negatives of themselves, so nothing is to be added.
        # Without one, the anchor is added to the losses that InfoNCE has computed, as another term
        # e^(1 / temperature) of the denominator. This is exact only if all negatives have weight 1
        # and the positive is in the denominator as well. The temperature must be a number: InfoNCE
        # averages the gradient of a learned temperature over processes, but could not include the
        # gradient of a term that is added later.
        loss = self.info_nce
        is_plain = not (loss.hardness or loss.debias or loss.decoupled)
        is_plain = is_plain and loss.similarity == "cosine"
        return loss.memory_size > 0 or (is_plain and isinstance(loss.temperature, float))

    def _paired_losses(
        self, anchor: Tensor, other: Tensor, self_negatives: bool
    ) -> Sequence[Tensor]:
        self.info_nce.queries, self.info_nce.reduction = "all", "none"
        losses = self.info_nce(anchor, other)  # [2N]
        if self_negatives and not self.info_nce.memory_size:
            # The loss is log(1 + S / e^x) with the sum S over negatives and the score x of the
            # positive. One more negative of score y makes it log(e^loss + e^(y - x)).
            units = unit_vectors(torch.stack([anchor, other]), losses.dtype)  # [2, N, D]
            # The cosine of an anchor with itself is 1, except for an embedding of zeros, where it
            # is 0.
            gaps = units.square().sum(-1) - units.prod(0).sum(-1)  # [2, N]
            losses = torch.logaddexp(losses, gaps.flatten() / self.info_nce.temperature)
        # Each call returns the mean over its anchors: a sum divided by a count, of all processes.
        sums = torch.stack([call_losses.sum() for call_losses in losses.tensor_split(2)])  # [2]
        count = losses.new_tensor(len(anchor))
        if self.info_nce.is_distributed():
            group = self.info_nce.process_group
            totals = torch.cat([sums.detach(), count.view(1)])  # [3]
            distributed.all_reduce(totals, group=group)
            # The loss is a sum over processes, but DistributedDataParallel takes the mean of their
            # gradients, so the gradient is multiplied by the number of processes. The value becomes
            # the sum over all processes.
            sums = sums * count_ranks(group)
            sums = sums + (totals[:-1] - sums).detach()
            count = totals[-1]
        # A user may change a loss in place, so the losses must not be views of one tensor.
        return [total / count.clamp(min=1) for total in sums]

    def _masked_loss(self, anchor: Tensor, sample: Tensor, *masks: Tensor | None) -> Tensor:
        pos_mask, neg_mask = masks
        if pos_mask is None:
            raise ValueError("without pos_mask, sample must be the other view, or it and anchor")
        if self.info_nce.memory_size:
            raise ValueError(
                f"memory_size is {self.info_nce.memory_size}, but it must be 0 for mode 'G2L' and "
                "with extra masks: graph i of a batch is not graph i of the next one. Call "
                "pgcl_losses.InfoNCE with items that number the graphs of the dataset"
            )
        # List the positives with their weights. A pair that is in neither mask is listed with
        # weight 0, which leaves it out. All pairs that are not listed are negatives.
        listed = pos_mask != 0  # [N, M], or [N, M + N] with intraview_negs
        if neg_mask is not None:
            listed = listed | (neg_mask == 0)
        elif _ends_with_anchors(sample, anchor):
            listed.diagonal(len(anchor)).fill_(True)  # no anchor is its own negative
        i, j = listed.nonzero(as_tuple=True)  # [P] each
        loss = self.info_nce
        loss.negatives, loss.queries, loss.reduction = "cross", "first", "mean"
        return loss(
            anchor,
            sample,
            positives=torch.stack([i, j + len(anchor)]),
            positive_weights=pos_mask[i, j].float(),
        )


def _import_losses() -> Any:
    """Import ``GCL.losses``. If that fails, the error says how to install PyGCL."""
    try:
        return importlib.import_module("GCL.losses")
    except (ImportError, OSError) as error:  # OSError: a dependency was built for another torch
        raise ImportError(
            f"PyGCL cannot be imported ({error}). With Python 3.11 or older, in this order: pip "
            "install torch wheel setuptools ninja; pip install --no-build-isolation torch-scatter "
            "torch-sparse; pip install PyGCL==0.1.2 dgl==1.1.3 packaging torch-geometric"
        ) from error


def _source(view: Tensor, copied: bool = False) -> Any:
    """Return the node of the autograd graph, and its input, that the gradient of a view goes to.

    ``copied``: whether ``view`` is the result of a ``torch.cat``, of which the first tensor counts.
    """
    if not (torch.is_grad_enabled() and view.requires_grad):
        return None, 0
    node, number = get_gradient_edge(view)[:2]
    return node.next_functions[0] if copied and node.next_functions else (node, number)


def _version(tensor: Tensor) -> tuple[Any, ...]:
    """Return what changes when another tensor takes its place, or when it is changed in place."""
    # Inference tensors have no version counter.
    return id(tensor), tensor.requires_grad, tensor.is_inference() or tensor._version


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, where NaN equals NaN."""
    if one.shape != other.shape:
        return False
    return bool(one.isclose(other.to(one), rtol=0, atol=0, equal_nan=True).all())


def _ends_with_anchors(sample: Tensor, anchor: Tensor) -> bool:
    """Return whether the anchors are the second half of ``sample``, as with intraview_negs."""
    return len(sample) == 2 * len(anchor) and _are_equal(sample[len(anchor) :], anchor)


def _problem(
    anchor: Tensor, sample: Tensor, pos_mask: Tensor | None, neg_mask: Tensor | None
) -> str:
    """Return what is wrong with the masks, or an empty string if they are right."""
    for name, mask in (("pos_mask", pos_mask), ("neg_mask", neg_mask)):
        if mask is not None and mask.shape != (len(anchor), len(sample)):
            return (
                f"{name} has shape {tuple(mask.shape)}, but anchor has {len(anchor)} embeddings "
                f"and sample {len(sample)}"
            )
    if pos_mask is None and len(anchor) not in (len(sample), len(sample) / 2):
        return (
            f"anchor has {len(anchor)} embeddings and sample {len(sample)}: without pos_mask, "
            "embedding i of both must be one graph or node"
        )
    if pos_mask is not None and neg_mask is not None and ((pos_mask != 0) & (neg_mask != 0)).any():
        return "pos_mask and neg_mask must not have a pair in common"
    return ""


def _is_paired(
    anchor: Tensor,
    other: Tensor,
    pos_mask: Tensor | None,
    neg_mask: Tensor | None,
    intraview: bool,
) -> tuple[bool, bool]:
    """Return whether the views are plainly paired, and whether anchors are their own negatives.

    Plainly paired: embedding i of the other view is the only positive of anchor i, with weight 1,
    and all other embeddings are negatives. Such a loss does not read the masks, so it cannot take
    other weights of positives, nor pass a gradient to weights that are learned.
    """
    count = len(anchor)
    if count != len(other):
        return False, False
    if pos_mask is not None:
        is_eye = pos_mask.count_nonzero() == count and (pos_mask.diagonal() == 1).all()
        if pos_mask.requires_grad or not is_eye:
            return False, False
    if neg_mask is None:
        return True, False
    left_out = neg_mask == 0  # [N, N], or [N, 2N] with intraview_negs
    # With intraview_negs, anchor i is also embedding N + i of the samples.
    num_without_self = int(left_out.diagonal(count).sum()) if intraview else 0
    num_left_out = count + num_without_self
    all_others = bool(left_out.sum() == num_left_out and left_out.diagonal().all())
    return all_others and num_without_self in (0, count), intraview and num_without_self < count
