"""Rows for the forward pass of training: an unknown id gives the row that its first update will start from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.sharded.parts import Lists, Tables
from shoal.table.table import HashTable

MOST = 1024  # cached sets of tables


class InitialRows:
    """Reads tables through their groups, without changing them. Threads can share it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[Sequence[HashTable], Tables]] = {}

    def rows(self, tables: Sequence[HashTable], counts: Sequence[int], ids: Tensor) -> Tensor:
        """The rows of ``counts[i]`` ids of ``tables[i]``, concatenated and flat."""
        key = tuple(table.name for table in tables)
        kept = self._kept.get(key)
        if kept is None or any(old is not new for old, new in zip(kept[0], tables, strict=True)):
            if len(self._kept) >= MOST:
                self._kept.clear()
            kept = self._kept[key] = (tables, Tables(tables))
        return kept[1].lookup(Lists(range(len(tables)), counts, ids), "initial")

    def forget(self) -> None:
        """Drop the references to all tables."""
        self._kept.clear()
