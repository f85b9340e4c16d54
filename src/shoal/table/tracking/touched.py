"""`TouchedKeySet`: the ids that training changed since they were last taken."""

import logging
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch

from shoal import _core
from shoal.errors import ConfigError
from shoal.fid import as_int64
from shoal.metrics import emit_counter

log = logging.getLogger(__name__)

LOG_SECS = 60.0


class TouchedKeySet(_core.TouchedKeys):
    """A concurrent, insert-only set of int64 keys, which `steal` empties.

    If it already has more than ``capacity`` keys at an insertion, it is emptied first, so that memory stays bounded
    without a reader. `insert` returns the number of keys dropped, and the counter ``touched_key_set_dropped`` counts
    them. Tables insert pairs (id, table number). ``concurrency_level`` has no effect. Memory is allocated as keys
    arrive.

    >>> keys = TouchedKeySet(capacity=3)
    >>> keys.insert([1, 2, 3, 4, 5, 6])
    4
    """

    def __init__(self, capacity: int = 2097152, concurrency_level: int = 1024, name_suffix: str = "") -> None:
        if concurrency_level < 1:
            raise ConfigError(f"TouchedKeySet: concurrency_level must be at least 1, got {concurrency_level}")
        super().__init__(int(capacity))
        self.concurrency_level = int(concurrency_level)
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self.name = f"TouchedKeySet_{name_suffix}"
        self._reporting = threading.Lock()
        self._reported = 0
        self._logged = float("-inf")

    def insert(self, ids: Any, table: int = 0) -> int:
        """Adds keys one by one; returns the number of keys dropped to make room."""
        if not isinstance(ids, torch.Tensor):
            ids = torch.as_tensor(ids, device="cpu")
            ids = ids if ids.numel() else ids.long()  # torch reads an empty list as floats
        flat = as_int64(ids, "TouchedKeySet: keys").detach().cpu().contiguous().view(-1)
        dropped = self._insert(flat.data_ptr(), flat.numel(), table)
        if dropped:
            self.report_dropped()
        return dropped

    def steal(self) -> torch.Tensor:
        """All keys, int64 ``[n]`` in no particular order; the set is empty afterwards."""
        return self.steal_pairs()[0]

    def steal_pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and the number of the table that inserted each (int32); the set is empty afterwards."""
        self._settle()
        ids, tables = self._steal()
        return (
            torch.from_numpy(np.frombuffer(ids, np.int64).copy()),
            torch.from_numpy(np.frombuffer(tables, np.int32).copy()),
        )

    def ask_first(self, source: Any) -> None:
        """Calls ``source.settle()`` before keys are counted or taken, because keys from a GPU can still be pending."""
        self._sources.add(source)

    def _settle(self) -> None:
        for source in list(self._sources):
            source.settle()

    def size(self) -> int:
        self._settle()
        return self._size()

    def __len__(self) -> int:
        return self.size()

    @property
    def touched_key_set_dropped(self) -> int:
        """The total number of keys dropped because of the capacity."""
        return self._dropped()

    def report_dropped(self) -> None:
        """Adds the keys dropped since the last report to the counter, and logs them at most once a minute.

        Keys that native tables insert are reported when they are stolen.
        """
        with self._reporting:
            total = self.touched_key_set_dropped
            fresh, self._reported = total - self._reported, total
            if not fresh:
                return
            due = time.monotonic() - self._logged >= LOG_SECS
            if due:
                self._logged = time.monotonic()
        emit_counter("touched_key_set_dropped", fresh, f"name={self.name}")
        if due:
            log.warning("%s holds at most %d keys; %d were dropped", self.name, self.capacity + 1, fresh)

    @property
    def handle(self) -> "TouchedKeySet":
        """The object that native tables hold."""
        return self

    @property
    def capacity(self) -> int:
        return self._capacity()
