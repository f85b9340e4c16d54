"""A folder of files that is complete or not there: what belongs to it, and how it comes into being in one step."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from shoal.errors import DataError
from shoal.table.checkpoint.naming import StrPath, sync_folder, write_whole

FORMAT = "shoal.checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint folder holds. It is the last file written, so where it is, everything it names is, too."""

    kind: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    step: int = 0
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="microseconds"))
    files: dict[str, int] = field(default_factory=dict)
    """File name -> bytes."""
    content: dict[str, Any] = field(default_factory=dict)
    """What the kind of checkpoint needs besides."""

    def write(self, path: StrPath) -> None:
        fields = {"kind": self.kind, "id": self.id, "step": self.step, "created": self.created}
        whole = {"format": FORMAT, "version": VERSION, **fields, "files": self.files, "content": self.content}
        write_whole(path, json.dumps(whole, indent=1))

    @classmethod
    def read(cls, path: StrPath) -> Manifest:
        """Raises `DataError` for what is no manifest, ``FileNotFoundError`` where there is none."""
        where = os.fspath(path)
        try:
            with open(where, encoding="utf-8") as file:
                whole = json.load(file)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{where}: not a JSON file: {error}") from error
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise DataError(f"{where}: not a checkpoint manifest")
        if whole.get("version") != VERSION:
            raise DataError(f"{where}: manifest version {whole.get('version')!r}, this library reads {VERSION}")
        types = {"kind": str, "id": str, "step": int, "created": str, "files": dict, "content": dict}
        for name, kind in types.items():
            if not isinstance(whole.get(name), kind):
                raise DataError(f"{where}: {name} must be a {kind.__name__}, got {whole.get(name)!r:.80}")
        files = whole["files"]
        for name, size in files.items():
            if os.path.basename(name) != name or name in ("", ".", "..") or not isinstance(size, int):
                raise DataError(f"{where}: files must map plain names to sizes, got {name!r:.80}: {size!r:.20}")
        return cls(**{name: whole[name] for name in types})

    def missing(self, folder: StrPath) -> str | None:
        """What of it is not in ``folder`` in its full size, None when all is."""
        for name, size in self.files.items():
            path = os.path.join(folder, name)
            try:
                found = os.path.getsize(path)
            except OSError:
                return f"{path} is missing"
            if found != size:
                return f"{path} has {found} bytes instead of {size}"
        return None


def file_sizes(folder: StrPath) -> dict[str, int]:
    """Name -> bytes of the files in a folder."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


@contextlib.contextmanager
def new_folder(target: StrPath) -> Iterator[str]:
    """A folder to fill under another name; it becomes ``target`` in one step when the block ends without an error.

    Raises:
        FileExistsError: ``target`` came into being in the meantime.
    """
    target = os.fspath(target)
    parent, name = os.path.split(target)
    os.makedirs(parent or ".", exist_ok=True)
    temporary = os.path.join(parent, f".tmp-{name}-{secrets.token_hex(8)}")
    os.mkdir(temporary)
    try:
        yield temporary
        sync_folder(temporary)
        try:
            os.rename(temporary, target)
        except OSError as error:
            if os.path.exists(target):
                raise FileExistsError(f"{target} exists already") from error
            raise
        sync_folder(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_folder(folder: StrPath) -> None:
    """Removes a folder so that nobody ever sees it half empty."""
    folder = os.fspath(folder)
    parent, name = os.path.split(folder)
    doomed = os.path.join(parent, f".tmp-{name}-{secrets.token_hex(8)}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
