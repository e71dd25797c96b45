"""Data sets of PyG: a download is complete or absent."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def downloaded(collection: Callable[[str, str], object], name: str, cache: Path) -> Path:
    """A folder like ``--root``, with the set as PyG's ``collection(root, name)`` downloads it."""
    root = cache / "downloaded"
    if not (root / name).exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as part:
            try:
                collection(part, name)
            except Exception as error:
                raise ValueError(
                    f"{name} cannot be downloaded ({type(error).__name__}: {error}): if it is on "
                    "this machine, --root names the folder where it lies"
                ) from error
            os.rename(Path(part) / name, root / name)
    return root
