"""`TableSlot`: what all modules on one table share: the number that ops know it by, and the gradients that wait."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from shoal.errors import ConfigError, UnsupportedError
from shoal.nn.amp import is_scaled, watch_scalers
from shoal.nn.gradients import Gradients, sum_by_id
from shoal.nn.pooling import lookup_pool, pool
from shoal.nn.protocol import EmbeddingTable, check_table, keywords
from shoal.nn.state import copy_table
from shoal.table.arguments import as_time
from shoal.table.table import HashTable

_handles = itertools.count()
_slots: weakref.WeakValueDictionary[int, TableSlot] = weakref.WeakValueDictionary()
_making = threading.Lock()


class TableSlot:
    """One table as the modules see it.

    ``handle`` is what compiled graphs hold. ``anchor`` is an empty tensor that asks for gradients, so that autograd
    comes back to us; ``tape`` counts the gradients that came, and tells the compiler that backward has an effect.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        self.table = table
        self.dim = int(table.dim_size)
        self.home = torch.device(getattr(table, "device", None) or "cpu")
        """Where the table reads ids and leaves rows."""
        self.handle = next(_handles)
        self.anchor = torch.zeros(0, requires_grad=True, device="cpu")
        self.tape = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.fused: bool | None = None
        """True: backward updates the rows. False: gradients wait. None: they wait once an optimizer holds the table."""
        self.held = False
        self.global_step = 0
        """Of the next update made in backward."""
        self.clock: Callable[[], float] = time.time
        """Tells when a write happens; what another than ``time.time`` tells is a time that was given."""
        self.pending = Gradients(self.dim)
        self._lookup_keywords = keywords(table.lookup, "insert_missing", "req_time")
        self._apply_keywords = keywords(table.apply_gradients, "enable_dedup", "req_time")
        self._lock = threading.Lock()
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        watch_scalers()

    def choose(self, fused: bool | None) -> None:
        """What a module says about ``fused``; all modules of a table agree."""
        if fused is None:
            return
        if self.fused is not None and self.fused != fused:
            raise ConfigError(
                f"table {self.table.name!r}: one module says fused={self.fused} and another fused={fused}; "
                "the gradients of a table have one way to go"
            )
        if fused and self.held:
            raise ConfigError(
                f"table {self.table.name!r}: fused=True, but a SparseOptimizer holds the table; leave one of them out"
            )
        self.fused = fused

    def hold(self) -> None:
        """From now on gradients wait for a SparseOptimizer."""
        if self.fused:
            raise ConfigError(
                f"table {self.table.name!r} updates its rows in backward (fused=True), so no optimizer can step it"
            )
        self.held = True

    def creates(self) -> bool:
        """Whether a training forward makes rows: not while a filter counts how often an id is updated."""
        return "insert_missing" in self._lookup_keywords and not _filters(self.table)

    def lookup(self, ids: Tensor, create: bool) -> Tensor:
        """The rows of ``ids``. With ``create`` unknown ids get one, if this table `creates`."""
        extra: dict[str, Any] = {}
        if create and self.creates() and not getattr(self.table, "serving", False):
            extra["insert_missing"] = True
            if "req_time" in self._lookup_keywords:
                extra["req_time"] = self._time()
        return self.table.lookup(ids, **extra)

    def lookup_pooled(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, kind: int, length: int, create: bool
    ) -> Tensor:
        """`pool` of `lookup`."""
        table = self.table
        if not isinstance(table, HashTable) or table.on_gpu:
            return pool(self.lookup(ids, create), offsets, weights, kind, length)
        create = create and not table.serving and self.creates()
        time_s = self._time() if create else 0
        return lookup_pool(table._native, self.dim, ids, offsets, weights, kind, length, create, time_s)

    def add_gradient(self, ids: Tensor, grads: Tensor) -> None:
        """Takes a gradient from a backward pass and keeps it, or applies it when that pass ends.

        ``grads`` are contiguous float32 ``[N, D]`` that nobody else holds.
        """
        if self.held or self.fused is False:
            return self.pending.add(ids.clone(), grads)  # the user may fill the tensor of ids anew before the step
        task = torch._C._current_graph_task_id()
        if is_scaled(task):
            raise ConfigError(
                f"table {self.table.name!r} updates its rows in backward, where a GradScaler's gradients are "
                "still scaled; nothing was applied. Make a SparseOptimizer over the modules (not fused=True) and call "
                "scaler.step(optimizer), or autocast to bfloat16, which needs no GradScaler"
            )
        if task < 0:  # an op called by hand, outside backward
            return self.apply(ids, grads, global_step=self._next_step())
        with self._lock:
            current = self._passes.get(task)
            if current is None:
                current = self._passes[task] = _Pass(self)
                # The engine holds the callback, and with it the pass: a backward that fails drops both.
                torch.autograd.Variable._execution_engine.queue_callback(current.end)
        current.gradients.add(ids, grads)
        return None

    def apply(
        self, ids: Tensor, grads: Tensor, *, global_step: int, req_time: int | None = None, lr_factor: float = 1.0
    ) -> None:
        """One step of the table's optimizer for each distinct id, on the sum of its gradients."""
        seconds = self._time(req_time)
        if isinstance(self.table, HashTable) and lr_factor != 1.0:
            rates = [rate * lr_factor for rate in self.table._rates(global_step)]
            self.table._apply(ids, grads, rates, global_step, True, seconds)
            return
        if lr_factor != 1.0:
            raise UnsupportedError(
                f"table {self.table.name!r} ({type(self.table).__name__}) sets its own learning rate; "
                "give it a schedule instead of changing lr here"
            )
        extra: dict[str, Any] = {"req_time": seconds} if "req_time" in self._apply_keywords else {}
        if "enable_dedup" in self._apply_keywords:
            extra["enable_dedup"] = True
        else:
            ids, grads = sum_by_id(ids, grads)
        self.table.apply_gradients(ids, grads, global_step, **extra)

    def base_lr(self) -> float:
        """The table's own rate at step 0, of its first segment; 1 where the table does not tell."""
        return self.table._rates(0)[0] if isinstance(self.table, HashTable) else 1.0

    def _time(self, req_time: Any = None) -> int:
        """Of a write: what was given, or what the clock tells. Every table goes by the clock under a module."""
        if req_time is None and self.clock is not time.time:
            req_time = int(self.clock())
        return as_time(req_time, self.table.name, clocked=True)

    def after_fork(self) -> None:
        """In a child process, which does not have the threads that may hold the locks."""
        self._lock = threading.Lock()
        self.pending.after_fork()

    def _next_step(self) -> int:
        with self._lock:
            self.global_step += 1
            return self.global_step - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> TableSlot:
        table = memo.get(id(self.table))
        if table is None:
            table = copy_table(self.table) if isinstance(self.table, HashTable) else copy.deepcopy(self.table, memo)
            memo[id(self.table)] = table
        slot = slot_of(table)
        slot.fused, slot.global_step, slot.clock = self.fused, self.global_step, self.clock
        memo[id(self)] = slot
        return slot

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"table {self.table.name!r} is not pickled; save model.state_dict(), or the table with table.save(path)"
        )


class _Pass:
    """The gradients of one backward pass, applied as one step when it ends."""

    def __init__(self, slot: TableSlot) -> None:
        self.slot = slot
        self.gradients = Gradients(slot.dim)

    def end(self) -> None:
        taken = self.gradients.take()
        if taken is not None:
            self.slot.apply(*taken, global_step=self.slot._next_step())


def slot_of(table: EmbeddingTable) -> TableSlot:
    """The slot of a table, the same one for as long as the table lives."""
    check_table(table)
    with _making:
        slot = getattr(table, "_nn_slot", None)
        if slot is None:
            slot = TableSlot(table)
            table._nn_slot = slot  # pyrefly: ignore[missing-attribute]
            _slots[slot.handle] = slot
        return slot


def _after_fork() -> None:
    global _making
    _making = threading.Lock()
    for slot in list(_slots.values()):
        slot.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def find_slot(handle: int) -> TableSlot:
    """The slot with that handle."""
    slot = _slots.get(handle)
    if slot is None:
        raise UnsupportedError(f"the table with handle {handle} is gone; a compiled graph outlived the module it is of")
    return slot


def _filters(table: Any) -> bool:
    """Whether ids have to be seen more than once before they get a row: that is counted by `apply_gradients` alone."""
    hash_filter = getattr(table, "hash_filter", None)
    if hash_filter is None:
        return False
    active = getattr(hash_filter, "_active", None)  # a filter of the user's own is taken to be
    return True if active is None else bool(active())
