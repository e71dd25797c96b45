"""Values of command-line options. An invalid one is an error of one line, before any work."""

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def checked(parse: Callable[[str], Any], expected: str, is_valid: Callable[[Any], bool]) -> Any:
    """A ``type`` of argparse, which puts the option's name before the message."""

    def value_of(text: str) -> Any:
        with suppress(ValueError, RuntimeError):
            value = parse(text)
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"must be {expected}, but it is {text}")

    return value_of


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m experiments.NAME``."""
    return argparse.ArgumentParser(
        f"python -m experiments.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def program(name: str, main: Callable[[], None]) -> None:
    """Run a program; what it cannot do ends it with a line instead of a traceback."""
    try:
        main()
    except ValueError as error:
        sys.exit(f"experiments.{name}: {error}")


def at_least(least: int) -> Any:
    return checked(int, f"a whole number, {least} or more", lambda number: number >= least)


def is_available(device: str) -> bool:
    known = torch.device(device)
    gpus = torch.cuda.device_count() if known.type == "cuda" else 0
    return known.type == "cpu" or (known.index or 0) < gpus


count = at_least(1)
positive = checked(float, "a number above 0", lambda number: 0 < number < math.inf)
file = checked(Path, "an existing file", Path.is_file)
device = checked(str, "cpu or a CUDA device that this machine has", is_available)
