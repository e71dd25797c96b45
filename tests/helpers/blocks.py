"""The streaming engine and the positives in blocks of another size, on every device."""

from contextlib import ExitStack
from unittest import mock

from pgcl_losses import positives
from pgcl_losses.engine import blocks


def in_blocks(rows):
    stack = ExitStack()
    for module in (blocks, positives):
        stack.enter_context(mock.patch.multiple(module, _BLOCK=rows, _BLOCK_ELSEWHERE=rows))
    return stack
