"""A served table: a hash table or a multi-table behind one face, with what was pushed to it."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from shoal.table.touched import TouchedKeySet


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
        self._pushed = TouchedKeySet()
        self._recent: list[tuple[int, torch.Tensor]] = []  # pushed ids that are not in the set yet
        self._recent_rows = 0
        self._log_lock = threading.Lock()
        self._sorting = threading.Lock()

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

    def assign_sub(self, number: int, ids: torch.Tensor, values: torch.Tensor, req_time: int | None) -> None:
        """Writes rows, stamped now unless a time is given, and remembers that they were pushed."""
        self._subs[number].assign(ids, values, int(time.time()) if req_time is None else req_time)
        with self._log_lock:
            self._recent.append((number, ids))
            self._recent_rows += len(ids)
            many = self._recent_rows > 1_000_000 and not self._sorting.locked()
            if many:
                self._recent_rows = 0
        if many:
            threading.Thread(target=self._sort, name="shoal-pushed", daemon=True).start()

    def _sort(self) -> None:
        """Moves the log of pushed ids into the set, away from the push that filled it."""
        with self._sorting:
            with self._log_lock:
                recent, self._recent = self._recent, []
                self._recent_rows = 0
            for number, ids in recent:
                self._pushed.insert(ids, number)

    def pushed_ids(self) -> dict[int, torch.Tensor]:
        """sub-table number -> ids that pushes wrote; they are kept."""
        self._sort()
        ids, numbers = self._pushed.steal_pairs()
        found = {int(number): ids[numbers == number] for number in numbers.unique()}
        for number, group in found.items():
            self._pushed.insert(group, number)
        return found

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
