"""The streaming engine in blocks of other sizes than its own."""

import importlib
from unittest import mock

streaming_file = importlib.import_module("pgcl_losses.engine.streaming")


def in_blocks(block, elements):
    return mock.patch.multiple(streaming_file, _BLOCK=block, _ELEMENTS=elements)
