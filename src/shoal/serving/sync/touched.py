"""Which (id, table) pairs wait to be pushed: those trained since the last round, and those that a target missed."""

import logging
import time
from collections.abc import Iterable

import numpy as np

from shoal.metrics import emit_counter
from shoal.serving.sync.history import Ids, count, merge
from shoal.table.touched import TouchedKeySet

log = logging.getLogger(__name__)

CAPACITY = 64 * 1024 * 1024 // 32
CONCURRENCY_LEVEL = 1024


class TouchedPairs:
    """The trained pairs of one client, and since when they have been collected."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self.keys = TouchedKeySet(capacity, CONCURRENCY_LEVEL)
        """Where tables insert; shared with native code."""
        self.keys.name = name  # losses are counted under the client's name
        self._since = time.time()

    def begin(self) -> None:
        """Pushing starts: what is trained from now on is no older than now, unless something waits already."""
        now = time.time()
        if not len(self.keys):
            self._since = now

    def steal(self) -> tuple[Ids, float]:
        """(all pairs by table, Unix time before which none of them was trained); the set is empty afterwards."""
        since, self._since = self._since, time.time()  # before stealing: a pair in between only looks older than it is
        ids, tables = (each.numpy() for each in self.keys.steal_pairs())
        self.keys.report_dropped()
        return {int(table): ids[tables == table] for table in np.unique(tables)}, since

    def __len__(self) -> int:
        return len(self.keys)


class Missed:
    """What each target still lacks, after failed pushes or because it has just appeared."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self._name = name
        self._capacity = capacity
        self._of: dict[str, tuple[Ids, float]] = {}

    def add(self, target: str, groups: Ids, oldest: float | None) -> None:
        """Remembers pairs for a target; beyond the capacity everything it missed is dropped, counted and logged."""
        if not count(groups):
            return
        former, since = self._of.get(target, ({}, None))
        merged = merge(former, groups)
        total = count(merged)
        if total > self._capacity + 1:
            emit_counter("touched_key_set_dropped", total, f"name={self._name}|target={target}")
            log.warning("%s: %s missed %d ids, more than are kept; they were dropped", self._name, target, total)
            self._of.pop(target, None)
            return
        times = [each for each in (since, oldest) if each is not None]
        self._of[target] = (merged, min(times) if times else time.time())

    def take(self, target: str) -> tuple[Ids, float | None]:
        return self._of.pop(target, ({}, None))

    def keep_only(self, targets: Iterable[str]) -> None:
        """Forgets targets that left the list; what they missed is counted and logged."""
        kept = set(targets)
        for target in self._of.keys() - kept:
            missed = self.count(target)
            emit_counter("parameter_sync_forgotten_fids", missed, f"name={self._name}|target={target}")
            log.info("%s: %s left the targets; %d ids that it missed are forgotten", self._name, target, missed)
        self._of = {target: what for target, what in self._of.items() if target in kept}

    def count(self, target: str) -> int:
        return count(self._of.get(target, ({}, None))[0])

    def __bool__(self) -> bool:
        return bool(self._of)
