"""`ExportedRows`: the rows of a table as files of an export."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from shoal import _core
from shoal.comm.ranks.ranks import Ranks
from shoal.durable import temporary_path
from shoal.table.checkpoint import naming
from shoal.table.config.optim import Sgd
from shoal.table.table import HashTable

Page = tuple[Tensor, Tensor]
"""Ids ``[n]`` and their weights ``[n, D]``."""
_PER_FILE = 1 << 26  # bytes of weights per file, if they come in pages


class ExportedRows:
    """The rows of one table to export: a table on this rank, or pages of ids and weights.

    Args:
        table: the rows of this rank; with ``pages``, only its name and width are used.
        pages: yields rows that are elsewhere.
    """

    def __init__(self, table: HashTable, pages: Callable[[], Iterator[Page]] | None = None) -> None:
        self.table, self.pages = table, pages
        self.name, self.dim = table.name, table.dim_size

    def empty(self) -> HashTable:
        """A table of its name and width, without rows."""
        return HashTable(self.dim, optimizer=Sgd(), initializer="zeros", name=self.name)

    def write(self, folder: str, base: str, ranks: Ranks, each: int) -> dict[str, Any]:
        """Write this rank's files; return their digests and the number of rows."""
        if self.pages is not None:
            return self._write_pages(os.path.join(folder, base), self.pages()) if ranks.first else _no_files()
        names = [f"{base}-{ranks.rank * each + i:05d}-of-{each * ranks.world_size:05d}" for i in range(each)]
        return _save(self.table, [os.path.join(folder, name) for name in names])

    def _write_pages(self, base: str, pages: Iterator[Page]) -> dict[str, Any]:
        """Write files of a few pages each, and name them at the end, when their number is known."""
        parts: list[str] = []
        done = _no_files()
        room = _PER_FILE // (4 * self.dim)
        waiting: list[Page] = []

        def flush() -> None:
            if not waiting and parts:
                return
            held = self.empty()
            for ids, values in waiting:
                held.assign(ids, values)
            waiting.clear()
            parts.append(f"{base}-part-{len(parts)}")
            written = _save(held, [parts[-1]])
            done["rows"] += written["rows"]
            done["files"][parts[-1]] = next(iter(written["files"].values()))

        for page in pages:
            waiting.append(page)
            if sum(len(ids) for ids, _ in waiting) >= room:
                flush()
        flush()
        files = {}
        for index, part in enumerate(parts):
            path = naming.shard_path(base, index, len(parts))
            os.rename(part, path)
            files[os.path.basename(path)] = done["files"][part]
        return {"files": files, "rows": done["rows"]}


def _no_files() -> dict[str, Any]:
    return {"files": {}, "rows": 0}


def _save(table: HashTable, paths: Sequence[str]) -> dict[str, Any]:
    """Write only weights, including those of rows that will expire at the next checkpoint."""
    drafts = [temporary_path(path) for path in paths]
    written = _core.save([table.source(stale=True)], drafts, list(paths), False, 0, None, False)
    return {
        "files": {os.path.basename(path): digest for path, (_, digest) in zip(paths, written, strict=True)},
        "rows": sum(sum(rows) for rows, _ in written),
    }
