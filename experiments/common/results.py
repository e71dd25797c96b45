"""Records of finished runs: one JSON line each, found by the whole configuration."""

import json
import multiprocessing
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
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


def key(config: Config) -> str:
    """The identity of a run."""
    return json.dumps(config, sort_keys=True)


def read(path: Path) -> dict[str, Run]:
    """The runs of a file by their `key`; none if it does not exist."""
    runs = {}
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            run = json.loads(line)
            runs[key(run["config"])] = run
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}, is not a run ({error}): choose another file"
            ) from error
    return runs


def matching(runs: Iterable[Run], config: Config) -> dict[int, Run]:
    """Seed -> run of this configuration, whatever its own seed and the digests of data."""

    def named(config: Config) -> Config:
        return {name: value for name, value in config.items() if name not in ("seed", "data")}

    wanted = named(config)
    return {run["config"]["seed"]: run for run in runs if named(run["config"]) == wanted}


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write the file atomically: ``fill`` writes a temporary one, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    fill(part)
    os.replace(part, path)


def _one_thread() -> None:
    """In each process: several with a thread for each core would mostly wait for each other.

    torch is loaded by then, as this module is; a limit set before would not reach it.
    """
    threadpool_limits(1)


def complete(
    path: Path, jobs: Iterable[tuple[Any, ...]], function: Callable[..., Run], workers: int
) -> dict[str, Run]:
    """Run the jobs that the file lacks, append each result, and return all runs of the file.

    ``function(*job)`` makes a run, in a process with one thread; a job begins with its
    configuration. What is finished stays in the file, whatever ends the program.
    """
    done = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    missing = [job for name, job in {key(job[0]): job for job in jobs}.items() if name not in done]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_thread)
    try:
        futures = [pool.submit(function, *job) for job in missing]
        for future in tqdm(as_completed(futures), total=len(futures), unit="run"):
            run = future.result()
            run = {**run, "versions": VERSIONS | run.get("versions", {})}
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            done[key(run["config"])] = run
    finally:
        pool.shutdown(cancel_futures=True)
    return done
