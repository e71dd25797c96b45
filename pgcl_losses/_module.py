"""The base of all modules: checked options, and agreement between processes."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgcl_losses import _checks
from pgcl_losses._modes import is_transformed, untraced
from pgcl_losses.distributed import Processes, agreed_processes, count_ranks

Check = Callable[[str, Any], Any]
Function = TypeVar("Function", bound=Callable[..., Any])
Self = TypeVar("Self", bound="LossModule")

# Names in papers and other libraries for each argument.
_OTHER_NAMES = {
    "temperature": "tau temp T",
    "num_prototypes": "K n_clusters num_clusters",
    "consistency_weight": "lambda_ lambd lmbda lam",
    "epsilon": "eps",
    "dim": "embedding_dim embed_dim emb_dim hidden_dim",
    "memory_size": "memory memory_bank_size",
    "gather": "gather_distributed",
    "items": "labels label targets target y",
    "positives": "edge_index pairs",
}
_HINTS = {
    "warm": "for a warm-up train by InfoNCE first and by PGCLLoss later, see docs/swap.md",
    "anchor": "PyGCL's contrast models take the losses of pgcl_losses.adapters.pygcl",
}
# State changes in every step; comparing it over processes in each would cost a pass over it.
_COMPARE_STATE_EVERY = 64


class LossModule(nn.Module):
    """A module whose options are checked whenever they are assigned, and shown by its repr.

    With several processes it computes one result over the batches of all of them, as ``gather`` and
    ``process_group`` say. A module that is given a :class:`~pgcl_losses.Batch` checks nothing: the
    module that made the batch has done so.
    """

    options: ClassVar[dict[str, Check]] = {}  # in the order of the constructor
    fixed: ClassVar[frozenset[str]] = frozenset()  # those that cannot change
    shared: ClassVar[dict[str, Check]] = {
        "gather": _checks.flag,
        "process_group": _checks.process_group,
    }

    gather: bool = True
    process_group: ProcessGroup | None = None
    _calls: int = 0  # with other processes

    def __new__(cls: type[Self], *args: Any, **options: Any) -> Self:
        check_arguments(cls.__name__, cls.__init__, options, args)
        return super().__new__(cls)

    def __call__(self, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except TypeError:
            check_arguments(f"a call of {type(self).__name__}", self.forward, given)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        check = self.options.get(name) or self.shared.get(name)
        if check is not None:
            value = check(name, value)
            if name in self.fixed and self.__dict__.get(name, value) != value:
                raise AttributeError(
                    f"{name} is {getattr(self, name)!r} and cannot change in this "
                    f"{type(self).__name__}, but {value!r} was assigned: make a new one"
                )
            self._parameters.pop(name, None)  # a number or tensor may follow a parameter
        elif not (name.startswith("_") or hasattr(self, name)):
            self._check_name(name, value)
        super().__setattr__(name, value)

    def _check_name(self, name: str, value: Any) -> None:
        """A subclass may have attributes of its own, but none that looks like an option."""
        if any(name in inspect.get_annotations(base) for base in type(self).__mro__):
            return
        is_ours = type(self).__module__.startswith("pgcl_losses.")
        is_wrong = is_ours and not isinstance(value, (Tensor, nn.Module))
        if hint := _hint(name, self.all_options(), is_wrong):
            raise AttributeError(f"{type(self).__name__} has no option {name}: {hint}")

    def all_options(self) -> list[str]:
        return [*self.options, *self.shared]

    @classmethod
    def of_options(cls: type[Self], given: Mapping[str, Any]) -> Self:
        """A module with those values that are its options."""
        return cls(**{name: given[name] for name in cls.options})

    def _assign_options(self, given: Mapping[str, Any]) -> None:
        """Assign the options by name, as a constructor's ``locals()`` has them."""
        for name in (*self.options, *self.shared):
            if name in given:  # a subclass has options of its own
                setattr(self, name, given[name])

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self.options}
        shown = [
            f"{name}={type(value).__name__ if isinstance(value, Tensor) else repr(value)}"
            for name, value in values.items()
        ]
        return ", ".join(shown if self.gather else [*shown, "gather=False"])

    def facts(self) -> dict[str, Any]:
        """What must be the same in all processes, by name: plain values and tensors."""
        return {"type": type(self).__name__} | {name: getattr(self, name) for name in self.options}

    def agree(
        self,
        call: str,
        check: Callable[[bool], None],
        sets: Sequence[Any],
        same: Callable[[], Mapping[str, Any]] = dict,
    ) -> Processes:
        """The processes that hold these sets ``[N, ...]``: this one, or all that agree.

        ``call``: the method that all must call. ``check(may_be_empty)`` raises an error if the
        input is wrong; of several processes either all raise it or none does. ``same()`` is called
        after it: what else must be the same in all processes, tensors and plain values by name.
        """
        if not self.is_distributed():
            check(False)
            return Processes([(len(of_set),) for of_set in sets])
        problem: Exception | None = None
        facts: dict[str, Any] = {"call": f"{type(self).__name__}.{call}"}
        state: list[Tensor] = []
        length = 0
        try:
            check(True)
            length = len(sets[0])
            facts |= self.facts() | {
                "training": self.training,
                "gradients enabled": torch.is_grad_enabled(),
                "views": len(sets),
                "dimension": sets[0].shape[-1],
                "dtype": str(sets[0].dtype),
                "requires_grad": any(of_set.requires_grad for of_set in sets),
            }
            for name, value in (facts | dict(same())).items():
                if isinstance(value, Tensor):
                    state.append(value)
                    value = f"{value.dtype}{[*value.shape]}, requires_grad={value.requires_grad}"
                facts[name] = value
        except Exception as error:  # whatever it is: the other processes must not wait for this one
            problem = error
        # NCCL needs a GPU, and part of a wrong input may be on a CPU.
        given = [*self.parameters(), *sets]
        devices = [value.device for value in given if isinstance(value, Tensor)]
        device = max(devices or [torch.device("cpu")], key=lambda device: device.type != "cpu")
        compared = None if self._calls % _COMPARE_STATE_EVERY or not state else state
        self._calls += 1
        return agreed_processes(
            len(sets), length, facts, problem, compared, device, self.process_group
        )

    def moves_state(self, embeddings: Tensor) -> bool:
        """Whether a forward is a training step; a function that is transformed has no state."""
        return self.training and torch.is_grad_enabled() and not is_transformed(embeddings)

    def is_distributed(self) -> bool:
        """Whether other processes hold portions of the same batch."""
        return self.gather and count_ranks(self.process_group) > 1

    def traceable(self, function: Function, sets: Sequence[Any] = ()) -> Function:
        """The function, untraced if processes exchange data or if its engine cannot be traced.

        ``sets``: the embeddings ``[N, D]`` of a loss that has an engine.
        """
        if not torch.compiler.is_compiling():
            return function
        if self.is_distributed():  # retraced for each number of embeddings in each process
            return untraced(function, "collectives must not be traced")
        return function


def check_arguments(owner: str, function: Any, given: Mapping[str, Any], args: Any = ()) -> None:
    """An error for arguments that a constructor or a call does not have."""
    has = inspect.getfullargspec(function)
    if has.kwonlyargs and not has.varargs and len(args) >= len(has.args):
        option, came = has.kwonlyargs[0], _checks.shown(args[len(has.args) - 1])
        raise TypeError(f"{owner} takes options by name, such as {option}=, but got {came}")
    names = [name for name in (*has.args, *has.kwonlyargs) if name != "self"]
    names = [f"{has.varargs} (by position)", *names] if has.varargs else names
    for name in given:
        if hint := _hint(name, names, has.varkw is None):
            raise TypeError(f"{owner} has no argument {name}: {hint}") from None


def _hint(name: str, names: Sequence[str], is_wrong: bool) -> str:
    """A hint for a name that is not among these; empty if it may be the caller's own."""
    if name in names:
        return ""
    meant = [right for right, others in _OTHER_NAMES.items() if name in others.split()]
    meant += difflib.get_close_matches(name, names, 1, cutoff=0.75)
    if right := next((right for right in meant if right in names), ""):
        return f"did you mean {right}?"
    hints = [hint for start, hint in _HINTS.items() if name.startswith(start)]
    return (hints or [f"it has {', '.join(names)}"])[0] if is_wrong else ""
