"""The (id, table) pairs that were trained since the last round of a sync client."""

import time

import numpy as np

from shoal.serving.sync.history import Ids
from shoal.table.tracking.touched import TouchedKeySet

CAPACITY = 64 * 1024 * 1024 // 32
CONCURRENCY_LEVEL = 1024


class TouchedPairs:
    """The trained pairs of one client, and since when they have been collected."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self.keys = TouchedKeySet(capacity, CONCURRENCY_LEVEL)
        """The set that tables insert into; shared with native code."""
        self.keys.name = name  # losses are counted under the client's name
        self._since = time.time()

    def begin(self) -> None:
        """Set the start of collecting to now, unless pairs are waiting already."""
        now = time.time()
        if not len(self.keys):
            self._since = now

    def steal(self) -> tuple[Ids, float]:
        """(all pairs by table, Unix time before which none of them was trained); the set is empty afterwards."""
        since, self._since = self._since, time.time()  # before stealing: a pair must not seem newer than it is
        ids, tables = (each.numpy() for each in self.keys.steal_pairs())
        self.keys.report_dropped()
        return {int(table): ids[tables == table] for table in np.unique(tables)}, since

    def __len__(self) -> int:
        return len(self.keys)
