"""`TableKeeper`: the state that all modules over one table share: its step, its clock and its pending gradients."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shoal.background.lane import Lane
from shoal.errors import ConfigError
from shoal.nn.amp import watch_scalers
from shoal.nn.protocol import EmbeddingTable, check_table
from shoal.nn.update.gradients import Pending
from shoal.nn.update.steps import StepCounter
from shoal.table.arguments import as_time
from shoal.table.clock import now

_handles = itertools.count()
_keepers: dict[int, tuple[weakref.ref[Any], TableKeeper]] = {}
_making = threading.Lock()


class TableKeeper:
    """The shared state of all modules over one table. It lives as long as the table, but does not keep it alive."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = weakref.ref(table)
        self.name = table.name
        self.dim = int(table.dim_size)
        self.device = torch.device(getattr(table, "device", None) or "cpu")
        self.handle = next(_handles)
        """A number unique to this keeper."""
        self.fused: bool | None = None
        """True: backward updates the rows. False: gradients wait. None: they wait once an optimizer holds the table."""
        self.held = False
        self.waits = False
        """Whether gradients wait for a `SparseOptimizer`."""
        self.counter = StepCounter()
        self.clock: Callable[[], float] = time.time
        """Returns the time of a write; a time from any clock but ``time.time`` counts as given by the user."""
        self.pending = Pending(self)
        self.lane: Lane | None = None
        """The thread that reads and updates the rows, in the order of requests; None: the calling thread does."""
        watch_scalers()

    @property
    def table(self) -> Any:
        table = self._table()
        if table is None:
            raise ConfigError(
                f"table {self.name!r} was deleted; keep a reference to it, or to a module over it, while it is used"
            )
        return table

    @property
    def global_step(self) -> int:
        """Number of the next update in backward. Waits for the device once a CUDA graph has captured an update."""
        return self.counter.number

    @global_step.setter
    def global_step(self, number: int) -> None:
        self.counter.number = number

    def choose(self, fused: bool | None) -> None:
        """Set ``fused`` as a module asks; all modules of a table must agree."""
        if fused is None:
            return
        if self.fused is not None and self.fused != fused:
            raise ConfigError(
                f"table {self.name!r}: all modules of a table must agree on fused, got {self.fused} and {fused}"
            )
        if fused and self.held:
            raise ConfigError(
                f"table {self.name!r}: fused must not be True for a table in a SparseOptimizer; drop one of the two"
            )
        self.fused = fused
        self.waits = self.held or not fused

    def hold(self) -> None:
        """Have gradients wait for a SparseOptimizer from now on."""
        if self.fused:
            raise ConfigError(
                f"table {self.name!r} updates its rows in backward (fused=True), so no optimizer can step it"
            )
        self.held = self.waits = True

    def settle(self) -> None:
        """Wait until every submitted update has been applied to the rows."""
        if self.lane is not None:
            self.lane.settle()

    def time(self, req_time: Any = None) -> int:
        """Return the time of a write: the given one, or that of the clock."""
        if req_time is None:
            if self.clock is time.time:
                return now()
            req_time = int(self.clock())
        return as_time(req_time, self.name, clocked=True)

    def base_lr(self) -> float:
        """Return the learning rate of the table's first segment at step 0; 1 if the table has no ``rates``."""
        rates = getattr(self.table, "rates", None)
        return 1.0 if rates is None else rates(0)[0]


def keeper_of(table: EmbeddingTable) -> TableKeeper:
    """Return the keeper of a table, always the same one while the table lives."""
    key = id(table)
    with _making:
        known = _keepers.get(key)
        if known is not None and known[0]() is table:
            return known[1]
        check_table(table)
        keeper = TableKeeper(table)
        _keepers[key] = weakref.ref(table, lambda ref: _forget(key, ref)), keeper
        return keeper


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    known = _keepers.get(key)
    if known is not None and known[0] is ref:  # else another table has this id() by now
        _keepers.pop(key, None)


def _after_fork() -> None:
    global _making
    _making = threading.Lock()  # the thread that may hold it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)
