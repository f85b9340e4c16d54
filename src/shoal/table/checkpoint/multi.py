"""Many named tables in one checkpoint: Snappy blocks of records, and meta files with the number of rows per table."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from shoal import _core
from shoal.durable import BasenameSave, Saved, StrPath, digest_file, find_saved, read_newest, temporary_path
from shoal.errors import DataError, UnsupportedError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.scales import has_scales, load_scales
from shoal.table.checkpoint.single import add_scales, begin_load, naming_table, pick_scales, save_shards
from shoal.table.config.messages import MultiHashTableMetadata

if TYPE_CHECKING:
    from shoal.table.multi import MultiHashTable
    from shoal.table.table import HashTable

log = logging.getLogger(__name__)


def save_multi_table(
    multi: MultiHashTable,
    basename: StrPath,
    random_sleep_ms: int = 0,
    *,
    progress: _core.Progress | None = None,
    state: bool = True,
) -> None:
    """Writes all tables of ``multi`` to ``<basename>-00000-of-0000N`` and ``<basename>.meta-00000-of-0000N``.

    The files hold table after table, sorted by name. Rows that are stale by their table's expiry are left out. See
    `save_table` for the rest.
    """
    base = os.fspath(basename)
    tables = multi.tables
    for table in tables.values():
        if table.serving:
            raise UnsupportedError(f"table {multi.name!r}: save is not supported by serving entries")
    count = naming.shard_count(multi.saver_parallel, sum(table.size() for table in tables.values()))
    scales = {name: table._host.scales() for name, table in tables.items() if has_scales(table.table_config)}
    with naming_table(multi.name), BasenameSave(base) as save:
        counts, _ = save_shards(
            [table.source() for table in tables.values()],
            base,
            count,
            into=save,
            snappy=True,
            random_sleep_ms=random_sleep_ms,
            progress=progress,
            state=state,
        )
        for index in range(count):
            path = naming.shard_path(base + ".meta", index, count)
            save.add(path, write_meta(save.temporary(path), dict(zip(tables, counts[index], strict=True))))
        add_scales(save, base, scales)
        save.commit(naming.share_fields(_share(tables)))
    if multi.saver_parallel < 1:
        naming.remove_other_counts(base, count)
        naming.remove_other_counts(base + ".meta", count)


def restore_multi_table(
    multi: MultiHashTable,
    basename: StrPath | Sequence[StrPath],
    strict: bool = True,
    *,
    shard: Sequence[int] | None = None,
    progress: _core.Progress | None = None,
) -> None:
    """Replaces the rows of every table that the checkpoint has under the same name; see `restore_table`.

    Tables in the checkpoint that ``multi`` does not have are skipped. Tables that are not in the checkpoint are
    unchanged, and a warning is logged.
    """
    if multi.on_gpu:
        from shoal.table.cuda.multi import StagedMulti

        staged = StagedMulti(multi)
        restore_multi_table(staged, basename, strict, shard=shard, progress=progress)  # type: ignore[arg-type]
        return staged.adopt()
    bases = [basename] if isinstance(basename, str | os.PathLike) else list(basename)
    return read_newest(bases, lambda: _restore(multi, bases, strict, shard, progress))


def _restore(
    multi: MultiHashTable,
    bases: Sequence[StrPath],
    strict: bool,
    shard: Sequence[int] | None,
    progress: _core.Progress | None,
) -> None:
    """One attempt of `restore_multi_table`, for tables on the CPU."""
    tables = multi.tables
    with naming_table(multi.name):
        if not bases:
            raise naming.CheckpointNotFoundError("there is no checkpoint to restore: the list of basenames is empty")
        files = [_Files.of(os.fspath(base)) for base in bases]
        shard = naming.shard_to_load(shard, _share(tables), bases, [of_base.data for of_base in files])
        shards = [shard for of_base in files for shard in of_base.shards()]
        saved = {name for _, _, meta in shards for name, _ in meta}
        loads = {name: begin_load(table, strict, shard) for name, table in tables.items() if name in saved}

        def read(shard: tuple[_Files, int, list[tuple[str, int]]]) -> None:
            of_base, index, meta = shard
            found = [loads.get(name) for name, _ in meta]
            of_base.check(index, _core.load_multi(of_base.data.paths[index], found, [n for _, n in meta], progress))

        with ThreadPoolExecutor(min(4, len(shards)), "shoal-restore") as pool:
            list(pool.map(read, shards))
        for name, load in loads.items():
            expected = sum(n for _, _, meta in shards for table, n in meta if table == name)
            if shard is None and not tables[name].serving and load.rows() != expected:
                raise DataError(f"table {name!r}: records with a duplicate id: {expected - load.rows()}")
        found_scales = (load_scales(base, of.saved) for base, of in zip(bases, files, strict=True))
        scales = next(filter(None, found_scales), {})
        found = {
            name: pick_scales(tables[name], {tables[name].name: scales[name]})
            for name in loads
            if name in scales and has_scales(tables[name].table_config)
        }
        for load in loads.values():
            load.commit()
    for name, of_table in found.items():
        tables[name]._native.set_scales(of_table)
    for name in sorted(set(tables) - saved):
        log.warning("table %r: %s has no table %r; its rows are unchanged", multi.name, bases[0], name)


def _share(tables: Mapping[str, HashTable]) -> tuple[int, int, bool] | None:
    """The ``rank_share`` of the tables, which all have the same."""
    return next((table.rank_share for table in tables.values()), None)


def feature_stat(basename: StrPath) -> dict[str, int]:
    """Table name -> number of rows in the checkpoint, summed over its shards; only the small meta files are read."""
    stat: dict[str, int] = {}
    base = os.fspath(basename)
    for meta in read_metas(naming.open_shards(base + ".meta", find_saved(base))):
        for name, n in meta:
            stat[name] = stat.get(name, 0) + n
    return stat


@dataclass(frozen=True)
class _Files:
    """The files of one multi table."""

    data: naming.Shards
    meta: naming.Shards

    @classmethod
    def of(cls, base: str) -> _Files:
        saved = find_saved(base)
        data, meta = naming.open_shards(base, saved), naming.open_shards(base + ".meta", saved)
        if len(data.paths) != len(meta.paths):
            raise DataError(f"checkpoint {base!r} has {len(data.paths)} data files and {len(meta.paths)} meta files")
        return cls(data, meta)

    @property
    def saved(self) -> Saved | None:
        return self.data.saved

    def shards(self) -> list[tuple[_Files, int, list[tuple[str, int]]]]:
        """The index of each data file with the contents of its meta file."""
        return [(self, index, meta) for index, meta in enumerate(read_metas(self.meta))]

    def check(self, index: int, digest: tuple[int, int]) -> None:
        if self.saved is not None:
            self.saved.check(self.data.names[index], digest)


def write_meta(path: str, counts: Mapping[str, int]) -> tuple[int, int]:
    """Writes a meta file, the number of rows of each table in the order of the data file; returns its digest."""
    records = [MultiHashTableMetadata(table_name=name, num_entries=n).SerializeToString() for name, n in counts.items()]
    return _core.write_records(temporary_path(path), path, records)


def read_metas(files: naming.Shards) -> list[list[tuple[str, int]]]:
    """Checks the digests of the meta files and returns their contents."""
    if files.saved is not None:
        files.check([digest_file(path) for path in files.paths])  # type: ignore[misc]
    return [read_meta(path) for path in files.paths]


def read_meta(path: str) -> list[tuple[str, int]]:
    try:
        messages = [MultiHashTableMetadata.FromString(record) for record in _core.read_records(path)]
    except DecodeError as error:
        raise DataError(f"{path}: a record is not a MultiHashTableMetadata message") from error
    for message in messages:
        if message.num_entries >= 1 << 62:
            raise DataError(f"{path}: table {message.table_name!r} cannot have {message.num_entries} entries")
    return [(message.table_name, message.num_entries) for message in messages]
