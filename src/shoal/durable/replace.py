"""Replace the files of a save in an existing folder with those of a new one, atomically.

The switch is the writing of the manifest: by then the new files are in the folder under temporary names, which the
manifest lists. A reader before the renames, or after a crash in between, finds each file under one of its two names.
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
    """Make ``files`` the save of ``manifest``, and remove files of the previous save that are not among them.

    Args:
        manifest: path of the manifest; other names are relative to its folder.
        fields: further fields of the manifest.
        files: name -> digest.
        moves: name -> current name of the file, which is complete and on disk.
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
    """Rename files to their final names, manifests last; files that were renamed already are kept."""
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
    """The digests of the files below a folder that are listed in a manifest there."""
    known = {}
    for name in files_below(folder):
        if name.endswith(SIDECAR):
            files = read_saved(os.path.join(folder, name)).files
            known |= {os.path.join(os.path.dirname(name), of): digest for of, digest in files.items()}
    return known


def digests_below(folder: StrPath) -> dict[str, FileDigest]:
    """The digests of all files below a folder; files in no manifest are read."""
    known = digests_known(folder)
    return {name: known.get(name) or digest_file(os.path.join(folder, name)) for name in files_below(folder)}


def _files_before(manifest: str) -> set[str]:
    """The files of the save that a new one replaces, under final and temporary names."""
    try:
        saved: Saved = read_saved(manifest, unsealed=True)
    except (DataError, FileNotFoundError):
        return set()
    return {*saved.files, *saved.moves.values()}


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold a lock, so that processes on this machine replace saves in a folder one at a time."""
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
