"""`Outcomes`: log records of the rows that each write evicts from tables with budgets.

Which rows a full table evicts depends not only on the writes in the log, but also on the positions of ids in its index,
which differ after a restart. So each write to such a table is followed by a record of the rows that it evicted and the
ids that were refused, and a server that applies the log evicts the same rows. A write without that record was not
acknowledged; its evictions are chosen again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.sharded.ps.protocol import Op, Request
from shoal.sharded.ps.server.shard import Shard
from shoal.table.table import HashTable

MAKES_ROWS = (Op.ASSIGN, Op.ASSIGN_ADD, Op.APPLY, Op.INSERT, Op.REINITIALIZE)


class Outcomes:
    """The outcomes of writes to the tables of one shard. Methods must be called in the thread that writes."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def budgets(self, request: Request) -> list[tuple[str, HashTable]]:
        """The tables with budgets in which a write may create rows, each once."""
        if request.op not in MAKES_ROWS:
            return []
        tables = ((name, self._shard.tables.get(name)) for name in dict.fromkeys(request.names))
        return [(name, table) for name, table in tables if table is not None and table.has_budget]

    def begin(self, tables: Iterable[tuple[str, HashTable]], *, follow: bool = False) -> None:
        """Record the outcome of the next write; with ``follow``, its outcome is known and only applied."""
        for _, table in tables:
            _core.follow_evictions(table._native, follow)
            _core.record_outcomes(table._native, not follow)
            _core.take_outcome(table._native)

    def stop(self) -> None:
        """Stop recording: writes choose the rows to evict, and the choice is not recorded."""
        for table in self._shard.tables.values():
            if table.has_budget:
                _core.follow_evictions(table._native, False)
                _core.record_outcomes(table._native, False)
                _core.take_outcome(table._native)

    def record(self, tables: list[tuple[str, HashTable]]) -> Request:
        """The outcome of the write: the evicted ids of each table, then the refused ids of each table."""
        taken = [_core.take_outcome(table._native) for _, table in tables]
        ids = [part[which] for which in (0, 1) for part in taken]
        names = tuple(name for name, _ in tables) * 2
        return Request(Op.OUTCOME, counts=[len(part) // 8 for part in ids], names=names, ids=b"".join(ids))

    def prepare(self, request: Request, outcome: Request) -> tuple[Request, Tensor | None]:
        """Evict the rows that a write evicted, and remove from it the ids that have no row after it.

        Returns:
            The write, and a bool mask of the ids that remain in it; None: all.
        """
        ids = np.frombuffer(bytes(outcome.ids), np.int64).copy()
        parts = np.split(ids, np.cumsum(outcome.counts)[:-1]) if outcome.counts else []
        half = len(parts) // 2
        tables = [self._shard.tables[name] for name in outcome.names[:half]]
        for table, gone in zip(tables, parts[:half], strict=True):
            _core.let_go(table._native, gone.ctypes.data, len(gone))
        for table, refused in zip(tables, parts[half:], strict=True):
            _core.count_refused(table._native, len(refused))
        absent = parts[half:]
        if request.op == Op.INSERT:  # it does not write the rows that it finds, so its other ids may evict them
            absent = [np.concatenate(both) for both in zip(parts[:half], parts[half:], strict=True)]
        if not any(len(part) for part in absent):
            return request, None
        return self._without(request, dict(zip(outcome.names, map(torch.from_numpy, absent), strict=False)))

    def _without(self, request: Request, absent: dict[str, Tensor]) -> tuple[Request, Tensor]:
        given, brings = request.ids_tensor(), request.op not in (Op.INSERT, Op.REINITIALIZE)
        stay, chosen, counts, at, at_value = [], [], [], 0, 0
        flat = request.values_tensor() if brings else None
        for name, n in zip(request.names, request.counts, strict=True):
            own = given[at : at + n]
            keep = ~torch.isin(own, absent.get(name, own[:0]))
            if flat is not None:
                dim = self._shard.tables[name].dim_size
                chosen.append(flat[at_value : at_value + n * dim].view(n, dim)[keep].reshape(-1))
                at_value += n * dim
            stay.append(keep)
            counts.append(int(keep.sum()))
            at += n
        kept = torch.cat(stay)
        values = request.values if flat is None else torch.cat(chosen)
        return replace(request, ids=given[kept], values=values, counts=counts), kept
