"""`CudaHashTable`: a `HashTable` with its rows in GPU memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import UnsupportedError
from shoal.table.arguments import as_ids, as_int
from shoal.table.checkpoint.copies import about_to_change
from shoal.table.clock import now
from shoal.table.config.native import default_expiry_s, slot_expiry_s
from shoal.table.cuda import bridge, compiled, groups
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.storage import FRESH, ROW
from shoal.table.cuda.stored import StoredTable, in_turn
from shoal.table.cuda.updates import Update, update_rows
from shoal.table.reference.filters import hash_id
from shoal.table.table import HashTable


class CudaHashTable(StoredTable):
    """The class of ``HashTable(..., device="cuda")``: the same calls, on tensors of that device.

    Lookups, updates and inserts run on the current stream and do not wait for the device as long as there is room for
    the ids (`reserve`): the host keeps an upper bound of their number, and only checks when they might not fit. Calls
    can come from several threads and streams; each sees the effects of the previous one. Calls that return a Python
    number or use a filter wait for the device.

    With ``on_bad_gradient="raise"``, a call with a NaN or infinite gradient changes nothing, and a later call or
    `as_op` raises the error, once the device has reported it. The same holds for the values of `assign`.

    With ``deterministic``, the sums of equal ids' gradients are bitwise equal in every run; without it, the order of
    addition can depend on the positions of rows.
    """

    # --- reading ------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        ids: Tensor,
        use_multi_threads: bool = False,
        enable_dedup: bool = False,
        *,
        insert_missing: bool = False,
        req_time: Any = None,
    ) -> Tensor:
        """As `HashTable.lookup`, on the table's device."""
        if insert_missing:
            self.check_trains("lookup with insert_missing")
        if torch.compiler.is_compiling():
            seconds = compiled.NO_TIME if req_time is None else req_time
            return torch.ops.shoal.gpu_table_lookup(ids, self._token, self._handle, insert_missing, seconds)
        return self._lookup(self._ids(ids), insert_missing, self._time(req_time) if insert_missing else 0)

    @in_turn
    def _lookup(self, ids: Tensor, insert_missing: bool, seconds: int) -> Tensor:
        if not insert_missing:
            return self._read(self._storage.find(ids, self._number, "weights"))
        about_to_change(self)
        drop = self._filtered(ids, dedup=False, remember=True)
        rows = self._insert(ids, time=seconds, only_new=True, drop=drop)
        self._host.raise_max_update_time(seconds)
        self._version += 1
        out = torch.empty(ids.numel(), self.dim_size, dtype=torch.float32, device=self.device)
        refused = self._budget is not None and not self._host.has_filter()  # ids that a filter rejects give zeros
        self._storage.arena.start_fresh(rows, ids, self._seed, out=out, refused=refused)
        self._mark(ids, torch.where(rows & FRESH != 0, rows, -1), trained=False)
        return self._read(self._storage.arena.gather(rows, self.dim_size, out, refused))

    def group_key(self) -> Hashable:
        """Tables with equal keys can form a group (`shoal.table.protocol`)."""
        return groups.group_key(self)

    @staticmethod
    def make_group(tables: tuple[Any, ...]) -> Any:
        """The group of tables with equal keys."""
        return groups.make_group(tables)

    def read(self, ids: Tensor, *, initial: bool) -> Tensor:
        """`lookup`; with ``initial``, an unknown id gives its initial row, or zeros if the table has a filter."""
        rows = self._lookup(ids, False, 0)
        if not initial or self.serving or self._host.has_filter() or ids.numel() == 0:
            return rows
        unknown = ~self.contains(ids)
        with self._storage as storage:
            first = self._read(storage.arena.first_rows(ids, self._seed))
        return torch.where(unknown[:, None], first, rows)

    def _read(self, weights: Tensor) -> Tensor:
        """Converts stored weights to the values that lookups return."""
        layout = self._storage.layout
        if layout.plain:
            return weights
        scales = self._host.scales()
        for s in layout.segments:
            part = weights[:, s.weight : s.weight + s.dim]
            if s.codec == "fixed_r8":
                quantum = s.native.r / 128
                code = torch.trunc((part + torch.copysign(part.new_full((), quantum * 0.5), part)) / quantum)
                part.copy_(torch.nan_to_num(code, nan=0.0, posinf=127, neginf=-128).clamp(-128, 127) * quantum)
            elif s.codec == "one_bit":
                part.copy_(s.native.amplitude * torch.tanh(scales[s.index] * part))
        return weights

    @in_turn
    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `HashTable.find`. Waits for the device."""
        there = as_ids(ids, self.name).to(self.device)
        rows = self._storage.find(there, self._number, "rows")
        weights = self._read(self._storage.find(there, self._number, "weights"))
        return weights.cpu(), (rows >= 0).cpu()

    @in_turn
    def contains(self, ids: Tensor) -> Tensor:
        """bool ``[n]``: which ids have a row."""
        return self._storage.find(self._ids(ids), self._number, "rows") >= 0

    @in_turn
    def lookup_entry(self, ids: Tensor) -> list[bytes]:
        """Each id's row as a serialized ``EntryDump`` without its id; empty bytes for an unknown id."""
        self.check_trains("lookup_entry")
        ids = self._ids(ids)
        rows = self._storage.find(ids, self._number, "rows")
        known = rows >= 0
        staged = _core.Table(self._storage.layout.native, 0)
        bridge.to_host(self._storage, ids[known], rows[known], staged)
        return _core.lookup_entry(staged, ids.tolist())

    # --- writing ------------------------------------------------------------------------------------------------------

    def assign(
        self, ids: Tensor, values: Tensor, req_time: Any = None, *, scores: Any = None, distinct: bool = False
    ) -> HashTable:
        """As `HashTable.assign`. An id that occurs twice despite ``distinct`` gets parts of both values."""
        return self._assign(ids, values, req_time, scores, add=False, distinct=distinct)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None, *, scores: Any = None) -> HashTable:
        """Adds to the weights of ``ids``, every occurrence in order; a new id starts from its initializer."""
        return self._assign(ids, values, req_time, scores, add=True)

    @in_turn
    def _assign(
        self, ids: Any, values: Any, req_time: Any, scores: Any, add: bool, distinct: bool = False
    ) -> HashTable:
        ids, values, seconds = self._write_arguments(ids, values, req_time)
        numbers = self._scores(ids, scores, seconds)
        about_to_change(self)
        self._judge.check()
        how = "raise" if self.finite_values else "ignore"
        gate, _ = self._judge.judge(values, self.dim_size, how, "values")
        if self._host.has_filter():  # the filter counts occurrences, so it must not see rejected ids
            self._judge.check(wait=True)
        drop = self._filtered(ids, dedup=False, remember=add)
        if self._layout.skip_zero and not add:
            ids, values, drop = self._without_zeros(ids, values, drop)
        rows = self._insert(ids, time=seconds, drop=drop, gate=gate, scores=numbers)
        self._host.raise_max_update_time(seconds)
        self._version += 1
        arena, layout = self._storage.arena, self._layout
        if add or layout.words > layout.dim:
            arena.start_fresh(rows, ids, self._seed)
        elif not distinct and not layout.serving:  # rows are overwritten completely
            rows = torch.where(rows >= 0, rows & ROW, rows)
        if distinct and not layout.serving:
            arena.scatter(rows, values.view(-1, self.dim_size))
        else:
            arena.assign(rows, values, add)
        self._mark(ids, rows, trained=False)
        return self

    def _without_zeros(self, ids: Tensor, values: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """Removes ids whose last value is zeros; returns the other distinct ids and their last values.

        Waits for the device.
        """
        distinct, group = torch.unique(ids, return_inverse=True)
        at = torch.arange(ids.numel(), device=self.device)
        if drop is not None:
            at = torch.where(drop == 0, at, -1)
        last = torch.full((distinct.numel(),), -1, device=self.device).scatter_reduce_(0, group, at, "amax")
        last = last[last >= 0]
        values = values.view(-1, self.dim_size)[last]
        zero = (values * values).sum(1) < torch.finfo(torch.float32).tiny
        ids = ids[last]
        self.erase(ids[zero])
        return ids[~zero], values[~zero], None

    def apply_gradients(
        self,
        ids: Tensor,
        grads: Tensor,
        global_step: Any = 0,
        use_multi_threads: bool = False,
        enable_dedup: bool = False,
        req_time: Any = None,
        *,
        scores: Any = None,
        distinct: bool = False,
    ) -> HashTable:
        """As `HashTable.apply_gradients`. ``distinct`` promises that no id occurs twice, which saves a sort.

        An id that occurs twice despite ``distinct`` makes one of its steps, or a mixture of both.
        """
        self.check_trains("apply_gradients")
        if torch.compiler.is_compiling():
            seconds = compiled.NO_TIME if req_time is None else req_time
            given = None if scores is None else torch.as_tensor(scores, dtype=torch.float32, device=ids.device)
            torch.ops.shoal.gpu_table_apply(
                ids, grads, given, self._token, self._handle, global_step, enable_dedup, seconds, distinct
            )
            return self
        ids, grads, seconds = self._write_arguments(ids, grads, req_time, "grads")
        step = as_int(global_step, self.name, "global_step")
        numbers = self._scores(ids, scores, seconds)
        self._apply(ids, grads, self.rates(step), step, enable_dedup, seconds, numbers, distinct=distinct)
        return self

    @in_turn
    def _apply(
        self,
        ids: Tensor,
        grads: Tensor,
        rates: Sequence[float],
        step: int,
        dedup: bool,
        seconds: int,
        scores: Tensor | None = None,
        *,
        distinct: bool = False,
        gate: Tensor | None = None,
        judged: bool = False,
    ) -> None:
        """`apply_gradients` with checked arguments. ``judged``: gradients of tables that raise have been checked."""
        self._check_step(step)
        self._check_marks()
        about_to_change(self)
        self._judge.check()
        drop = None
        if self.on_bad_gradient == "skip" or not judged:
            gate, drop = self._judge.judge(grads, self.dim_size, self.on_bad_gradient)
            if self._host.has_filter():  # the filter counts occurrences, so it must not see rejected ids
                self._judge.check(wait=True)
        drop = self._filtered(ids, dedup=dedup, remember=False, skip=drop)
        if drop is not None and self._host.has_filter() and bool((drop != 0).all()):
            self._host.raise_max_update_time(seconds)
            return
        rows = self._insert(ids, time=seconds, drop=drop, gate=gate, scores=scores)
        self._host.raise_max_update_time(seconds)
        if ids.numel() == 0:
            return
        self._version += 1
        self._move_scales(step)
        every_rate = [[]] * self._number + [list(rates)]
        update_rows(self._storage, ids, rows, self._number, grads, self._update(every_rate, step), dedup, distinct,
                    self.deterministic)  # fmt: skip
        self._mark(ids, rows)

    def _update(self, rates: Sequence[Sequence[float]], step: int) -> Update:
        calls = self._host.calls()
        self._host.set_calls(calls + 1)
        noise = hash_id(self._seed + calls) if self._rounds else 0
        return Update(rates, self._host.scales(), step, noise, self._seed)

    def _move_scales(self, step: int) -> None:
        """Equivalent to `Table::update_scales` in the native core."""
        if self._storage.layout.plain or step < 0:
            return
        scales = self._host.scales()
        for s in self._storage.layout.segments:
            if s.codec == "one_bit" and s.native.step_size > 0 and step % s.native.step_size == 0:
                scales[s.index] = min(s.native.init_scale * (1 + 0.005 * step) ** 0.5, s.native.max_scale)
        self._host.set_scales(scales)

    def _mark(self, ids: Tensor, rows: Tensor, trained: bool = True) -> None:
        if self._marks is not None:
            self._marks.add(ids, rows, trained)

    def _check_marks(self) -> None:
        if self._marks is not None and capturing(self.device):
            raise UnsupportedError(
                f"table {self.name!r}: a CUDA graph cannot report which ids it writes to the table's replicas and "
                "trackers; train without a graph"
            )

    # --- checks before a write ----------------------------------------------------------------------------------------

    def _filtered(self, ids: Tensor, *, dedup: bool, remember: bool, skip: Tensor | None = None) -> Tensor | None:
        """uint8: which ids the filter or ``skip`` rejects; None: none. Waits for the device if there is a filter."""
        if not self._host.has_filter() or ids.numel() == 0:
            return skip
        unknown = self._storage.find(ids, self._number, "rows") < 0
        if skip is not None:
            unknown &= skip == 0
        asked = ids[unknown].cpu()
        drop = torch.zeros(asked.numel(), dtype=torch.uint8, device="cpu")
        if asked.numel():
            self._host.filtered(asked.data_ptr(), asked.numel(), dedup, remember, drop.data_ptr())
        out = torch.zeros(ids.numel(), dtype=torch.uint8, device=self.device) if skip is None else skip.clone()
        out[unknown] = drop.to(self.device)
        return out

    @property
    def skipped_gradients(self) -> int:
        """Occurrences skipped because of a NaN or infinite gradient, with ``on_bad_gradient="skip"``.

        Waits for the device.
        """
        return self._judge.skipped

    @skipped_gradients.setter
    def skipped_gradients(self, count: int) -> None:
        if hasattr(self, "_judge"):  # else the table is being built
            self._judge.skipped = count

    # --- removal and the rest -----------------------------------------------------------------------------------------

    @in_turn
    def reinitialize(self, ids: Tensor) -> tuple[HashTable, Tensor]:
        """Resets weights and optimizer state; returns int32 ``[n]``, 1 if an id existed and 0 if it was inserted."""
        ids = self._ids(ids)
        self._check_marks()
        about_to_change(self)
        seconds = now()
        rows = self._insert(ids, time=seconds if self.clocked else int(seconds))
        self._version += 1
        fresh = (rows >= 0) & (rows & FRESH != 0)
        existed = torch.ones(ids.numel(), dtype=torch.int32, device=self.device)
        if ids.numel():
            # The first of equal new ids was inserted; the others existed by then.
            distinct, group = torch.unique(rows & ROW, return_inverse=True)
            first = torch.full((distinct.numel(),), ids.numel(), device=self.device)
            first.scatter_reduce_(0, group, torch.arange(ids.numel(), device=self.device), "amin")
            new = torch.zeros(distinct.numel(), dtype=torch.bool, device=self.device)
            new[group[fresh]] = True
            existed[first[new]] = 0
        self._storage.arena.start_fresh(rows, ids, self._seed, every=True)
        self._mark(ids, rows)
        return self, existed

    @in_turn
    def erase(self, ids: Tensor) -> int:
        """Removes ids; returns how many of them had a row. Waits for the device."""
        ids = self._ids(ids)
        about_to_change(self)
        self._version += 1
        known = ids[:0]
        if self.reports_removed:
            known = torch.unique(ids[self._storage.find(ids, self._number, "rows") >= 0])
            self._changes.remove(known)
        erased = self._storage.erase(ids, self._number)
        if self._marks is not None:
            self._marks.remove(known)
        return erased

    @in_turn
    def evict(self, max_update_time: Any = None) -> int:
        """Removes rows that have expired at ``max_update_time`` (default: the table's); returns their number."""
        now = self.max_update_time if max_update_time is None else as_int(max_update_time, self.name, "max_update_time")
        about_to_change(self)
        config = self.table_config.slot_expire_time_config
        limits = torch.full((32768,), default_expiry_s(config), dtype=torch.int64, device="cpu")
        for slot, seconds in slot_expiry_s(config).items():
            limits[slot] = seconds
        limits, stale_slots, gone = limits.to(self.device), [], []
        for ids, rows, slots in self._storage.chunks(self._number):
            stale = now - self._storage.arena.row_times(rows) >= limits[(ids >> 48) & 0x7FFF]
            stale_slots.append(slots[stale])
            self._changes.remove(ids[stale])
            gone.append(ids[stale])
        self._version += 1
        erased = self._storage.erase_slots(torch.cat(stale_slots), self._number)
        if self._marks is not None:
            self._marks.remove(torch.cat(gone))
        return erased

    @in_turn
    def clear(self) -> HashTable:
        """Removes all rows and frees their memory (in a `MultiHashTable`, for its other tables)."""
        about_to_change(self)
        self._version += 1
        previous = self._ids_to_report()
        self._storage.clear(self._number)
        self._changes.start_over()
        self._replaced(previous)
        return self
