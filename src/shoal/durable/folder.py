"""A folder of files that appears complete: it is filled under another name, sealed by a manifest, and renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.durable.files import StrPath, remove_folder, sync_file, sync_folder
from shoal.durable.manifest import MANIFEST, FileDigest, Saved, digest_file, read_saved, write_saved
from shoal.durable.replace import digests_known, files_below
from shoal.errors import DataError


class Draft:
    """A folder in progress that will become ``target``.

    Several processes can fill it: one of them calls `begin`, the others construct theirs with the same ``token``; when
    all have written, one of them calls `seal` and `publish`.
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
        """Write the manifest of all files in the draft.

        Args:
            fields: further fields of the manifest.
            files: known digests, by name relative to the folder. These files, and those listed in a manifest in the
                draft, must be on disk already; the others are read and flushed here.
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
        """Rename the folder to its final name.

        Raises:
            FileExistsError: another folder has that name.
        """
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if os.path.exists(self.target):
                raise FileExistsError(f"{self.target} exists already") from error
            raise
        sync_folder(self._parent)

    def clear_target(self) -> None:
        """Remove an existing folder with the target's name, atomically."""
        with contextlib.suppress(FileNotFoundError):
            remove_folder(self.target)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def new_folder(target: StrPath) -> Iterator[Draft]:
    """Yield a draft to fill and seal; it becomes ``target`` atomically when the block ends without an error."""
    draft = Draft(target).begin()
    try:
        yield draft
        draft.publish()
    except BaseException:
        draft.discard()
        raise


def read_folder(folder: StrPath, *, unsealed: bool = False) -> Saved:
    """Read the manifest of a folder, and check that its files exist with the right sizes; see `read_saved`."""
    saved = read_saved(os.path.join(folder, MANIFEST), unsealed=unsealed)
    if lost := saved.missing():
        raise DataError(lost)
    return saved
