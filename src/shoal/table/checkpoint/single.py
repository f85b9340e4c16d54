"""Saving and restoring of one table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal import _core
from shoal.durable import BasenameSave, FileDigest, Saved, StrPath, make_parents, read_newest, temporary_path
from shoal.errors import CancelledError, DataError, UnsupportedError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.copies import about_to_change
from shoal.table.checkpoint.scales import has_scales, load_scales, save_scales, scales_path
from shoal.table.config.native import default_expiry_s, slot_expiry_s

if TYPE_CHECKING:
    from shoal.table.table import HashTable

Progress = _core.Progress
"""The progress of a long save or load, for another thread: ``rows`` and ``bytes`` so far; ``cancel()`` ends it."""

Source = tuple[_core.Table, _core.Expiry | None, int] | tuple[_core.Table, _core.Expiry | None, int, Any, int]
"""The rows for a save: the table, the expiry rule, and the epoch since which changes are saved. For rows outside the
table, also a function that reads one part of them, and the number of parts."""


def save_table(
    table: HashTable,
    basename: StrPath,
    random_sleep_ms: int = 0,
    *,
    progress: _core.Progress | None = None,
    state: bool = True,
) -> None:
    """Writes the rows of ``table`` that are not stale to ``<basename>-00000-of-0000N``.

    ``<basename>.manifest`` lists these files with their digests. A save with the name of an earlier one replaces it
    atomically, so a crash leaves one of the two. Other threads can read and write the table meanwhile; each row is
    saved as it was at some moment during the save.

    Args:
        table: a training table.
        basename: the prefix of the file names; missing folders are created.
        random_sleep_ms: each shard first waits a random time below this, so that many tables do not start at once.
        progress: counts rows as they are written; its ``cancel()`` ends the save.
        state: False leaves out optimizer state; serving tables can read such files, training tables cannot.

    Raises:
        UnsupportedError: the table is for serving.
        OSError: the disk is full or the folder cannot be written; no file has changed.
        CancelledError: ``progress`` was cancelled.
    """
    if table.serving:
        raise UnsupportedError(f"table {table.name!r}: save is not supported by serving entries")
    base = os.fspath(basename)
    count = naming.shard_count(table.saver_parallel, table.size())
    scales = {table.name: table._host.scales()} if has_scales(table.table_config) else {}
    with naming_table(table.name), BasenameSave(base) as save:
        save_shards(
            [table.source()], base, count, into=save, random_sleep_ms=random_sleep_ms, progress=progress, state=state
        )  # fmt: skip
        add_scales(save, base, scales)
        save.commit(naming.share_fields(table.rank_share))
    if table.saver_parallel < 1:
        naming.remove_other_counts(base, count)


def save_shards(
    sources: Sequence[Source],
    basename: str,
    count: int,
    *,
    into: BasenameSave | None = None,
    snappy: bool = False,
    random_sleep_ms: int = 0,
    progress: _core.Progress | None = None,
    state: bool = True,
) -> tuple[list[list[int]], dict[str, FileDigest]]:
    """Writes ``count`` files with the rows of all sources.

    Args:
        sources: the rows, source after source in each file.
        basename: the prefix of the files' names.
        count: the number of files.
        into: the save that the files are added to; None for files in a folder that no reader uses yet.

    Returns:
        The number of rows in each file, by source; and the digest of each file, by name.
    """
    make_parents(basename)
    paths = [naming.shard_path(basename, index, count) for index in range(count)]
    at: Callable[[str], str] = into.temporary if into is not None else str
    targets = [at(path) for path in paths]
    drafts = [temporary_path(path) for path in targets]
    written = _core.save(list(sources), drafts, targets, snappy, max(0, int(random_sleep_ms)), progress, state)
    digests = {os.path.basename(path): FileDigest(*digest) for path, (_, digest) in zip(paths, written, strict=True)}
    if into is not None:
        for name, digest in digests.items():
            into.add(name, digest)
    return [rows for rows, _ in written], digests


def add_scales(save: BasenameSave, basename: str, scales: dict[str, list[float]]) -> None:
    """Adds the scales of a table, if it has any, to a save."""
    if scales:
        path = scales_path(basename)
        save.add(path, save_scales(save.temporary(path), scales))


def restore_table(
    table: HashTable,
    basename: StrPath | Sequence[StrPath],
    strict: bool = True,
    *,
    shard: Sequence[int] | None = None,
    progress: _core.Progress | None = None,
    saved: Saved | None = None,
) -> None:
    """Replaces all rows of ``table`` with those of a checkpoint.

    Everything is read and checked before the table changes; the change is atomic for other threads. While the files are
    read, both the old and the new rows take memory.

    Args:
        table: a training table with the same row layout, or a serving table, which keeps only the weights.
        basename: the basename given to `save_table`; several for a table that several processes saved in parts.
        strict: False accepts records whose optimizer state does not fit: weights are kept and the state starts fresh.
        shard: ``(index, count)`` takes only the ids with ``id mod count == index``, so that any number of processes can
            read a table saved by W processes; ``(index, count, True)`` leaves rank 0 empty. By default, a rank's shard
            of a synchronous table takes its own ids from the saves of all ranks.
        progress: counts records as they are read; its ``cancel()`` ends the load.
        saved: the manifest that lists the files; by default ``<basename>.manifest``, if it exists.

    Raises:
        CheckpointNotFoundError: there are no such files.
        DataError: a file is missing, damaged or from a table with a different row layout, or an id occurs twice. The
            table is unchanged.
    """
    if table.on_gpu:
        staged = table.staging()  # type: ignore[attr-defined]
        restore_table(staged, basename, strict, shard=shard, progress=progress, saved=saved)
        return table.adopt(staged._native)  # type: ignore[attr-defined]
    bases = [basename] if isinstance(basename, str | os.PathLike) else list(basename)

    def load() -> None:
        _restore(table, bases, strict, shard, progress, saved)

    return load() if saved is not None else read_newest(bases, load)


def _restore(
    table: HashTable,
    bases: Sequence[StrPath],
    strict: bool,
    shard: Sequence[int] | None,
    progress: _core.Progress | None,
    saved: Saved | None,
) -> None:
    """One attempt of `restore_table`, for a table on the CPU."""
    with naming_table(table.name):
        if not bases:
            raise naming.CheckpointNotFoundError("there is no checkpoint to restore: the list of basenames is empty")
        files = [naming.open_shards(base, saved) for base in bases]
        scales = {}
        if has_scales(table.table_config):
            found = (load_scales(base, of.saved) for base, of in zip(bases, files, strict=True))
            scales = next(filter(None, found), {})
        load = begin_load(table, strict, naming.shard_to_load(shard, table.rank_share, bases, files))
        check_distinct(load, read_shards(load, files, progress))
        set_scales = pick_scales(table, scales)
        load.commit()
    if set_scales is not None:
        table._native.set_scales(set_scales)


def restore_files(
    table: HashTable, files: Sequence[naming.Shards], before_commit: Callable[[], None] = lambda: None
) -> None:
    """Replaces all rows of ``table`` with those in the files; if ``before_commit`` raises, nothing changes.

    Raises:
        DataError: a file is damaged or from a table with a different row layout, or an id occurs twice. The table is
            unchanged.
    """
    target: Any = table.staging()
    with naming_table(table.name):
        load = begin_load(target)
        check_distinct(load, read_shards(load, files))
        before_commit()
        load.commit()
    if table.on_gpu:
        table.adopt(target._native)


def begin_load(table: HashTable, strict: bool = True, shard: Sequence[int] | None = None) -> _core.Load:
    """Starts a load of rows for ``table``; see `restore_table`.

    If no record has a time (version 0.1 wrote a time only if one was given), a table that uses the clock and expires
    rows treats all of them as written now. Otherwise they would expire at its first write.
    """
    about_to_change(table)
    now, expiry = int(time.time()), table.table_config.slot_expire_time_config
    shortest = min([default_expiry_s(expiry), *slot_expiry_s(expiry).values()])
    unstamped = now if table.clocked and shortest <= now else 0
    return _core.Load(table._native, strict, *naming.shard_rule(shard), unstamped)


def read_shards(load: _core.Load, files: Sequence[naming.Shards], progress: _core.Progress | None = None) -> int:
    """Reads files into a load and checks their digests; returns the number of records taken."""
    taken, digests = load.read([path for each in files for path in each.paths], progress)
    for each in files:
        each.check(digests[: len(each.paths)])
        digests = digests[len(each.paths) :]
    return taken


def check_distinct(load: _core.Load, taken: int) -> None:
    """Raises if ids occurred twice, because it is unknown which of their rows is right."""
    if load.rows() != taken:
        raise DataError(f"{taken - load.rows()} of the {taken} records repeat the id of another record")


def pick_scales(table: HashTable, scales: dict[str, list[float]]) -> list[float] | None:
    """The scales saved for ``table``, or those of the only table in the file, whatever its name."""
    found = scales.get(table.name) or (next(iter(scales.values())) if len(scales) == 1 else None)
    if found is None:
        return None
    segments = len(table.table_config.entry_config.segments)
    if len(found) != segments:
        raise DataError(f"the checkpoint has scales of {len(found)} segments, the table has {segments}")
    return found


@contextmanager
def naming_table(name: str) -> Iterator[None]:
    """Adds the table's name to the messages of errors about its files."""
    try:
        yield
    except naming.CheckpointNotFoundError as error:
        raise naming.CheckpointNotFoundError(f"table {name!r}: {error}") from None
    except DataError as error:
        raise DataError(f"table {name!r}: {error}; the table is unchanged") from None
    except CancelledError:
        raise CancelledError(f"table {name!r}: the checkpoint was cancelled") from None
