"""PGCL as a loss for PyGCL's contrast models; PyGCL's augmentors for the adapter of PyG::

    from pgcl_losses.adapters.pygcl import PGCLContrastLoss

    contrast_model = DualBranchContrast(PGCLContrastLoss(dim=64), mode="G2G", intraview_negs=True)
    optimizer = Adam([*encoder.parameters(), *contrast_model.parameters()], lr=0.01)

The optimizer needs both lists of parameters; PyGCL's own examples give it only the encoder's. With
PyGCL's augmentors::

    from pgcl_losses.adapters.pygcl import AsTransform

    model = pyg.ContrastiveModel(encoder, AsTransform(NodeDropping(pn=0.1)), NodeDrop(0.1), loss)
"""

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from pgcl_losses._warnings import NOT_THE_USER
from pgcl_losses.agree import fingerprint
from pgcl_losses.pgcl import PGCLLoss

__all__ = ["AsTransform", "PGCLContrastLoss"]

NOT_THE_USER.add("GCL")  # its contrast models call the loss

_Options = ParamSpec("_Options")


def _takes_what_pgcl_takes(
    pgcl: Callable[Concatenate[PGCLLoss, _Options], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Options], None]]:
    """For type checkers: they see the options that another constructor lists."""
    return lambda constructor: constructor


class _Computation(NamedTuple):
    """What decides the value and the gradient of a loss."""

    options: tuple[Any, ...]
    gradients: tuple[Any, ...]  # where those of both views go
    numbers: Tensor  # a fingerprint of the views, the prototypes, their state and the loss

    def is_that(self, other: "_Computation") -> bool:
        return self[:2] == other[:2] and torch.equal(self.numbers, other.numbers)


class PGCLContrastLoss(nn.Module):
    """:class:`~pgcl_losses.PGCLLoss` where PyGCL wants a loss: in ``DualBranchContrast``.

    For modes ``"G2G"`` and ``"L2L"``. ``intraview_negs=True`` of the contrast model is
    ``negatives="all"``, ``False`` is ``"cross"``: each call sets that option of ``loss.pgcl``. A
    sample is never its own negative. A contrast model calls the loss once for each view and takes
    the mean. Both calls return PGCL of both views: the second call has the views swapped, and
    returns the result of the first while that is in use and nothing else has changed.

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

    @_takes_what_pgcl_takes(PGCLLoss.__init__)
    def __init__(self, dim: int, num_prototypes: int | Sequence[int] = 10, **options: Any) -> None:
        super().__init__()
        _check_options(options)
        losses = _import_losses()
        # All that its Loss has to inherit is a __call__ that would bypass the hooks of a module.
        losses.Loss.register(type(self))
        self.pgcl = PGCLLoss(dim, num_prototypes, **options)
        # The loss of the first call, while it is alive, with what the second one has to be.
        self._first: WeakTensorKeyDictionary | None = None

    @classmethod
    def recommended(
        cls, dim: int, *, batch_size: int, steps: int, temperature: float = 0.2, **options: Any
    ) -> "PGCLContrastLoss":
        """With the setting of :meth:`PGCLLoss.recommended <pgcl_losses.PGCLLoss.recommended>`."""
        _check_options(options)
        loss = cls(dim)
        loss.pgcl = PGCLLoss.recommended(
            dim, batch_size=batch_size, steps=steps, temperature=temperature, **options
        )
        return loss

    def forward(
        self,
        anchor: Tensor,
        sample: Tensor,
        pos_mask: Tensor | None = None,
        neg_mask: Tensor | None = None,
    ) -> Tensor:
        return self.compute(anchor, sample, pos_mask, neg_mask)

    def compute(
        self,
        anchor: Tensor,
        sample: Tensor,
        pos_mask: Tensor | None = None,
        neg_mask: Tensor | None = None,
    ) -> Tensor:
        """What PyGCL calls by this name."""
        num_rows = len(anchor)
        intraview = len(sample) == 2 * num_rows
        if not intraview and len(sample) != num_rows:
            raise ValueError(
                f"anchor has {num_rows} rows and sample {len(sample)}, but sample must have as "
                "many or, with intraview_negs, twice as many: mode must be 'G2G' or 'L2L'"
            )
        _check_masks(pos_mask, neg_mask, num_rows, len(sample))
        self.pgcl.negatives = "all" if intraview else "cross"
        other = sample[:num_rows]
        origins = _origin(anchor), _origin(sample, copied=intraview)
        first, self._first = self._first, None
        for loss, second in first.items() if first else ():  # type: ignore[no-untyped-call]  # torch has no type there
            if second.is_that(self._computation((anchor, other), origins, loss)):
                result: Tensor = loss
                return result
        loss = self.pgcl(anchor, other)
        second = self._computation((other, anchor), origins[::-1], loss)
        self._first = WeakTensorKeyDictionary({loss: second})
        if loss.requires_grad:  # backward frees its graph
            loss.register_hook(lambda _: setattr(self, "_first", None))  # type: ignore[no-untyped-call]  # torch has no type there
        return loss

    def _computation(
        self, views: tuple[Tensor, ...], origins: tuple[Any, ...], loss: Tensor
    ) -> _Computation:
        pgcl = self.pgcl
        state = [*pgcl.prototypes.state().values()]
        options = (
            pgcl.facts(),
            pgcl.gather,
            pgcl.process_group,
            [module.training for module in pgcl.modules()],
            torch.is_grad_enabled(),
            [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*views, *state)],
        )
        numbers = fingerprint([*views, *state, loss], loss.device)
        return _Computation(options, origins, numbers)

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be pickled.
        return {**self.__dict__, "_first": None}


class AsTransform:
    """An augmentor of PyGCL as a transform of PyG: whole ``Batch`` in, whole ``Batch`` out.

    PyGCL's augmentors keep all nodes. It is an error if one does not, or if it joins graphs by an
    edge, as ``EdgeAdding`` does. ``NodeShuffling`` moves features of nodes to other graphs of the
    batch. Several augmentors fail if a whole batch has no edge.

    An augmentor carries one weight per edge: ``edge_weight``, or the only attribute that the edges
    have, under any name. If there is none and the augmentor makes one, it becomes ``edge_weight``.

    Args:
        augmentor: what maps ``(x, edge_index, edge_weight)`` to the same three, such as
            ``GCL.augmentors.Compose([...])``.
    """

    def __init__(self, augmentor: Callable[..., tuple[Tensor, Tensor, Tensor | None]]) -> None:
        if not callable(augmentor):
            raise TypeError(
                f"augmentor must be an augmentor of PyGCL, but got {augmentor!r}; for no "
                "augmentation give the model torch.nn.Identity() instead of AsTransform"
            )
        if _remembers(augmentor):
            raise ValueError(
                "augmentor would return its first batch for every other one, from its cache: make "
                "it with use_cache=False"
            )
        self.augmentor = augmentor

    def __call__(self, data: Any) -> Any:
        from ._pyg_batch import edge_attributes, replace_edges, structure

        data = copy.copy(data)
        ptr, graph = structure(data)
        names = edge_attributes(data, ptr)
        name = names[0] if len(names) == 1 else "edge_weight"
        x, edge_index, weight = self.augmentor(data.x, data.edge_index, data.get(name))
        if x is not None:
            if len(x) != len(graph):
                raise ValueError(
                    f"augmentor made {len(x)} nodes of {len(graph)}: it must keep them all, since "
                    "it does not say to which graph other nodes belong"
                )
            data.x = x
        carried = {} if weight is None else {name: weight}
        if edge_index is not data.edge_index and set(names) - carried.keys():
            raise ValueError(
                f"augmentor changes the edges and takes {', '.join(carried) or 'nothing'} along, "
                f"but they have {', '.join(names)}: delete the rest"
            )
        if (graph[edge_index[0]] != graph[edge_index[1]]).any():
            raise ValueError(
                "augmentor joined graphs of the batch by an edge; EdgePerturb of the adapter of "
                "PyG adds edges inside of graphs"
            )
        if weight is not None and len(weight) != edge_index.shape[1]:
            raise ValueError(
                f"augmentor made {edge_index.shape[1]} edges but {len(weight)} values of {name}"
            )
        return replace_edges(data, edge_index, graph, len(ptr) - 1, carried)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.augmentor).__name__})"


def _remembers(augmentor: Any) -> bool:
    """Whether it, or one that it is made of, has a cache, which is for a single graph."""
    parts = getattr(augmentor, "augmentors", [])
    return getattr(augmentor, "use_cache", False) or any(_remembers(part) for part in parts)


def _import_losses() -> Any:
    try:
        return importlib.import_module("GCL.losses")
    except (
        ImportError,
        OSError,
    ) as error:  # OSError: a compiled dependency of it, built for other torch
        raise ImportError(
            f"PyGCL cannot be imported ({error}). With Python 3.11 or older, in this order: pip "
            "install torch wheel setuptools ninja; pip install --no-build-isolation torch-scatter "
            "torch-sparse; pip install PyGCL==0.1.2 dgl==1.1.3 packaging torch-geometric"
        ) from error


def _check_options(options: Mapping[str, Any]) -> None:
    for name in ("negatives", "reduction"):
        if name in options:
            raise TypeError(f"{name} is up to the contrast model, but got {options[name]!r}")


def _origin(view: Tensor, copied: bool = False) -> tuple[Any, ...]:
    """Where the gradient of a view goes; with intraview_negs PyGCL gives a copy of both views."""
    if not (torch.is_grad_enabled() and view.requires_grad):
        return None, 0
    edge = get_gradient_edge(view)
    return edge.node.next_functions[0] if copied and edge.node.next_functions else tuple(edge[:2])


def _check_masks(
    pos_mask: Tensor | None, neg_mask: Tensor | None, num_rows: int, num_samples: int
) -> None:
    """Only those masks that a contrast model makes by itself.

    By mistake it leaves each anchor in ``neg_mask`` as a negative of itself; this class does not.
    """
    if pos_mask is not None and not (
        pos_mask.shape == (num_rows, num_samples)
        and pos_mask.count_nonzero() == num_rows
        and pos_mask.diagonal().all()
    ):
        raise ValueError(
            "pos_mask must pair row i with row i of the other view and with nothing else: PGCL "
            "knows no other positives (mode 'G2L', extra_pos_mask)"
        )
    if neg_mask is None:
        return
    left_out = int((neg_mask == 0).sum())
    # The other view of the anchor's own graph, and perhaps the anchor itself.
    if neg_mask.shape != (num_rows, num_samples) or left_out not in (
        num_rows,
        num_rows * (num_samples // num_rows),
    ):
        raise ValueError(
            "neg_mask must be that of the sampler: PGCL leaves out negatives only by cluster "
            "(extra_neg_mask)"
        )
