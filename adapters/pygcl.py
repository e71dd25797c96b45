"""PyGCL's ``DualBranchContrast`` for the losses of this package. Two lines of a script change::

    from pgcl_losses import InfoNCE
    from pgcl_losses.adapters.pygcl import DualBranchContrast

    contrast_model = DualBranchContrast(loss=InfoNCE(temperature=0.2), mode="G2G")

The value is the one of PyGCL's contrast model with ``L.InfoNCE(tau=0.2)``. PyGCL is not imported.

The prototypes of PGCL are parameters of the contrast model. Give them to the optimizer; PyGCL's own
scripts optimize the encoder alone::

    contrast_model = DualBranchContrast(loss=PGCLLoss(dim=64), mode="G2G")
    optimizer = Adam([*encoder.parameters(), *contrast_model.parameters()], lr=0.01)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from pgcl_losses import InfoNCE, PGCLLoss

__all__ = ["DualBranchContrast"]

Mode = Literal["G2G", "L2L", "G2L"]


class DualBranchContrast(nn.Module):
    """PyGCL's ``DualBranchContrast``, which calls a loss of this package.

    With :class:`~pgcl_losses.InfoNCE`, values and gradients are those of PyGCL's contrast model
    with PyGCL's ``InfoNCE``. In mode ``"G2L"`` and with ``extra_pos_mask``, where anchors have
    several positives, this needs ``over_positives="supcon"``. As in PyGCL, ``intraview_negs=True``
    makes each anchor a negative of itself, unless ``extra_neg_mask`` is given. A graph without
    nodes, for which PyGCL returns NaN, is left out of the mean.

    With :class:`~pgcl_losses.PGCLLoss`, the value is PGCL of both views. No embedding is its own
    negative.

    The loss is called once for both directions, and in mode ``"G2L"`` twice: with the graphs g1 and
    the nodes h2, and with g2 and h1. With several processes the loss is global, as always; each
    process gives the batch and masks of its own embeddings.

    Args:
        loss (Module): an :class:`~pgcl_losses.InfoNCE` or :class:`~pgcl_losses.PGCLLoss`, or a
            module with the same call and options. The constructor **sets its options**
            ``negatives`` and ``queries``, because ``mode`` and ``intraview_negs`` decide them.
            Values that contradict them are an error. Give each contrast model its own loss.
        mode (str): ``"G2G"`` compares graphs, ``"L2L"`` nodes, and ``"G2L"`` graphs with nodes.
        intraview_negs (bool): whether negatives come from the anchor's own view as well.
        kwargs: further arguments of each call of the loss.

    Shape:
        - h1, h2: embeddings of nodes in both views, ``[V, D]``
        - g1, g2: embeddings of graphs in both views, ``[G, D]``
        - batch: the graph of each node for mode ``"G2L"``, ``[V]``
        - h3, h4: nodes of a corrupted graph for mode ``"G2L"`` with a single graph, ``[V, D]``: h3
          are negatives of g2, and h4 of g1
        - extra_pos_mask, extra_neg_mask: a row for each anchor and a column for each sample,
          ``[N, N]`` or ``[G, V]``; with ``intraview_negs`` the anchors are further samples,
          ``[N, 2N]`` or ``[G, V + G]``. The first adds positives, the second says which negatives
          remain. A pair in neither mask is left out. A pair in both masks is an error.
        - output: scalar

    Examples:
        >>> import torch
        >>> from pgcl_losses import InfoNCE
        >>> from pgcl_losses.adapters.pygcl import DualBranchContrast
        >>> contrast_model = DualBranchContrast(InfoNCE(temperature=0.2), mode="G2G")
        >>> g1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> g2 = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> contrast_model(g1=g1, g2=g2)
        tensor(0.1163)

    """

    loss: Callable[..., Tensor]

    def __init__(
        self, loss: nn.Module, mode: Mode, intraview_negs: bool = False, **kwargs: Any
    ) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be 'G2G', 'L2L' or 'G2L', but got {mode!r}")
        if not isinstance(loss, nn.Module) or not hasattr(_contrast_of(loss), "negatives"):
            raise TypeError(
                "loss must be InfoNCE(...) or PGCLLoss(...) of pgcl_losses, but got "
                f"{loss!r:.60}: a loss of PyGCL needs PyGCL's own DualBranchContrast"
            )
        is_pgcl = isinstance(loss, PGCLLoss)
        if is_pgcl and mode == "G2L":
            raise ValueError("mode must not be 'G2L': PGCLLoss compares views of the same graphs")
        self.loss, self.mode, self.intraview_negs, self.kwargs = loss, mode, intraview_negs, kwargs
        # InfoNCE gets the samples of PyGCL as its second set. With intraview_negs the anchors are
        # among them, so each anchor is a negative of itself.
        self.has_samples = mode == "G2L" or (intraview_negs and not is_pgcl)
        if self.has_samples:
            self._require(memory_size=(0,))  # both branches would store the same embeddings
        negatives = "all" if intraview_negs else "cross"
        self._require(negatives=("all", negatives))
        self._require(queries=("all", "first" if mode == "G2L" else "all"))
        queries = "first" if self.has_samples else "all"
        self.options = {"negatives": negatives if is_pgcl else "cross", "queries": queries}
        for name, value in self.options.items():
            setattr(_contrast_of(loss), name, value)

    def _require(self, **allowed: tuple[object, ...]) -> None:
        """Raise unless each option of the loss has one of the allowed values."""
        for name, values in allowed.items():
            if (given := getattr(_contrast_of(self.loss), name, values[0])) not in values:
                fix = f"give each DualBranchContrast a new loss, without {name}"
                why = f"mode={self.mode!r} and intraview_negs={self.intraview_negs} decide it"
                raise ValueError(
                    f"{name} of the loss is {given!r}, not {values[-1]!r}: {fix}, since {why}"
                )

    def forward(
        self,
        h1: Tensor | None = None,
        h2: Tensor | None = None,
        g1: Tensor | None = None,
        g2: Tensor | None = None,
        batch: Tensor | None = None,
        h3: Tensor | None = None,
        h4: Tensor | None = None,
        extra_pos_mask: Tensor | None = None,
        extra_neg_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of both branches."""
        # A script may have assigned another loss, or another option of it.
        self._require(**{name: (value,) for name, value in self.options.items()})
        masks = extra_pos_mask, extra_neg_mask
        if self.mode == "L2L":
            return self._loss_of_views(*self._given(h1=h1, h2=h2), *masks)
        g1, g2 = self._given(g1=g1, g2=g2)
        if self.mode == "G2G":
            return self._loss_of_views(g1, g2, *masks)
        if len(g1) == 1 and not self._is_distributed():  # no other graph has nodes
            h1, h2, h3, h4 = self._given(h1=h1, h2=h2, h3=h3, h4=h4)
        if len(g1) == 1 and batch is None and h1 is not None:
            batch = torch.zeros(len(h1), dtype=torch.long, device=h1.device)
        h1, h2, batch = self._given(h1=h1, h2=h2, batch=batch)
        first = self._loss_of_graphs(g1, h2, h4, batch, *masks)
        return (first + self._loss_of_graphs(g2, h1, h3, batch, *masks)) / 2

    if TYPE_CHECKING:
        __call__ = forward

    def _is_distributed(self) -> bool:
        """Whether other processes have further graphs of the batch."""
        return isinstance(self.loss, InfoNCE) and self.loss.is_distributed()

    def _given(self, **tensors: Tensor | None) -> list[Tensor]:
        """Raise unless all tensors are given and have the same length."""
        given = [tensor for tensor in tensors.values() if tensor is not None]
        if len(given) < len(tensors) or len({len(tensor) for tensor in given}) > 1:
            shapes = {name: getattr(tensor, "shape", None) for name, tensor in tensors.items()}
            raise ValueError(f"mode {self.mode!r} needs tensors of one length, but got {shapes}")
        return given

    def _loss_of_views(self, z1: Tensor, z2: Tensor, *masks: Tensor | None) -> Tensor:
        """Compare two views ``[N, D]`` in both directions."""
        n, sets = len(z1), (z1, z2)
        if self.has_samples:  # row i of the second set is the positive of anchor i
            sets = torch.cat([z1, z2]), torch.cat([z2, z1])
        if all(mask is None for mask in masks):
            return self.loss(*sets, **self.kwargs)
        own = torch.arange(n, device=z1.device).expand(2, n)
        (row, column), weights = self._list_pairs(own, (n, n * (1 + self.intraview_negs)), *masks)
        # PyGCL's samples of the first view are [z2, z1], and of the second view [z1, z2].
        turned = (column + n) % (2 * n)
        keys = (column + 2 * n, turned + 2 * n) if self.has_samples else (turned, column)
        pairs = torch.stack([torch.cat([row, row + n]), torch.cat(keys)])
        return self.loss(*sets, positives=pairs, positive_weights=weights.repeat(2), **self.kwargs)

    def _loss_of_graphs(
        self, graphs: Tensor, nodes: Tensor, others: Tensor | None, batch: Tensor, *masks: Any
    ) -> Tensor:
        """Compare graphs ``[G, D]`` with nodes, of which ``others`` belong to no graph."""
        own = torch.stack([batch, torch.arange(len(batch), device=batch.device)])
        samples = nodes if others is None or len(graphs) > 1 else torch.cat([nodes, others])
        sets = graphs, torch.cat([samples, graphs]) if self.intraview_negs else samples
        (row, column), weights = self._list_pairs(own, (len(graphs), len(sets[1])), *masks)
        pairs = torch.stack([row, column + len(graphs)])
        return self.loss(*sets, positives=pairs, positive_weights=weights, **self.kwargs)

    def _list_pairs(self, own: Tensor, shape: tuple[int, ...], *masks: Any) -> tuple[Tensor, ...]:
        """List the pairs (anchor, sample) that are no negatives ``[2, P]``, with weights ``[P]``.

        A positive has weight 1, and a pair that is left out 0. ``own``: the positives without
        masks. ``shape``: of the masks.
        """
        extra_pos_mask, extra_neg_mask = masks
        if extra_pos_mask is None and extra_neg_mask is None:
            return own, torch.ones(own.shape[1], device=own.device)
        for mask in masks:
            if mask is not None and mask.shape != shape:
                raise ValueError(f"masks must have shape {shape}, but got {tuple(mask.shape)}")
        is_own = torch.zeros(shape, dtype=torch.bool, device=own.device)
        is_own[own[0], own[1]] = True
        positive = is_own if extra_pos_mask is None else is_own | extra_pos_mask.bool()
        negative = ~positive
        if extra_neg_mask is not None:
            negative = extra_neg_mask.bool() & ~is_own
            if self.intraview_negs:  # no anchor is its own negative; PGCL leaves it out anyway
                negative.diagonal(shape[1] - shape[0]).fill_(not self.has_samples)
            if (positive & negative).any():
                raise ValueError("the masks share a pair: give extra_neg_mask & ~extra_pos_mask")
        pairs = (~negative).nonzero().T
        return pairs, positive[pairs[0], pairs[1]].float()


def _contrast_of(loss: Any) -> Any:
    """Return the module that has the options ``negatives`` and ``queries``."""
    return getattr(loss, "contrast", loss)
