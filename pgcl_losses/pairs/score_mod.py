"""`score_mod`: a function of the user's that weighs, masks or shifts the scores of negatives.

It has the form of torch's FlexAttention: `score_mod(scores, pair)` gets the scores s / tau of some
queries with all their keys, ``[I, K]``, and returns the scores with which the keys count as
negatives. `add_log_weights` in `negatives` calls it, once for each chunk of rows.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base.checks import shown
from pgcl_losses.base.modes import is_transformed
from pgcl_losses.base.normalize import full_precision


class Pair(NamedTuple):
    """What a `score_mod` may know of queries and keys besides their scores ``[I, K]``.

    Example:
        >>> from pgcl_losses import InfoNCE, Pair
        >>> def within_a_group(scores: torch.Tensor, pair: Pair) -> torch.Tensor:
        ...     return scores.masked_fill(pair.query != pair.key, -torch.inf)
        >>> loss_of, groups = InfoNCE(score_mod=within_a_group), torch.arange(8) // 4
        >>> loss_of(torch.randn(8, 4), torch.randn(8, 4), metadata=groups).shape
        torch.Size([])
    """

    is_negative: Tensor  # [I, K] which keys are negatives: not the query, nor its positives
    temperature: Tensor  # tau; it broadcasts with the scores, and scores * tau are cosines
    metadata: tuple[Tensor, Tensor] | None = None  # of the queries and of the keys

    @property
    def query(self) -> Tensor:
        """The metadata of queries, ``[I, 1, ...]``."""
        return self._metadata()[0].unsqueeze(1)

    @property
    def key(self) -> Tensor:
        """The metadata of keys, ``[1, K, ...]``."""
        return self._metadata()[1].unsqueeze(0)

    def _metadata(self) -> tuple[Tensor, Tensor]:
        if self.metadata is None:
            missing = "pair.query and pair.key are metadata, which the loss was called without"
            raise AttributeError(f"{missing}: give the loss metadata=")
        return self.metadata


ScoreMod = Callable[[Tensor, Pair], Tensor]


def function_or_none(name: str, value: Any) -> Any:
    """Check the option of a loss: None, or a function of two arguments."""
    expected = "None, or a function of scores [I, K] and a pair"
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be {expected}, but got {shown(value)}")
    try:
        signature = inspect.signature(getattr(value, "forward", value))
    except (TypeError, ValueError):  # None, or a function that has no signature
        return value
    try:
        signature.bind("scores", "pair")
    except TypeError as error:
        raise TypeError(f"{name} must be {expected}, but got {shown(value)}: {error}") from None
    return value


Function = Annotated[ScoreMod | None, function_or_none]  # the type of the option


def modified(score_mod: ScoreMod, scores: Tensor, pair: Pair) -> Tensor:
    """Call the user's function on scores ``[I, K]``, which it may change; check what it returns.

    What it returns for keys that are no negatives is ignored by the caller. Nor has it a derivative
    there: log(1 - cosine) of a query with itself would make every gradient NaN.
    """
    if torch.is_grad_enabled() or is_transformed(scores):
        scores, pair = (
            scores.where(pair.is_negative, scores.detach()),
            differentiable_at_negatives(pair),
        )
    return checked(score_mod(scores, pair), scores)


def differentiable_at_negatives(pair: Pair) -> Pair:
    """Make a temperature that is learned a matrix, with a gradient at negatives alone."""
    tau = pair.temperature
    if not (tau.requires_grad or is_transformed(tau)):  # vmap hides requires_grad
        return pair
    return pair._replace(temperature=tau.where(pair.is_negative, tau.detach()))


def checked(result: Any, scores: Tensor) -> Tensor:
    """Check what the user's function returns, and return it in the dtype of its scores."""
    is_tensor = isinstance(result, Tensor)
    if not is_tensor or not result.is_floating_point() or result.shape != scores.shape:
        came = f"{result.dtype} of shape {tuple(result.shape)}" if is_tensor else shown(result)
        raise TypeError(
            f"score_mod must return floating-point scores of shape {tuple(scores.shape)}, such as "
            f"scores.masked_fill(mask, -torch.inf), but returned {came}"
        )
    return torch.Tensor.to(result, scores.dtype)


class Differentiated:
    """The user's function, which autograd differentiates within an operation of our own.

    It does what `modified` does under autograd, in half the time.
    """

    def __init__(self, score_mod: ScoreMod, learns_temperature: bool) -> None:
        self.score_mod, self.learns_temperature = score_mod, learns_temperature

    def __call__(self, scores: Tensor, pair: Pair) -> Tensor:
        tau = pair.temperature.detach().requires_grad_(self.learns_temperature)
        self.leaves = (scores.detach().requires_grad_(), *[tau] * self.learns_temperature)
        self.is_negative = pair.is_negative
        with torch.enable_grad():
            pair = differentiable_at_negatives(pair._replace(temperature=tau))
            self.result = checked(self.score_mod(self.leaves[0].clone(), pair), scores)
        nodes: list[Any] = [self.result.grad_fn]
        known = {None}
        while nodes:
            if (node := nodes.pop()) not in known:
                known.add(node)
                nodes += [before for before, _ in node.next_functions]
        others: set[Any] = {getattr(node, "variable", None) for node in known}
        for x in others - {None, *self.leaves}:
            raise ValueError(
                f"score_mod uses a Tensor of shape {tuple(x.shape)} that requires grad, which only "
                "engine='dense' differentiates: choose it, or detach the Tensor (the temperature "
                "of the loss is pair.temperature)"
            )
        return self.result.detach()

    def gradients(self, d: Tensor, retain_graph: bool) -> Sequence[Tensor]:
        """Compute the gradient by scores and, if the temperature is learned, by tau.

        The gradient by scores of keys that are no negatives is to be ignored. ``retain_graph``:
        whether it is computed again, as compilers of functions do.
        """
        if not self.result.requires_grad:
            return [d.new_zeros(x.shape) for x in self.leaves]
        options = {"retain_graph": retain_graph, "materialize_grads": True}
        with full_precision(d.device):
            return torch.autograd.grad(self.result, self.leaves, d.to(self.result), **options)
