"""Writing of checkpoints without a table: files by ``id mod shards``, which appear only when all are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from shoal import _core
from shoal.durable import BasenameSave, file_bases, new_folder, temporary_path
from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.checkpoint.multi import write_meta
from shoal.table.checkpoint.single import add_scales
from shoal.table.offline.distinct import Distinct
from shoal.table.offline.scan import Batch, Floats, Ints

NEVER = {"default_days": 36500, "slots": []}


class TableWriter:
    """The files ``<base>-?????-of-?????`` of one table.

    Row ``id`` goes to file ``id mod shards``: if as many processes restore, process r finds all its rows in file r.
    """

    def __init__(self, base: str, name: str, shards: int) -> None:
        if not 1 <= shards <= 99_999:
            raise ConfigError(f"the number of shards must be 1 to 99999, got {shards}")
        self.base, self.name, self.shards = base, name, shards
        self.dim: int | None = None
        self.rows_written = 0
        self.max_update_time = 0
        self.expiry: dict[str, Any] = NEVER
        self.scales: Sequence[float] = (1.0,)
        self._ids = Distinct()
        self._sinks = [_core.EntrySink(temporary_path(naming.shard_path(base, i, shards))) for i in range(shards)]

    def copy(self, batch: Batch) -> None:
        """Adds rows from another file, byte for byte."""
        self._take(batch.ids, batch.times, batch.dim)
        for sink, rows in self._by_shard(batch.ids):
            places = np.ascontiguousarray(batch.indices[rows])
            sink.copy(batch.scan, places.ctypes.data, len(places))

    def rows(self, ids: Ints, times: Ints, weights: Floats, states: Sequence[bytes] | bytes = b"") -> None:
        """Adds rows; ``states`` is one serialized ``OptimizerDump`` for all rows, or one per row."""
        if len(ids) == 0:
            return
        if (bad := np.flatnonzero((times < 0) | (times > 0xFFFFFFFF))).size:
            raise DataError(f"id {ids[bad[0]]}: a time must be 0..4294967295 seconds, got {times[bad[0]]}")
        self._take(ids, times, weights.shape[1])
        for sink, rows in self._by_shard(ids):
            part_ids, part_times = np.ascontiguousarray(ids[rows]), np.ascontiguousarray(times[rows])
            part = np.ascontiguousarray(weights[rows], np.float32)
            ends = None
            blob = states
            if not isinstance(states, bytes):
                own = [states[i] for i in rows.tolist()]
                ends, blob = np.cumsum([len(s) for s in own], dtype=np.int64), b"".join(own)
            sink.rows(
                part_ids.ctypes.data, part_times.ctypes.data, part.ctypes.data, len(part), part.shape[1], blob,
                0 if ends is None else ends.ctypes.data,
            )  # fmt: skip

    def _take(self, ids: Ints, times: Ints, dim: int) -> None:
        self.dim = dim if self.dim is None else self.dim
        if dim != self.dim:
            raise DataError(f"table {self.name!r}: all rows must have {self.dim} weights like the first, got {dim}")
        self._ids.add(ids)
        self.rows_written += len(ids)
        self.max_update_time = max(self.max_update_time, int(times.max(initial=0)))

    def _by_shard(self, ids: Ints) -> Iterator[tuple[_core.EntrySink, Ints]]:
        if self.shards == 1:
            yield self._sinks[0], np.arange(len(ids))
            return
        of = np.mod(ids, self.shards)
        for shard in np.unique(of).tolist():
            yield self._sinks[shard], np.flatnonzero(of == shard)

    def finish(self) -> None:
        """Writes all rows to disk, still under temporary names; raises if an id occurred twice."""
        again, examples = self._ids.repeated()
        if again:
            raise DataError(
                f"table {self.name!r}: rows with a duplicate id: {again} (such as "
                f"{', '.join(map(str, examples))}); remove the duplicates"
            )
        for sink in self._sinks:
            sink.sync()

    def publish(self, save: BasenameSave | None = None) -> dict[str, tuple[int, int]]:
        """Gives the files their final names, or adds them to a save; returns their digests by name."""
        digests = {}
        for index, sink in enumerate(self._sinks):
            path = naming.shard_path(self.base, index, self.shards)
            sink.rename_to(path if save is None else save.temporary(path))
            digests[os.path.basename(path)] = sink.digest()
            if save is not None:
                save.add(path, sink.digest())
        return digests

    def described(self) -> dict[str, Any]:
        """The table's part of a manifest."""
        return {
            "name": self.name,
            "file": os.path.basename(self.base),
            "shards": self.shards,
            "rows": self.rows_written,
            "removed": 0,
            "dim": self.dim or 0,
            "max_update_time": self.max_update_time,
            "scales": list(self.scales),
            "expiry": self.expiry,
        }


@contextmanager
def folder_writer(
    target: str, shards: int | Callable[[str], int], *, step: int = 0
) -> Iterator[Callable[[str], TableWriter]]:
    """Creates ``target/ckpt-00000001`` from the tables that the block writes; leaves nothing there if the block fails.

    `shoal.table.restore_incremental` reads it, and deltas can be added to it. Yields a function from a table's name to
    its writer.

    Raises:
        ConfigError: ``target`` is a file, or a folder that is not empty.
    """
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise ConfigError(f"{target} exists already; choose a new folder")
    made = not os.path.isdir(target)
    writers: dict[str, TableWriter] = {}
    try:
        with new_folder(os.path.join(target, "ckpt-00000001")) as draft:

            def writer(name: str) -> TableWriter:
                if name not in writers:
                    base = file_bases([*writers, name])[name]
                    count = shards if isinstance(shards, int) else shards(name)
                    if any(base == os.path.basename(each.base) for each in writers.values()):
                        base = f"{base}~{len(writers)}"
                    writers[name] = TableWriter(os.path.join(draft.path, base), name, count)
                return writers[name]

            yield writer
            for each in writers.values():
                each.finish()
            files: dict[str, tuple[int, int | None]] = {}
            for each in writers.values():
                files |= each.publish()
            tables = [each.described() for _, each in sorted(writers.items())]
            draft.seal(Manifest(kind="full", step=step, content={"tables": tables}).fields(), files)
    except BaseException:
        if made and os.path.isdir(target) and not os.listdir(target):
            os.rmdir(target)
        raise


@contextmanager
def basename_writer(
    base: str, name: str, shards: int, scales: dict[str, list[float]] | None = None
) -> Iterator[TableWriter]:
    """Creates the files ``<base>-?????-of-?????`` of one table; leaves nothing there if the block fails."""
    if naming.has_shards(base):
        raise ConfigError(f"files {base}-?????-of-????? exist already; choose another name")
    with BasenameSave(base) as save:
        writer = TableWriter(base, name, shards)
        yield writer
        writer.finish()
        writer.publish(save)
        add_scales(save, base, scales or {})
        save.commit()


class MultiWriter:
    """The data and meta files of a multi table: table after table in every file."""

    def __init__(self, base: str, shards: int) -> None:
        if naming.has_shards(base) or naming.has_shards(base + ".meta"):
            raise ConfigError(f"files {base}-?????-of-????? exist already; choose another name")
        self.base, self.shards = base, shards
        self._save = BasenameSave(base)
        self._counts: list[dict[str, int]] = [{} for _ in range(shards)]
        self._distinct: dict[str, Distinct] = {}
        self._sinks = [_core.EntrySink(temporary_path(naming.shard_path(base, i, shards)), True) for i in range(shards)]

    def begin(self, table: str) -> None:
        """Starts a table: the following rows belong to ``table``. Tables must come in order of their names."""
        for counts in self._counts:
            counts[table] = 0
        self._distinct[table] = Distinct()

    def copy(self, batch: Batch) -> None:
        table = next(reversed(self._distinct))
        self._distinct[table].add(batch.ids)
        of = np.mod(batch.ids, self.shards)
        for shard in np.unique(of).tolist():
            places = np.ascontiguousarray(batch.indices[of == shard])
            self._sinks[shard].copy(batch.scan, places.ctypes.data, len(places))
            self._counts[shard][table] += len(places)

    def finish(self, scales: dict[str, list[float]]) -> dict[str, int]:
        """Writes the files; returns the number of rows of each table."""
        for table, distinct in self._distinct.items():
            if again := distinct.repeated()[0]:
                raise DataError(f"table {table!r}: rows with a duplicate id: {again}; remove the duplicates")
        for sink in self._sinks:
            sink.sync()
        with self._save as save:
            for index, (sink, counts) in enumerate(zip(self._sinks, self._counts, strict=True)):
                data, meta = (naming.shard_path(base, index, self.shards) for base in (self.base, self.base + ".meta"))
                save.add(meta, write_meta(save.temporary(meta), counts))
                sink.rename_to(save.temporary(data))
                save.add(data, sink.digest())
            add_scales(save, self.base, scales)
            save.commit()
        return {table: sum(counts[table] for counts in self._counts) for table in self._distinct}
