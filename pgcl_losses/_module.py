"""What all modules have in common: options that may change, and processes that agree."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgcl_losses import _checks
from pgcl_losses.agree import agreed_ranks
from pgcl_losses.ranks import Ranks, count_ranks

Check = Callable[[str, Any], Any]
Result = TypeVar("Result")
Self = TypeVar("Self", bound="LossModule")

# Names of arguments in papers and other libraries, and their names here.
_OTHER_NAMES = {
    "tau": "temperature",
    "K": "num_prototypes",
    "lambda_": "consistency_weight",
    "lam": "consistency_weight",
    "eps": "epsilon",
    "embedding_dim": "dim",
    "hidden_dim": "dim",
    "lead_steps": "warmup_steps",
}
# From torch 2.8 on; older graph breaks have no message.
_CAN_SAY_WHY = "reason" in inspect.signature(torch.compiler.disable).parameters


class LossModule(nn.Module):
    """A module whose options are checked whenever they are assigned, and shown by its repr.

    With several processes it computes one result over the batches of all of them, as ``gather`` and
    ``process_group`` say. A module that is given a batch of :mod:`pgcl_losses.batch` checks
    nothing: the module that made the batch has done so.
    """

    options: ClassVar[dict[str, Check]] = {}  # in the order of the constructor
    fixed: ClassVar[frozenset[str]] = frozenset()  # those that stay as they were made
    shared: ClassVar[dict[str, Check]] = {
        "gather": _checks.flag,
        "process_group": _checks.process_group,
    }

    gather: bool = True
    process_group: ProcessGroup | None = None

    def __new__(cls: type[Self], *args: Any, **options: Any) -> Self:
        for name in _OTHER_NAMES.keys() & options.keys():
            right, names = _OTHER_NAMES[name], inspect.signature(cls.__init__).parameters
            if right in names and name not in names:
                raise TypeError(f"{cls.__name__} has no argument {name}: did you mean {right}?")
        return super().__new__(cls)

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
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)  # torch would register a parameter beside it
        else:
            super().__setattr__(name, value)

    @classmethod
    def of_options(cls: type[Self], given: Mapping[str, Any]) -> Self:
        """A module made of those values that are its options."""
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
        views: Sequence[Any],
        same: Callable[[], Mapping[str, Any]] = dict,
    ) -> Ranks:
        """The processes that hold a batch of views ``[N, ...]``: this one, or all that agree.

        ``call``: the method that all must call. ``check(may_be_empty)`` raises an error if the
        input is wrong; of several processes either all raise it or none does. ``same()`` is called
        after it: what else must be the same in all processes, tensors and plain values by name.
        """
        if not self.is_distributed():
            check(False)
            return Ranks((len(views[0]),))
        problem: Exception | None = None
        facts: dict[str, Any] = {"call": f"{type(self).__name__}.{call}"}
        tensors: list[Tensor] = []
        num_graphs = 0
        try:
            check(True)
            num_graphs = len(views[0])
            facts |= self.facts() | {
                "training": self.training,
                "gradients enabled": torch.is_grad_enabled(),
                "views": len(views),
                "dimension": views[0].shape[-1],
                "dtype": str(views[0].dtype),
                "requires_grad": any(view.requires_grad for view in views),
            }
            for name, value in (facts | dict(same())).items():
                if isinstance(value, Tensor):
                    tensors.append(value)
                    value = f"{value.dtype}, requires_grad={value.requires_grad}"
                facts[name] = value
        except Exception as error:  # whatever it is: the other processes must not wait for this one
            problem = error
        # NCCL sends nothing from a CPU, where half of a wrong input may be.
        given = [*self.parameters(), *views]
        devices = [value.device for value in given if isinstance(value, Tensor)]
        device = max(devices or [torch.device("cpu")], key=lambda device: device.type != "cpu")
        return agreed_ranks(num_graphs, facts, problem, tensors, device, self.process_group)

    def is_distributed(self) -> bool:
        """Whether other processes hold portions of the same batch."""
        return self.gather and count_ranks(self.process_group) > 1

    def untraced(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """The function; or one that runs outside of a compiled graph, if it must.

        (As a decorator this would import the compiler with the package.)
        """
        if torch.compiler.is_compiling() and (reason := self.why_untraced()):
            if _CAN_SAY_WHY:  # in the error of fullgraph=True
                torch._dynamo.graph_break(msg=reason)
            return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]  # torch has no type there
        return function

    def why_untraced(self) -> str:
        """Why this must run outside of a compiled graph; empty if it need not."""
        # Everything else would be traced anew for each number of embeddings in each process.
        return "collectives must not be traced" if self.is_distributed() else ""
