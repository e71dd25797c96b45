"""Warnings that point to the user's own line."""

import sys
import warnings

import torch

# Packages whose code may run between the user's line and this one. Adapters add their frameworks.
NOT_THE_USER = {"pgcl_losses", "torch"}


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn, and point to the line of the user's code that called this package.

    A compiler cannot trace the search for this line, so compiled code does not warn.
    """
    if torch.compiler.is_compiling():
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in NOT_THE_USER:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(f"pgcl_losses: {message}", kind, stacklevel=level)
