"""A directory of numbered checkpoint folders: which are complete, how they build on each other, which can go.

A full checkpoint has all rows; a delta has the rows written since its parent and the ids removed since.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint.manifest import Manifest, remove_folder
from shoal.table.checkpoint.naming import CheckpointNotFoundError, StrPath
from shoal.table.checkpoint.scales import check_scales

MANIFEST = "manifest.json"
_NAME = re.compile(r"ckpt-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint of a directory."""

    path: str
    name: str
    kind: str
    """``full`` or ``delta``."""
    parent: str | None
    """The name of the checkpoint that a delta builds on."""
    step: int
    created: str
    rows: int
    """Rows that this checkpoint itself holds."""
    removed: int
    """Ids that it takes back."""
    bytes: int
    id: str


def list_checkpoints(directory: StrPath) -> list[Checkpoint]:
    """The complete checkpoints of a directory, oldest first; what is damaged or half removed is passed over."""
    return [describe(os.fspath(directory), name, manifest) for name, manifest in _complete(os.fspath(directory))]


def latest_checkpoint(directory: StrPath) -> Checkpoint | None:
    """The newest complete checkpoint of a directory, None when there is none."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


def prune_checkpoints(
    directory: StrPath, keep: int = 1, *, leftovers_after: timedelta = timedelta(days=1)
) -> list[str]:
    """Removes all but the newest ``keep`` checkpoints and those that they build on; the names of the removed.

    What a process that was killed left half written is removed once it is older than ``leftovers_after``.
    """
    if keep < 1:
        raise ConfigError(f"prune_checkpoints: keep must be at least 1, got {keep}")
    directory = os.fspath(directory)
    complete = dict(_complete(directory))
    needed: set[str] = set()
    for name in list(complete)[-keep:]:
        at: str | None = name
        while at is not None and at not in needed:
            needed.add(at)
            at = _parent_name(complete[at]) if at in complete else None
    doomed = [name for name in complete if name not in needed]
    for name in reversed(doomed):  # deltas before what they build on
        remove_folder(os.path.join(directory, name))
    oldest = time.time() - leftovers_after.total_seconds()
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a save that has just been finished
                if entry.name.startswith(".tmp-ckpt-") and entry.stat().st_mtime < oldest:
                    shutil.rmtree(entry.path, ignore_errors=True)
    return doomed


def _numbers(directory: str) -> dict[int, str]:
    try:
        entries = os.listdir(directory)
    except FileNotFoundError:
        return {}
    return {int(match[1]): entry for entry in entries if (match := _NAME.fullmatch(entry))}


def next_name(directory: str) -> str:
    return f"ckpt-{max(_numbers(directory), default=0) + 1:08d}"


def _complete(directory: str) -> list[tuple[str, Manifest]]:
    found = []
    for _, name in sorted(_numbers(directory).items()):
        folder = os.path.join(directory, name)
        try:
            manifest = Manifest.read(os.path.join(folder, MANIFEST))
        except (DataError, OSError):
            continue
        if manifest.missing(folder) is None and manifest.kind in ("full", "delta"):
            found.append((name, manifest))
    return found


def read_chain(directory: str, name: str | None) -> list[tuple[str, Manifest]]:
    """The full checkpoint and the deltas that lead to ``name``, oldest first."""
    if name is None:
        complete = _complete(directory)
        if not complete:
            raise CheckpointNotFoundError(f"there is no complete checkpoint in {directory!r}")
        name = complete[-1][0]
    if not _NAME.fullmatch(name):
        raise CheckpointNotFoundError(f"a checkpoint is called like 'ckpt-00000001', got {name!r}")
    chain: list[tuple[str, Manifest]] = []
    wanted: str | None = None
    while True:
        folder = os.path.join(directory, name)
        try:
            manifest = Manifest.read(os.path.join(folder, MANIFEST))
        except FileNotFoundError:
            builds = f", on which {chain[0][0]} builds," if chain else ""
            raise CheckpointNotFoundError(f"checkpoint {folder!r}{builds} is not there") from None
        missing = manifest.missing(folder)
        if missing is not None:
            raise DataError(f"checkpoint {folder!r} is damaged: {missing}")
        if wanted is not None and manifest.id != wanted:
            raise DataError(f"checkpoint {folder!r} is not the one that {chain[0][0]} builds on: it was written anew")
        if any(name == seen for seen, _ in chain):
            raise DataError(f"checkpoint {folder!r} builds on itself")
        chain.insert(0, (name, manifest))
        if manifest.kind == "full":
            return chain
        parent = _parent_name(manifest)
        if manifest.kind != "delta" or parent is None:
            raise DataError(f"checkpoint {folder!r} is neither full nor a delta on another")
        wanted = manifest.content["parent"].get("id")
        name = parent


def _parent_name(manifest: Manifest) -> str | None:
    parent = manifest.content.get("parent")
    name = parent.get("name") if isinstance(parent, dict) else None
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def table_in(manifest: Manifest, name: str, where: str) -> dict[str, Any]:
    """What a manifest says of one table, its types checked."""
    tables = manifest.content.get("tables")
    found = [t for t in tables if isinstance(t, dict) and t.get("name") == name] if isinstance(tables, list) else []
    if len(found) != 1:
        raise CheckpointNotFoundError(f"unable to find table checkpoint: {where} has no table {name!r}")
    described = found[0]
    base = described.get("file")
    if not isinstance(base, str) or os.path.basename(base) != base:
        raise DataError(f"{where}: file must be a plain name, got {base!r:.80}")
    for key, limit in {"shards": 1 << 20, "rows": 1 << 62, "removed": 1 << 48, "max_update_time": 1 << 32}.items():
        value = described.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise DataError(f"{where}: {key} of table {name!r} is a number, got {value!r:.80}")
    described["scales"] = check_scales({name: described.get("scales")}, where)[name]
    return described


def describe(directory: str, name: str, manifest: Manifest) -> Checkpoint:
    tables = [t for t in manifest.content.get("tables", []) if isinstance(t, dict)]
    return Checkpoint(
        path=os.path.join(directory, name),
        name=name,
        kind=manifest.kind,
        parent=_parent_name(manifest),
        step=manifest.step,
        created=manifest.created,
        rows=sum(t.get("rows", 0) for t in tables),
        removed=sum(t.get("removed", 0) for t in tables),
        bytes=sum(manifest.files.values()),
        id=manifest.id,
    )
