"""The README's Python blocks run as they stand, and its table names what exists."""

import re
from pathlib import Path

import pytest

import pgcl_losses

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    exec(compile(block, "README.md", "exec"), {})


def test_every_public_name_is_explained():
    for name in pgcl_losses.__all__:
        assert f"`{name}`" in README
