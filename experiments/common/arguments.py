"""Values of options. One that does not fit is an error of one line, before any work."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def fitting(kind: Callable[[str], Any], expected: str, fits: Callable[[Any], bool]) -> Any:
    """A ``type`` of argparse, which puts the option's name before what is said here."""

    def value_of(text: str) -> Any:
        with suppress(ValueError, RuntimeError):
            value = kind(text)
            if fits(value):  # nan fits nowhere
                return value
        raise argparse.ArgumentTypeError(f"must be {expected}, but it is {text}")

    return value_of


def at_least(least: int) -> Any:
    return fitting(int, f"a whole number, {least} or more", lambda number: number >= least)


def is_here(device: str) -> bool:
    known = torch.device(device)
    gpus = torch.cuda.device_count() if known.type == "cuda" else 0
    return known.type == "cpu" or (known.index or 0) < gpus


count = at_least(1)
positive = fitting(float, "a number above 0", lambda number: 0 < number < math.inf)
weight = fitting(float, "a number, 0 or more", lambda number: 0 <= number < math.inf)
share = fitting(float, "a number from 0 to below 1", lambda number: 0 <= number < 1)
file = fitting(Path, "a file that is there", Path.is_file)
device = fitting(str, "cpu or a CUDA device that this machine has", is_here)
