"""A backward pass: collects gradients by group and makes one update of each table when it ends."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.errors import ConfigError
from shoal.nn.amp import is_scaled
from shoal.nn.update.gradients import add_waiting, detached, is_empty
from shoal.nn.update.steps import next_step
from shoal.nn.update.units import (
    RowsByTable,
    Unit,
    by_clock,
    disjoint,
    expand,
    have_one_clock,
    lane_of,
    row_units,
    update_all,
)
from shoal.table.protocol import Part, Step

if TYPE_CHECKING:
    from shoal.nn.read.plan import Call

numbers = itertools.count()
"""Numbers of forwards, so that ranks that work together make their updates in the order of their finds."""
_WAITS = {True}
_passes: dict[int, weakref.ref[_Pass]] = {}
_making = threading.Lock()
_current_task = torch._C._current_graph_task_id
_queue = torch.autograd.Variable._execution_engine.queue_callback


def hand_over(number: int, given: Sequence[tuple[Call, Part]]) -> None:
    """Receive the gradients of one forward from backward: keep them for a step, or apply them when this pass ends."""
    passed: _Pass | None = None
    for call, part in given:
        waits = {keeper.waits for keeper in call.touched}
        if waits == _WAITS:
            add_waiting(call.group, call.keepers, detached(part), number)
            continue
        if passed is None:
            passed = _pass_of(call)
        if len(waits) > 1:  # an optimizer holds some tables of the group
            kept = detached(part)
            for table, ids, grads in expand(kept, call.group.dim):
                keeper = call.keepers[table]
                if keeper.waits:
                    keeper.pending.rows.add(ids, grads)
                else:
                    passed.rows.setdefault(keeper, []).append((ids, grads))
        else:
            passed.entries.append((number, call, part))
    if passed is not None and not passed.queued:  # the op was called directly, outside backward
        passed.end()


class _Pass:
    def __init__(self) -> None:
        self.entries: list[tuple[int, Call, Part]] = []
        self.rows: RowsByTable = {}
        self.queued = False

    def end(self) -> None:
        entries = self.entries
        if len(entries) == 1 and not self.rows:
            _, call, part = entries[0]
            run([Unit(call.group, call.keepers, [part])])
            return
        entries.sort(key=lambda entry: entry[0])
        units: dict[Any, Unit] = {}
        for _, call, part in entries:
            unit = units.get(call.group)
            if unit is None:
                units[call.group] = Unit(call.group, call.keepers, [part])
            else:
                unit.parts.append(part)
        every = [*units.values(), *(row_units(self.rows) if self.rows else ())]
        run(disjoint(every) if len(every) > 1 else every)


def _pass_of(call: Call) -> _Pass:
    """Return the running pass; outside backward, a new one that ends at once."""
    task = _current_task()
    if task < 0:
        return _Pass()
    if is_scaled(task):
        raise ConfigError(
            f"table {call.touched[0].name!r} updates its rows in backward, where a GradScaler's gradients are "
            "still scaled; nothing was applied. Create a SparseOptimizer over the modules (not fused=True) and call "
            "scaler.step(optimizer), or autocast to bfloat16, which needs no GradScaler"
        )
    current = _running(task)
    if current is None:
        with _making:
            current = _running(task)
            if current is None:
                current = _Pass()
                current.queued = True
                # The engine keeps the callback, and thereby the pass, alive; a backward that fails drops both.
                _queue(current.end)
                _passes[task] = weakref.ref(current, lambda _: _passes.pop(task, None))
    return current


def _running(task: int) -> _Pass | None:
    ref = _passes.get(task)
    return None if ref is None else ref()


def run(units: Sequence[Unit]) -> None:
    """Make one step of the tables of each group, in backward."""
    if len(units) == 1 and units[0].group.traits.shares is None:  # the usual case
        (unit,) = units
        if is_empty(unit):
            return
        touched = unit.touched()
        if have_one_clock(touched) and lane_of(touched) is None:
            unit.group.update(unit.parts, step=next_step(unit.group, touched))
            return

    def updates() -> Iterator[tuple[Unit, Step]]:
        for unit in units:
            if is_empty(unit):
                continue
            touched = unit.touched()
            for one in by_clock(unit, touched):
                yield one, next_step(one.group, touched if one is unit else one.touched())

    update_all(updates())


def _after_fork() -> None:
    global _making
    _making = threading.Lock()  # the thread that may hold it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)
