"""Run a function on several gloo ranks, each a process of its own.

The processes stay for the next function, as their start takes longer than most tests.
"""

import datetime
import io
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

# Ranks are forked from a process that has imported torch already, and has done nothing else.
STARTER = multiprocessing.get_context("forkserver")
STARTER.set_forkserver_preload(["torch.distributed", "torch._dynamo", "pytest", "hypothesis"])

DEAD = "this rank died"
TIMEOUT = 60  # seconds, of collectives


class _Group:
    def __init__(self, num_ranks: int) -> None:
        self.store = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = STARTER.Pipe()
            arguments = rank, num_ranks, self.store.name, theirs
            process = STARTER.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, job: Any, may_die: Collection[int]) -> list[tuple[Any, str]]:
        """What each rank returns, and its traceback if it fails."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(job))
        return [
            (DEAD, "") if rank in may_die else _outcome(pipe)
            for rank, pipe in enumerate(self.pipes)
        ]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.store.cleanup()


_groups: dict[int, _Group] = {}  # by their number of ranks


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, may_die: Collection[int] = ()
) -> list[Any]:
    """What ``function(rank, num_ranks, *args)`` returns; ``DEAD`` for ranks that may die."""
    group = _groups.pop(num_ranks, None) or _Group(num_ranks)
    outcomes = group.run((function, args), may_die)
    failures = [trace for _, trace in outcomes if trace]
    dead = {rank for rank, (result, _) in enumerate(outcomes) if result is DEAD}
    if failures or dead:
        group.end()
    else:
        _groups[num_ranks] = group
    assert not failures, "\n".join(failures)
    assert dead <= set(may_die), f"ranks {sorted(dead)} ended without a result"
    return [result for result, _ in outcomes]


def _outcome(pipe: Connection) -> tuple[Any, str]:
    try:
        if pipe.poll(5 * TIMEOUT):
            return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except (EOFError, OSError):
        pass
    return DEAD, ""


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:  # the tests are over
            return
        torch.manual_seed(0)
        torch.compiler.reset()
        try:
            if not distributed.is_initialized():
                distributed.init_process_group(
                    "gloo",
                    init_method=f"file://{store}/store",
                    rank=rank,
                    world_size=num_ranks,
                    timeout=datetime.timedelta(seconds=TIMEOUT),
                )
            function, args = pickle.loads(job)
            outcome = function(rank, num_ranks, *args), ""
        except (Exception, pytest.fail.Exception):
            outcome = None, f"rank {rank}: {traceback.format_exc()}"
        written = io.BytesIO()
        torch.save(outcome, written)
        pipe.send_bytes(written.getvalue())
