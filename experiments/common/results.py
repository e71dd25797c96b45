"""Records of finished runs: one JSON line each, identified by the whole configuration."""

import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sklearn
import torch
import torch_geometric
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import pgcl_losses

Config = dict[str, Any]
Run = dict[str, Any]  # a configuration under "config", and its results
START = b'{"config": '  # of every line


def commit() -> str:
    """The commit of this checkout, with a + if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    with suppress(FileNotFoundError):
        described = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True)
        return described.stdout.decode().strip() or "unknown"
    return "unknown"


VERSIONS = {
    "commit": commit(),
    "python": platform.python_version(),
    "torch": torch.__version__,
    "torch_geometric": torch_geometric.__version__,
    "scikit-learn": sklearn.__version__,
    "pgcl_losses": pgcl_losses.__version__,
}


class Stopped(Exception):
    """Some runs are missing; the finished ones are in a file."""


@contextmanager
def processes(workers: int, output: Path) -> Iterator[ProcessPoolExecutor]:
    """Worker processes for jobs whose results are appended to ``output`` one by one.

    Raises `Stopped` on Ctrl-C and when a process is killed. After any error no further job begins.
    """
    kept = f"stopped; what is finished is kept in {output}"
    spawn = multiprocessing.get_context("spawn")
    # Not as a context: leaving it waits for the jobs that have not begun.
    pool = ProcessPoolExecutor(workers, spawn, _begin)
    try:
        yield pool
    except KeyboardInterrupt:
        raise Stopped(kept) from None
    except BrokenProcessPool:  # Ctrl-C as well, where a process is quicker to end than this one
        raise Stopped(f"a process was killed, by Ctrl-C or for its memory: {kept}") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """In each process: Ctrl-C ends it without a traceback, and it computes with one thread.

    Several processes with a thread for each core would mostly wait for each other.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threadpool_limits(1)


def key(config: Config) -> str:
    """The identity of a run.

    Committed records are found by it. So configurations keep the names of the first records where
    the code has other words by now: ``place`` (a setting), ``lead`` and ``lead_epochs`` (the
    warm-up), ``start`` and ``start_from_rows`` (prototypes initialised from embeddings),
    ``rows_learn`` (the consistency trains the encoder), ``data`` (a digest).
    """
    return json.dumps(config, sort_keys=True)


def agrees(config: Config, setting: dict[str, Any]) -> bool:
    """Whether a configuration has these values, after JSON, for the names that it has."""
    return all(
        config.get(name, value) == value for name, value in json.loads(json.dumps(setting)).items()
    )


def read(path: Path) -> dict[str, Run]:
    """The runs of a file by their `key`. A truncated last line is ignored."""
    runs = {}
    if path.is_dir():
        raise ValueError(f"{path} is a folder: --output must be a file")
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            run = json.loads(line)
            runs[key(run["config"])] = run
        except (ValueError, KeyError, TypeError) as error:
            if is_truncated(line):
                break
            raise ValueError(
                f"{path}, line {number}, is not a run ({error}): choose another file"
            ) from error
    return runs


def is_truncated(line: bytes) -> bool:
    """Whether the line is the beginning of a run that was interrupted while it was written."""
    try:
        json.loads(line)
    except ValueError:
        return not line.endswith(b"\n") and (line.startswith(START) or START.startswith(line))
    return False


def append(path: Path, run: Run) -> None:
    """Append a line, in place of a truncated last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_bytes() if path.exists() else b""
    last = lines.rpartition(b"\n")[2]
    if last and is_truncated(last):
        os.truncate(path, len(lines) - len(last))
        last = b""
    line = ("\n" if last else "") + json.dumps(run) + "\n"
    with path.open("ab", buffering=0) as file:  # at once: another process may add lines too
        file.write(line.encode())
        os.fsync(file.fileno())


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write the file atomically: ``fill`` writes a temporary one, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    fill(part)
    os.replace(part, path)


def complete(
    path: Path, jobs: Iterable[tuple[Any, ...]], function: Callable[..., Run], workers: int
) -> dict[str, Run]:
    """Run the jobs that the file lacks, append each result, and return all runs of the file.

    ``function(*job)`` makes a run, in another process; a job begins with its configuration.
    Raises `Stopped` as `processes` does, and the errors of ``function``.
    """
    done = read(path)
    wanted = {key(job[0]): job for job in jobs}
    missing = [job for name, job in wanted.items() if name not in done]
    with processes(workers, path) as pool, tqdm(total=len(missing), unit="run") as progress:
        waiting = {pool.submit(function, *job) for job in missing}
        while waiting:
            finished, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
            for future in finished:
                run = future.result()
                append(path, run | {"versions": VERSIONS | run.get("versions", {})})
                progress.update()
            if sys.stderr.isatty():
                progress.refresh()  # its clock shows that something happens
    return read(path)
