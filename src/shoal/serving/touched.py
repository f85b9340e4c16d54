"""Which (id, table) pairs wait to be pushed: those trained since the last round, and those that a target missed."""

import logging
import threading
import time
from collections.abc import Iterable

import numpy as np
import torch

from shoal import _core
from shoal.serving.metrics import emit_counter

log = logging.getLogger(__name__)

CAPACITY = 64 * 1024 * 1024 // 32
CONCURRENCY_LEVEL = 1024

Groups = dict[int, np.ndarray]
"""table number -> distinct int64 ids"""


class TouchedPairs:
    """The trained pairs of one client, and when the oldest of them was trained."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self.name = name
        self.capacity = capacity
        self._set = _core.TouchedPairs(capacity)
        self._oldest: float | None = None
        self._logged = float("-inf")
        self._lock = threading.Lock()

    def insert(self, ids: torch.Tensor, table: int) -> int:
        """Marks ids of a table; returns how many pairs were dropped because the set was full."""
        ids = ids.detach().reshape(-1).to(torch.int64).contiguous()
        if self._oldest is None and ids.numel():
            self._oldest = time.time()
        dropped = self._set.insert(ids.data_ptr(), ids.numel(), table)
        if dropped:
            self._report(dropped)
        return dropped

    def steal(self) -> tuple[Groups, float | None]:
        """(all pairs by table, Unix time of the oldest mark); the set is empty afterwards."""
        oldest, self._oldest = self._oldest, None  # before stealing: a mark in between only looks older than it is
        stolen = self._set.steal()
        ids, tables = np.empty(len(stolen), np.int64), np.empty(len(stolen), np.int32)
        stolen.copy_to(ids.ctypes.data, tables.ctypes.data)
        return {int(table): ids[tables == table] for table in np.unique(tables)}, oldest

    def __len__(self) -> int:
        return len(self._set)

    def _report(self, dropped: int) -> None:
        emit_counter("touched_key_set_dropped", dropped, f"client={self.name}")
        with self._lock:
            if time.monotonic() - self._logged < 60:
                return
            self._logged = time.monotonic()
        log.warning("%s: more than %d ids wait to be pushed; %d were dropped", self.name, self.capacity, dropped)


class Missed:
    """What each target still lacks, after failed pushes or because it has just appeared."""

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self._name = name
        self._capacity = capacity
        self._of: dict[str, tuple[Groups, float]] = {}

    def add(self, target: str, groups: Groups, oldest: float | None) -> None:
        """Remembers pairs for a target; beyond the capacity everything it missed is dropped, counted and logged."""
        if not any(len(ids) for ids in groups.values()):
            return
        former, since = self._of.get(target, ({}, None))
        merged = merge(former, groups)
        total = sum(len(ids) for ids in merged.values())
        if total > self._capacity + 1:
            emit_counter("touched_key_set_dropped", total, f"client={self._name}|target={target}")
            log.warning("%s: %s missed %d ids, more than are kept; they were dropped", self._name, target, total)
            self._of.pop(target, None)
            return
        times = [each for each in (since, oldest) if each is not None]
        self._of[target] = (merged, min(times) if times else time.time())

    def take(self, target: str) -> tuple[Groups, float | None]:
        return self._of.pop(target, ({}, None))

    def keep_only(self, targets: Iterable[str]) -> None:
        """Forgets targets that left the list."""
        kept = set(targets)
        self._of = {target: what for target, what in self._of.items() if target in kept}

    def count(self, target: str) -> int:
        return sum(len(ids) for ids in self._of.get(target, ({}, None))[0].values())

    def __bool__(self) -> bool:
        return bool(self._of)


def merge(one: Groups, two: Groups) -> Groups:
    """The pairs of both."""
    merged = dict(one)
    for table, ids in two.items():
        merged[table] = np.union1d(merged[table], ids) if table in merged else ids
    return merged
