"""Run a function in several gloo processes on this machine."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """What ``function(*args)`` returns in process 0 of so many."""
    with tempfile.TemporaryDirectory() as folder:
        # What forkserver starts ends without tearing Python down. Threads of DistributedData-
        # Parallel's group outlive it, and one that lets go of a tensor meanwhile aborts.
        multiprocessing.start_processes(
            _rank, (num_ranks, folder, function, args), nprocs=num_ranks, start_method="forkserver"
        )
        return torch.load(Path(folder) / "returned.pt", weights_only=False)


def _rank(
    rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    returned = function(*args)
    if rank == 0:
        torch.save(returned, Path(folder) / "returned.pt")
    distributed.barrier()
    distributed.destroy_process_group()
