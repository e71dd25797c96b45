"""Triton's interpreter, for tests on a machine without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """It keeps bfloat16 as 16-bit integers, and multiplies those in tl.dot."""
    original = InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, widened(a), widened(b), *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield
