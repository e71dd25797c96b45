"""Warnings that point to the user's own line."""

import sys
import warnings


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=_calls_from_outside())


def _calls_from_outside() -> int:
    """How many calls up from a warning the user's own line is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("pgcl_losses", "torch"):
            break
        level, frame = level + 1, frame.f_back
    return level
