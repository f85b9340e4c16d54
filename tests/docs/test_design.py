"""docs/design.md describes the tree as it is: folders, files, and the modules that requests pass."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import _core

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "shoal"
PAGE = (ROOT / "docs" / "design.md").read_text()
TREE = PAGE.partition("## The tree")[2].partition("## ")[0]

VOCABULARY = {
    "serving": {
        "tensors.py",
        "wire.py",
        "security.py",
        "sync/replica.py",
        "sync/split.py",
        "sync/quantize.py",
        "sync/history.py",
        "sync/publication.py",
        "sync/push.py",
        "server/push_log.py",
        "server/noting.py",
        "server/traffic.py",
        "server/admission.py",
    },
    "gather": {"errors.py", "payload/spec.py", "payload/codec.py", "stores/base.py"},
}
"""Modules that only compute something on the way."""


def documented(title):
    """The modules of a path, as the page lists them."""
    part = PAGE.partition(f"**{title}**")[2].partition("\n\n**")[0]
    return set(re.findall(r"^\| `([\w/.]+)`", part, re.MULTILINE))


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """What of serving and gather each request passed, as another process saw it."""
    script = Path(__file__).with_name("trace_paths.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("trace"))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def test_every_package_and_room_is_in_the_tree():
    folders = [path for path in SRC.rglob("*") if path.is_dir() and (path / "__init__.py").exists()]
    for path in folders:
        if not {"ops", "proto", "cli", "cuda"} & set(path.relative_to(SRC).parts[:-1]):
            assert re.search(rf"\b{path.name}/", TREE), path
    for path in SRC.glob("[a-z]*.py"):
        if path.stem != "trainer":  # an alias of train.loop
            assert re.search(rf"\b{path.stem}\b", TREE), path


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/.]+/[\w.]*\.(?:py|h|cpp|proto)|[\w/]+/)`", PAGE))))
def test_every_file_that_is_named_exists(name):
    rooms = (ROOT, SRC, SRC / "serving", SRC / "gather")
    assert any((room / name).exists() for room in rooms), name


@pytest.mark.parametrize(
    ("title", "kind", "room", "most"),
    [
        ("A prediction", "predict", "serving", 0),
        ("A pushed row", "push", "serving", 8),
        ("A gather", "gather", "gather", 12),
    ],
)
def test_a_request_passes_the_modules_that_the_page_lists(passed, title, kind, room, most):
    listed = {name for name in documented(title) if not name.startswith("csrc/")}
    if room == "serving" and not _core.front_available():
        pytest.skip("the page describes the native front end, which was not built")
    seen = set(passed[kind]) - VOCABULARY[room]
    if room == "gather":
        seen = {"stores/" if name.startswith("stores/") else name for name in seen}
    if kind == "push":
        seen -= {"predict.py", "server/batching.py", "client/remote.py"}  # message types, pacing, deadlines
    assert seen == listed
    assert len(listed) <= most
