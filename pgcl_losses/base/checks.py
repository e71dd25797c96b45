"""Checks of inputs: each error message names the argument, what was given and what was expected."""

import sys
from collections.abc import Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.base.modes import can_be_read, is_eager

_LARGEST = sys.float_info.max


def shown(value: Any) -> str:
    """Describe a value in one line for a message: its repr and type, or the shape of a tensor."""
    if isinstance(value, Tensor) and value.dim() > 0:
        return f"a Tensor of shape {tuple(value.shape)}"
    return f"{' '.join(repr(value).split()):.60} ({type(value).__name__})"


def number(
    name: str, value: Any, *, expected: str, lowest: float = 0.0, highest: float = _LARGEST
) -> float:
    """Check that a value is a finite number from ``lowest`` to ``highest``; return it as a float.

    ``expected`` describes these bounds in the message.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {expected}, but got {shown(value)}")
    if value < lowest or not value <= highest:  # this form also catches NaN
        raise ValueError(f"{name} must be {expected}, but got {value!r:.40}")
    return float(value)


# Cosines are multiplied by 1 / temperature and by 1 / epsilon in float32. Within these bounds the
# products stay finite.
scale = partial(
    number, expected="a finite number of at least 1e-30, at most 1e30", lowest=1e-30, highest=1e30
)
weight = partial(number, expected="a finite number of at least 0")
fraction = partial(number, expected="a number from 0 to 1", highest=1.0)


def temperature(value: float | Tensor, z: Tensor) -> None:
    """Check the current value and the device of a temperature that is a tensor.

    The value may change between calls. It is read on a CPU only: on a GPU, reading it would
    synchronise.
    """
    if isinstance(value, Tensor):
        device("temperature", value, "z1", z)
        if can_be_read(value.detach()):
            scale("temperature", value.item())


def count(name: str, value: Any, minimum: int) -> int:
    """Check that a value is a whole number of at least ``minimum``; return it as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, but got {shown(value)}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, but got {value!r}")
    return int(value)


def matrix(name: str, value: Any, shape: str) -> None:
    """Check that a value is a dense floating-point matrix with at least one column."""
    if not isinstance(value, Tensor):
        parts = ", ".join(type(part).__name__ for part in value) if type(value) is tuple else ""
        hint = f" ({parts}): of what the encoder returns, give the embeddings" if parts else ""
        came = type(value).__name__ + hint
        raise TypeError(f"{name} must be a Tensor of shape {shape}, but got {came}")
    if value.dim() != 2:
        is_vector = value.dim() == 1 and shape == "[N, D]" and name != "z1"
        hint = ": give labels as labels=" if is_vector or not value.is_floating_point() else ""
        raise ValueError(f"{name} must have shape {shape}, but got {tuple(value.shape)}{hint}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point Tensor, but got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense Tensor, but got layout {value.layout}")
    if value.shape[1] == 0:
        raise ValueError(f"{name} must not be empty, but got shape {tuple(value.shape)}")


def matrices(
    named: Sequence[tuple[str, Any]],
    shape: str = "[N, D]",
    lengths_may_differ: bool = False,
) -> None:
    """Check that named matrices have the same dtype, device and shape.

    With ``lengths_may_differ`` only their numbers of columns must be the same, not of rows.
    """
    first_name, first = named[0]
    matrix(first_name, first, shape)
    start = 1 if lengths_may_differ else 0
    for name, view in named[1:]:
        matrix(name, view, shape)
        if view.shape[start:] != first.shape[start:]:
            rule = "row i of every view must be graph i (or give InfoNCE labels= or positives=)"
            if view.shape[1] != first.shape[1]:
                rule = f"the dimension {shape[-2]} must be the same"
            shapes = f"{tuple(view.shape)} but {first_name} has {tuple(first.shape)}"
            raise ValueError(f"{name} has shape {shapes}: {rule}")
        if view.dtype != first.dtype:
            raise TypeError(f"{name} is {view.dtype} but {first_name} is {first.dtype}")
        device(name, view, first_name, first)


def loss_views(
    views: Sequence[Any], fewest: int, lengths_may_differ: bool = False, why: str = ""
) -> None:
    """Check the views of one batch of graphs or, with ``lengths_may_differ``, sets of embeddings.

    ``fewest``: the smallest number of views that the loss takes, 1 or 2. ``why`` is added to the
    message about this number.
    """
    if len(views) < fewest:
        hint = ": unpack a list or a stack by *views, torch.cat of two views by *z.chunk(2)"
        expected = f"{('one', 'two')[fewest - 1]} or more Tensors of shape [N, D]{why}"
        raise TypeError(f"views must be {expected}, but got {len(views)}{hint if views else ''}")
    named = [(f"z{v}", z) for v, z in enumerate(views, 1)]
    matrices(named, "[N, D]", lengths_may_differ)


def negatives_of_memory(negatives: str, memory_size: int) -> None:
    """Check that a loss with ``negatives="memory"`` has a memory."""
    if negatives == "memory" and memory_size == 0:
        raise ValueError("negatives is 'memory', which needs a memory, but memory_size is 0")


def prototypes(name: str, value: Tensor, z_name: str, z: Tensor, maker: str = "") -> None:
    """Check that prototypes ``[K, D]`` have the dimension and the device of embeddings.

    ``maker``: the class that owns the prototypes, which the message tells the user to construct
    anew.
    """
    if hasattr(value, "full_tensor"):  # a DTensor
        raise TypeError(
            f"{name} is sharded (a DTensor): leave it out of fully_shard with ignored_params, or "
            f"call {maker or 'the loss'} in the sharded module's forward, and start_from_ earlier"
        )
    if z.shape[1] != value.shape[1]:
        dimensions = f"{z.shape[1]} but {name} has dimension {value.shape[1]}"
        fix = f": make {maker}(dim={z.shape[1]})" if maker else ""
        raise ValueError(f"{z_name} has dimension {dimensions}{fix}")
    device(z_name, z, name, value)


def finite(name: str, value: Tensor) -> None:
    """Check that there is no NaN or inf. It synchronises, and compiled graphs leave it out."""
    if is_eager(value) and not bool(value.isfinite().all()):
        raise ValueError(f"{name} must be finite, but there is a NaN or an inf among them")


def device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors are on the same device."""
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device} but {other_name} is on {other.device}")


def sizes(name: str, value: Any, heads: Sequence[int], z_name: str, z: Tensor) -> None:
    """Check sizes of clusters ``[K]``, of all heads: not negative, and one above 0 in each head."""
    shape = (sum(heads),)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor of shape {shape}, but got {shown(value)}")
    if value.shape != shape:
        expected = f"{shape}, one for each prototype"
        raise ValueError(f"{name} must have shape {expected}, but got {tuple(value.shape)}")
    if value.is_complex() or value.layout != torch.strided:
        came = f"{value.dtype} with layout {value.layout}"
        raise TypeError(f"{name} must be a dense Tensor of numbers or bools, but got {came}")
    device(name, value, z_name, z)
    if not can_be_read(value):
        return
    for head in value.detach().double().split_with_sizes([*heads]):
        if not bool((head >= 0).all() & head.isfinite().all() & (head > 0).any()):
            expected = "finite, at least 0, and above 0 for one prototype of each head"
            raise ValueError(f"{name} must be {expected}, but got {shown_values(head)}")


def claim_of(values: Tensor | None) -> object:
    """What processes compare of a few values: the values themselves if Python may read them."""
    return values.tolist() if values is not None and can_be_read(values) else values


def shown_values(values: Tensor) -> str:
    """The first values of a vector, for a message."""
    first = ", ".join(f"{x:g}" for x in values[:8].tolist())
    return f"{first}{', ...' if len(values) > 8 else ''}"


def integers(name: str, value: Any, shape: str, z_name: str, z: Tensor) -> None:
    """Check for an int64 tensor on the device of ``z``; the message shows ``shape``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor of shape {shape}, but got {type(value).__name__}")
    if value.dtype != torch.long:
        hint = "" if value.is_floating_point() else ": use .long()"
        raise TypeError(f"{name} must be an int64 Tensor, but got {value.dtype}{hint}")
    device(name, value, z_name, z)


def clusters(name: str, value: Any, z_name: str, z: Tensor, heads: Sequence[int] = ()) -> None:
    """Check cluster numbers or labels: one for each embedding ``[N]``, or for each head ``[N, H]``.

    ``heads``: the number of prototypes in each head. If it is given, cluster numbers must be in
    range.
    """
    columns = (len(heads),) if len(heads) > 1 else ()
    shape = f"[N, {len(heads)}], a column for each head," if columns else "[N]"
    integers(name, value, shape, z_name, z)
    if value.dim() == 0 or value.shape[1:] != columns:
        raise ValueError(f"{name} must have shape {shape}, but got {tuple(value.shape)}")
    if value.shape[0] != z.shape[0]:
        lengths = f"{len(value)} but {z_name} has {len(z)}"
        raise ValueError(f"{name} has length {lengths}: there must be one for each embedding")
    # On a GPU and in a compiled graph the numbers cannot be read here. There torch itself reports
    # an index that is out of range.
    if value.shape[0] == 0 or not heads or not can_be_read(value):
        return
    for num_prototypes, column in zip(heads, value.view(len(value), -1).unbind(1), strict=False):
        low, high = (int(bound) for bound in column.aminmax())
        if low < 0 or high >= num_prototypes:
            all_of = f"0..{num_prototypes - 1}, one number per prototype"
            raise ValueError(f"{name} must lie in {all_of}, but its values span {low}..{high}")
