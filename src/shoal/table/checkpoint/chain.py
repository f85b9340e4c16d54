"""A directory of numbered checkpoint folders: which are complete, which others they need, which can be removed.

A full checkpoint has all rows; a delta has the rows written and the ids removed since its parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from shoal.durable import Found, Saved, Series, StrPath, remove_folder
from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.checkpoint.naming import CheckpointNotFoundError
from shoal.table.checkpoint.scales import check_scales

log = logging.getLogger(__name__)
T = TypeVar("T")

_PREFIX, _DIGITS = "ckpt-", 8
_NAME = re.compile(r"ckpt-(\d{8,})")
_NUMBERS = {"shards": 1 << 20, "rows": 1 << 62, "removed": 1 << 48, "max_update_time": 1 << 32}  # upper limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint in a directory."""

    path: str
    name: str
    kind: str
    """``full`` or ``delta``."""
    parent: str | None
    """The name of the checkpoint that a delta is relative to."""
    step: int
    created: str
    rows: int
    """The number of rows in this checkpoint itself."""
    removed: int
    """The number of ids that it removes."""
    bytes: int
    id: str


def checkpoints_of(directory: StrPath) -> Series:
    """The folders ``ckpt-<number>`` in a directory, complete or not."""
    return Series(directory, _PREFIX, _DIGITS)


def list_checkpoints(directory: StrPath) -> list[Checkpoint]:
    """The complete checkpoints in a directory, oldest first.

    Manifests and file sizes are checked; a damaged checkpoint is left out and a warning is logged.
    """
    return [describe(link) for link in _complete(os.fspath(directory))]


def latest_checkpoint(directory: StrPath) -> Checkpoint | None:
    """The newest complete checkpoint in a directory, or None."""
    found = list_checkpoints(directory)
    return found[-1] if found else None


def prune_checkpoints(
    directory: StrPath, keep: int = 1, *, leftovers_after: timedelta = timedelta(days=1)
) -> list[str]:
    """Removes all but the newest ``keep`` checkpoints and those that they need; returns the names of the removed.

    Incomplete folders left by a process that was killed are removed once they are older than ``leftovers_after``.
    """
    if keep < 1:
        raise ConfigError(f"prune_checkpoints: keep must be at least 1, got {keep}")
    directory = os.fspath(directory)
    complete = {link.name: link.manifest for link in _complete(directory)}
    needed: set[str] = set()
    for name in list(complete)[-keep:]:
        at: str | None = name
        while at is not None and at not in needed:
            needed.add(at)
            at = _parent_name(complete[at]) if at in complete else None
    doomed = [name for name in complete if name not in needed]
    for name in reversed(doomed):  # deltas before the checkpoints that they need
        remove_folder(os.path.join(directory, name))
    oldest = time.time() - leftovers_after.total_seconds()
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # the save has just finished
                if entry.name.startswith(".tmp-ckpt-") and entry.stat().st_mtime < oldest:
                    shutil.rmtree(entry.path, ignore_errors=True)
    return doomed


def next_name(directory: str) -> str:
    series = checkpoints_of(directory)
    return os.path.basename(series.path(max(series.numbers(), default=0) + 1))


@dataclass(frozen=True)
class Link:
    """One checkpoint of a chain."""

    manifest: Manifest
    saved: Saved

    @property
    def folder(self) -> str:
        return self.saved.folder

    @property
    def name(self) -> str:
        return os.path.basename(self.folder)

    @classmethod
    def of(cls, found: Found) -> Link:
        """Raises `DataError` for a damaged folder, or one that is not a checkpoint of tables."""
        if found.saved is None:
            raise DataError(found.damage or f"{found.path} has no manifest")
        manifest = Manifest.of(found.saved)
        if manifest.kind not in ("full", "delta"):
            raise DataError(f"{found.saved.manifest}: kind must be 'full' or 'delta', got {manifest.kind!r:.40}")
        _check_numbers(manifest.content.get("tables"), found.saved.manifest)
        return cls(manifest, found.saved)


def _complete(directory: str) -> list[Link]:
    complete = []
    for found in checkpoints_of(directory).all():
        try:
            complete.append(Link.of(found))
        except DataError as error:
            log.warning("checkpoint %s is damaged and ignored: %s", found.path, error)
    return complete


def newest_chain(directory: str, load: Callable[[list[Link]], T], report: Callable[[str], None] | None = None) -> T:
    """The result of ``load`` for the chain of the newest readable checkpoint.

    Args:
        directory: the directory of the checkpoints.
        load: must change nothing if it raises.
        report: called for each damaged checkpoint that is skipped; by default a warning is logged.

    Raises:
        CheckpointNotFoundError: there are no checkpoints.
        DataError: none of the checkpoints can be read.
    """
    result = checkpoints_of(directory).load_newest(
        lambda found: load(read_chain(directory, found.name)), report or log.warning, _verify
    )
    if result is None:
        raise CheckpointNotFoundError(f"there is no complete checkpoint in {directory!r}")
    return result


def _verify(found: Found) -> None:
    """Reads every file of a checkpoint and of the checkpoints that it needs."""
    for link in read_chain(os.path.dirname(found.path), found.name):
        link.saved.verify()


def read_chain(directory: str, name: str) -> list[Link]:
    """The full checkpoint and the deltas that lead to ``name``, oldest first."""
    if not _NAME.fullmatch(name):
        raise CheckpointNotFoundError(f"the name of a checkpoint must be like 'ckpt-00000001', got {name!r}")
    chain: list[Link] = []
    wanted: str | None = None
    series = checkpoints_of(directory)
    while True:
        folder = os.path.join(directory, name)
        role = f", the parent of {chain[0].name}," if chain else ""
        if not os.path.isdir(folder):
            raise CheckpointNotFoundError(f"checkpoint {folder!r}{role} does not exist")
        try:
            link = Link.of(series.look(int(name.removeprefix(_PREFIX))))
        except DataError as error:
            raise DataError(f"checkpoint {folder!r}{role} is damaged: {error}") from None
        manifest = link.manifest
        if wanted is not None and manifest.id != wanted:
            raise DataError(f"checkpoint {folder!r} is not the parent of {chain[0].name}: another one has replaced it")
        if any(name == seen.name for seen in chain):
            raise DataError(f"checkpoint {folder!r} is its own ancestor")
        chain.insert(0, link)
        if manifest.kind == "full":
            return chain
        parent = _parent_name(manifest)
        if parent is None:
            raise DataError(f"checkpoint {folder!r} is a delta, but does not name its parent")
        wanted = manifest.content["parent"].get("id")
        name = parent


def _parent_name(manifest: Manifest) -> str | None:
    parent = manifest.content.get("parent")
    name = parent.get("name") if isinstance(parent, dict) else None
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def _check_numbers(tables: Any, where: str) -> None:
    """Raises `DataError` unless every entry of a manifest's tables has its numbers, within their limits."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise DataError(f"{where}: tables must be a list of objects, got {tables!r:.80}")
    for table in tables:
        for key, limit in _NUMBERS.items():
            value = table.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
                name = table.get("name")
                raise DataError(f"{where}: {key} of table {name!r:.80} must be 0..{limit - 1}, got {value!r:.80}")


def table_in(manifest: Manifest, name: str, where: str) -> dict[str, Any]:
    """The entry for one table in the manifest of a `Link`, with its types checked."""
    found = [table for table in manifest.content["tables"] if table.get("name") == name]
    if len(found) != 1:
        raise CheckpointNotFoundError(f"unable to find table checkpoint: {where} has no table {name!r}")
    described = found[0]
    base = described.get("file")
    if not isinstance(base, str) or os.path.basename(base) != base:
        raise DataError(f"{where}: file must be a plain name, got {base!r:.80}")
    described["scales"] = check_scales({name: described.get("scales")}, where)[name]
    return described


def describe(link: Link) -> Checkpoint:
    """The public description of a checkpoint."""
    manifest = link.manifest
    tables = manifest.content["tables"]
    return Checkpoint(
        path=link.folder,
        name=link.name,
        kind=manifest.kind,
        parent=_parent_name(manifest),
        step=manifest.step,
        created=manifest.created,
        rows=sum(table["rows"] for table in tables),
        removed=sum(table["removed"] for table in tables),
        bytes=sum(digest.bytes for digest in link.saved.files.values()),
        id=manifest.id,
    )
