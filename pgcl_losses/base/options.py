"""Options of modules: the annotation of a constructor's argument says how its value is checked.

The constructor assigns them, as in ``self.temperature = 0.1``, and `LossModule.__setattr__` calls
the check of each, also of later assignments. Each call of a loss checks options that contradict
each other again.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from pgcl_losses.base import checks as check
from pgcl_losses.base.arguments import check_arguments
from pgcl_losses.base.modes import is_transformed

Check = Callable[[str, Any], Any]  # takes an option's name and value; returns the value
Constructor = TypeVar("Constructor", bound=Callable[..., None])

COMMON = ("gather", "process_group")  # options of all modules, the last in a signature


def checked(constructor: Constructor) -> Constructor:
    """Decorate a constructor: a wrong argument is an error with a hint, and types have checks."""
    signature = inspect.signature(constructor)
    kinds = {name: _type_and_check(x.annotation) for name, x in signature.parameters.items()}

    @functools.wraps(constructor)
    def wrapped(self: nn.Module, *args: Any, **options: Any) -> None:
        check_arguments(type(self).__name__, constructor, options, args)
        constructor(self, *args, **options)

    # help() and the reference show this signature, without checks.
    shown = [x.replace(annotation=kinds[name][0]) for name, x in signature.parameters.items()]
    made: Any = wrapped
    made.__signature__ = signature.replace(parameters=shown)
    made.__annotations__ = {x.name: x.annotation for x in shown[1:]} | {"return": None}
    made.options = {name: kinds[name][1] for name in [*kinds][1:]}
    return cast(Constructor, wrapped)


def _type_and_check(kind: Any) -> tuple[Any, Check]:
    """Separate the annotation of an option into its plain type and its check."""
    if get_origin(kind) is Annotated:
        return kind.__origin__, kind.__metadata__[0]
    if kind is bool or get_origin(kind) is Literal:
        return kind, partial(one_of, choices=get_args(kind) or (True, False))
    return kind, lambda name, value: value


def temperature(name: str, value: Any) -> float | Tensor:
    """Check a number, or a tensor with one number.

    The value of a tensor may change, so it is checked when the loss is called.
    """
    if not isinstance(value, Tensor):
        return check.scale(name, value)
    if value.dim() != 0:
        raise ValueError(f"{name} must be a number or have shape (), but got {tuple(value.shape)}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point Tensor, but got {value.dtype}")
    is_learned = value.requires_grad and value.is_leaf and not is_transformed(value)
    if is_learned and not isinstance(value, nn.Parameter):
        raise TypeError(
            f"{name} is a Tensor that requires grad but is not in the loss's parameters(): give "
            "torch.nn.Parameter(...)"
        )
    return value


def heads(name: str, value: Any) -> int | tuple[int, ...]:
    """Check a number of prototypes, or several numbers, one for each head."""
    if isinstance(value, Integral):
        return check.count(name, value, minimum=1)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) == 0:
        expected = "a whole number, or a sequence of them with one for each head"
        raise TypeError(f"{name} must be {expected}, but got {check.shown(value)}")
    heads = tuple([check.count(f"{name}[{i}]", size, 1) for i, size in enumerate(value)])
    return heads if len(heads) > 1 else heads[0]


def one_of(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Check that a value is one of the choices, and of their type."""
    if not isinstance(value, type(choices[0])) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, but got {value!r}")
    return value


def process_group(name: str, value: Any) -> ProcessGroup | None:
    """Check None, or a process group that contains this process."""
    if distributed.is_available() and value == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name} does not contain this process: make the loss only on its members")
    if value is not None and not isinstance(value, ProcessGroup):
        raise TypeError(f"{name} must be a ProcessGroup or None, but got {value!r}")
    return value


# Types of options.
Scale = Annotated[float, check.scale]
Weight = Annotated[float, check.weight]
Temperature = Annotated[float | Tensor, temperature]
Size = Annotated[int, partial(check.count, minimum=0)]
Positive = Annotated[int, partial(check.count, minimum=1)]
Heads = Annotated[int | Sequence[int], heads]
Dimension = Annotated[int | None, lambda name, x: x if x is None else check.count(name, x, 1)]
# The gradient of hard negatives is the difference of two softmaxes, times beta. The larger beta is,
# the more digits this difference loses in float32. At 100 it is right to a thousandth.
Hardness = Annotated[float, partial(check.number, expected="a number from 0 to 100", highest=100.0)]
# The corrected mean over negatives is divided by 1 - tau+.
Debias = Annotated[float, partial(check.number, expected="a number from 0 to 0.999", highest=0.999)]
Group = Annotated[ProcessGroup | None, process_group]
