"""Run a function on several gloo ranks, each a process of its own."""

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

# Ranks are forked from a process that has imported torch already, and has done nothing else.
STARTER = multiprocessing.get_context("forkserver")
STARTER.set_forkserver_preload(["torch.distributed", "torch._dynamo", "pytest", "hypothesis"])

DEAD = "this rank died"
TIMEOUT = 60  # seconds, of collectives


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, may_die: Any = ()) -> list:
    """What ``function(rank, num_ranks, *args)`` returns on each rank, or ``DEAD`` if it may die."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            STARTER.Process(target=_rank, args=(rank, num_ranks, folder, function, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(5 * TIMEOUT)
            process.kill()
        outcomes = [_outcome(Path(folder) / f"{rank}.pt") for rank in range(num_ranks)]
    failures = [trace for _, trace in outcomes if trace]
    assert not failures, "\n".join(failures)
    dead = [rank for rank, (result, _) in enumerate(outcomes) if result is DEAD]
    assert set(dead) <= set(may_die), f"ranks {dead} ended without a result"
    return [result for result, _ in outcomes]


def _rank(rank, num_ranks, folder, function, args):
    torch.set_num_threads(1)
    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=TIMEOUT),
        )
        outcome = function(rank, num_ranks, *args), ""
    except Exception:
        outcome = None, f"rank {rank}: {traceback.format_exc()}"
    torch.save(outcome, Path(folder) / f"{rank}.pt")


def _outcome(path):
    return torch.load(path, weights_only=False) if path.exists() else (DEAD, "")
