"""Warnings that point to the user's own line."""

import sys
import warnings

# Whose code stands between the user's line and ours: this package, torch, and PyGCL, whose contrast
# models call the loss. (Python 3.12 has `skip_file_prefixes` for this, but we support older ones.)
_NOT_THE_USER = ("pgcl_losses", "torch", "GCL")


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=_calls_from_outside())


def _calls_from_outside() -> int:
    """How many calls up from a warning the user's own line is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _NOT_THE_USER:
            break
        level, frame = level + 1, frame.f_back
    return level
