"""How the files of a checkpoint are called, and which files on the disk make up a whole one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from typing import TypeAlias

from shoal.errors import ConfigError, DataError

StrPath: TypeAlias = str | os.PathLike[str]

_SHARD = re.compile(r"-(\d{5,})-of-(\d{5,})")


class CheckpointNotFoundError(DataError, FileNotFoundError):
    """No file of the checkpoint is there."""


def shard_path(basename: StrPath, index: int, count: int) -> str:
    """``<basename>-00000-of-00004``."""
    return f"{os.fspath(basename)}-{index:05d}-of-{count:05d}"


def temporary_path(path: StrPath) -> str:
    """A name beside ``path`` that nobody else uses and no reader takes for a shard."""
    return f"{os.fspath(path)}-tmp-{secrets.token_hex(8)}"


def file_base(table_name: str) -> str:
    """A table's name as it appears in file names: ``:`` and ``/`` become ``-``."""
    return table_name.replace(":", "-").replace("/", "-")


def assets_dir(basename: StrPath, step: int) -> str:
    """The folder of the tables of the model checkpoint ``<basename>-<step>``."""
    return f"{os.fspath(basename)}-{int(step)}.assets"


def shard_count(saver_parallel: int, rows: int) -> int:
    """How many files a save makes: as asked for, else one per million rows, four at most."""
    return saver_parallel if saver_parallel >= 1 else min(4, max(1, rows // 1_000_000))


def shard_files(basename: StrPath) -> dict[tuple[int, int], str]:
    """The files of the exact form ``<basename>-<index>-of-<count>``: (index, count) -> path."""
    base = os.fspath(basename)
    folder, prefix = os.path.split(base)
    try:
        entries = os.listdir(folder or ".")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {}
    for entry in entries:
        match = _SHARD.fullmatch(entry, len(prefix)) if entry.startswith(prefix) else None
        if match is None:
            continue
        index, count = int(match[1]), int(match[2])
        path = os.path.join(folder, entry)
        if path == shard_path(base, index, count) and os.path.isfile(path):
            found[index, count] = path
    return found


def find_shards(basename: StrPath) -> list[str]:
    """The paths of all shards of one checkpoint, by index.

    Raises:
        CheckpointNotFoundError: there is no shard at all.
        DataError: shards of different counts are mixed, an index is not below its count, or one is missing.
    """
    base = os.fspath(basename)
    found = shard_files(base)
    if not found:
        raise CheckpointNotFoundError(f"there is no checkpoint {base!r}: no file matches {base}-?????-of-?????")
    counts = sorted({count for _, count in found})
    if len(counts) > 1:
        mixed = " and ".join(map(str, counts))
        raise DataError(f"checkpoint {base!r} mixes shards of {mixed} files; remove those of the older save")
    count = counts[0]
    beyond = sorted(index for index, _ in found if index >= count)
    if beyond:
        raise DataError(f"checkpoint {base!r}: shard index {beyond[0]} is not below the count {count}")
    missing = [index for index in range(count) if (index, count) not in found]
    if missing:
        first = os.path.basename(shard_path(base, missing[0], count))
        raise DataError(f"checkpoint {base!r}: {len(missing)} of {count} shards are missing, the first is {first}")
    return [found[index, count] for index in range(count)]


def remove_other_counts(basename: StrPath, count: int) -> None:
    """Removes shards that an earlier save left under another count."""
    for (_, other), path in shard_files(basename).items():
        if other != count:
            os.unlink(path)


def make_parents(path: StrPath) -> None:
    """Makes the folders that ``path`` will lie in."""
    os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)


def sync_folder(folder: StrPath) -> None:
    """Waits until the names in a folder are on the disk, as a rename alone does not."""
    fd = os.open(os.fspath(folder) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: StrPath, text: str) -> None:
    """Writes a small file that appears whole or not at all."""
    temporary = temporary_path(path)
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def shard_rule(shard: Sequence[int] | None) -> tuple[int, int]:
    """``(index, count)`` or ``(index, count, empty_rank0)`` as the rule ``id mod modulus == residue``.

    With an empty rank 0 the others share the ids: rank r has those with ``id mod (count - 1) == r - 1``.
    """
    if shard is None:
        return 1, 0
    if len(shard) not in (2, 3) or not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"shard is (index, count) with 0 <= index < count, got {tuple(shard)}")
    index, count, *empty = shard
    if empty and empty[0] and count > 1:
        return count - 1, index - 1  # residue -1 is nobody's
    return count, index
