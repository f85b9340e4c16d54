"""Names and writes that hold over a crash: what is on the disk is whole, under a name that only whole files get."""

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
"""In the name of a file that has not got its own yet."""


def temporary_path(path: StrPath) -> str:
    """A name next to ``path`` that nobody else uses and that no reader takes for a finished file."""
    return f"{os.fspath(path)}{TEMPORARY}{secrets.token_hex(8)}"


def make_parents(path: StrPath) -> None:
    """Makes the folders that ``path`` will be in."""
    os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)


def sync_folder(folder: StrPath) -> None:
    """Waits until the names in a folder are on the disk; a rename alone does not."""
    _sync(os.fspath(folder) or ".", os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: StrPath) -> None:
    """Waits until the bytes of a file are on the disk."""
    _sync(os.fspath(path), os.O_RDONLY)


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def appearing(path: StrPath) -> Iterator[str]:
    """Where to write a file that becomes ``path`` when the block ends, and is removed if an error ends it.

    Readers see it whole or not at all. Whether it outlives a crash of the machine is the writer's choice (`sync_file`).
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_whole(path: StrPath, text: str | bytes) -> None:
    """Writes a small file that appears whole or not at all."""
    with appearing(path) as temporary, open(temporary, "xb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def move_folder(folder: StrPath, to: StrPath) -> None:
    """Gives a folder another name, which is on the disk when this returns. Raises `OSError` where ``to`` is taken."""
    os.rename(folder, to)
    for parent in {os.path.dirname(os.path.abspath(path)) for path in (folder, to)}:
        sync_folder(parent)


def remove_folder(folder: StrPath) -> None:
    """Removes a folder so that nobody ever sees it half empty."""
    folder = os.fspath(folder)
    parent, name = os.path.split(folder)
    doomed = os.path.join(parent, f".tmp-{name}-{secrets.token_hex(8)}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def file_base(name: str) -> str:
    """A table's name as it appears in file names: ``:`` and ``/`` become ``-``."""
    return name.replace(":", "-").replace("/", "-")


def file_bases(names: Iterable[str]) -> dict[str, str]:
    """Name -> the beginning of its file names, different for different names.

    A name whose plain form (see `file_base`) another name has, too, is given a suffix made from its own letters, so
    that it does not depend on the order of the names.

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
