"""Crash-safe writes: a file gets its final name only once it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]


TEMPORARY = "-tmp-"
"""Part of the name of a file that does not have its final name yet."""


def temporary_path(path: StrPath) -> str:
    """A unique name next to ``path`` that no reader mistakes for a finished file."""
    return f"{os.fspath(path)}{TEMPORARY}{secrets.token_hex(8)}"


def make_parents(path: StrPath) -> None:
    """Create the parent folders of ``path``."""
    os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)


def sync_folder(folder: StrPath) -> None:
    """Wait until the names in a folder are on disk; a rename alone does not."""
    _sync(os.fspath(folder) or ".", os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: StrPath) -> None:
    """Wait until the bytes of a file are on disk."""
    _sync(os.fspath(path), os.O_RDONLY)


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def appearing(path: StrPath) -> Iterator[str]:
    """Yield a temporary path that becomes ``path`` when the block ends, and is removed if an error ends it.

    Readers never see a partial file. Call `sync_file` if it must survive a crash of the machine.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_whole(path: StrPath, text: str | bytes) -> None:
    """Write a small file atomically."""
    with appearing(path) as temporary, open(temporary, "xb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def move_folder(folder: StrPath, to: StrPath) -> None:
    """Rename a folder; the new name is on disk when this returns. Raises `OSError` if ``to`` exists."""
    os.rename(folder, to)
    for parent in {os.path.dirname(os.path.abspath(path)) for path in (folder, to)}:
        sync_folder(parent)


def remove_folder(folder: StrPath) -> None:
    """Remove a folder atomically: no reader sees it half empty."""
    folder = os.fspath(folder)
    parent, name = os.path.split(folder)
    doomed = os.path.join(parent, f".tmp-{name}-{secrets.token_hex(8)}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def file_base(name: str) -> str:
    """A table's name as it appears in file names: ``:`` and ``/`` become ``-``."""
    return name.replace(":", "-").replace("/", "-")


def file_bases(names: Iterable[str]) -> dict[str, str]:
    """Map each name to a unique beginning of its file names.

    If two names have the same plain form (see `file_base`), a suffix derived from the name is added, so that the result
    does not depend on the order of the names.

    >>> file_bases(["user", "u/a"])
    {'user': 'user', 'u/a': 'u-a'}
    >>> file_bases(["u-a", "u/a"])
    {'u-a': 'u-a', 'u/a': 'u-a~91b7584a'}
    """
    distinct = list(dict.fromkeys(names))
    plain = {name: file_base(name) for name in distinct}
    shared = {base for base in plain.values() if sum(base == other for other in plain.values()) > 1}
    return {
        name: f"{base}~{zlib.crc32(name.encode()):08x}" if base in shared and base != name else base
        for name, base in plain.items()
    }
