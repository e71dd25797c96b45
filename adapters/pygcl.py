"""Our losses for PyGCL's contrast models::

    from pgcl_losses.adapters.pygcl import PGCLContrastLoss

    contrast_model = DualBranchContrast(PGCLContrastLoss(dim=64), mode="G2G", intraview_negs=True)
    optimizer = Adam([*encoder.parameters(), *contrast_model.parameters()], lr=0.01)

The optimizer needs both lists of parameters; PyGCL's own examples give it only the encoder's.
InfoNCE has no prototypes, and nothing to optimize unless its temperature is a parameter::

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

NOT_THE_USER.add("GCL")  # its contrast models call the loss

_Options = ParamSpec("_Options")


def _takes_what(
    other: Callable[Concatenate[Any, _Options], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Options], None]]:
    """For type checkers: they see the options that another constructor lists."""
    return lambda constructor: constructor


class _Pair(NamedTuple):
    """The first call of a contrast model, and the loss of the second."""

    views: tuple[Tensor, Tensor]
    sources: tuple[Any, Any]  # where their gradients go
    state: list[Any]
    gradients: list[Tensor]  # of the first loss; backward frees the graph of both
    second: Tensor


class _ContrastLoss(nn.Module):
    """A loss as contrast models call it: once for each view.

    The first call of a pair computes the losses of both, so that memory and queue change once. The
    second call has the views swapped.
    """

    made_as: type[LossModule]  # whose options it takes

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if cls.__module__ == __name__:  # a subclass may have arguments of its own
            check_arguments(cls.__name__, cls.made_as.__init__, options, args)
        return super().__new__(cls)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        for name in ("negatives", "queries", "reduction"):
            if name in options:
                raise TypeError(f"{name} is up to the contrast model, but got {options[name]!r}")
        # All that its Loss has to inherit is a __call__ that would bypass the hooks of a module.
        _import_losses().Loss.register(type(self))
        self._pair: _Pair | None = None  # from the first call to the second

    @property
    def _loss(self) -> PGCLLoss | InfoNCE:
        return next(self.children())  # type: ignore[return-value]  # the only one

    def _of_both(self, anchor: Tensor, other: Tensor, own_negatives: bool) -> Sequence[Tensor]:
        """The losses of both calls; embedding i of both views is one item.

        ``own_negatives``: whether the contrast model makes each anchor a negative of itself.
        """
        raise NotImplementedError

    def _can_add_own_negatives(self) -> bool:
        """Whether both calls can be computed at once where anchors are negatives of themselves."""
        return True

    def _unpaired(self, anchor: Tensor, sample: Tensor, *masks: Tensor | None) -> Tensor:
        """The loss of one call with positives and negatives as masks say."""
        raise NotImplementedError

    def forward(
        self,
        anchor: Tensor,
        sample: Tensor,
        pos_mask: Tensor | None = None,
        neg_mask: Tensor | None = None,
    ) -> Tensor:
        problem = _problem(anchor, sample, pos_mask, neg_mask)
        intraview = _ends_with_anchors(sample, anchor)
        other = sample[: len(anchor)] if intraview else sample
        paired, own_negatives = False, False
        if not problem:
            paired, own_negatives = _is_paired(anchor, other, pos_mask, neg_mask, intraview)
        paired = paired and (not own_negatives or self._can_add_own_negatives())
        if self._loss.is_distributed():  # an empty rank has no masks to decide by
            seen = [bool(problem), not paired, intraview and len(anchor) > 0]
            facts = torch.tensor(seen, device=anchor.device).int()
            distributed.all_reduce(facts, distributed.ReduceOp.MAX, self._loss.process_group)
            any_problem, unpaired, intraview = map(bool, facts.tolist())
            paired = not unpaired
            problem = problem or ("the masks of another rank are wrong" if any_problem else "")
        if problem:
            raise ValueError(problem)
        if not paired:
            return self._unpaired(anchor, sample, pos_mask, neg_mask)
        contrast = getattr(self._loss, "contrast", self._loss)  # of PGCLLoss
        contrast.negatives = "all" if intraview else "cross"
        views, sources = (anchor, other), (_source(anchor), _source(sample, copied=intraview))
        pair, self._pair = self._pair, None
        # With intraview_negs the other view is a copy. So both views are compared by value and by
        # where their gradients go. Versions tell whether one was changed since, in place.
        if (
            pair is not None
            and pair.sources == sources[::-1]
            and pair.state == self._state(pair.views)
            and not pair.gradients
            and all(map(_are_equal, pair.views, views[::-1]))
        ):
            return pair.second
        first, second = self._of_both(anchor, other, own_negatives)
        gradients: list[Tensor] = []
        if first.requires_grad:
            first.register_hook(gradients.append)  # type: ignore[no-untyped-call]  # torch has no type there
        self._pair = _Pair(views, sources, self._state(views), gradients, second)
        return first

    compute = forward  # what PyGCL calls by this name

    def _state(self, views: Sequence[Tensor]) -> list[Any]:
        """What else decides the losses of both calls; tensors by identity and version."""
        loss = self._loss
        training = [module.training for module in loss.modules()]
        values = [*loss.all_options().values(), loss.gather, loss.process_group, *training]
        values += [torch.is_grad_enabled(), *views, *loss.parameters(), *loss.buffers()]
        return [_version(value) if isinstance(value, Tensor) else value for value in values]

    def __getstate__(self) -> dict[str, Any]:
        # A graph cannot be copied.
        return {**self.__dict__, "_pair": None}


class PGCLContrastLoss(_ContrastLoss):
    """:class:`~pgcl_losses.PGCLLoss` where PyGCL wants a loss: in ``DualBranchContrast``.

    For modes ``"G2G"`` and ``"L2L"``. ``intraview_negs=True`` of the contrast model is
    ``negatives="all"``, ``False`` is ``"cross"``: each call sets that option of
    ``loss.pgcl.contrast``. A sample is never its own negative. A contrast model calls the loss once
    for each view and takes the mean. Both calls return PGCL of both views, computed once.

    It is a module, so that ``contrast_model.parameters()`` has the prototypes; give these to the
    optimizer.

    Args:
        dim, num_prototypes: see :class:`~pgcl_losses.PGCLLoss`.
        options: its other options, by the same names, except ``negatives`` and ``reduction``.

    Shape:
        - anchor: ``[N, D]``
        - sample: the other view ``[N, D]``, or with ``intraview_negs`` also the anchor ``[2N, D]``
        - pos_mask, neg_mask: ``[N, N]`` or ``[N, 2N]``, as the contrast model makes them
    """

    made_as = PGCLLoss

    @_takes_what(PGCLLoss.__init__)
    def __init__(self, dim: int, num_prototypes: int | Sequence[int] = 10, **options: Any) -> None:
        super().__init__(options)
        self.pgcl = PGCLLoss(dim, num_prototypes, **options)

    def _of_both(self, anchor: Tensor, other: Tensor, own_negatives: bool) -> Sequence[Tensor]:
        loss = self.pgcl(anchor, other)
        return loss, loss.clone()

    def _unpaired(self, anchor: Tensor, sample: Tensor, *masks: Tensor | None) -> Tensor:
        given = ["no" if mask is None else int(mask.count_nonzero()) for mask in masks]
        raise ValueError(
            "mode must be 'G2G' or 'L2L', without extra_pos_mask and extra_neg_mask: PGCL takes "
            "embedding i of the other view as the only positive of anchor i, and all others as "
            f"negatives, but got {len(anchor)} anchors, {len(sample)} samples, {given[0]} "
            f"positives in pos_mask and {given[1]} negatives in neg_mask. Call "
            "pgcl_losses.PGCLLoss with items or positives"
        )


class InfoNCEContrastLoss(_ContrastLoss):
    r""":class:`~pgcl_losses.InfoNCE` where PyGCL wants a loss, at any batch size.

    For all of its contrast models, in modes ``"G2G"``, ``"L2L"`` and ``"G2L"``.
    ``intraview_negs=True`` of the contrast model is ``negatives="all"``, ``False`` is ``"cross"``:
    each call sets that option of ``loss.info_nce``.

    A contrast model calls the loss once for each view and takes the mean. A call returns the mean
    over its anchors. With ``extra_pos_mask`` or ``extra_neg_mask``, and for ``"G2L"``, where the
    positives of a graph are its nodes, the positives of the masks are positives by index; an anchor
    without any is left out of the mean.

    Where each anchor has one positive, values and gradients are those of PyGCL's ``InfoNCE``, also
    with ``intraview_negs``, where the contrast model makes each anchor a negative of itself (it
    does not if ``extra_neg_mask=torch.ones(N, 2 * N)`` is given; with a memory it never is).

    With several positives p of anchor i, its loss is their mean of
    :math:`-\log( e^{s_{ip} / \tau} / ( e^{s_{ip} / \tau} + \sum_j e^{s_{ij} / \tau} ) )`, with j
    over its negatives. In PyGCL's sum j runs over its other positives as well, as with
    ``over_positives="supcon"``: then its values are PyGCL's.

    Args:
        options: those of :class:`~pgcl_losses.InfoNCE`, by the same names, except ``negatives``,
            ``queries`` and ``reduction``. ``memory_size`` needs ``dim``, mode ``"G2G"`` or
            ``"L2L"``, and no extra masks.

    Shape:
        - anchor: ``[N, D]``
        - sample: ``[M, D]``; with ``intraview_negs`` the anchors follow, ``[M + N, D]``
        - pos_mask, neg_mask: ``[N, M]`` or ``[N, M + N]``, of zeros and ones; pairs in neither are
          left out. Other values of ``pos_mask`` are weights.
    """

    made_as = InfoNCE

    @_takes_what(InfoNCE.__init__)
    def __init__(self, **options: Any) -> None:
        super().__init__(options)
        self.info_nce = InfoNCE(**options)

    def _can_add_own_negatives(self) -> bool:
        loss = self.info_nce
        is_plain = not (loss.hardness or loss.debias or loss.decoupled)
        is_plain = is_plain and loss.similarity == "cosine"
        return loss.memory_size > 0 or (is_plain and isinstance(loss.temperature, float))

    def _of_both(self, anchor: Tensor, other: Tensor, own_negatives: bool) -> Sequence[Tensor]:
        self.info_nce.queries, self.info_nce.reduction = "all", "none"
        losses = self.info_nce(anchor, other)
        if own_negatives and not self.info_nce.memory_size:  # another term of the denominator
            units = unit_vectors(torch.stack([anchor, other]), losses.dtype)  # [2, N, D]
            gaps = units.square().sum(-1) - units.prod(0).sum(-1)  # 1 - cosine, unless it is zero
            losses = torch.logaddexp(losses, gaps.flatten() / self.info_nce.temperature)
        # The mean of each call: its sum over a count, both added over processes.
        sums = torch.stack([of_call.sum() for of_call in losses.tensor_split(2)])
        count = losses.new_tensor(len(anchor))
        if self.info_nce.is_distributed():
            group = self.info_nce.process_group
            of_all = torch.cat([sums.detach(), count.view(1)])
            distributed.all_reduce(of_all, group=group)
            # Its gradient is averaged over processes.
            sums = sums * count_ranks(group)
            sums = sums + (of_all[:-1] - sums).detach()
            count = of_all[-1]
        # Not views of one tensor: a user may change a loss in place.
        return [total / count.clamp(min=1) for total in sums]

    def _unpaired(self, anchor: Tensor, sample: Tensor, *masks: Tensor | None) -> Tensor:
        pos_mask, neg_mask = masks
        if pos_mask is None:
            raise ValueError("without pos_mask, sample must be the other view, or it and anchor")
        if self.info_nce.memory_size:
            raise ValueError(
                f"memory_size is {self.info_nce.memory_size}, but it must be 0 for mode 'G2L' and "
                "with extra masks: graph i of a batch is not graph i of the next one. Call "
                "pgcl_losses.InfoNCE with items that number the graphs of the dataset"
            )
        listed = pos_mask != 0
        if neg_mask is not None:
            listed = listed | (neg_mask == 0)
        i, j = listed.nonzero(as_tuple=True)
        # Positives are those of the mask alone: no two embeddings are of one item.
        items = torch.arange(len(anchor) + len(sample), device=anchor.device)
        items = items * count_ranks(None) + (distributed.get_rank() if count_ranks(None) > 1 else 0)
        loss = self.info_nce
        loss.negatives, loss.queries, loss.reduction = "cross", "first", "mean"
        return loss(
            anchor,
            sample,
            items=(items[: len(anchor)], items[len(anchor) :]),
            positives=torch.stack([i, j + len(anchor)]),
            positive_weights=pos_mask[i, j].float(),
        )


def _import_losses() -> Any:
    try:
        return importlib.import_module("GCL.losses")
    except (ImportError, OSError) as error:  # OSError: a dependency built for another torch
        raise ImportError(
            f"PyGCL cannot be imported ({error}). With Python 3.11 or older, in this order: pip "
            "install torch wheel setuptools ninja; pip install --no-build-isolation torch-scatter "
            "torch-sparse; pip install PyGCL==0.1.2 dgl==1.1.3 packaging torch-geometric"
        ) from error


def _source(view: Tensor, copied: bool = False) -> Any:
    """Where the gradient of a view goes; ``copied``: of the first view in a ``torch.cat``."""
    if not (torch.is_grad_enabled() and view.requires_grad):
        return None, 0
    node, number = get_gradient_edge(view)[:2]
    return node.next_functions[0] if copied and node.next_functions else (node, number)


def _version(tensor: Tensor) -> tuple[Any, ...]:
    # Inference tensors have no version.
    return id(tensor), tensor.requires_grad, tensor.is_inference() or tensor._version


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether both have the same values, NaN or not."""
    if one.shape != other.shape:
        return False
    return bool(one.isclose(other.to(one), rtol=0, atol=0, equal_nan=True).all())


def _ends_with_anchors(sample: Tensor, anchor: Tensor) -> bool:
    """Whether the second half of sample are the anchors, as with intraview_negs."""
    return len(sample) == 2 * len(anchor) and _are_equal(sample[len(anchor) :], anchor)


def _problem(
    anchor: Tensor, sample: Tensor, pos_mask: Tensor | None, neg_mask: Tensor | None
) -> str:
    """What is wrong with the masks; empty if nothing is."""
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
    """Whether embedding i of the other view is the only positive of anchor i.

    And all others are negatives; and whether an anchor is a negative of itself.
    """
    count = len(anchor)
    if count != len(other) or (
        pos_mask is not None
        and not (pos_mask.count_nonzero() == count and pos_mask.diagonal().all())
    ):
        return False, False
    if neg_mask is None:
        return True, False
    left_out = neg_mask == 0
    num_own = int(left_out.diagonal(count).sum()) if intraview else 0
    all_others = bool(left_out.sum() == count + num_own and left_out.diagonal().all())
    return all_others and num_own in (0, count), intraview and num_own < count
