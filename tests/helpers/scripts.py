"""Scripts, run by a process of their own or in this one."""

import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def threads_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of experiments without processes to start, each of which imports all frameworks."""
    from experiments.common import results  # needs the extra

    monkeypatch.setattr(
        results, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers)
    )


def main_here(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> None:
    """The main of an experiment in this process."""
    threads_for_processes(monkeypatch)
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    module.main()


def script_here(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """A script in this process, which has imported the frameworks."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(ROOT / script), run_name="__main__")
