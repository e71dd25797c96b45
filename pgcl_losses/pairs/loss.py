"""The loss of a batch: which way computes the losses of its queries, and their mean or sum."""

import functools
import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pgcl_losses.base.distributed import Processes
from pgcl_losses.base.modes import is_eager, is_transformed
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.base.warnings import warn
from pgcl_losses.pairs.chunks import is_one_chunk, losses_by_chunks
from pgcl_losses.pairs.forms import Compared, LossesOfRows
from pgcl_losses.pairs.lists import losses_of_lists, plain_products, products_in_parts
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows, all_rows
from pgcl_losses.pairs.sums import PLAIN, matrix_sums, row_losses, sums_in_place
from pgcl_losses.pairs.two_views import blocks_of, losses_of_block

Engine = Literal["auto", "dense", "chunks", "fused"]
Way = Literal["dense", "lists", "two views", "one chunk", "chunks", "fused"]


def loss_of_pairs(
    pairs: Pairs, inputs: Inputs, reduction: str, engine: Engine, processes: Processes
) -> Tensor:
    """Compute the mean or sum of the losses of queries that have positives, or all losses ``[Q]``.

    With several processes, each computes the losses of its own queries against the keys of all
    processes. The mean or the sum is taken over the queries of all processes.
    """
    if processes.num_ranks() > 1:
        return _loss_of_processes(pairs, inputs, reduction, engine, processes)
    is_sum = reduction != "none"
    losses, count = losses_of_queries(pairs, inputs, engine, processes, is_sum=is_sum)
    return reduced(losses, count, reduction)


def _loss_of_processes(
    pairs: Pairs, inputs: Inputs, reduction: str, engine: Engine, processes: Processes
) -> Tensor:
    """Compute the loss over the queries of all processes; if one process fails, all of them do."""
    error, is_sum = None, reduction != "none"
    try:
        losses, count = losses_of_queries(pairs, inputs, engine, processes, is_sum=is_sum)
    except Exception as raised:
        if pairs.score_mod is None:
            raise
        # The user's function failed in this process, and others wait for its losses.
        error, losses, count = raised, inputs.z.new_zeros(()), 0
    if reduction == "none" and pairs.score_mod is None:
        return losses
    total, count, failures = processes.sum_of(losses.sum(), count, error)
    if pairs.score_mod is not None:
        processes.raise_on_all(failures, error, "score_mod")
    return losses if reduction == "none" else reduced(total, count, reduction)


def reduced(losses: Tensor, count: Tensor | int, reduction: str) -> Tensor:
    """Divide a sum of losses by how many queries have positives, if their mean is asked for.

    Another reduction keeps ``losses``: ``[Q]`` for "none", else their sum ``[]``. A count that is a
    tensor may be 0: then the mean of no loss is 0.
    """
    if reduction != "mean":
        return losses
    return losses / (count.clamp_min(1) if isinstance(count, Tensor) else count)


def check_engine(engine: Engine, inputs: Inputs, num_ranks: int) -> None:
    """Raise an error for an engine that cannot compute these inputs."""
    if engine == "chunks" and is_transformed(*inputs):
        raise ValueError(
            "engine='chunks' is for backward alone, but torch.func or forward mode differentiates "
            "the loss: choose engine='auto' or 'dense'"
        )
    if engine == "dense" and num_ranks > 1:
        raise ValueError(
            f"engine='dense' computes one matrix in one process, but {num_ranks} processes hold a "
            "batch together: choose engine='auto' or 'chunks', or gather=False"
        )
    is_interpreted = engine == "fused" and os.environ.get("TRITON_INTERPRET") == "1"
    if engine == "fused" and not (inputs.z.is_cuda or is_interpreted):
        raise ValueError(
            "engine='fused' is for embeddings on a GPU, but they are on "
            f"{inputs.z.device.type}: choose engine='auto'"
        )


def choose_way(
    engine: Engine, pairs: Pairs, inputs: Inputs, rows: Sequence[Rows], num_ranks: int
) -> Way:
    """Choose how to compute the losses of rows. A table in docs/architecture.md says the same."""
    z, needs_plain_torch = inputs.z, torch.compiler.is_compiling() or is_transformed(*inputs)
    if engine == "dense" or (needs_plain_torch and engine != "chunks" and num_ranks == 1):
        return "dense"
    if pairs.negative_pairs is not None:
        return "lists"
    # Rows that are computed at once wait for a backward. With a memory they cannot, because the
    # same step overwrites the memory. Nor can a user's function that other processes wait for: an
    # error in its backward must be raised in the forward, where all of them hear of it.
    can_wait = pairs.memory is None and (num_ranks == 1 or pairs.score_mod is None)
    if engine != "fused" and can_wait and is_one_chunk(pairs, rows, z):
        return "two views" if num_ranks == 1 and pairs.are_two_views() else "one chunk"
    can_be_fused = engine != "chunks" and is_eager(z) and pairs.can_be_fused()
    if can_be_fused and (engine == "fused" or (z.is_cuda and kernels_run_on(z.device))):
        return "fused"
    return "chunks"


def losses_of_queries(
    pairs: Pairs, inputs: Inputs, engine: Engine, processes: Processes, *, is_sum: bool
) -> tuple[Tensor, Tensor | int]:
    """Compute the losses ``[Q]`` of this process, or their sum, and how many have positives.

    A number says that all Q have positives, a tensor that some may have none.
    """
    num_ranks = processes.num_ranks()
    rows = all_rows(pairs, processes.own_spans() if num_ranks > 1 else None)
    check_engine(engine, inputs, num_ranks)
    way = choose_way(engine, pairs, inputs, rows, num_ranks)
    results: Sequence[LossesOfRows]
    if way == "two views":
        blocks = blocks_of(pairs, inputs, rows)
        return joined([(losses_of_block(pairs, x, inputs), None) for x in blocks], inputs, is_sum)
    inputs = inputs.normalized(pairs)
    if pairs.negative_pairs is not None:
        products = plain_products if way == "dense" else products_in_parts
        results = losses_of_lists(pairs, inputs, rows, products, is_sum)
    elif way in ("dense", "one chunk"):
        sums = matrix_sums if way == "dense" else sums_in_place
        results = [row_losses(pairs, some, inputs, sums) for some in rows]
    else:
        passes = PLAIN
        if way == "fused":
            from pgcl_losses.pairs.fused import KERNELS as passes
        return losses_by_chunks(pairs, inputs, rows, passes, is_sum=is_sum)
    return joined(results, inputs, is_sum)


@torch.no_grad()
def num_compared(pairs: Pairs, inputs: Inputs, engine: Engine, processes: Processes) -> Tensor:
    """Count the queries of this process that have both positives and negatives."""
    pairs = pairs._replace(form=Compared(), hardness=0.0, learns=False)
    with full_precision(inputs.z.device):
        return losses_of_queries(pairs, inputs, engine, processes, is_sum=True)[0]


def joined(
    results: Sequence[LossesOfRows], inputs: Inputs, is_sum: bool
) -> tuple[Tensor, Tensor | int]:
    """Join rows: their losses ``[Q]`` or the sum, and how many queries have positives."""
    losses = [losses for losses, _ in results]
    if len(results) != 1:
        # A process without queries takes part in the exchange of gradients, so it needs a graph.
        losses = [torch.cat([inputs.z[:0, 0] / inputs.temperature, *losses])]
    exist = [exist for _, exist in results if exist is not None]
    count = sum([x.sum() for x in exist]) if exist else len(losses[0])
    return losses[0].sum() if is_sum else losses[0], count


@functools.cache
def kernels_run_on(device: torch.device) -> bool:
    """Whether to use kernels by default: on GPUs of the kind on which their tests have run.

    They also need Triton, and Triton a C compiler.
    """
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    if not is_hopper:
        return False
    try:
        from pgcl_losses.pairs import fused

        fused.try_on(device)
    except Exception as error:  # whatever is missing, the loss does not need kernels
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warn(f"large batches are slower, as Triton compiles no kernels here ({reason})")
        return False
    return True
