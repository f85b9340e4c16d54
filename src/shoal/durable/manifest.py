"""A manifest: JSON with the names and digests of the files of one save, and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal import _core
from shoal.durable.files import StrPath, write_whole
from shoal.errors import DataError

MANIFEST = "manifest.json"
"""The manifest of a folder."""
MAX_BYTES = 256 << 20
_RESERVED = ("files", "moves", "digest")

T = TypeVar("T")


class FileDigest(NamedTuple):
    """A file's size and checksum. ``crc32c`` is None in manifests of version 0.1, which have sizes only."""

    bytes: int
    crc32c: int | None


def digest_file(path: StrPath) -> FileDigest:
    """Read a file and return its digest."""
    return FileDigest(*_core.digest_file(os.fspath(path)))


@dataclass(frozen=True)
class Saved:
    """The files of one save, as listed in its manifest."""

    manifest: str
    """The path of the manifest; names of files are relative to its folder."""
    fields: dict[str, Any]
    """Further fields of the manifest."""
    files: dict[str, FileDigest]
    moves: dict[str, str] = field(default_factory=dict)
    """File -> its temporary name, which it still has if the save was killed."""

    @property
    def folder(self) -> str:
        return os.path.dirname(self.manifest)

    def path(self, name: str) -> str:
        """The path of a file."""
        if name not in self.files:
            raise DataError(f"{self.manifest} does not list the file {name!r}")
        if name in self.moves:
            written = os.path.join(self.folder, self.moves[name])
            if os.path.exists(written):
                return written
        return os.path.join(self.folder, name)

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        try:
            return stat.S_ISREG(self._use(name, os.stat).st_mode)
        except OSError:
            return False

    def check(self, name: str, found: tuple[int, int]) -> None:
        """Raise `DataError` unless a file that was read has the digest in the manifest."""
        expected = self.files.get(name)
        if expected is None:
            raise DataError(f"{self.manifest} does not list the file {name!r}")
        if found[0] != expected.bytes:
            raise DataError(f"{self.path(name)} has {found[0]} bytes, its manifest says {expected.bytes}{self._advice}")
        if expected.crc32c is not None and found[1] != expected.crc32c:
            raise DataError(
                f"{self.path(name)} is damaged: its CRC-32C is {found[1]:08x}, its manifest says "
                f"{expected.crc32c:08x}{self._advice}"
            )

    @property
    def _advice(self) -> str:
        """Advice for a file that was changed on purpose, next to its manifest; empty for our own folders."""
        if os.path.basename(self.manifest) == MANIFEST:
            return ""
        return f"; if another program wrote it on purpose, remove {self.manifest}"

    def read(self, name: str) -> bytes:
        """Read and check a file; return its bytes."""
        data = self._read(name, lambda path: Path(path).read_bytes())
        self.check(name, (len(data), _core.crc32c(data)))
        return data

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read files, by default all, and raise `DataError` for the first that is missing or changed."""
        for name in self.files if names is None else names:
            self.check(name, self._read(name, _core.digest_file))

    def missing(self) -> str | None:
        """Describe the first file that is missing or has the wrong size; None if there is none. Reads no file."""
        for name, expected in self.files.items():
            try:
                found = self._use(name, os.path.getsize)
            except OSError:
                return f"{self.path(name)} is missing"
            if found != expected.bytes:
                return f"{self.path(name)} has {found} bytes instead of {expected.bytes}"
        return None

    def _read(self, name: str, read: Callable[[str], T]) -> T:
        try:
            return self._use(name, read)
        except OSError as error:
            raise DataError(f"{self.path(name)} cannot be read: {error.strerror}") from error

    def _use(self, name: str, use: Callable[[str], T]) -> T:
        """``use(path)`` of a file, also if the save gives it its final name in between."""
        path = self.path(name)
        try:
            return use(path)
        except FileNotFoundError:
            if path == (final := os.path.join(self.folder, name)):
                raise
            return use(final)


def write_saved(
    path: StrPath,
    fields: Mapping[str, Any],
    files: Mapping[str, tuple[int, int | None]],
    moves: Mapping[str, str] | None = None,
) -> None:
    """Write a manifest atomically."""
    if taken := [name for name in _RESERVED if name in fields]:
        raise ValueError(f"manifest fields must not contain {taken[0]!r}: {', '.join(_RESERVED)} are reserved")
    listed = {name: {"bytes": size, "crc32c": f"{crc or 0:08x}"} for name, (size, crc) in sorted(files.items())}
    content: dict[str, Any] = {**fields, "files": listed}
    if moves:
        content["moves"] = dict(moves)
    content = json.loads(json.dumps(content))  # as a reader sees it
    write_whole(path, json.dumps({**content, "digest": _digest(content)}, indent=1))


def read_saved(path: StrPath, *, unsealed: bool = False) -> Saved:
    """Read and check a manifest.

    Args:
        path: path of the manifest.
        unsealed: also accept a manifest without a digest, as version 0.1 wrote; its files have sizes at most.

    Raises:
        FileNotFoundError: the manifest does not exist.
        DataError: it cannot be read, was changed, or is not a manifest.
    """
    where = os.fspath(path)
    content = _read_json(where)
    sealed = "digest" in content
    if not sealed and (not unsealed or any(isinstance(d, dict) for d in _dict(content.get("files")).values())):
        raise DataError(f"{where} has no digest; it was changed, or is not a manifest")
    if sealed:
        digest = content.pop("digest")
        if digest != _digest(content):
            raise DataError(f"{where} is damaged: its digest does not match its contents")
    files = _files(content.pop("files", {}), where, sealed)
    moves = content.pop("moves", {})
    if not isinstance(moves, dict) or not all(_inside(n) and _inside(to) and n in files for n, to in moves.items()):
        raise DataError(f"{where}: moves must map the names of files to names inside the folder")
    return Saved(where, content, files, moves)


def _read_json(where: str) -> dict[str, Any]:
    try:
        with open(where, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise DataError(f"{where} has more than {MAX_BYTES} bytes, so it is not a manifest")
        content = json.loads(data)
    except (FileNotFoundError, DataError):
        raise
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also for integers of thousands of digits
        raise DataError(f"{where} is not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{where} is not a manifest: it holds a JSON {type(content).__name__}")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def _files(listed: Any, where: str, sealed: bool) -> dict[str, FileDigest]:
    files = {}
    for name, entry in _dict(listed).items():
        try:
            size = entry["bytes"] if sealed else entry
            crc = int(entry["crc32c"], 16) if sealed else None
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"{where}: file {name!r:.80} must have a size and a CRC-32C, got {entry!r:.80}") from error
        if not _inside(name) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise DataError(f"{where}: files must map names inside the folder to sizes, got {name!r:.80}: {size!r:.40}")
        files[name] = FileDigest(size, crc)
    return files


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _inside(name: Any) -> bool:
    """Whether a name stays in its folder."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return not any(part in ("", ".", "..") for part in parts) and "\0" not in name
