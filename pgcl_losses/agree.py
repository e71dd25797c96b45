"""What ranks must agree on before they exchange embeddings.

Ranks that differ would wait for each other for ever, or compute a wrong loss. So each compares what
it is about to do with the others. If they differ, all raise the same error.
"""

import json
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from pgcl_losses.ranks import Ranks, all_gather, named

# What a rank reports: its call, options and properties of its input, as plain values.
Facts = Mapping[str, bool | int | float | str | None]


def agreed_ranks(
    num_graphs: int,
    facts: Facts,
    problem: Exception | None,
    state: Sequence[Tensor],
    device: torch.device,
    group: ProcessGroup | None,
) -> Ranks:
    """The ranks of a group, after a check that all of them want the same.

    ``facts``: what this rank is about to do. ``problem``: an error that stops it. ``state``: what
    must be the same on all ranks.
    """
    claims = dict(facts) if problem is None else {"call": facts["call"]}
    claims["problem"] = "" if problem is None else f"{type(problem).__name__}: {problem}"
    summary = [num_graphs, zlib.crc32(json.dumps(claims, sort_keys=True).encode())]
    mine = torch.cat([torch.tensor(summary, device=device), fingerprint(state, device)])
    num_ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    of_ranks = mine.new_empty(num_ranks * len(mine))
    with named("all-gather of batch sizes", group):
        all_gather(of_ranks, mine, group)
    counts, summaries, states = of_ranks.view(num_ranks, -1).T.tolist()
    if len(set(summaries)) > 1:
        raise ValueError(_differences(claims, group)) from problem
    if problem is not None:
        raise problem
    if len(set(states)) > 1:
        raise ValueError(
            "the prototypes, their step counter or queue, the warm-up, the memory or the "
            "temperature are not the same on all ranks: give all ranks one seed or put the loss "
            "into the module that DistributedDataParallel wraps, load one checkpoint on all ranks, "
            "and optimize the prototypes on all ranks"
        )
    if sum(counts) == 0:
        raise ValueError("the batch must not be empty on every rank")
    return Ranks(counts, rank, group)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number ``[1]``: most probably another one if any bit or the order differs."""
    sums = [torch.zeros(1, dtype=torch.int64, device=device)]
    for tensor in tensors:
        tensor = tensor.detach().contiguous()
        tensor = tensor.view(tensor.shape or 1)
        words = tensor.view(_WORDS[tensor.element_size()]).to(torch.int64, copy=True)
        # Columns and rows have factors of their own, so that none is needed for each number.
        words.mul_(_factors(words.shape[-1], 0, tensor.device))
        sums.append(words.sum(-1).flatten().to(device))
    of_rows = torch.cat(sums)
    return (of_rows * _factors(len(of_rows), 1 << 32, device)).sum(0, keepdim=True)


def _factors(count: int, first: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern ``[count]``, for the positions from ``first`` on."""
    # The mixing of SplitMix64: with factors in proportion to positions, moves could cancel out.
    mixed = torch.arange(first + 1, first + 1 + count, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1


def _differences(claims: Facts, group: ProcessGroup | None) -> str:
    """What ranks disagree on; every rank gets the same message."""
    by_rank: list[dict[str, object]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(by_rank, dict(claims), group)
    first_by_call = {of_rank["call"]: rank for rank, of_rank in reversed([*enumerate(by_rank)])}
    if len(first_by_call) > 1:
        in_order = sorted(first_by_call.items(), key=lambda pair: pair[1])
        calls = ", ".join(f"rank {rank} calls {call}" for call, rank in in_order)
        return f"{calls}: all ranks must make the same calls"
    names = sorted({name for of_rank in by_rank for name in of_rank})
    if any(of_rank["problem"] for of_rank in by_rank):
        names = ["problem"]
    lines = ["the ranks of process_group cannot compute one loss, because they differ:"]
    for name in names:
        values = [of_rank.get(name, "absent") for of_rank in by_rank]
        if any(value != values[0] for value in values):
            label = "" if name == "problem" else f"{name}="
            shown = [value if value != "" else "ready" for value in values]
            lines += [f"  rank {rank}: {label}{value}" for rank, value in enumerate(shown)]
    return "\n".join(lines)
