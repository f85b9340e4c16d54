"""The folder of tables and filters that belongs to a model checkpoint: ``<basename>-<step>.assets``.

Several parts of a program, and several processes, may put files into the folder of one step. Each adds a manifest of
its own, last: a folder whose manifests do not hold is passed over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable

from google.protobuf import text_encoding

from shoal.errors import DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.manifest import Manifest, file_sizes, new_folder
from shoal.table.checkpoint.naming import StrPath

_SHARD = re.compile(r"(.*)-\d{5,}-of-(\d{5,})")
_LATEST = re.compile(r'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\]|\\.)*)"', re.MULTILINE)


def save_assets(basename: StrPath, step: int, kind: str, names: Iterable[str], fill: Callable[[str], None]) -> str:
    """Lets ``fill(folder)`` write files and makes them part of the folder of ``step``; that folder.

    Args:
        basename: of the model checkpoint.
        step: the global step.
        kind: what the files are: ``tables``, ``multi_tables``, ``filters``.
        names: of the tables; a second save of the same ones replaces the first.
        fill: gets a folder that nobody looks at yet.
    """
    target = naming.assets_dir(basename, step)
    tag = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]
    name = f"manifest.{kind}.{tag}.json"
    manifest = Manifest(kind=kind, step=int(step))

    def complete(folder: str) -> Manifest:
        return Manifest(kind=kind, id=manifest.id, step=manifest.step, files=file_sizes(folder))

    if not os.path.isdir(target):
        with contextlib.suppress(FileExistsError), new_folder(target) as folder:
            fill(folder)
            complete(folder).write(os.path.join(folder, name))
            return target
    staging = os.path.join(target, naming.temporary_path(".staging"))
    os.mkdir(staging)
    try:
        fill(staging)
        manifest = complete(staging)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(target, name))  # until the new one is there the folder is not complete
        for file in manifest.files:
            os.replace(os.path.join(staging, file), os.path.join(target, file))
        for base, count in {(m[1], int(m[2])) for m in map(_SHARD.fullmatch, manifest.files) if m}:
            naming.remove_other_counts(os.path.join(target, base), count)
        naming.sync_folder(target)
        manifest.write(os.path.join(target, name))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def find_assets(basename: StrPath, kind: str, holds: Callable[[str], bool]) -> str | None:
    """The folder to restore from, None when there is nothing to choose.

    First what the text file ``checkpoint`` beside the model names; then the newest folder with complete manifests of
    ``kind``, if possible one that ``holds`` what is wanted; then the only ``*.assets`` folder there is.
    """
    folder = os.path.dirname(os.fspath(basename)) or "."
    latest = model_checkpoint_path(folder)
    if latest is not None:
        return latest + ".assets"
    try:
        entries = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    prefix = os.path.basename(os.fspath(basename)) + "-"
    paths = [os.path.join(folder, e) for e in entries if e.endswith(".assets") and not e.startswith(".tmp-")]
    paths = [path for path in paths if os.path.isdir(path)]
    dated = []
    for path in paths:
        created = _created(path, kind) if os.path.basename(path).startswith(prefix) else None
        if created is not None:
            dated.append((created, path))
    ordered = [path for _, path in sorted(dated, reverse=True)]
    for path in ordered:
        if holds(path):
            return path
    if ordered:
        return ordered[0]
    return paths[0] if len(paths) == 1 else None


def _created(folder: str, kind: str) -> str | None:
    """When the newest manifest of ``kind`` was written; None when there is none or one does not hold."""
    created = []
    for entry in os.listdir(folder):
        if not (entry.startswith(f"manifest.{kind}.") and entry.endswith(".json")):
            continue
        try:
            manifest = Manifest.read(os.path.join(folder, entry))
        except (DataError, OSError):
            return None
        if manifest.missing(folder) is not None:
            return None
        created.append(manifest.created)
    return max(created, default=None)


def model_checkpoint_path(folder: str) -> str | None:
    """``model_checkpoint_path`` of the text file ``checkpoint``, relative to its folder."""
    try:
        with open(os.path.join(folder, "checkpoint"), encoding="utf-8") as file:
            match = _LATEST.search(file.read())
    except (OSError, UnicodeDecodeError):
        return None
    if match is None:
        return None
    path = text_encoding.CUnescape(match[1]).decode("utf-8", "surrogateescape")
    return os.path.join(folder, path) if path else None
