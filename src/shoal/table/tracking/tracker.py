"""`TableTracker`: the ids of a table that were written or removed since they were last taken."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.metrics import emit_counter
from shoal.table.table import HashTable

log = logging.getLogger(__name__)

CAPACITY = 1 << 22


class Changed(NamedTuple):
    """What `TableTracker.take` gives."""

    ids: Tensor
    """int64 ``[n]``, distinct, in no particular order: written or removed; `HashTable.find` tells which."""
    everything: bool
    """Whether any row of the table may have changed (`HashTable.all_ids`), beside those in ``ids``."""
    lost: int
    """Ids that were removed and are not known any more, for more were removed than are kept."""


class TableTracker:
    """Follows one table, on any device, from now on. Any number of trackers may follow a table.

    Noted are the ids of all writes (gradients, `assign`, `reinitialize`, inserts, `restore`) and of all that left
    (`erase`, `evict`, `clear`, what `restore` replaced). A change is noted after it was made, so that an id that was
    taken and is read then has its new value, or will be taken again. Writes and `take` may come from any threads.

    >>> table = HashTable(1, initializer="zeros")
    >>> tracker = TableTracker(table)
    >>> _ = table.assign(torch.tensor([7]), torch.ones(1, 1))
    >>> tracker.take().ids, tracker.take().ids
    (tensor([7]), tensor([], dtype=torch.int64))

    Args:
        table: a table of this process: on the CPU, on a GPU, or cached there.
        capacity: ids kept of those written, and of those removed, at 32 bytes each at most. Where more are written
            between two takes any row may have changed; removed ones beyond it are lost, counted in
            ``table_changes_lost`` and logged. Raise it where that happens.
    """

    def __init__(self, table: HashTable, *, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ConfigError(f"table {table.name!r}: capacity of a tracker must be at least 1, got {capacity}")
        self.table = table
        self._native = _core.Tracker(capacity)
        table.track(self._native)

    def take(self) -> Changed:
        """What changed since the last take. One thread at a time."""
        self.table.settle()
        raw, everything, lost = self._native.take()
        if lost:
            emit_counter("table_changes_lost", lost, f"table={self.table.name}")
            log.warning(
                "table %r: %d removed ids were lost, more than a tracker keeps; copies have those rows until they are "
                "made anew",
                self.table.name,
                lost,
            )
        return Changed(torch.from_numpy(np.frombuffer(raw, np.int64).copy()), everything, lost)

    def __len__(self) -> int:
        """Ids that wait to be taken, of those that are noted one by one."""
        self.table.settle()
        return self._native.size()

    def close(self) -> None:
        """Follows the table no longer."""
        self.table.untrack(self._native)
