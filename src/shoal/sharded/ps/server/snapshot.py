"""A shard as it was between two writes, written to files while further writes continue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shoal import _core
from shoal.durable import FileDigest, temporary_path
from shoal.sharded.ps.protocol import WITH_IDS, Op, Request
from shoal.sharded.ps.server.shard import Shard
from shoal.sharded.ps.server.streams import Streams
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.filters import FilterCopy
from shoal.table.checkpoint.scales import has_scales, save_scales, scales_path
from shoal.table.table import HashTable

WHOLE_TABLE = (Op.CLEAR, Op.EVICT, Op.RESTORE)  # they name no ids, so the rows that they change cannot be copied first


class TableSnapshot:
    """One table. Small state is copied immediately, rows when they are saved or about to change.

    All rows are saved, including expired ones, so that a restored table is identical. The counts of an admission
    filter are copied immediately.
    """

    def __init__(self, table: HashTable, spec: dict[str, Any]) -> None:
        native = table._native
        self.rows = _core.Snapshot(native)
        self.filter = FilterCopy.of(table.hash_filter)
        self.scales = {table.name: native.scales()} if has_scales(table.table_config) else {}
        self.files = naming.shard_count(table.saver_parallel, native.size())
        self.entry = {
            "spec": spec,
            "rows": native.size(),
            "max_update_time": native.max_update_time(),
            "calls": native.calls(),
        }

    def save(self, folder: Path, position: int) -> tuple[dict[str, Any], dict[str, FileDigest]]:
        """Write the table's files to a folder; returns its manifest entry, and the digests of its row files."""
        names = {"file": f"table-{position:05d}", "filter": f"filter-{position:05d}"}
        base = str(folder / names["file"])
        paths = [naming.shard_path(base, index, self.files) for index in range(self.files)]
        written = self.rows.save([temporary_path(path) for path in paths], paths, None)
        digests = {
            os.path.basename(path): FileDigest(*digest) for path, (_, digest) in zip(paths, written, strict=True)
        }
        if self.scales:
            save_scales(scales_path(base), self.scales)
        if self.filter is not None:
            self.filter.save(str(folder / names["filter"]))
        return {**self.entry, **names}, digests


class ShardSnapshot:
    """A shard as it was at construction. No write may run during it; call `before_write` before every later one."""

    def __init__(self, shard: Shard, streams: Streams, number: int) -> None:
        self.number = number
        self._about = {
            "shard": shard.index, "of": shard.of, "number": number, "version": shard.version, "run": shard.run
        }  # fmt: skip
        self._streams = {"streams": streams.dump(), "answers": streams.dump_answers()}
        self._tables = {
            name: TableSnapshot(table, shard.specs[name]) for name, table in sorted(shard.tables.items())
        }  # fmt: skip

    def before_write(self, request: Request) -> None:
        """Copy the rows that a write is about to change. Tables created later are not in this snapshot."""
        if request.op not in WITH_IDS:
            return
        ids = request.ids_tensor()
        at = 0
        for name, n in zip(request.names, request.counts, strict=True):
            if n and name in self._tables:
                self._tables[name].rows.before_write(ids.data_ptr() + 8 * at, n)
            at += n

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, FileDigest]]:
        """Write all tables to a folder; returns their part of the manifest, and the digests known so far."""
        tables, digests = {}, {}
        for position, (name, table) in enumerate(self._tables.items()):
            tables[name], known = table.save(folder, position)
            digests |= known
        return {**self._about, **self._streams, "tables": tables}, digests
