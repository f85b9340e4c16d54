"""Rows as a training forward reads them: an unknown id gives the row that its first update will start from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import _core
from shoal.sharded.parts import Lists, Tables
from shoal.table.table import HashTable

MOST = 1024  # sets of tables that are remembered


class InitialRows:
    """Reads tables through their groups, which change nothing. Threads may share it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[Sequence[HashTable], Tables]] = {}

    def rows(self, tables: Sequence[HashTable], counts: Sequence[int], ids: Tensor) -> Tensor:
        """The rows of ``counts[i]`` ids of ``tables[i]``, one after another, flat."""
        if not hasattr(HashTable, "group_key"):
            return _rows(tables, counts, ids)
        key = tuple(table.name for table in tables)
        kept = self._kept.get(key)
        if kept is None or any(old is not new for old, new in zip(kept[0], tables, strict=True)):
            if len(self._kept) >= MOST:
                self._kept.clear()
            kept = self._kept[key] = (tables, Tables(tables))
        return kept[1].lookup(Lists(range(len(tables)), counts, ids), "initial")

    def forget(self) -> None:
        """Lets go of all tables."""
        self._kept.clear()


def _rows(tables: Sequence[HashTable], counts: Sequence[int], ids: Tensor) -> Tensor:
    parts = [torch.empty(0, device="cpu")]
    for table, own in zip(tables, torch.split(ids, list(counts)), strict=True):
        n = own.numel()
        out = torch.empty(n, table.dim_size, dtype=torch.float32, device="cpu")
        known = torch.empty(n, dtype=torch.bool, device="cpu")
        table._native.lookup(own.data_ptr(), n, out.data_ptr(), known.data_ptr())
        if not (table.serving or table._native.has_filter() or known.all()):
            unknown = ~known
            out[unknown] = _initial_rows(table, own[unknown])
        parts.append(out.view(-1))
    return torch.cat(parts)


def _initial_rows(table: HashTable, ids: Tensor) -> Tensor:
    """``[n, dim]``, made by an empty table of the same layout and seed, on which alone a first row depends."""
    empty = _core.Table(table._native.layout, table.seed, ids.numel())
    empty.set_scales(table._native.scales())
    rows = torch.empty(ids.numel(), table.dim_size, dtype=torch.float32, device="cpu")
    empty.lookup_or_insert(ids.data_ptr(), ids.numel(), 0, rows.data_ptr())
    return rows
