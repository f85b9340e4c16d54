"""A folder of files that is complete or not there: filled under another name, sealed by a manifest, renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.durable.files import StrPath, sync_file, sync_folder
from shoal.durable.manifest import MANIFEST, FileDigest, Saved, digest_file, read_saved, write_saved
from shoal.durable.replace import digests_known, files_below
from shoal.errors import DataError


class Draft:
    """A folder on its way to ``target``.

    Several processes may fill it: one of them makes the draft with `begin`, the others construct theirs with the same
    ``token``; when all have written, one of them calls `seal` and `publish`.
    """

    def __init__(self, target: StrPath, token: str | None = None) -> None:
        self.target = os.fspath(target)
        self.token = token or secrets.token_hex(8)
        parent, name = os.path.split(self.target)
        self._parent = parent or "."
        self.path = os.path.join(parent, f".tmp-{name}-{self.token}")

    def begin(self) -> Draft:
        os.makedirs(self._parent, exist_ok=True)
        os.mkdir(self.path)
        return self

    def seal(self, fields: Mapping[str, Any], files: Mapping[str, tuple[int, int | None]] | None = None) -> None:
        """Writes the manifest over everything that is in the draft now.

        Args:
            fields: what the kind of save needs besides.
            files: digests that are known, by name relative to the folder; those files are on the disk already, as are
                those that a manifest next to them names. The others are read and flushed here.
        """
        known = {**digests_known(self.path), **(files or {})}
        found = {name: known[name] if name in known else self._flushed(name) for name in files_below(self.path)}
        found.pop(MANIFEST, None)
        if lost := sorted(known.keys() - found.keys()):
            raise DataError(f"{os.path.join(self.path, lost[0])} is missing although it was written")
        write_saved(os.path.join(self.path, MANIFEST), fields, found)
        for folder, _, _ in os.walk(self.path):
            sync_folder(folder)

    def _flushed(self, name: str) -> FileDigest:
        path = os.path.join(self.path, name)
        sync_file(path)
        return digest_file(path)

    def publish(self) -> None:
        """The folder gets its name.

        Raises:
            FileExistsError: somebody else's folder has it.
        """
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if os.path.exists(self.target):
                raise FileExistsError(f"{self.target} exists already") from error
            raise
        sync_folder(self._parent)

    def clear_target(self) -> None:
        """Removes a folder that has the name; in one step it has another one, or none."""
        with contextlib.suppress(FileNotFoundError):
            left = Draft(self.target).path
            os.rename(self.target, left)
            shutil.rmtree(left, ignore_errors=True)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def new_folder(target: StrPath) -> Iterator[Draft]:
    """A draft to fill and to seal; it becomes ``target`` in one step when the block ends without an error."""
    draft = Draft(target).begin()
    try:
        yield draft
        draft.publish()
    except BaseException:
        draft.discard()
        raise


def read_folder(folder: StrPath, *, unsealed: bool = False) -> Saved:
    """The manifest of a folder, and whether its files are there in their sizes; see `read_saved`."""
    saved = read_saved(os.path.join(folder, MANIFEST), unsealed=unsealed)
    if lost := saved.missing():
        raise DataError(lost)
    return saved
