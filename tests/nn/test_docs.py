"""The README's program, the pages about modules and the examples in docstrings run as they are printed."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readmes_program_runs_as_printed_and_learns():
    (program,) = blocks("README.md")
    assert len(program.splitlines()) <= 15
    assert program == (ROOT / "examples" / "quickstart.py").read_text()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    assert done.stdout.splitlines()[-1].endswith("5000 rows")


def test_links_of_the_readme_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_every_example_of_the_page_about_modules_runs():
    names: dict[str, object] = {}
    assert len(blocks("docs/nn.md")) >= 4
    for block in blocks("docs/nn.md"):
        exec(compile(block, "docs/nn.md", "exec"), names)


@pytest.mark.parametrize("module", ["nn.bag", "nn.embedding", "nn.optimizer", "demo.run"])
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(f"shoal.{module}"))
    assert result.attempted
    assert not result.failed
