"""`TableKeeper`: what all modules on one table share: who updates its rows, at which step and time, and what waits."""

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
    """One table as the modules see it. It lives as long as the table, which it does not keep alive."""

    def __init__(self, table: EmbeddingTable) -> None:
        self._table = weakref.ref(table)
        self.name = table.name
        self.dim = int(table.dim_size)
        self.device = torch.device(getattr(table, "device", None) or "cpu")
        self.handle = next(_handles)
        """A number that no other keeper has."""
        self.fused: bool | None = None
        """True: backward updates the rows. False: gradients wait. None: they wait once an optimizer holds the table."""
        self.held = False
        self.waits = False
        """Whether gradients wait for a `SparseOptimizer`."""
        self.counter = StepCounter()
        self.clock: Callable[[], float] = time.time
        """Tells when a write happens; what another than ``time.time`` tells is a time that was given."""
        self.pending = Pending(self)
        self.lane: Lane | None = None
        """Who reads and updates the rows, in the order in which the modules ask; None: whoever asks, at once."""
        watch_scalers()

    @property
    def table(self) -> Any:
        table = self._table()
        if table is None:
            raise ConfigError(f"table {self.name!r} is gone; keep it, or a module over it, for as long as it is used")
        return table

    @property
    def global_step(self) -> int:
        """Of the next update made in backward. Waits for the device once a CUDA graph has captured an update."""
        return self.counter.number

    @global_step.setter
    def global_step(self, number: int) -> None:
        self.counter.number = number

    def choose(self, fused: bool | None) -> None:
        """What a module says about ``fused``; all modules of a table agree."""
        if fused is None:
            return
        if self.fused is not None and self.fused != fused:
            raise ConfigError(
                f"table {self.name!r}: one module says fused={self.fused} and another fused={fused}; "
                "all modules of a table must agree"
            )
        if fused and self.held:
            raise ConfigError(
                f"table {self.name!r}: fused=True, but a SparseOptimizer holds the table; leave one of them out"
            )
        self.fused = fused
        self.waits = self.held or not fused

    def hold(self) -> None:
        """From now on gradients wait for a SparseOptimizer."""
        if self.fused:
            raise ConfigError(
                f"table {self.name!r} updates its rows in backward (fused=True), so no optimizer can step it"
            )
        self.held = self.waits = True

    def settle(self) -> None:
        """Waits until every update that was made is in the rows."""
        if self.lane is not None:
            self.lane.settle()

    def time(self, req_time: Any = None) -> int:
        """Of a write: what was given, or what the clock tells. Every table goes by the clock under a module."""
        if req_time is None:
            if self.clock is time.time:
                return now()
            req_time = int(self.clock())
        return as_time(req_time, self.name, clocked=True)

    def base_lr(self) -> float:
        """The table's own rate at step 0, of its first segment; 1 where the table does not tell."""
        rates = getattr(self.table, "rates", None)
        return 1.0 if rates is None else rates(0)[0]


def keeper_of(table: EmbeddingTable) -> TableKeeper:
    """The keeper of a table, the same one for as long as the table lives."""
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
    if known is not None and known[0] is ref:  # else the number is another table's by now
        _keepers.pop(key, None)


def _after_fork() -> None:
    global _making
    _making = threading.Lock()  # the child does not have the thread that may hold it


os.register_at_fork(after_in_child=_after_fork)
