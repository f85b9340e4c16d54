"""The names of a table's files, and which files on disk make up a complete save."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.durable import Saved, StrPath, find_saved
from shoal.durable.files import file_base
from shoal.errors import ConfigError, DataError

__all__ = ["StrPath", "file_base"]

_SHARD = re.compile(r"-(\d{5,})-of-(\d{5,})")


class CheckpointNotFoundError(DataError, FileNotFoundError):
    """No file of the checkpoint exists."""


def shard_path(basename: StrPath, index: int, count: int) -> str:
    """``<basename>-00000-of-00004``."""
    return f"{os.fspath(basename)}-{index:05d}-of-{count:05d}"


def assets_dir(basename: StrPath, step: int) -> str:
    """The folder of the tables of the model checkpoint ``<basename>-<step>``."""
    return f"{os.fspath(basename)}-{int(step)}.assets"


def shard_count(saver_parallel: int, rows: int) -> int:
    """The number of files of a save: ``saver_parallel`` if given, else one per million rows, at most four."""
    return saver_parallel if saver_parallel >= 1 else min(4, max(1, rows // 1_000_000))


@dataclass(frozen=True)
class Shards:
    """The files of one table, by index, and the manifest that lists them, if there is one."""

    paths: list[str]
    names: list[str]
    """The names in the manifest."""
    saved: Saved | None

    def check(self, digests: Sequence[tuple[int, int]]) -> None:
        """Raises `DataError` unless the digests of the files read are those in the manifest."""
        if self.saved is not None:
            for name, digest in zip(self.names, digests, strict=True):
                self.saved.check(name, digest)


def open_shards(basename: StrPath, saved: Saved | None = None) -> Shards:
    """The files ``<basename>-?????-of-?????`` of one save.

    Args:
        basename: the prefix of their names.
        saved: the manifest that lists them; by default the one next to them. Without one, all files in the folder.

    Raises:
        CheckpointNotFoundError: there are no shards.
        DataError: shards with different counts are mixed, an index is not below its count, or a shard is missing.
    """
    base = os.fspath(basename)
    saved = saved or find_saved(base)
    if saved is None:
        found = shard_files(base)
        paths = [found[key] for key in _check_complete(base, found)]
        return Shards(paths, [os.path.basename(path) for path in paths], None)
    prefix = os.path.relpath(base, saved.folder or ".")
    matches = {name: _SHARD.fullmatch(name, len(prefix)) for name in saved.files if name.startswith(prefix)}
    named = {(int(m[1]), int(m[2])): name for name, m in matches.items() if m}
    keys = _check_complete(base, named)
    existing = {key: named[key] for key in keys if saved.has(named[key])}
    _check_complete(base, existing | _others(base, saved), len(keys))
    return Shards([saved.path(named[key]) for key in keys], [named[key] for key in keys], saved)


def find_shards(basename: StrPath) -> list[str]:
    """The paths of all shards of one save, by index; raises as `open_shards` does."""
    return open_shards(basename).paths


def has_shards(basename: StrPath) -> bool:
    """Whether any file of a save exists, even if the save is incomplete."""
    base = os.fspath(basename)
    return os.path.isfile(f"{base}.manifest") or bool(shard_files(base))


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


def _others(base: str, saved: Saved) -> dict[tuple[int, int], str]:
    """Shards next to those of a save that belong neither to it nor to the save that it replaced."""
    replaced = saved.fields.get("replaces", [])
    if not isinstance(replaced, list) or not all(isinstance(name, str) for name in replaced):
        raise DataError(f"{saved.manifest}: replaces must be a list of file names, got {replaced!r:.80}")
    own = {*saved.files, *replaced}
    return {
        key: path for key, path in shard_files(base).items() if os.path.relpath(path, saved.folder or ".") not in own
    }


def _check_complete(base: str, found: dict[tuple[int, int], str], expected: int = 0) -> list[tuple[int, int]]:
    """(index, count) of every shard, by index; raises unless they form one complete save."""
    if not found and not expected:
        raise CheckpointNotFoundError(f"there is no checkpoint {base!r}: no file matches {base}-?????-of-?????")
    counts = sorted({count for _, count in found} | ({expected} if expected else set()))
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
    return [(index, count) for index in range(count)]


def remove_other_counts(basename: StrPath, count: int) -> None:
    """Removes shards from an earlier save with a different count."""
    for (_, other), path in shard_files(basename).items():
        if other != count:
            os.unlink(path)


def share_fields(share: Sequence[int] | None) -> dict[str, Any]:
    """The fields that record a table's ``rank_share`` in the manifest of its save."""
    return {} if share is None else {"rank_share": [int(part) for part in share]}


def shard_to_load(
    shard: Sequence[int] | None, share: tuple[int, int, bool] | None, bases: Sequence[StrPath], files: Sequence[Shards]
) -> Sequence[int] | None:
    """The ``shard`` of a restore into a table with this ``rank_share``, by default: all rows if they are this share.

    If other ranks or another number of ranks saved them, the share's rows are taken, from all ranks' saves.

    Raises:
        DataError: saves of some of these ranks are missing.
    """
    found = [of.saved.fields["rank_share"] for of in files if of.saved is not None and "rank_share" in of.saved.fields]
    if shard is not None or share is None or len(found) < len(files) or found == [list(share)]:
        return shard
    for one in found:
        if not isinstance(one, list) or [type(part) for part in one] != [int] * 3:
            raise DataError(f"checkpoint {os.fspath(bases[0])!r}: rank_share must be three integers, got {one!r}")
    first, ranks, empty = found[0]
    if len(found) == ranks and sorted(found) == [[rank, ranks, empty] for rank in range(ranks)]:
        return share
    raise DataError(
        f"checkpoint {os.fspath(bases[0])!r} has the rows of rank {first} of {ranks}, but this table is for rank "
        f"{share[0]} of {share[1]}; give a list with the basenames of all {ranks} ranks, as in "
        "restore_table(table, [...]), to take this rank's rows from them"
    )


def shard_rule(shard: Sequence[int] | None) -> tuple[int, int]:
    """Converts ``(index, count)`` or ``(index, count, empty_rank0)`` to the rule ``id mod modulus == residue``.

    With an empty rank 0 the others share the ids: rank r has those with ``id mod (count - 1) == r - 1``.
    """
    if shard is None:
        return 1, 0
    if len(shard) not in (2, 3) or not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"shard must be (index, count) with 0 <= index < count, got {tuple(shard)}")
    index, count, *empty = shard
    if empty and empty[0] and count > 1:
        return count - 1, index - 1  # no id has residue -1
    return count, index
