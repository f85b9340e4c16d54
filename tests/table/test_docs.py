"""The page about tables runs as printed."""

import re
from pathlib import Path

from shoal.table import reset_registry

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


def test_every_example_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    reset_registry()
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        reset_registry()
