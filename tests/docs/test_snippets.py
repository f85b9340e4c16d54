"""Every block marked as Python in the README and the pages runs as it is printed, top to bottom, page by page.

Blocks that need a cluster, a GPU or a file of another machine are marked `text` or `console` and are not run.
"""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.serving import reset_sync_clients
from shoal.table import reset_registry

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "_build" not in page.parts and re.search(r"^ *```python$", page.read_text(), re.MULTILINE)
)


def blocks(page):
    """Each block, moved down to the lines that it has on its page, so that a traceback points there."""
    text = (ROOT / page).read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, match.start(1)) + match.group(1)


@pytest.fixture
def clean():
    """What pages leave in the process: names of tables and clients, the process group of one."""
    reset_registry()
    reset_sync_clients()
    yield
    reset_registry()
    reset_sync_clients()
    if dist.is_initialized():
        dist.destroy_process_group()


# tests/table/cuda/test_docs.py runs the page about GPUs on a GPU.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/gpu.md"])
def test_the_page_runs_as_printed(page, clean, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "__file__": str(ROOT / page)}
    for block in blocks(page):
        exec(compile(block, str(ROOT / page), "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert link.startswith("http") or os.path.exists((ROOT / page).parent / link), link
