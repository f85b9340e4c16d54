"""One table to files and back."""

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
"""Watches a long save or load from another thread: ``rows`` and ``bytes`` so far; ``cancel()`` ends it."""

Source = tuple[_core.Table, _core.Expiry | None, int] | tuple[_core.Table, _core.Expiry | None, int, Any, int]
"""What a save takes of a table: the table, what makes a row stale, and the epoch that changes are wanted since. For
rows that live elsewhere also a function that takes one of the parts, and how many there are."""


def save_table(
    table: HashTable,
    basename: StrPath,
    random_sleep_ms: int = 0,
    *,
    progress: _core.Progress | None = None,
    state: bool = True,
) -> None:
    """Writes the rows of ``table`` that are not stale to ``<basename>-00000-of-0000N``.

    ``<basename>.manifest`` names these files with their digests. A save under the name of an earlier one replaces it in
    one step, so that a crash leaves the one or the other. Other threads may read and write the table meanwhile; each
    row is then as it was at one moment of the save.

    Args:
        table: a training table.
        basename: beginning of the file names; missing folders are made.
        random_sleep_ms: each shard waits a random time below it before it begins, so that many tables do not begin at
            once.
        progress: counts rows as they are written; its ``cancel()`` ends the save.
        state: False leaves out what optimizers keep; a table for serving reads such files, one that trains does not.

    Raises:
        UnsupportedError: the table is for serving.
        OSError: the disk is full or the folder cannot be written; then no file has changed.
        CancelledError: by ``progress``.
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
        save.commit()
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
        basename: the beginning of the files' names.
        count: how many files.
        into: the save that they become part of; None for files in a folder that nobody looks at yet.

    Returns:
        The rows in each file, by source; and the digest of each file, by name.
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
    """Makes the scales of a table, if it has any, part of a save."""
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

    Everything is read and checked before the table changes; the change itself is one step for every other thread.
    While the files are read both the old rows and the new take memory.

    Args:
        table: a training table of the same shape, or a serving one, which keeps the weights alone.
        basename: what `save_table` got; several of them for a table that was saved in parts by several processes.
        strict: False keeps the weights of records whose optimizer state does not fit, and starts that state afresh.
        shard: ``(index, count)`` takes only the ids with ``id mod count == index``, so that a table saved by W
            processes is read by any other number of them; ``(index, count, True)`` leaves rank 0 empty.
        progress: counts records as they are read; its ``cancel()`` ends the load.
        saved: the manifest that names the files; by default ``<basename>.manifest``, where there is one.

    Raises:
        CheckpointNotFoundError: there are no such files.
        DataError: a file is missing, damaged or of a table of another shape, or an id comes twice. The table is as it
            was.
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
    """`restore_table` of a table on the CPU, once."""
    with naming_table(table.name):
        if not bases:
            raise naming.CheckpointNotFoundError("there is no checkpoint to restore: the list of basenames is empty")
        files = [naming.open_shards(base, saved) for base in bases]
        scales = {}
        if has_scales(table.table_config):
            found = (load_scales(base, of.saved) for base, of in zip(bases, files, strict=True))
            scales = next(filter(None, found), {})
        load = begin_load(table, strict, shard)
        check_distinct(load, read_shards(load, files, progress))
        set_scales = pick_scales(table, scales)
        load.commit()
    if set_scales is not None:
        table._native.set_scales(set_scales)


def restore_files(
    table: HashTable, files: Sequence[naming.Shards], before_commit: Callable[[], None] = lambda: None
) -> None:
    """Replaces all rows of ``table`` with those of the files; ``before_commit`` may still raise, and nothing changes.

    Raises:
        DataError: a file is damaged or of a table of another shape, or an id comes twice. The table is as it was.
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
    """A load of rows that ``table`` will have; see `restore_table`.

    Where no record has a time, as version 0.1 wrote them when it was given none, all count as written now in a table
    that reads the clock and expires rows: its first write would otherwise make them decades old.
    """
    about_to_change(table)
    now, expiry = int(time.time()), table.table_config.slot_expire_time_config
    shortest = min([default_expiry_s(expiry), *slot_expiry_s(expiry).values()])
    unstamped = now if table.clocked and shortest <= now else 0
    return _core.Load(table._native, strict, *naming.shard_rule(shard), unstamped)


def read_shards(load: _core.Load, files: Sequence[naming.Shards], progress: _core.Progress | None = None) -> int:
    """Reads files into a load and checks their digests; the number of records taken."""
    taken, digests = load.read([path for each in files for path in each.paths], progress)
    for each in files:
        each.check(digests[: len(each.paths)])
        digests = digests[len(each.paths) :]
    return taken


def check_distinct(load: _core.Load, taken: int) -> None:
    """Raises when ids came twice: which of their rows is right cannot be known."""
    if load.rows() != taken:
        raise DataError(f"{taken - load.rows()} of the {taken} records have an id that another record has, too")


def pick_scales(table: HashTable, scales: dict[str, list[float]]) -> list[float] | None:
    """The scales saved for ``table``, or those of the only table in the file, whatever its name was then."""
    found = scales.get(table.name) or (next(iter(scales.values())) if len(scales) == 1 else None)
    if found is None:
        return None
    segments = len(table.table_config.entry_config.segments)
    if len(found) != segments:
        raise DataError(f"the checkpoint has scales of {len(found)} segments, the table has {segments}")
    return found


@contextmanager
def naming_table(name: str) -> Iterator[None]:
    """Puts the table's name before what went wrong with its files."""
    try:
        yield
    except naming.CheckpointNotFoundError as error:
        raise naming.CheckpointNotFoundError(f"table {name!r}: {error}") from None
    except DataError as error:
        raise DataError(f"table {name!r}: {error}; the table is as it was") from None
    except CancelledError:
        raise CancelledError(f"table {name!r}: the checkpoint was cancelled") from None
