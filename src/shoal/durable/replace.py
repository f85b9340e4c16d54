"""Files of one save in a folder that stays, put in place of those of the save before in one step.

The step is the writing of the manifest: the new files are in the folder by then under other names, which the manifest
knows. Whoever reads before they are renamed, or after a crash in the middle, finds each under one name or the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.durable.files import StrPath, sync_folder
from shoal.durable.manifest import FileDigest, Saved, digest_file, read_saved, write_saved
from shoal.errors import DataError

SIDECAR = ".manifest"


def replace_files(
    manifest: StrPath,
    fields: Mapping[str, Any],
    files: Mapping[str, tuple[int, int | None]],
    moves: Mapping[str, str],
) -> None:
    """Makes ``files`` the save that ``manifest`` names; those of the save before that are not among them are removed.

    Args:
        manifest: its path; other names are relative to its folder.
        fields: what the kind of save needs besides.
        files: name -> digest.
        moves: name -> where the file is now, whole and on the disk.
    """
    path = os.fspath(manifest)
    folder = os.path.dirname(path)
    with _locked(folder):
        before = _files_before(path) - files.keys()
        for inner in {os.path.dirname(name) for name in moves.values()}:
            sync_folder(os.path.join(folder, inner))
        write_saved(path, {**fields, "replaces": sorted(before)}, files, moves)
        sync_folder(folder)
        finish_moves(folder, moves)
        for name in before:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        sync_folder(folder)


def finish_moves(folder: StrPath, moves: Mapping[str, str]) -> None:
    """Gives files their names, manifests among them last; those that have them already stay."""
    for name in sorted(moves, key=lambda name: name.endswith(SIDECAR)):
        target = os.path.join(folder, name)
        os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(os.path.join(folder, moves[name]), target)
    for inner in {os.path.dirname(name) for name in moves}:
        sync_folder(os.path.join(folder, inner))


def files_below(folder: StrPath) -> list[str]:
    """All files below a folder, by name relative to it."""
    found = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder) for path in found)


def digests_known(folder: StrPath) -> dict[str, FileDigest]:
    """The digests of the files below a folder that a manifest next to them names."""
    known = {}
    for name in files_below(folder):
        if name.endswith(SIDECAR):
            files = read_saved(os.path.join(folder, name)).files
            known |= {os.path.join(os.path.dirname(name), of): digest for of, digest in files.items()}
    return known


def digests_below(folder: StrPath) -> dict[str, FileDigest]:
    """The digests of all files below a folder; those that are not known are read."""
    known = digests_known(folder)
    return {name: known.get(name) or digest_file(os.path.join(folder, name)) for name in files_below(folder)}


def _files_before(manifest: str) -> set[str]:
    """The files of the save that a new one replaces, under whatever names."""
    try:
        saved: Saved = read_saved(manifest, unsealed=True)
    except (DataError, FileNotFoundError):
        return set()
    return {*saved.files, *saved.moves.values()}


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """One replacement at a time in a folder, by all processes of this machine."""
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
