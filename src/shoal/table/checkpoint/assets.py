"""The folder of tables and filters that belongs to a model checkpoint: ``<basename>-<step>.assets``.

Several parts of a program, and several processes, can put files into the folder of one step. Each writes its own
manifest last. A folder whose files do not match its manifests is skipped with a warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping

from google.protobuf import text_encoding

from shoal.durable import (
    Draft,
    StrPath,
    digests_below,
    finish_moves,
    read_saved,
    replace_files,
    sync_folder,
    temporary_path,
    write_saved,
)
from shoal.durable.replace import SIDECAR
from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.manifest import Manifest

log = logging.getLogger(__name__)

_LATEST = re.compile(r'^\s*model_checkpoint_path\s*:\s*"((?:[^"\\]|\\.)*)"', re.MULTILINE)


def save_assets(basename: StrPath, step: int, kind: str, bases: Mapping[str, str], fill: Callable[[str], None]) -> str:
    """Adds the files that ``fill(folder)`` writes to the folder of ``step``, and returns that folder.

    Args:
        basename: the basename of the model checkpoint.
        step: the global step.
        kind: the kind of files: ``tables``, ``multi_tables``, ``filters``.
        bases: table name -> prefix of its file names. A second save of the same tables replaces the first atomically.
        fill: gets a folder that no reader uses yet, and saves each table or filter with its prefix there.

    Raises:
        ConfigError: another process has saved a table with a different name to the same files.
    """
    target = naming.assets_dir(basename, step)
    tag = hashlib.sha256("\n".join(sorted(bases)).encode()).hexdigest()[:12]
    own = f"manifest.{kind}.{tag}.json"
    fields = Manifest(kind=kind, step=int(step), content={"tables": dict(bases)}).fields()
    if not os.path.isdir(target):
        draft = Draft(target).begin()
        try:
            fill(draft.path)
            write_saved(os.path.join(draft.path, own), fields, digests_below(draft.path))
            sync_folder(draft.path)
            with contextlib.suppress(FileExistsError):  # another process created it meanwhile
                draft.publish()
                return target
        finally:
            draft.discard()
    staging = temporary_path(os.path.join(target, ".staging"))
    os.mkdir(staging)
    try:
        fill(staging)
        for name, base in bases.items():
            _check_free(target, own, name, base)
        files = digests_below(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    replace_files(
        os.path.join(target, own), fields, files, {name: f"{os.path.basename(staging)}/{name}" for name in files}
    )
    os.rmdir(staging)
    return target


def find_assets(basename: StrPath, kind: str, holds: Callable[[str], bool]) -> str | None:
    """The folder to restore from, or None if there is no unambiguous one.

    The first choice is the folder named in the text file ``checkpoint`` next to the model; then the newest folder with
    complete manifests of ``kind`` for which ``holds`` is true; then the newest without that condition; then the only
    ``*.assets`` folder.

    Raises:
        DataError: all folders with manifests of ``kind`` are damaged.
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
    dated, damaged = [], []
    for path in paths:
        if not os.path.basename(path).startswith(prefix):
            continue
        try:
            created = _created(path, kind)
        except DataError as error:
            damaged.append(f"{path} is damaged: {error}")
            continue
        if created is not None:
            dated.append((created, path))
    if damaged and not dated:
        raise DataError(f"no checkpoint {prefix}*.assets in {folder} is complete: {'; '.join(damaged)}")
    for each in damaged:
        log.warning("checkpoint %s; another one is used instead", each)
    ordered = [path for _, path in sorted(dated, reverse=True)]
    for path in ordered:
        if holds(path):
            return path
    if ordered:
        return ordered[0]
    return paths[0] if len(paths) == 1 else None


def settle(folder: str, bases: Iterable[str]) -> None:
    """Finishes the renaming of files from a save that was interrupted, before they are read by basename.

    Raises:
        DataError: a manifest of the folder, or the manifest of one of the ``bases``, is damaged.
    """
    wanted = {f"{base}{SIDECAR}" for base in bases}
    for entry in _manifests(folder, ""):
        saved = read_saved(os.path.join(folder, entry), unsealed=True)
        finish_moves(folder, saved.moves)
        saved.verify(wanted & saved.files.keys())


def base_in(folder: str, name: str) -> str:
    """The prefix of a table's file names in a folder: from its manifests, else derived from the table's name."""
    for entry in _manifests(folder, ""):
        try:
            tables = Manifest.read(os.path.join(folder, entry)).content.get("tables")
        except (DataError, OSError):
            continue
        if isinstance(tables, dict) and isinstance(base := tables.get(name), str) and os.path.basename(base) == base:
            return base
    return naming.file_base(name)


def _created(folder: str, kind: str) -> str | None:
    """When the newest manifest of ``kind`` was written; None without one. Raises if it is damaged."""
    created = []
    for entry in _manifests(folder, kind + "."):
        saved = read_saved(os.path.join(folder, entry), unsealed=True)
        if lost := saved.missing():
            raise DataError(lost)
        created.append(Manifest.of(saved).created)
    return max(created, default=None)


def _manifests(folder: str, kind: str) -> list[str]:
    return sorted(e for e in os.listdir(folder) if e.startswith(f"manifest.{kind}") and e.endswith(".json"))


def _check_free(folder: str, own: str, name: str, base: str) -> None:
    """Raises if the files belong to a table with a different name."""
    for entry in _manifests(folder, ""):
        if entry == own:
            continue
        try:
            tables = Manifest.read(os.path.join(folder, entry)).content.get("tables")
        except (DataError, OSError):
            continue
        for other, taken in tables.items() if isinstance(tables, dict) else ():
            if taken == base and other != name:
                raise ConfigError(
                    f"tables {name!r} and {other!r} would both be saved to {os.path.join(folder, base)}-*; rename one"
                )


def model_checkpoint_path(folder: str) -> str | None:
    """The ``model_checkpoint_path`` in the text file ``checkpoint``, relative to its folder."""
    try:
        with open(os.path.join(folder, "checkpoint"), encoding="utf-8") as file:
            match = _LATEST.search(file.read())
    except (OSError, UnicodeDecodeError):
        return None
    if match is None:
        return None
    path = text_encoding.CUnescape(match[1]).decode("utf-8", "surrogateescape")
    return os.path.join(folder, path) if path else None
