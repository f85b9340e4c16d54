"""Files ``<basename>…`` in a folder that is not ours alone, with ``<basename>.manifest`` naming those of one save."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from shoal.durable.files import TEMPORARY, StrPath, make_parents, temporary_path
from shoal.durable.manifest import FileDigest, Saved, read_saved
from shoal.durable.replace import SIDECAR, replace_files
from shoal.errors import DataError

FORMAT = "shoal.files"
VERSION = 1
_TRIES = 20  # to read a save that others replace again and again

T = TypeVar("T")


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
        moves, self._temporary = self._temporary, {}  # from here on the manifest decides what they are
        try:
            replace_files(sidecar(self.basename), {**about, **(fields or {})}, self._digests, moves)
        except BaseException:
            saved = find_saved(self.basename)
            if saved is None or saved.fields["id"] != about["id"]:
                self._temporary = moves
            raise


def sidecar(basename: StrPath) -> str:
    """The path of the manifest of a basename."""
    return f"{os.fspath(basename)}{SIDECAR}"


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


def read_newest(basenames: Sequence[StrPath], read: Callable[[], T]) -> T:
    """``read()``, which changes nothing when it fails, and again where another save has taken the place of one of the
    basenames meanwhile: its files then were no longer those that the manifest named. Files of a save that has just
    been sealed may get their names meanwhile, too."""
    for _ in range(_TRIES):
        before = [_id_of(basename) for basename in basenames]
        try:
            return read()
        except (DataError, OSError) as error:
            moved = isinstance(error, FileNotFoundError) and TEMPORARY in str(error)  # it has got its name meanwhile
            if not moved and before == [_id_of(basename) for basename in basenames]:
                raise
    return read()


def _id_of(basename: StrPath) -> Any:
    try:
        saved = find_saved(basename)
    except (DataError, OSError):
        return None
    return None if saved is None else saved.fields.get("id")
