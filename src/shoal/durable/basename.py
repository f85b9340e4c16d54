"""Files ``<basename>…`` in a folder that is not ours alone, with ``<basename>.manifest`` naming those of one save.

A second save under the same basename replaces the first in one step, the writing of its manifest: the files are there
by then under temporary names, which the manifest knows. Whoever reads before they are renamed, or after a crash in the
middle, finds each file under one name or the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from shoal.durable.files import StrPath, make_parents, sync_folder, temporary_path
from shoal.durable.manifest import FileDigest, Saved, read_saved, write_saved
from shoal.errors import DataError

FORMAT = "shoal.files"
VERSION = 1


class BasenameSave:
    """Files on their way to ``<basename>…``: write each to `temporary`, tell its digest to `add`, then `commit`."""

    def __init__(self, basename: StrPath) -> None:
        self.basename = os.fspath(basename)
        make_parents(self.basename)
        self._folder = os.path.dirname(self.basename)
        self._temporary: dict[str, str] = {}
        self._digests: dict[str, FileDigest] = {}

    def __enter__(self) -> BasenameSave:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._temporary.values():  # those that were renamed are gone from here
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))

    def temporary(self, path: str) -> str:
        """Where to write the file that will be ``path``."""
        temporary = temporary_path(path)
        self._temporary[os.path.basename(path)] = os.path.basename(temporary)
        return temporary

    def add(self, path: str, digest: tuple[int, int | None]) -> None:
        """The file that will be ``path`` is written and on the disk."""
        self._digests[os.path.basename(path)] = FileDigest(*digest)

    def commit(self, fields: Mapping[str, Any] | None = None) -> None:
        """From now on these files are the save; files of the one before that are not among them are removed."""
        assert self._digests.keys() == self._temporary.keys()
        about = {"format": FORMAT, "version": VERSION, "id": secrets.token_hex(16)}
        about["created"] = datetime.now(UTC).isoformat(timespec="microseconds")
        with _locked(self._folder):
            before = _before(self.basename) - self._digests.keys()
            sync_folder(self._folder)
            moves = self._temporary
            fields = {**about, "replaces": sorted(before), **(fields or {})}
            write_saved(sidecar(self.basename), fields, self._digests, moves)
            self._temporary = {}  # they are part of the save now, under whatever name
            sync_folder(self._folder)
            for name, temporary in moves.items():
                os.replace(os.path.join(self._folder, temporary), os.path.join(self._folder, name))
            for name in before:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._folder, name))
            sync_folder(self._folder)


def sidecar(basename: StrPath) -> str:
    """The path of the manifest of a basename."""
    return f"{os.fspath(basename)}.manifest"


def find_saved(basename: StrPath) -> Saved | None:
    """The newest save under a basename; None where another program, or version 0.1, wrote the files.

    Raises:
        DataError: the manifest is damaged.
    """
    path = sidecar(basename)
    try:
        saved = read_saved(path)
    except FileNotFoundError:
        return None
    if saved.fields.get("format") != FORMAT or saved.fields.get("version") != VERSION:
        version = saved.fields.get("version")
        raise DataError(f"{path} is not a manifest of files, version {VERSION}: it has version {version!r:.40}")
    return saved


def _before(basename: str) -> set[str]:
    """The files of the save that a new one replaces."""
    try:
        saved = find_saved(basename)
    except DataError:
        return set()
    return set() if saved is None else {*saved.files, *saved.moves.values()}


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """One commit at a time in a folder, of all processes of this machine."""
    fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
