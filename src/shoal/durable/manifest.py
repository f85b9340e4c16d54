"""A manifest: JSON that names the files of one save with a digest for each, and carries a digest of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal import _core
from shoal.durable.files import StrPath, write_whole
from shoal.errors import DataError

MANIFEST = "manifest.json"
"""The manifest of a folder."""
MAX_BYTES = 256 << 20
_OURS = ("files", "moves", "digest")


class FileDigest(NamedTuple):
    """What a manifest says of a file. ``crc32c`` is None in manifests of version 0.1, which had sizes alone."""

    bytes: int
    crc32c: int | None


def digest_file(path: StrPath) -> FileDigest:
    """Reads a whole file."""
    return FileDigest(*_core.digest_file(os.fspath(path)))


@dataclass(frozen=True)
class Saved:
    """The files of one save, as its manifest names them."""

    manifest: str
    """The path of the manifest; names of files are relative to its folder."""
    fields: dict[str, Any]
    """What the kind of save needs besides."""
    files: dict[str, FileDigest]
    moves: dict[str, str] = field(default_factory=dict)
    """File -> the name that it was written under. A save that was killed left it there."""

    @property
    def folder(self) -> str:
        return os.path.dirname(self.manifest)

    def path(self, name: str) -> str:
        """Where a file is."""
        if name not in self.files:
            raise DataError(f"{self.manifest} names no file {name!r}")
        if name in self.moves:
            written = os.path.join(self.folder, self.moves[name])
            if os.path.exists(written):
                return written
        return os.path.join(self.folder, name)

    def check(self, name: str, found: tuple[int, int]) -> None:
        """Raises `DataError` unless a file that was read has the digest that the manifest gives it."""
        expected = self.files.get(name)
        if expected is None:
            raise DataError(f"{self.manifest} names no file {name!r}")
        if found[0] != expected.bytes:
            raise DataError(f"{self.path(name)} has {found[0]} bytes, its manifest says {expected.bytes}{self._advice}")
        if expected.crc32c is not None and found[1] != expected.crc32c:
            raise DataError(
                f"{self.path(name)} is damaged: its CRC-32C is {found[1]:08x}, its manifest says "
                f"{expected.crc32c:08x}{self._advice}"
            )

    @property
    def _advice(self) -> str:
        """What to do where a file next to its manifest was changed on purpose; folders of ours are not changed."""
        if os.path.basename(self.manifest) == MANIFEST:
            return ""
        return f"; if another program wrote it on purpose, remove {self.manifest}"

    def read(self, name: str) -> bytes:
        """The bytes of a file, once they have been checked."""
        path = self.path(name)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        self.check(name, (len(data), _core.crc32c(data)))
        return data

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Reads files, all of them by default, and raises `DataError` for the first that is missing or changed."""
        for name in self.files if names is None else names:
            path = self.path(name)
            try:
                found = _core.digest_file(path)
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
            self.check(name, found)

    def missing(self) -> str | None:
        """Which file is not there in its full size, None when all are. Reads no file."""
        for name, expected in self.files.items():
            path = self.path(name)
            try:
                found = os.path.getsize(path)
            except OSError:
                return f"{path} is missing"
            if found != expected.bytes:
                return f"{path} has {found} bytes instead of {expected.bytes}"
        return None


def write_saved(
    path: StrPath,
    fields: Mapping[str, Any],
    files: Mapping[str, tuple[int, int | None]],
    moves: Mapping[str, str] | None = None,
) -> None:
    """Writes a manifest, whole or not at all."""
    if taken := [name for name in _OURS if name in fields]:
        ours = ", ".join(_OURS)
        raise ValueError(f"{taken[0]!r} must not be among the fields of a manifest, which writes {ours} itself")
    listed = {name: {"bytes": size, "crc32c": f"{crc or 0:08x}"} for name, (size, crc) in sorted(files.items())}
    whole: dict[str, Any] = {**fields, "files": listed}
    if moves:
        whole["moves"] = dict(moves)
    whole = json.loads(json.dumps(whole))  # as a reader sees it
    write_whole(path, json.dumps({**whole, "digest": _digest(whole)}, indent=1))


def read_saved(path: StrPath, *, unsealed: bool = False) -> Saved:
    """Reads and checks a manifest.

    Args:
        path: of the manifest.
        unsealed: also take one without a digest, as version 0.1 wrote them; its files have sizes at most.

    Raises:
        FileNotFoundError: there is none.
        DataError: it cannot be read, was changed, or is not a manifest.
    """
    where = os.fspath(path)
    whole = _read_json(where)
    sealed = "digest" in whole
    if not sealed and (not unsealed or any(isinstance(d, dict) for d in _dict(whole.get("files")).values())):
        raise DataError(f"{where} has no digest; it was changed, or is not a manifest")
    if sealed:
        digest = whole.pop("digest")
        if digest != _digest(whole):
            raise DataError(f"{where} is damaged: its digest does not fit what it says")
    files = _files(whole.pop("files", {}), where, sealed)
    moves = whole.pop("moves", {})
    if not isinstance(moves, dict) or not all(_inside(n) and _inside(to) and n in files for n, to in moves.items()):
        raise DataError(f"{where}: moves must map the names of files to names inside the folder")
    return Saved(where, whole, files, moves)


def _read_json(where: str) -> dict[str, Any]:
    try:
        with open(where, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise DataError(f"{where} has more than {MAX_BYTES} bytes, so it is not a manifest")
        whole = json.loads(data)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also for integers of thousands of digits
        raise DataError(f"{where} is not a JSON file: {error}") from error
    if not isinstance(whole, dict):
        raise DataError(f"{where} is not a manifest: it holds a JSON {type(whole).__name__}")
    return whole


def _digest(whole: Mapping[str, Any]) -> str:
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"))
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
