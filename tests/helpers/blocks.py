"""The engine of blocks with blocks of another size than its own, on every device."""

from unittest import mock

from pgcl_losses.engine import pairs


def in_blocks(size):
    return mock.patch.multiple(pairs, _BLOCK=size, _BLOCK_ELSEWHERE=size)
