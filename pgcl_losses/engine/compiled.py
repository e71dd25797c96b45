"""The contrast as one operation of a compiled graph: it is traced whole, and runs as it is."""

from ast import literal_eval
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.distributed import Processes
from pgcl_losses.engine.losses import Losses
from pgcl_losses.engine.pair_weights import Factors, Gaussian, Table
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form

_parsed = lru_cache(literal_eval)  # which takes longer than a small operation of torch
_KINDS = {kind.__name__: kind for kind in (Pairs, Table, Factors, Gaussian, Form)}


def contrast(
    embeddings: Tensor,
    temperature: float | Tensor,
    positive_weights: Tensor | None,
    pairs: Pairs,
    form: Form,
    reduction: str,
    processes: Processes,
    with_gradient: bool,
) -> Tensor:
    """The losses of one process, reduced."""
    learned = temperature if isinstance(temperature, Tensor) else None
    tau = None if isinstance(temperature, Tensor) else temperature
    if reduction == "none" and pairs.memory is not None and pairs.filled is not None:
        # A copy for the backward, as this step overwrites the memory; inductor drops a clone.
        filled = pairs.filled[len(pairs.embeddings) :].unsqueeze(1)
        pairs = pairs._replace(memory=pairs.memory.where(filled, 0.0))
    variables: tuple[list[Tensor], list[float]] = ([], [])
    of_op: dict[str, Any] = {"embeddings": None, "lengths": (), "positive_weights": None}
    others = _literal((pairs._replace(**of_op), tau, form), *variables)
    options = repr((others, reduction, with_gradient))
    of_all = embeddings, learned, positive_weights, None, *variables, list(pairs.lengths), options
    loss: Tensor = _contrast(*of_all)[0]
    return loss


def _literal(value: Any, tensors: list[Tensor], numbers: list[float]) -> Any:
    """A literal of tuples: tensors, and numbers that a schedule may change, by their positions."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, float):
        numbers.append(value)
        return {"number": len(numbers) - 1}
    if isinstance(value, tuple):
        return type(value).__name__, [_literal(field, tensors, numbers) for field in value]
    return value


def _value(literal: Any, tensors: list[Tensor], numbers: list[float]) -> Any:
    """The inverse of :func:`_literal`."""
    if isinstance(literal, dict):
        ((kind, position),) = literal.items()
        return tensors[position] if kind == "tensor" else numbers[position]
    if isinstance(literal, tuple):
        kind, fields = literal
        values = [_value(field, tensors, numbers) for field in fields]
        return _KINDS[kind](*values) if kind in _KINDS else tuple(values)
    return literal


@torch.library.custom_op("pgcl_losses::contrast", mutates_args=())
def _contrast(
    embeddings: Tensor,
    learned_temperature: Tensor | None,
    positive_weights: Tensor | None,
    d_losses: Tensor | None,  # of losses that are not reduced: asks for their gradient alone
    tensors: list[Tensor],
    numbers: list[float],
    lengths: list[int],
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradient by embeddings, temperature and weights; empty without one."""
    others, reduction, with_gradient = _parsed(options)
    pairs, temperature, form = _value(others, tensors, numbers)
    pairs = pairs._replace(
        embeddings=embeddings, lengths=tuple(lengths), positive_weights=positive_weights
    )
    tau = temperature if learned_temperature is None else learned_temperature
    losses = Losses(pairs, tau, form, Processes([(length,) for length in lengths]))
    loss = losses.loss(reduction, with_gradient)
    gradient: tuple[Tensor | None, ...] = None, None, None
    if d_losses is not None or (with_gradient and reduction != "none"):
        gradient = losses.gradient(d_losses)
    d_z, d_temperature, d_weights = [embeddings.new_empty(0) if x is None else x for x in gradient]
    return loss, d_z, d_temperature, d_weights


@_contrast.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    embeddings, learned_temperature, positive_weights, d_losses, *variables, lengths, options = (
        inputs
    )
    others, reduction, with_gradient = _parsed(options)
    loss = embeddings.new_empty(())
    if reduction == "none":
        pairs, *_ = _value(others, *variables)
        pairs = pairs._replace(embeddings=embeddings, lengths=lengths)
        loss = embeddings.new_empty(pairs.num_queries())
    has_gradient = d_losses is not None or (with_gradient and reduction != "none")
    d_z, d_temperature, d_weights = [
        embeddings.new_empty(x.shape if has_gradient and x is not None else 0)
        for x in (embeddings, learned_temperature, positive_weights)
    ]
    return loss, d_z, d_temperature, d_weights


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    embeddings, learned, weights, _, tensors, *ctx.options = inputs
    ctx.is_reduced = output[0].dim() == 0
    ctx.has, ctx.num_tensors = (learned is not None, weights is not None), len(tensors)
    ctx.save_for_backward(
        *(output[1:] if ctx.is_reduced else (embeddings, learned, weights, *tensors))
    )


def _backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Any, ...]:
    if ctx.is_reduced:
        d_z, *others = [x * d_loss for x in ctx.saved_tensors]
    else:
        embeddings, learned, weights, *tensors = ctx.saved_tensors
        _, d_z, *others = _contrast(embeddings, learned, weights, d_loss, tensors, *ctx.options)
    by_others = [d if has else None for d, has in zip(others, ctx.has, strict=True)]
    return d_z, *by_others, None, [None] * ctx.num_tensors, None, None, None


_contrast.register_autograd(_backward, setup_context=_keep)
