"""The contrast: embeddings and weights of pairs go in, the loss comes out, with its gradient.

Where the loss is one number, its gradient is computed with it, and backward only scales it.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from pgcl_losses._modes import is_transformed
from pgcl_losses._normalize import full_precision
from pgcl_losses.distributed import Processes
from pgcl_losses.engine import compiled, dense
from pgcl_losses.engine.losses import Losses, reduced
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form

Engine = Literal["auto", "dense", "blocks"]


def contrast(
    pairs: Pairs,
    temperature: float | Tensor,
    form: Form,
    reduction: str,
    engine: str,
    processes: Processes,
) -> Tensor:
    """The mean or sum of the losses of queries that have positives, or those of all, ``[Q]``."""
    if engine == "auto":
        is_dense = processes.num_ranks() == 1 and is_transformed(
            pairs.embeddings, temperature, pairs.positive_weights
        )
        engine = "dense" if is_dense else "blocks"
    if engine == "dense":
        if processes.num_ranks() > 1:
            raise ValueError(
                f"engine='dense' computes one matrix in one process, but {processes.num_ranks()} "
                "processes hold a batch together: choose engine='auto' or 'blocks', or gather=False"
            )
        losses = dense.losses(pairs, temperature, form)
        return losses.values if reduction == "none" else reduced(losses, reduction)[0]
    inputs = pairs.embeddings, temperature, pairs.positive_weights
    with_gradient = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )
    function: Any = compiled.contrast if torch.compiler.is_compiling() else _Contrast.apply
    loss: Tensor = function(*inputs, pairs, form, reduction, processes, with_gradient)
    return loss


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        temperature: float | Tensor,
        positive_weights: Tensor | None,
        pairs: Pairs,
        form: Form,
        reduction: str,
        processes: Processes,
        with_gradient: bool,
    ) -> Tensor:
        # Those of a later backward must not lose their memory to another step.
        losses = Losses(pairs, temperature, form, processes, reduction != "none")
        loss = losses.loss(reduction, with_gradient)
        ctx.processes = processes
        if reduction == "none":
            ctx.losses = losses
        elif with_gradient:
            ctx.save_for_backward(*losses.gradient())
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "with this engine the loss is differentiable once: engine='dense', in one process, "
                "is differentiable any number of times"
            )
        # The losses of all processes depend on the sums of all embeddings.
        d_loss = ctx.processes.add(d_loss, "the gradient of the loss")
        if hasattr(ctx, "losses"):
            with full_precision(d_loss.device):
                gradients = ctx.losses.gradient(d_loss)
        else:
            gradients = [None if x is None else x * d_loss for x in ctx.saved_tensors]
        return *gradients, None, None, None, None, None
