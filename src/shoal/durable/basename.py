"""Saves as files ``<basename>…`` in a shared folder, listed in ``<basename>.manifest``."""

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
_ATTEMPTS = 20  # to read a save that others keep replacing

T = TypeVar("T")


class BasenameSave:
    """A save in progress to ``<basename>…``: write each file to `temporary`, `add` its digest, then `commit`."""

    def __init__(self, basename: StrPath) -> None:
        self.basename = os.fspath(basename)
        make_parents(self.basename)
        self._folder = os.path.dirname(self.basename)
        self._temporary: dict[str, str] = {}
        self._digests: dict[str, FileDigest] = {}

    def __enter__(self) -> BasenameSave:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._temporary.values():  # renamed files are no longer in here
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))

    def temporary(self, path: str) -> str:
        """The temporary path for the file that will be ``path``."""
        temporary = temporary_path(path)
        self._temporary[os.path.basename(path)] = os.path.basename(temporary)
        return temporary

    def add(self, path: str, digest: tuple[int, int | None]) -> None:
        """Add the file that will be ``path``, once it is written and on disk."""
        self._digests[os.path.basename(path)] = FileDigest(*digest)

    def commit(self, fields: Mapping[str, Any] | None = None) -> None:
        """Make these files the save, and remove files of the previous save that are not among them."""
        assert self._digests.keys() == self._temporary.keys()
        about = {"format": FORMAT, "version": VERSION, "id": secrets.token_hex(16)}
        about["created"] = datetime.now(UTC).isoformat(timespec="microseconds")
        moves, self._temporary = self._temporary, {}  # from here on the manifest owns them
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
    """Return the newest save under a basename; None if another program, or version 0.1, wrote the files.

    Raises:
        DataError: the manifest is damaged.
    """
    path = sidecar(basename)
    try:
        saved = read_saved(path)
    except FileNotFoundError:
        return None
    if saved.fields.get("format") != FORMAT or saved.fields.get("version") != VERSION:
        found = f"{saved.fields.get('format')!r:.40} version {saved.fields.get('version')!r:.40}"
        raise DataError(f"{path}: the format must be {FORMAT!r} version {VERSION}, got {found}")
    return saved


def read_newest(basenames: Sequence[StrPath], read: Callable[[], T]) -> T:
    """Call ``read()``, which must change nothing if it fails. If it fails because a save under one of the basenames
    was being replaced or its files renamed, call it again."""
    for _ in range(_ATTEMPTS):
        before = [_id_of(basename) for basename in basenames]
        try:
            return read()
        except (DataError, OSError) as error:
            renamed = isinstance(error, FileNotFoundError) and TEMPORARY in str(error)
            if not renamed and before == [_id_of(basename) for basename in basenames]:
                raise
    return read()


def _id_of(basename: StrPath) -> Any:
    try:
        saved = find_saved(basename)
    except (DataError, OSError):
        return None
    return None if saved is None else saved.fields.get("id")
