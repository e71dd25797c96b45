"""The streaming engine in blocks of another size than its own."""

from unittest import mock

from pgcl_losses.engine import blocks


def in_blocks(rows):
    return mock.patch.object(blocks, "_BLOCK", rows)
