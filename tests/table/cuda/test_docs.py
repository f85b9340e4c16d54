"""The page about GPU tables runs as printed, on a GPU."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


@pytest.mark.gpu
def test_every_example_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    names = {"next_ids": torch.arange(100, 300, device="cuda"), "grads": torch.ones(1 << 20, 64, device="cuda")}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        names["grads"] = torch.ones(names["ids"].numel(), 64, device="cuda")
