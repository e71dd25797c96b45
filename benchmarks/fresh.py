"""Memory of a step in a process of its own: what the machine must give, beside what tensors hold.

A process also keeps memory that tensors have given back, if what it made in between lies behind it.
So a loss whose tensors take little may still make a process grow.
"""

import ctypes
import importlib
import json
import subprocess
import sys
from pathlib import Path

from .measure import ROOT, Step, in_proc

PEAK = Path("/proc/self/clear_refs")  # Linux alone has it


def grown_mib(make: str, *given: str | int) -> float | None:
    """By how many MiB a process grows in a step, at its peak; None where nothing tells it.

    ``make``: a function of a module, as in ``"benchmarks.scripts:memory_steps"``. It returns a
    small step, which loads what a first step loads, and the step.
    """
    if not PEAK.exists():
        return None
    command = [sys.executable, "-m", "benchmarks.fresh", json.dumps([make, *given])]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(ended.stdout.split()[-1])


def growth(small: Step, step: Step) -> float:
    """The same, of this process."""
    small()
    # What was made before and is free again goes back, or the step would use it without growing.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    trim(0)
    PEAK.write_text("5")  # the peak begins anew
    before = int(in_proc("self/status", r"VmRSS:\s*(\d+)") or 0)
    step()
    return (int(in_proc("self/status", r"VmHWM:\s*(\d+)") or 0) - before) / 1024


if __name__ == "__main__":
    make, *given = json.loads(sys.argv[1])
    module, _, function = make.partition(":")
    print(growth(*getattr(importlib.import_module(module), function)(*given)))
