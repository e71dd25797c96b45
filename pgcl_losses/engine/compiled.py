"""The contrast as one operation of a compiled graph: it is traced whole, and runs as it is."""

from ast import literal_eval
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.distributed import Processes
from pgcl_losses.engine.losses import Losses, reduced
from pgcl_losses.engine.pair_weights import Factors, Gaussian, Table
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form

_parsed = lru_cache(literal_eval)  # which takes longer than a small operation of torch
_TENSORS = ("items", "memory", "filled", "positives")


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
    named = [(name, x) for name in _TENSORS if (x := getattr(pairs, name)) is not None]
    if reduction == "none":  # what is kept for the backward must not change
        named = [(name, x.clone() if name == "memory" else x) for name, x in named]
    if isinstance(pairs.weights, Table):
        named += [("table", table) for table in pairs.weights.log_weights]
        named += [("clusters", pairs.weights.clusters)]
    elif pairs.weights is not None:
        named += [("left", pairs.weights.left), ("right", pairs.weights.right)]
    if pairs.pair_weight is not None:
        named += [("mean", pairs.pair_weight.mean), ("variance", pairs.pair_weight.variance)]
    names, rule = [name for name, _ in named], (pairs.negatives, pairs.first_queries)
    tau = 1.0 if isinstance(temperature, Tensor) else temperature
    options = repr((names, rule, pairs.hardness, tau, tuple(form), reduction, with_gradient))
    tensors, lengths = [x for _, x in named], list(pairs.lengths)
    of_all = embeddings, learned, positive_weights, None, tensors, lengths, options
    loss: Tensor = _contrast(*of_all)[0]
    return loss


@torch.library.custom_op("pgcl_losses::contrast", mutates_args=())
def _contrast(
    embeddings: Tensor,
    learned_temperature: Tensor | None,
    positive_weights: Tensor | None,
    d_losses: Tensor | None,  # of losses that are not reduced: asks for their gradient alone
    tensors: list[Tensor],
    lengths: list[int],
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradient by embeddings, temperature and weights; empty without one."""
    names, rule, hardness, temperature, form, reduction, with_gradient = _parsed(options)
    of = dict(zip(names, tensors, strict=True))
    weights: Table | Factors | None = None
    if "table" in of:
        tables = [x for name, x in zip(names, tensors, strict=True) if name == "table"]
        weights = Table(tuple(tables), of["clusters"])
    elif "left" in of:
        weights = Factors(of["left"], of["right"])
    pairs = Pairs(
        embeddings,
        tuple(lengths),
        rule[0],
        weights=weights,
        pair_weight=Gaussian(of["mean"], of["variance"]) if "mean" in of else None,
        hardness=hardness,
        first_queries=rule[1],
        positive_weights=positive_weights,
        **{name: of[name] for name in _TENSORS if name in of},
    )
    tau = temperature if learned_temperature is None else learned_temperature
    of_queries = Losses(pairs, tau, Form(*form), Processes([(length,) for length in lengths]))
    losses = of_queries.compute(with_gradient)
    loss = of_queries.unsorted(losses.values) if reduction == "none" else embeddings.new_empty(0)
    gradient: tuple[Tensor | None, ...] = None, None, None
    if d_losses is not None:
        gradient = of_queries.gradient(of_queries.sorted(d_losses))
    elif reduction != "none":
        loss, d_reduced = reduced(losses, reduction)
        gradient = of_queries.gradient(d_reduced) if with_gradient else gradient
    d_z, d_temperature, d_weights = [embeddings.new_empty(0) if x is None else x for x in gradient]
    return loss, d_z, d_temperature, d_weights


@_contrast.register_fake
def _(
    embeddings: Tensor,
    learned_temperature: Tensor | None,
    positive_weights: Tensor | None,
    d_losses: Tensor | None,
    tensors: list[Tensor],
    lengths: list[int],
    options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, (_, first_queries), *_, reduction, with_gradient = _parsed(options)
    loss = embeddings.new_empty(())
    if reduction == "none":
        loss = embeddings.new_empty(lengths[0] if first_queries else embeddings.shape[0])
    has_gradient = with_gradient and reduction != "none" if d_losses is None else True
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
    return d_z, *by_others, None, [None] * ctx.num_tensors, None, None


_contrast.register_autograd(_backward, setup_context=_keep)
