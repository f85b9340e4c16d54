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
    """The result of `TableTracker.take`."""

    ids: Tensor
    """The ids written or removed: int64 ``[n]``, distinct, in no particular order; `HashTable.find` shows which."""
    everything: bool
    """Whether any row of the table (`HashTable.all_ids`) may have changed, in addition to those in ``ids``."""
    lost: int
    """The number of removed ids that were lost because more were removed than the capacity."""


class TableTracker:
    """Tracks the changes of one table, on any device, from now on. A table can have any number of trackers.

    It records the ids of all writes (gradients, `assign`, `reinitialize`, inserts, `restore`) and removals (`erase`,
    `evict`, `clear`, rows replaced by `restore`). A change is recorded after it was made: reading an id after `take`
    gives its new value, or the id will be taken again. Writes and `take` can come from any threads.

    >>> table = HashTable(1, initializer="zeros")
    >>> tracker = TableTracker(table)
    >>> _ = table.assign(torch.tensor([7]), torch.ones(1, 1))
    >>> tracker.take().ids, tracker.take().ids
    (tensor([7]), tensor([], dtype=torch.int64))

    Args:
        table: a table in this process: on the CPU, on a GPU, or cached on a GPU.
        capacity: the most written ids, and the most removed ids, to keep, at up to 32 bytes each. If more are written
            between two takes, any row may have changed. Removed ids beyond the capacity are lost, counted in
            ``table_changes_lost`` and logged; raise the capacity if that happens.
    """

    def __init__(self, table: HashTable, *, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ConfigError(f"table {table.name!r}: capacity of a tracker must be at least 1, got {capacity}")
        self.table = table
        self._native = _core.Tracker(capacity)
        table.track(self._native)

    def take(self) -> Changed:
        """The changes since the last call. Only one thread can call it at a time."""
        self.table.settle()
        raw, everything, lost = self._native.take()
        if lost:
            emit_counter("table_changes_lost", lost, f"table={self.table.name}")
            log.warning(
                "table %r: %d removed ids exceeded the tracker's capacity and were lost; copies keep those rows until "
                "they are rebuilt",
                self.table.name,
                lost,
            )
        return Changed(torch.from_numpy(np.frombuffer(raw, np.int64).copy()), everything, lost)

    def __len__(self) -> int:
        """The number of individually recorded ids that have not been taken."""
        self.table.settle()
        return self._native.size()

    def close(self) -> None:
        """Stops tracking the table."""
        self.table.untrack(self._native)
