"""The examples in the documentation and in the docstrings run as written."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import shoal.ops

MODULES = [m.name for m in pkgutil.walk_packages(shoal.ops.__path__, "shoal.ops.")] + ["shoal.ragged"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if ".cuda." in name:
        pytest.importorskip("triton")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_page_examples():
    page = Path(__file__).parents[2] / "docs" / "ops.md"
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert names["out"].output.tolist() == [4, 4, 9, 7, 5]
    assert [list(t.shape) for t in names["tensors"]] == [[2, 1], [2, 4]]
