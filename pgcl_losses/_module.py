"""The base of all modules: checked options, and agreement between processes."""

import difflib
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, distributed, nn

from pgcl_losses import _checks
from pgcl_losses._modes import is_transformed
from pgcl_losses._options import COMMON, Check, Group, with_options
from pgcl_losses.distributed import Processes, checksum, count_ranks, differences, gathered

Function = TypeVar("Function", bound=Callable[..., Any])
Module = TypeVar("Module", bound="LossModule")

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
    "similarity": "clusters are cosines; similarity='dot' is an option of InfoNCE",
    "warm": "for a warm-up train by InfoNCE first and by PGCLLoss later, see docs/swap.md",
    "anchor": "PyGCL's contrast models take the losses of pgcl_losses.adapters.pygcl",
}
# State changes in every step; comparing it over processes in each would cost a pass over it.
_COMPARE_STATE_EVERY = 64


def called_by_all(call: str) -> Callable[[Function], Function]:
    """Of a method that all processes call: wrong arguments of one are an error of all.

    If processes exchange data, a compiler does not trace it: it would trace it again for each
    number of embeddings in each process.
    """

    def decorate(method: Any) -> Any:
        names = {*inspect.signature(method).parameters}

        @functools.wraps(method)
        def wrapped(self: "LossModule", *args: Any, **given: Any) -> Any:
            if not given.keys() <= names:
                owner = f"a call of {type(self).__name__}"
                self.agree(call, lambda _: check_arguments(owner, method, given), args)
            if torch.compiler.is_compiling() and self.is_distributed():
                # The message is in the error of fullgraph=True.
                torch._dynamo.graph_break(msg="collectives must not be traced")
                return torch.compiler.disable(method)(self, *args, **given)  # type: ignore[no-untyped-call]  # torch has no type there
            return method(self, *args, **given)

        return wrapped

    return decorate


@with_options
class LossModule(nn.Module):
    """A module whose options are checked whenever they are assigned, and shown by its repr.

    With several processes it computes one result over the batches of all of them, as ``gather`` and
    ``process_group`` say. A module that is given a :class:`~pgcl_losses.Batch` checks nothing: the
    module that made the batch has done so.
    """

    options: ClassVar[dict[str, Check]]
    fixed: ClassVar[frozenset[str]] = frozenset()  # what cannot change

    gather: bool = True
    process_group: Group = None
    _calls = 0  # with other processes

    def __new__(cls: type[Module], *args: Any, **options: Any) -> Module:
        check_arguments(cls.__name__, cls.__init__, options, args)
        module: Module = super().__new__(cls)
        nn.Module.__init__(module)  # before the constructor, which is a dataclass's
        return module

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        is_internal = name[0] == "_" or name in self.fixed or isinstance(value, nn.Module)
        if check := self.options.get(name):
            value = check(name, value)
            self._parameters.pop(name, None)  # a number or tensor may follow a parameter
        elif not (is_internal or hasattr(self, name)):
            self._check_name(name, value)
        if name in self.fixed and self.__dict__.get(name, value) != value:
            raise AttributeError(
                f"{name} is {getattr(self, name)!r} and cannot change in this "
                f"{type(self).__name__}, but {value!r} was assigned: make a new one"
            )
        super().__setattr__(name, value)

    def _check_name(self, name: str, value: Any) -> None:
        """A subclass may have attributes of its own, but none that looks like an option."""
        of_children = {c: getattr(m, "options", ()) for c, m in self.named_children()}
        owner = type(self).__name__
        if there := [child for child in of_children if name in of_children[child]]:
            fix = f"set its {' and '.join(f'{child}.{name}' for child in there)}"
            if all(name in getattr(getattr(self, child), "fixed", ()) for child in there):
                fix = "it cannot change, make a new one"
            raise AttributeError(f"{name} cannot be assigned to {owner}: {fix}")
        is_ours = type(self).__module__.startswith("pgcl_losses.")
        is_wrong = is_ours and not isinstance(value, Tensor)
        names = [*dict.fromkeys(chain(self.options, *of_children.values()))]
        if hint := _hint(name, names, is_wrong):
            raise AttributeError(f"{owner} has no option {name}: {hint}")

    def extra_repr(self) -> str:
        own = {name: getattr(self, name) for name in self.options if name not in COMMON}
        own |= {} if self.gather else {"gather": False}
        kinds = {name: type(x).__name__ for name, x in own.items() if isinstance(x, Tensor)}
        return ", ".join(f"{name}={kinds.get(name, repr(x))}" for name, x in own.items())

    def all_options(self) -> dict[str, Any]:
        """The class and the options of this module and of those in it."""
        values: dict[str, Any] = {}
        for path, module in self.named_modules():
            values[f"{path}.type".lstrip(".")] = type(module).__name__
            for name in module.options if isinstance(module, LossModule) else ():
                if name not in COMMON:
                    values[f"{path}.{name}".lstrip(".")] = getattr(module, name)
        return values

    def agree(
        self, call: str, check: Callable[[bool], Mapping[str, Any]], sets: Sequence[Any]
    ) -> Processes:
        """The processes that hold these sets ``[N, ...]``: this one, or all that agree.

        Different calls would deadlock. So all processes raise one error if their calls, ``call``,
        options, parameters or buffers differ, or what ``check(may_be_empty)`` returns by name, or
        if that raises an error in one of them.
        """
        if not self.is_distributed():
            check(False)
            return Processes([(of_set.shape[0],) for of_set in sets])
        group, length, problem = self.process_group, 0, None
        claims: dict[str, Any] = {"call": f"{type(self).__name__}.{call}"}
        try:
            of_input = check(True)
            claims |= {
                **self.all_options(),
                **dict(self.named_parameters()),
                **dict(self.named_buffers()),
                "training": self.training,
                "gradients enabled": torch.is_grad_enabled(),
                "views": len(sets),
                "dimension": sets[0].shape[-1],
                "dtype": str(sets[0].dtype),
                "requires_grad": any(of_set.requires_grad for of_set in sets),
                **of_input,
            }
            length = len(sets[0])
        except Exception as error:  # whatever it is: the other processes must not wait for this one
            problem = error
            claims["problem"] = f"{type(error).__name__}: {error}"
        tensors = {name: x for name, x in claims.items() if isinstance(x, Tensor)}
        for name, x in tensors.items():
            claims[name] = f"{x.dtype}{[*x.shape]}, requires_grad={x.requires_grad}"
        # start_from_ gives all processes the same prototypes.
        compares = call != "start_from_" and self._calls % _COMPARE_STATE_EVERY == 0
        self._calls += call != "start_from_"
        state = checksum(tensors.values()) if compares else -1
        # NCCL needs a GPU, and part of a wrong input may be on a CPU.
        devices = [x.device for x in (*self.parameters(), *sets) if isinstance(x, Tensor)]
        device = max(devices, key=lambda d: d.type != "cpu", default=torch.device("cpu"))
        summary = torch.tensor([length, zlib.crc32(repr(claims).encode()), state], device=device)
        lengths, of_claims, states = gathered(summary, group, "batch sizes").T.tolist()
        if len(set(of_claims)) > 1:
            raise ValueError(differences(claims, group)) from problem
        if problem is not None:
            raise problem
        if -1 not in states and len(set(states)) > 1:
            raise ValueError(
                "the prototypes, or other parameters or buffers of the loss, are not the same on "
                "all ranks: put the loss into the module that DistributedDataParallel wraps, or "
                "give all ranks one seed, one checkpoint and the same steps of an optimizer"
            )
        if sum(lengths) == 0:
            raise ValueError("the batch must not be empty on every rank")
        return Processes([lengths] * len(sets), distributed.get_rank(group), group)

    def moves_state(self, embeddings: Tensor) -> bool:
        """Whether a forward is a training step; a function that is transformed has no state."""
        return self.training and torch.is_grad_enabled() and not is_transformed(embeddings)

    def is_distributed(self) -> bool:
        """Whether other processes hold portions of the same batch."""
        return self.gather and count_ranks(self.process_group) > 1


def check_arguments(owner: str, function: Any, given: Mapping[str, Any], args: Any = ()) -> Any:
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
