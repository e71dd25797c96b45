"""Scripts, run by a process of their own or in this one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        # A script of many processes ends those too when it is asked to, not when it is killed.
        os.killpg(process.pid, signal.SIGTERM)
        raise
    assert process.returncode == 0, errors
    return printed


def threads_for_processes(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """The same work without processes to start, each of which imports all frameworks."""
    monkeypatch.setattr(
        module, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers)
    )


def main_here(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> None:
    """A script's main in this process, for the same reason."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
    module.main()


def kept_here(
    module: Any,
    results: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
) -> Callable[..., tuple[str, Path]]:
    """Runs a program here, with its files in a folder: what it prints, and where its runs are."""
    threads_for_processes(monkeypatch, results)

    def call(*arguments: str) -> tuple[str, Path]:
        output = folder / "runs.jsonl"
        given = (f"--output={output}", f"--cache={folder / 'cache'}", *arguments)
        main_here(monkeypatch, module, *given)
        return capsys.readouterr().out, output

    return call
