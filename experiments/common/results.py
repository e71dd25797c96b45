"""Records of finished runs: one JSON line each, identified by configuration and source code."""

import hashlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import sklearn
import torch
import torch_geometric
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import pgcl_losses
import pgcl_losses.adapters

from .probes import NAMES

Config = dict[str, Any]
Run = dict[str, Any]  # a configuration under "config", its results, and "versions"
Candidate = TypeVar("Candidate")
TIED, WORST_TIED = 0.5, 1.0  # points


def commit() -> str:
    """The commit of this checkout, with a + if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    here = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, **here).strip()
    return "unknown"


def digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()[:12]


def digest_of_source(folders: Iterable[Path]) -> str:
    """A digest of the Python files below these folders."""
    files = [(file, folder) for folder in folders for file in sorted(folder.rglob("*.py"))]
    texts = [
        (file.relative_to(folder).as_posix().encode(), file.read_bytes()) for file, folder in files
    ]
    return digest(part for of_file in texts for part in of_file)


def code_of(module: str) -> str:
    """A digest of what a run depends on: the package, `experiments.common`, the module's folder."""
    program = str(sys.modules[module].__file__)
    files = (pgcl_losses.__file__, pgcl_losses.adapters.__file__, __file__, program)
    return digest_of_source(Path(file).parent for file in files)


ROUNDS = {  # what rounds, beside the code
    "python": platform.python_version(),
    "torch": torch.__version__,
    "torch_geometric": torch_geometric.__version__,
    "scikit-learn": sklearn.__version__,
    "cpu": torch.backends.cpu.get_cpu_capability(),
}
VERSIONS = {"commit": commit(), **ROUNDS, "pgcl_losses": pgcl_losses.__version__}


def key(config: Config, versions: dict[str, Any]) -> str:
    """The identity of a run: its configuration, its source code, and the threads it had."""
    return json.dumps([config, versions.get("code"), versions.get("threads")], sort_keys=True)


def read(path: Path) -> dict[str, Run]:
    """The runs of a file by their `key`; none if it does not exist."""
    runs = {}
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            run = json.loads(line)
            runs[key(run["config"], run["versions"])] = run
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def best(
    candidates: Iterable[Candidate], values: Callable[[Candidate], Collection[float]]
) -> Candidate:
    """The candidate with the highest mean of its values: those of the runs that choose settings."""

    def mean(candidate: Candidate) -> float:
        found = [*values(candidate)]
        if not found:
            raise ValueError(f"the record has no runs that choose settings of {candidate}")
        return float(np.mean(found))

    return max(candidates, key=mean)


def tied(distances: Mapping[Candidate, Collection[float]]) -> list[Candidate]:
    """The candidates that count as equally good, from how far each is below the best of each set.

    Those within 0.5 points of the smallest mean distance are tied; of these, those stay that are
    within 1 point of the smallest worst distance.
    """
    means = {candidate: float(np.mean([*of])) for candidate, of in distances.items()}
    near = [c for c, mean in means.items() if mean <= min(means.values()) + TIED]
    worst = min(max(distances[candidate]) for candidate in near)
    return [candidate for candidate in near if max(distances[candidate]) <= worst + WORST_TIED]


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write the file atomically: ``fill`` writes a temporary one, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    fill(part)
    os.replace(part, path)


def announce(path: Path, finished: list[Run]) -> None:
    """Say which runs of a file are not run again, and what made them if it is not here now."""
    if finished:
        print(f"{len(finished)} finished runs read from {path}: delete it to train again")
    made_by = {(name, run["versions"].get(name)) for run in finished for name in ROUNDS}
    for name, version in sorted(made_by - ROUNDS.items()):
        print(f"Warning: some of them ran with {name} {version}, and this is {ROUNDS[name]}")


def limit_threads(threads: int) -> None:
    """In each process, where torch is loaded as this module is: earlier limits do not reach it."""
    threadpool_limits(threads)


def headline(run: Run) -> str:
    """The row of a run and what it measured first, for a progress bar."""
    found = {name: value for name, value in run.items() if name != "config"}
    parts = [value for value in found.values() if isinstance(value, dict)]
    name, value = next(iter((parts or [found])[0].items()), ("", ""))
    text = f"accuracy with {NAMES[name]} {value:.1f} %" if name in NAMES else f"{name} {value}"
    return f"{run['config'].get('row', 'last')}: {text}"


def complete(
    path: Path,
    jobs: Iterable[tuple[Any, ...]],
    function: Callable[..., Run],
    workers: int,
    threads: int = 1,
) -> list[Run]:
    """The runs of all jobs: those in the file, and those that it lacks, which are appended to it.

    ``function(*job)`` makes a run in a process of its own, with one thread unless ``threads`` says
    otherwise: several processes with a thread for each core would mostly wait for each other. A job
    begins with its configuration. What is finished stays in the file, whatever ends the program.
    """
    versions = VERSIONS | {"code": code_of(function.__module__), "threads": threads}
    done, jobs = read(path), list(jobs)
    names = [key(job[0], versions) for job in jobs]
    missing = {name: job for name, job in zip(names, jobs, strict=True) if name not in done}
    announce(path, [done[name] for name in {*names} if name in done])
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, limit_threads, (threads,))
        try:
            futures = [pool.submit(function, *job) for job in missing.values()]
            bar = tqdm(as_completed(futures), total=len(futures), unit="run")
            for future in bar:
                run = future.result()
                bar.set_postfix_str(headline(run))
                run = {**run, "versions": versions | run.get("versions", {})}
                with path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                done[key(run["config"], versions)] = run
        finally:
            pool.shutdown(cancel_futures=True)
    return [done[name] for name in names]
