"""The contrast as one operation of a compiled graph: it is traced whole, and runs as it is."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.distributed import Processes
from pgcl_losses.engine.losses import Losses, reduced
from pgcl_losses.engine.pairs import Factors, Gaussian, Pairs, Table
from pgcl_losses.forms import Form


def contrast(
    embeddings: Tensor,
    temperature: float | Tensor,
    positive_weights: Tensor | None,
    pairs: Pairs,
    form: Form,
    reduction: str,
    processes: Processes,
) -> Tensor:
    """The losses of one process, reduced."""
    learned = temperature if isinstance(temperature, Tensor) else None
    with_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (embeddings, learned, positive_weights)
    )
    named = [
        (name, x)
        for name in ("items", "memory", "filled", "positives")
        if (x := getattr(pairs, name)) is not None
    ]
    if reduction == "none":  # what is kept for the backward must not change
        named = [(name, x.clone() if name == "memory" else x) for name, x in named]
    if isinstance(pairs.weights, Table):
        named += [("table", table) for table in pairs.weights.log_weights]
        named += [("clusters", pairs.weights.clusters)]
    elif pairs.weights is not None:
        named += [("left", pairs.weights.left), ("right", pairs.weights.right)]
    if pairs.pair_weight is not None:
        named += [("mean", pairs.pair_weight.mean), ("variance", pairs.pair_weight.variance)]
    loss: Tensor = _contrast(
        embeddings,
        learned,
        positive_weights,
        None,
        [x for _, x in named],
        ",".join([name for name, _ in named]),
        pairs.lengths,
        pairs.negatives,
        pairs.first_queries,
        pairs.hardness,
        1.0 if isinstance(temperature, Tensor) else temperature,
        *form,
        reduction,
        with_gradient,
    )[0]
    return loss


@torch.library.custom_op("pgcl_losses::contrast", mutates_args=())
def _contrast(
    embeddings: Tensor,
    learned_temperature: Tensor | None,
    positive_weights: Tensor | None,
    d_losses: Tensor | None,  # of losses that are not reduced: asks for their gradient alone
    others: list[Tensor],
    names: str,
    lengths: list[int],
    negatives: str,
    first_queries: bool,
    hardness: float,
    temperature: float,
    decoupled: bool,
    debias: float,
    reduction: str,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradient by embeddings, temperature and weights; empty without one."""
    of = defaultdict[str, list[Tensor]](list)
    for name, tensor in zip(names.split(","), others, strict=False):
        of[name].append(tensor)
    one = {name: of[name][0] for name in ("items", "memory", "filled", "positives") if name in of}
    weights: Table | Factors | None = None
    if "table" in of:
        weights = Table(tuple(of["table"]), of["clusters"][0])
    elif "left" in of:
        weights = Factors(of["left"][0], of["right"][0])
    pairs = Pairs(
        embeddings,
        tuple(lengths),
        negatives,
        weights=weights,
        pair_weight=Gaussian(of["mean"][0], of["variance"][0]) if "mean" in of else None,
        hardness=hardness,
        first_queries=first_queries,
        positive_weights=positive_weights,
        **one,
    )
    tau = temperature if learned_temperature is None else learned_temperature
    form, processes = Form(decoupled, debias), Processes([(length,) for length in lengths])
    of_queries = Losses(pairs, tau, form, processes)
    losses = of_queries.compute(with_gradient or d_losses is not None)
    empty = embeddings.new_empty(0)
    gradient: tuple[Tensor | None, ...] = (None, None, None)
    if d_losses is not None:
        loss, gradient = empty, of_queries.gradient(of_queries.sorted(d_losses))
    elif reduction == "none":
        return of_queries.unsorted(losses.values), empty, empty.clone(), empty.clone()
    else:
        loss, d_reduced = reduced(losses, reduction)
        gradient = of_queries.gradient(d_reduced) if with_gradient else gradient
    d_z, d_temperature, d_weights = [empty.clone() if x is None else x for x in gradient]
    return loss, d_z, d_temperature, d_weights


@_contrast.register_fake
def _(
    embeddings: Tensor,
    learned_temperature: Tensor | None,
    positive_weights: Tensor | None,
    d_losses: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, lengths, _, first_queries, *_, reduction, with_gradient = options
    losses = embeddings.new_empty(lengths[0] if first_queries else embeddings.shape[0])
    loss = losses if reduction == "none" else embeddings.new_empty(())
    if d_losses is not None:
        loss = embeddings.new_empty(0)
    by: tuple[Tensor | None, ...] = embeddings, learned_temperature, positive_weights
    if d_losses is None and (reduction == "none" or not with_gradient):
        by = None, None, None
    d_z, d_temperature, d_weights = [embeddings.new_empty(0 if x is None else x.shape) for x in by]
    return loss, d_z, d_temperature, d_weights


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    embeddings, learned, weights, _, others, *options = inputs
    ctx.is_reduced, ctx.options, ctx.num_others = options[-2] != "none", options, len(others)
    ctx.has = learned is not None, weights is not None
    if ctx.is_reduced:
        ctx.save_for_backward(*output[1:])
    else:
        ctx.save_for_backward(embeddings, learned, weights, *others)


def _backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Any, ...]:
    if ctx.is_reduced:
        gradients = [x * d_loss for x in ctx.saved_tensors]
    else:
        embeddings, learned, weights, *others = ctx.saved_tensors
        gradients = _contrast(embeddings, learned, weights, d_loss, others, *ctx.options)[1:]
    d_z, d_temperature, d_weights = gradients
    by_learned = [
        d if has else None for d, has in zip((d_temperature, d_weights), ctx.has, strict=True)
    ]
    return d_z, *by_learned, None, [None] * ctx.num_others, *([None] * len(ctx.options))


_contrast.register_autograd(_backward, setup_context=_keep)
