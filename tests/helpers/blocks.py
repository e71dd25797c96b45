"""The streaming engine in blocks of another size than its own, on every device."""

from unittest import mock

from pgcl_losses.engine import blocks


def in_blocks(rows):
    return mock.patch.multiple(blocks, _BLOCK=rows, _BLOCK_ELSEWHERE=rows)
