"""A served table: a hash table or a multi-table behind one face, with what was pushed to it."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.serving.server.push_log import PushLog


class TableView:
    """A hash table or a multi-table, seen alike: numbered sub-tables with names and dims.

    Args:
        table: a ``HashTable`` or a ``MultiHashTable``.
        slots: alias of the lookup signature -> sub-table name.
    """

    def __init__(self, table: Any, slots: Mapping[str, str] | None = None) -> None:
        self.table = table
        self.name: str = table.name
        self.multi = hasattr(table, "raw_assign")
        if self.multi:
            self._subs = list(table.tables.values())
            self.sub_tables = list(table.tables)
        else:
            self._subs, self.sub_tables = [table], [table.name]
        self.dims = [int(sub.dim_size) for sub in self._subs]
        self.slots = dict(slots) if slots else {name: name for name in self.sub_tables}
        self.pushes = 0
        self.pushed_rows = 0
        self.last_push = 0.0
        self.lag = 0.0
        """Seconds from the oldest gradient of the last push to its being servable, 0 when the pusher did not say."""
        self.push_logs = [PushLog() for _ in self._subs]
        """When the rows of each sub-table were pushed, for the version that comes after."""
        self.logs_pushes = True

    def renamed(self, name: str) -> "TableView":
        """The same table under another name, as one of several shards."""
        view = TableView(self.table, self.slots)
        view.name = name
        if not self.multi:
            view.sub_tables = [name]
            view.slots = dict.fromkeys(self.slots, name)
        return view

    def rows(self) -> int:
        return sum(self.sub_rows())

    def sub_rows(self) -> list[int]:
        return [sub.size() for sub in self._subs]

    def memory_bytes(self) -> int:
        return sum(sub.memory_bytes() for sub in self._subs)

    def configs(self) -> list[Any]:
        """The ``EmbeddingHashTableConfig`` of each sub-table."""
        return [sub.table_config for sub in self._subs]

    def lookup_sub(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        return self._subs[number].lookup(ids)

    def number_of(self, sub_table: str, dim: int) -> int | None:
        """The number of the sub-table of that name (of a hash table: of the table itself), None if its dim differs."""
        number = self.sub_tables.index(sub_table) if sub_table in self.sub_tables else -1
        return number if number >= 0 and self.dims[number] == dim else None

    def assign_sub(self, number: int, ids: torch.Tensor, values: torch.Tensor, read_at: np.ndarray | float) -> None:
        """Writes rows that were pushed, stamped now. ``read_at``: when they were read from the trainer."""
        self._subs[number].assign(ids, values, int(time.time()))
        if self.logs_pushes:
            self.push_logs[number].add(ids, read_at)

    def count_push(self, rows: int, since: float) -> None:
        self.pushes += 1
        self.pushed_rows += rows
        self.last_push = time.time()
        self.lag = self.last_push - since if since else 0.0


def as_views(tables: Any) -> list[TableView]:
    """Views of a table, of several, of ``{alias: table}``; views stay as they are."""
    if isinstance(tables, Mapping):
        return [
            TableView(table, None if hasattr(table, "raw_assign") else {alias: table.name})
            for alias, table in tables.items()
        ]
    listed = tables if isinstance(tables, list | tuple) else [tables]
    return [table if isinstance(table, TableView) else TableView(table) for table in listed]
