"""An argument or attribute that a module does not have: the error suggests what could be meant."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pgcl_losses.base import checks as check

# What papers and other libraries call each argument. The message about an unknown argument uses it.
_OTHER_NAMES = {
    "temperature": "tau temp T",
    "num_prototypes": "K n_clusters num_clusters",
    "consistency_weight": "lambda_ lambd lmbda lam",
    "epsilon": "eps",
    "dim": "embedding_dim embed_dim emb_dim hidden_dim",
    "memory_size": "memory memory_bank_size",
    "gather": "gather_distributed",
    "labels": "label targets target y ids items item",
    "positives": "edge_index pairs",
    "metadata": "features meta",
    "score_mod": "weight_fn mask_fn mask mask_mod",
}
RIGHT_NAMES = {other: right for right, others in _OTHER_NAMES.items() for other in others.split()}
_HINTS = {
    "similarity": "clusters are assigned by cosine; similarity='dot' is an option of InfoNCE",
    "warm": "for a warm-up, train with InfoNCE first and with PGCLLoss later, see docs/pgcl.md",
    "anchor": "pgcl_losses.adapters.pygcl.DualBranchContrast takes this loss, PyGCL's own does not",
}


def check_arguments(owner: str, function: Any, given: Mapping[str, Any], args: Any = ()) -> Any:
    """Raise an error for an argument that a constructor or a call does not have, with a hint.

    ``owner`` describes the constructor or call in the message.
    """
    has = inspect.getfullargspec(function)
    if has.kwonlyargs and not has.varargs and len(args) >= len(has.args):
        option, came = has.kwonlyargs[0], check.shown(args[len(has.args) - 1])
        raise TypeError(f"{owner} takes options by name, such as {option}=, but got {came}")
    names = [name for name in (*has.args, *has.kwonlyargs) if name != "self"]
    names = [f"{has.varargs} (by position)", *names] if has.varargs else names
    for name in given:
        if hint := _hint(name, names, has.varkw is None):
            raise TypeError(f"{owner} has no argument {name}: {hint}") from None


def _hint(name: str, names: Sequence[str], is_wrong: bool) -> str:
    """Suggest what an unknown argument could mean, given the ``names`` of the existing arguments.

    The hint is empty if the argument exists, or if nothing is suggested and ``is_wrong`` is False:
    then the function takes any keyword, and the name may be the caller's own.
    """
    if name in names:
        return ""
    meant = [RIGHT_NAMES.get(name, "")]
    meant += difflib.get_close_matches(name, names, 1, cutoff=0.75)
    if right := next((right for right in meant if right in names), ""):
        return f"did you mean {right}?"
    hints = [hint for start, hint in _HINTS.items() if name.startswith(start)]
    return (hints or [f"it has {', '.join(names)}"])[0] if is_wrong else ""
