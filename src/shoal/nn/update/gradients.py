"""Pending gradients of rows: as unexpanded parts of groups, or as sums by id once they are read."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal import _core
from shoal.nn.update.units import RowsByTable, Unit, expand, row_units
from shoal.table.protocol import Found, Group, Part, group_of

if TYPE_CHECKING:
    from shoal.nn.keeper import TableKeeper

# Rows are summed by id once there are this many and twice as many as after the last sum, so that a long accumulation
# only needs memory for its distinct ids.
_SUM_ROWS = 1 << 20
_lock = threading.RLock()


class Gradients:
    """``(ids, grads)`` of one table; ids may repeat. Safe to use from several threads."""

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        self._dim, self._device = dim, device
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._rows = 0
        self._sum_at = _SUM_ROWS
        self._summed = True  # ids are distinct
        self.came = False
        """Whether a gradient was added, even one without ids."""

    def add(self, ids: Tensor, grads: Tensor) -> None:
        """Keep both tensors, which must not be changed afterwards."""
        with _lock:
            self.came = True
            if not ids.numel():
                return
            self._parts.append((ids, grads))
            self._rows += ids.numel()
            self._summed = False
            if self._rows > self._sum_at:
                self._sum()
                self._sum_at = max(_SUM_ROWS, 2 * self._rows)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Remove and return everything, not summed by id; None if no gradient was added."""
        with _lock:
            parts, self._parts, self._rows = self._parts, [], 0
            came, self.came = self.came, False
            self._sum_at, self._summed = _SUM_ROWS, True
        return self._joined(parts) if came else None

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return distinct ids and the sums of their gradients, which stay pending and can be changed in place."""
        with _lock:
            self._sum()
            return self._joined(self._parts)

    def __len__(self) -> int:
        """Number of pending rows, repeated ids included."""
        return self._rows

    def _sum(self) -> None:
        if not self._summed:
            self._parts = [sum_by_id(*self._joined(self._parts))]
            self._rows = self._parts[0][0].numel()
            self._summed = True

    def _joined(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if not parts:
            no_grads = torch.empty(0, self._dim, dtype=torch.float32, device=self._device)
            return torch.empty(0, dtype=torch.int64, device=self._device), no_grads
        if len(parts) == 1:
            return parts[0]
        return torch.cat([ids for ids, _ in parts]), torch.cat([grads for _, grads in parts])


def sum_by_id(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Return distinct ids, by first occurrence, and the sums of their rows, in new tensors."""
    n, dim = grads.shape
    if ids.is_cuda:
        distinct, place = torch.unique(ids, return_inverse=True)
        return distinct, grads.new_zeros(distinct.shape[0], dim).index_add_(0, place, grads)
    out_ids = torch.empty(n, dtype=torch.int64, device="cpu")
    out = torch.empty(n, dim, dtype=torch.float32, device="cpu")
    distinct = _core.sum_by_id(ids.data_ptr(), n, grads.data_ptr(), dim, out_ids.data_ptr(), out.data_ptr())
    return out_ids[:distinct].clone(), out[:distinct].clone()


class Waiting:
    """The pending parts of one group, shared by all its tables."""

    def __init__(self, group: Group, keepers: tuple[TableKeeper, ...]) -> None:
        self.collective = group.traits.collective
        self.dim = group.dim
        self.keepers = keepers
        self.numbered: list[tuple[int, Part]] = []
        self.ids = 0
        self._group = weakref.ref(group)

    def parts(self) -> list[Part]:
        """Return the parts in the order of the forwards, not of the backward passes."""
        return [part for _, part in sorted(self.numbered, key=lambda numbered: numbered[0])]

    def unit(self) -> Unit:
        """Return the update with the forward's group or, if its module was deleted, with an equal one."""
        group = self._group()
        if group is not None:
            return Unit(group, self.keepers, self.parts())
        group = group_of([keeper.table for keeper in self.keepers])
        parts = []
        for part in self.parts():
            found = group.find(part.found.ids, part.found.counts, part.features, missing="zeros")
            parts.append(part._replace(found=found))
        return Unit(group, self.keepers, parts)


class Pending:
    """The pending gradients of one table."""

    def __init__(self, keeper: TableKeeper) -> None:
        self.rows = Gradients(keeper.dim, keeper.device)
        """Expanded gradients: those that were read, or whose group could not be updated as one."""
        self.waiting: dict[tuple[int, ...], Waiting] = {}
        self._keeper = weakref.ref(keeper)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return distinct ids and the sums of their gradients, which stay pending and can be changed in place."""
        with _lock:
            _expand_all(self.waiting.values())
            return self.rows.sums()

    def clear(self) -> None:
        """Drop the pending gradients of this table."""
        keeper = self._keeper()
        if keeper is not None:
            clear_pending([keeper])


def add_waiting(group: Group, keepers: tuple[TableKeeper, ...], part: Part, number: int) -> None:
    """Keep a part of forward ``number`` until a step; its tensors must not be changed afterwards."""
    key = tuple([keeper.handle for keeper in keepers])
    with _lock:
        waiting = keepers[0].pending.waiting.get(key)
        if waiting is None:
            waiting = Waiting(group, keepers)
            for keeper in keepers:
                keeper.pending.waiting[key] = waiting
        waiting.numbered.append((number, part))
        waiting.ids += part.found.ids.numel()
        if waiting.ids > _SUM_ROWS and not waiting.collective:  # ranks must not differ in this
            _expand_all([waiting])


def detached(part: Part) -> Part:
    """Return the part with copies of the tensors that the user can change before the step."""
    offsets, weights = (None if one is None else one.clone() for one in (part.offsets, part.weights))
    ids, counts, where, came = part.found
    if counts.shape[0] != len(part.features.tables):  # counts are the offsets
        counts = counts.clone() if offsets is None else offsets
    found = Found(ids.clone(), counts, where, came)
    return Part(found, part.features, part.grad.clone(), offsets, weights, part.marks)


def clear_pending(keepers: Sequence[TableKeeper]) -> None:
    """Drop the pending gradients of some tables; those of others stay."""
    with _lock:
        handles = {keeper.handle for keeper in keepers}
        for waiting in _waiting_of(keepers):
            if all(keeper.handle in handles for keeper in waiting.keepers):
                _remove(waiting)
            else:
                _expand_all([waiting])
        for keeper in keepers:
            keeper.pending.rows.take()


def take_pending(keepers: Sequence[TableKeeper]) -> list[Unit]:
    """Remove and return the pending updates of some tables; each table is in only one of them."""
    with _lock:
        handles = {keeper.handle for keeper in keepers}
        uses = dict.fromkeys(handles, 0)
        for keeper in keepers:
            uses[keeper.handle] += keeper.pending.rows.came
        found = _waiting_of(keepers)
        for waiting in found:
            for keeper in waiting.keepers:
                uses[keeper.handle] = uses.get(keeper.handle, 0) + 1
        complete = []
        for waiting in found:
            if all(keeper.handle in handles and uses[keeper.handle] == 1 for keeper in waiting.keepers):
                complete.append(waiting)
                _remove(waiting)
            else:
                _expand_all([waiting])
        rows: RowsByTable = {}
        for keeper in keepers:
            taken = keeper.pending.rows.take()
            if taken is not None:
                rows[keeper] = [taken]
    return [waiting.unit() for waiting in complete] + row_units(rows)


def put_back(unit: Unit) -> None:
    """Return an update that `take_pending` removed to the pending ones."""
    if unit.rows is None:
        for part in unit.parts:
            add_waiting(unit.group, unit.keepers, part, -1)  # before later ones, in their own order
        return
    for keeper, parts in unit.rows.items():
        for ids, grads in parts:
            keeper.pending.rows.add(ids, grads)


def _waiting_of(keepers: Iterable[TableKeeper]) -> list[Waiting]:
    return list({id(waiting): waiting for keeper in keepers for waiting in keeper.pending.waiting.values()}.values())


def _remove(waiting: Waiting) -> None:
    key = tuple([keeper.handle for keeper in waiting.keepers])
    for keeper in waiting.keepers:
        keeper.pending.waiting.pop(key, None)


def _expand_all(several: Iterable[Waiting]) -> None:
    for waiting in list(several):
        _remove(waiting)
        for part in waiting.parts():
            for table, ids, grads in expand(part, waiting.dim):
                waiting.keepers[table].pending.rows.add(ids, grads)


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that may hold it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)


def is_empty(unit: Unit) -> bool:
    """Whether an update has no ids and involves no other rank."""
    for part in unit.parts:
        if part.found.ids.numel():
            return False
    return not unit.group.traits.collective
