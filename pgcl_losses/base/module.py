"""The base class of all modules: it checks options, and makes sure that processes agree."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgcl_losses.base.arguments import RIGHT_NAMES, check_arguments
from pgcl_losses.base.distributed import Processes, agree, count_ranks
from pgcl_losses.base.modes import is_transformed
from pgcl_losses.base.options import COMMON, Check

_IS_BEFORE_2_9 = torch.__version__ < "2.9"
Function = TypeVar("Function", bound=Callable[..., Any])


def _with_collectives_or_before_torch_2_9(method: Any, *args: Any, **given: Any) -> Any:
    """Call a method that torch.compile must not trace. The compiler's error shows this name."""
    return method(*args, **given)


def called_by_all(call: str) -> Callable[[Function], Function]:
    """Decorate a method that all processes call: if one gets wrong arguments, all raise an error.

    ``call``: the name of the call, which the error shows.

    With several processes torch.compile leaves the method out of its graph. It would otherwise
    compile it again for each combination of batch sizes. The compiler of a torch before 2.9 cannot
    trace the whole method, so there it always runs eagerly.
    """

    def decorate(method: Any) -> Any:
        has = inspect.getfullargspec(method)
        names, positional = {*has.args, *has.kwonlyargs}, dict.fromkeys(has.args[1:])  # no self
        signature = inspect.signature(method)

        def check_call(self: "LossModule", *args: Any, **given: Any) -> dict[str, object]:
            owner = f"a call of {type(self).__name__}"
            check_arguments(owner, method, given)
            try:
                signature.bind(self, *args, **given)
            except TypeError as error:
                takes = ", ".join([*positional, *[f"{x}= by name" for x in has.kwonlyargs]])
                came = f"got {len(args)} by position: {error}"
                raise TypeError(f"{owner}.{call} takes {takes}, but {came}") from None
            return {}

        @functools.wraps(method)
        def wrapped(self: "LossModule", *args: Any, **given: Any) -> Any:
            if not given.keys() <= names or not (
                has.varargs or len(args) + len(given.keys() & positional) == len(positional)
            ):
                self.check_on_all(call, args, functools.partial(check_call, self, *args, **given))
            if torch.compiler.is_compiling() and (_IS_BEFORE_2_9 or self.is_distributed()):
                # With fullgraph=True the compiler raises an error here, which shows the next line.
                return torch.compiler.disable(_with_collectives_or_before_torch_2_9)(  # type: ignore[no-untyped-call]  # torch has no type there
                    method, self, *args, **given
                )
            return method(self, *args, **given)

        return wrapped

    return decorate


class LossModule(nn.Module):
    """A module that checks its options whenever they are assigned, and shows them in its repr.

    With several processes the module computes one result over the batches of all processes.
    ``gather=False`` gives each process a result of its own, and ``process_group`` names the
    processes that compute one result. A module that is called with a :class:`~pgcl_losses.Batch`
    does not check it: the module that made the batch has checked the inputs.
    """

    # The arguments of the constructor, or those that `own_options` names: others are options of
    # modules in this module.
    options: ClassVar[dict[str, Check]] = {}
    own_options: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[frozenset[str]] = frozenset()  # the options that cannot change
    gather: bool
    process_group: ProcessGroup | None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        checks = getattr(vars(cls).get("__init__"), "options", None)
        if checks is not None:
            cls.options = {name: checks[name] for name in cls.own_options or checks}

    def set_options(self, given: Mapping[str, Any]) -> None:
        """Assign the options among the arguments of a constructor, in their order."""
        for name in self.options:
            if name in given:  # the constructor of a base class has fewer
                setattr(self, name, given[name])

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in vars(self):  # before nn.Module.__init__, which torch may refuse
            super().__setattr__(name, value)
            return
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        if name in self.options:
            value = self._checked_option(name, value)
        else:
            self._refuse_option_of_child(name)
        self._refuse_change(name, value)
        self._refuse_other_name(name, value)
        super().__setattr__(name, value)

    def _checked_option(self, name: str, value: Any) -> Any:
        """Check the value of an option, and forget the Parameter or Module that it replaces."""
        value = self.options[name](name, value)
        for owned in (self._parameters, self._modules):
            owned.pop(name, None)  # a number may replace a Parameter, a function a Module
        return value

    def _refuse_option_of_child(self, name: str) -> None:
        """Raise an error if modules of this module have an option that this module lacks."""
        owners = [child for child, m in self.named_children() if name in _options_of(m)]
        if not owners:
            return
        fix = f"set its {' and '.join(f'{child}.{name}' for child in owners)}"
        if all(name in getattr(getattr(self, child), "fixed", ()) for child in owners):
            fix = "it cannot change, make a new one"
        raise AttributeError(f"{name} cannot be assigned to {type(self).__name__}: {fix}")

    def _refuse_change(self, name: str, value: Any) -> None:
        """Raise an error if an option that cannot change is to get another value."""
        if name in self.fixed and self.__dict__.get(name, value) != value:
            raise AttributeError(
                f"{name} is {getattr(self, name)!r} and cannot change in this "
                f"{type(self).__name__}, but {value!r} was assigned: make a new one"
            )

    def _refuse_other_name(self, name: str, value: Any) -> None:
        """Raise an error for the name that other libraries have for an option, such as tau."""
        right = RIGHT_NAMES.get(name, "")
        is_own = type(self).__module__.startswith("pgcl_losses.")  # no subclass of a user's
        is_new = not hasattr(self, name) and not isinstance(value, nn.Module)
        if is_own and is_new and any(right in _options_of(module) for module in self.modules()):
            raise AttributeError(f"{type(self).__name__} has no {name}: set {right}")

    def extra_repr(self) -> str:
        """Show the temperature, and the options that differ from their defaults."""
        signature, shown = inspect.signature(type(self).__init__).parameters, []
        for name in self.options:
            value, option = getattr(self, name), signature.get(name)
            is_default = option is not None and named(option.default) == named(value)
            if name == "temperature" or not (is_default or name == "process_group"):
                text = type(value).__name__ if isinstance(value, Tensor) else named(value)
                shown.append(f"{name}={repr(text) if text is value else text}")
        return ", ".join(shown)

    def all_options(self) -> dict[str, Any]:
        """The classes and options of this module and of all modules in it, by their paths."""
        values: dict[str, Any] = {}
        for path, module in self.named_modules():
            values[f"{path}.type".lstrip(".")] = type(module).__name__
            for name in _options_of(module):
                if name not in COMMON:
                    values[f"{path}.{name}".lstrip(".")] = named(getattr(module, name))
        return values

    def check_on_all(
        self,
        call: str,
        sets: Sequence[Any],
        check: Callable[[], Mapping[str, object]],
        compare_state: bool = True,
    ) -> Processes:
        """Check the inputs of a call on all processes, and return those that hold its sets.

        One process only calls ``check``. With several processes, all of them raise an error if one
        of them does, or if their options, inputs or parameters and buffers differ, see
        `pgcl_losses.base.distributed.agree`.

        ``call``: the name of the method. ``sets``: the tensors ``[N, ...]`` that it was called
        with. ``check``: raises an error for wrong inputs, and returns further claims about them on
        which all processes must agree. ``compare_state``: whether parameters and buffers must be
        the same on all processes.
        """
        if not self.is_distributed():
            check()
            return Processes([(part.shape[0],) for part in sets]).check_not_empty(call)
        call = f"{type(self).__name__}.{call}"
        claims = self.all_options()
        claims |= {"training": self.training, "gradients enabled": torch.is_grad_enabled()}
        if compare_state:
            claims |= {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return agree(call, sets, check, claims, self.process_group)

    def moves_state(self, embeddings: Tensor) -> bool:
        """Whether this forward is a training step, which may change the queue, memory and counters.

        Under torch.func transforms and in forward mode a module must act as a pure function, so its
        state does not change.
        """
        return self.training and torch.is_grad_enabled() and not is_transformed(embeddings)

    def is_distributed(self) -> bool:
        """Whether other processes hold parts of the same batch."""
        return self.gather and count_ranks(self.process_group) > 1


def _options_of(module: nn.Module) -> Mapping[str, Check]:
    """The options of a module of this package with their checks; other modules have none."""
    return module.options if isinstance(module, LossModule) else {}


def named(value: Any) -> Any:
    """Return a function's qualified name, or that of a callable's class; other values unchanged."""
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}" if callable(value) else value
