"""Finished runs, one JSON line each, found again by their whole configuration."""

import json
import os
from pathlib import Path
from typing import Any


def key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The runs of a file by their configuration. A last line cut short is no run."""
    runs = {}
    if path.exists():
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
            try:
                run = json.loads(line)
                runs[key(run["config"])] = run
            except (ValueError, KeyError) as error:
                if line.endswith("\n"):
                    raise ValueError(f"{path}, line {number}, is not a run: {error}") from error
    return runs


def append(path: Path, run: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_short = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    if cut_short:
        whole, _, _ = path.read_text().rpartition("\n")
        path.write_text(whole + "\n" if whole else "")
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")
        file.flush()
        os.fsync(file.fileno())
