"""A device that is not the CPU, on a machine that has no other: it holds tensors of the CPU.

As on a GPU, tensors on two devices do not mix, generators of the CPU do not draw on it, and Python
waits when it reads a value: `no_waiting` makes this an error.
"""

import os
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils import backend_registration

NAME = "pretend"
# Autograd on a GPU fails beside this device.
IS_POSSIBLE = not torch.cuda.is_available() and hasattr(
    backend_registration, "_setup_privateuseone_for_python_backend"
)
# Operations that take tensors on two devices, since they copy one of them; and that read values.
COPYING = ("_to_copy", "copy_", "_copy_from")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
READING = (
    *("_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero"),
    *("repeat_interleave", "unique_consecutive", "unique_dim"),
)

_state = {"may_wait": True}
_libraries = []  # the kernels of a library last as long as it does


class Pretended(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        device = torch.device(NAME, 0)
        return cls._make_wrapper_subclass(
            cls, held.size(), dtype=held.dtype, device=device, **layout
        )

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"{self.held!r} on {NAME}"

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return call(function, *args, **(kwargs or {}))


def call(function, *args, **kwargs):
    """Call an operation with the tensors that are held, and hold its results."""
    name, tensors = function.overloadpacket.__name__, []
    each(
        (args, tuple(kwargs.values())), lambda x: isinstance(x, torch.Tensor) and tensors.append(x)
    )
    known = {id(x.held): x for x in tensors if isinstance(x, Pretended)}
    # A number on the CPU may be an operand anywhere.
    foreign = [x for x in tensors if not isinstance(x, Pretended) and x.dim() > 0] if known else []
    if foreign and name not in COPYING + INDEXING:
        raise RuntimeError(f"{name} of tensors on {NAME} and on the CPU")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{name} on {NAME} takes no generator of the CPU")
    stays = kwargs.get("device") is None or torch.device(kwargs["device"]).type == NAME
    if not _state["may_wait"]:
        masks = name in INDEXING and [x for x in args[1] if x is not None and x.dtype == torch.bool]
        at_once = kwargs.get("non_blocking") or (name in COPYING and args[2:3] == (True,))
        if name in READING or masks or ((foreign or not stays) and not at_once):
            raise RuntimeError(f"{name} waits for the device")
    if "device" in kwargs:
        kwargs["device"] = "cpu"

    def on_device(x):
        if not isinstance(x, torch.Tensor):
            return x
        if (own := known.get(id(x))) is None:
            return Pretended(x)
        if own.shape != x.shape:  # as after squeeze_
            with torch._C._DisableTorchDispatch():
                own.as_strided_(x.shape, x.stride(), x.storage_offset())
        return own

    args, values = each((args, tuple(kwargs.values())), lambda x: getattr(x, "held", x))
    with torch._C._DisableTorchDispatch():
        result = function(*args, **dict(zip(kwargs, values, strict=True)))
    return each(result, on_device) if stays else result


def each(tree, function):
    """Apply a function to all items of lists in lists."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([each(item, function) for item in tree])
    return function(tree)


@contextmanager
def no_waiting():
    """A block in which an operation fails that waits for the device."""
    _state["may_wait"] = False
    try:
        yield
    finally:
        _state["may_wait"] = True


def makers():
    """The operations that make a tensor from none, with their names."""
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, name, None) if full.startswith("aten::") else None
        operation = getattr(packet, overload or "default", None)
        if operation is None:
            continue
        types = {argument.name: str(argument.type) for argument in operation._schema.arguments}
        if "device" in types and not any("Tensor" in kind for kind in types.values()):
            yield full.removeprefix("aten::"), operation


@contextmanager
def registered():
    """A block in which the device can be used, and modules convert their parameters to it."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    register()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def lowered(operation, *tensors, **kwargs):
    """What autocast makes of a product of matrices."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    dtype = torch.get_autocast_dtype(NAME)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        given = [x.to(dtype) if x.dtype == torch.float32 else x for x in tensors]
        return operation(*given, **kwargs)


def register():
    """Make the device, once in a process."""
    if _libraries:
        return
    os.environ["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "0"  # its thread needs Python to end

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.float16, torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    _libraries.append(library := torch.library.Library("aten", "IMPL"))
    for name, operation in makers():
        library.impl(name, partial(call, operation), "PrivateUse1")

    _libraries.append(every := torch.library.Library("_", "IMPL"))
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("matmul", "mm", "addmm", "bmm", "linalg_vecdot"):
        kernel = partial(lowered, getattr(torch.ops.aten, name).default)
        library.impl(name, kernel, "AutocastPrivateUse1")

    def copy_from(source, target, non_blocking=False):
        return call(torch.ops.aten.copy_.default, target, source, non_blocking)

    library.impl("_copy_from", copy_from, "PrivateUse1")  # how torch.tensor copies
