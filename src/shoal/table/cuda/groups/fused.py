"""`FusedGroup`: GPU tables with the same row layout that are read and updated together, with or without shared memory.

One launch finds the ids of all tables, one pools their rows into the output, and a short sequence updates them. Nothing
waits for the device, and memory that a captured graph reads never moves: see `Described` and `Control`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table.checkpoint.copies import WAITING, about_to_change
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.described import Described
from shoal.table.cuda.groups.control import Control
from shoal.table.cuda.groups.plan import Plan
from shoal.table.cuda.groups.pools import pool_bags
from shoal.table.cuda.groups.room import Room
from shoal.table.cuda.groups.single import SingleGroup
from shoal.table.cuda.groups.sums import Source, Sums
from shoal.table.cuda.judge import GroupReport
from shoal.table.cuda.kernels import located as lk
from shoal.table.cuda.launch import Bound, cdiv, power_of_2
from shoal.table.cuda.shapes import find_shape, row_shape
from shoal.table.cuda.storage.turn import share_turn
from shoal.table.protocol import EVERY, Features, Found, Missing, Part, Step, Traits, marks_shape

if TYPE_CHECKING:
    from shoal.table.cuda.table import CudaHashTable

_PLANS = 64


class FusedGroup:
    """Tables with equal `group_key`: one layout and optimizer; each has its own seed, rates and schedules."""

    def __init__(self, tables: tuple[CudaHashTable, ...]) -> None:
        self.tables = tables
        self.device, self.layout = tables[0].device, tables[0]._layout
        self.dim = self.layout.dim
        cuda = self.device.type == "cuda"
        self.traits = Traits(
            device=self.device, capturable=cuda, local_state=True, checks_bags=cuda, counts_bags=True, pools=EVERY
        )
        self._storages = list({id(table._storage): table._storage for table in tables}.values())
        share_turn(self._storages)
        self._places = [(self._storages.index(table._storage), table._number) for table in tables]
        self.described, self.control = Described(tables), Control(tables)
        names = [table.name for table in tables]
        whose = (
            f"table {names[0]!r}" if len(names) == 1 else f"tables {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
        )
        self._names = whose
        self.report = GroupReport(whose, self)
        for table in tables:
            table._judge.reports.append(self.report)
        self._versions = power_of_2(len(tables))
        self.mark_bytes = marks_shape(0, self.dim)[1]
        self.no_marks = torch.zeros(16, dtype=torch.uint8, device=self.device)
        """The argument for kernels that do not read marks."""
        self._plans: dict[Features, Plan] = {}
        self._kernels: dict[Any, Bound] = {}
        self._sums = Sums(self)
        self._one_by_one = SingleGroup(tables)
        self._room = Room(self._storages, self._places, self.report.words)
        self._stream: int | None = None
        self.capturing = False
        """Whether the current call is captured in a CUDA graph."""

    # --- turns --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> FusedGroup:
        """Only one call at a time uses the tables; the current stream waits for the stream of the previous call."""
        first = self._storages[0]
        first.__enter__()
        if self.device.type != "cuda":
            return self
        try:
            self.capturing = torch.cuda.is_current_stream_capturing()
            if first.turn.stream != self._stream and not self.capturing:
                self._stream = first.turn.stream
                stream = torch.cuda.current_stream(self.device)
                for tensor in (self.described.origin, self.described.words, self.control.words, self._sums.tally):
                    tensor.record_stream(stream)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._storages[0].__exit__()

    def describe(self) -> None:
        """Updates the descriptions of the tables for the kernels."""
        if self.capturing:
            self.described.captured = True
            if self.described.stale:
                raise UnsupportedError(f"{self._names}: run the step once before the capture")
            return
        if self.described.stale:
            self.described.refresh()

    def plan(self, features: Features) -> Plan:
        found = self._plans.get(features)
        if found is None:
            if capturing(self.device):
                raise UnsupportedError(f"{self._names}: run the step once before the capture")
            if len(self._plans) >= _PLANS and not self.described.captured:
                self._plans.clear()
            found = self._plans[features] = Plan(features, len(self.tables), self.dim, self.device)
        return found

    def kernel(self, key: Any, fn: Any, constants: dict[str, Any]) -> Bound:
        """A kernel with constants that are determined by the key."""
        made = self._kernels[key] = Bound.of(fn, **constants)
        return made

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        """As `Group.find`: row numbers, and the version of each storage, which changes when rows are freed.

        Raises errors that kernels have found in the arguments of previous calls.
        """
        self.report.check()
        plan = self.plan(features)
        n = self._check_ids(ids)
        where = torch.empty(n, dtype=torch.int32, device=self.device)
        versions = torch.empty(self._versions, dtype=torch.int64, device=self.device)
        if n == 0:
            return Found(ids, counts, where, versions)
        with self:
            self.describe()
            each = 0 if plan.alone or not plan.few else plan.each(counts)
            begins = ids if plan.alone else counts if each else plan.begins(counts, n, self.capturing)
            padding = features.padding
            key = ("find", plan.alone, plan.few if each else 0, padding is not None)
            kernel = self._kernels.get(key)
            block, warps = find_shape(1)
            if kernel is None:
                kernel = self.kernel(key, lk.find, {
                    "SINGLE": plan.alone, "BORDERS": plan.few if each else 0, "PAD": padding is not None,
                    "TABLES": self._versions, "BLOCK": block, "num_warps": warps,
                })  # fmt: skip
            described = self.described
            kernel(
                cdiv(n, block), ids, begins, plan.tables, described.words, described.origin, where, versions, n,
                plan.only, plan.features, plan.jump, each, 0 if padding is None else padding,
            )  # fmt: skip
        return Found(ids, counts, where, versions)

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        """As `Group.rows`."""
        plan, ids = self.plan(features), found.ids
        n = self._check_ids(ids)
        out = torch.empty(n, self.dim, dtype=torch.float32, device=self.device)
        if n == 0:
            return out
        with self:
            self.describe()
            begins = ids if plan.alone else plan.begins(found.counts, n, self.capturing)
            described = self.described
            for s in self.layout.segments:
                block, warps = row_shape(s.width)
                initial = missing == "initial" and s.init != 0
                key = ("rows", plan.alone, initial, s.index)
                kernel = self._kernels.get(key) or self.kernel(key, lk.read, {
                    "SINGLE": plan.alone, "INITIAL": initial, "INIT": s.init, "INDEX": s.index, "D": s.dim,
                    "WIDTH": s.width, "STRIDE": self.layout.stride, "WEIGHT": s.weight, "DIM": self.dim, "BLOCK": block,
                    "num_warps": warps,
                })  # fmt: skip
                kernel(
                    cdiv(n, block), ids, begins, plan.tables, described.words, described.origin, found.where,
                    found.came, out, n, plan.only, plan.features, plan.jump, *s.first,
                )  # fmt: skip
        return out

    def pooled(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> None:
        """As `Group.pooled`: one launch per segment of a row and per way to pool."""
        plan, ids = self.plan(features), found.ids
        n = self._check_ids(ids)
        bags = self._check_bags(plan, offsets, weights, out, "out", n)
        if marks is not None:
            self.check_marks(marks, n)
        if bags == 0:
            return
        with self:
            self.describe()
            pool_bags(self, plan, found, features.padding is not None, offsets, weights, out, marks, missing)

    # --- updating -----------------------------------------------------------------------------------------------------

    def set_step(self, step: Step) -> None:
        """Sets the step, time and learning rates that captured updates read when their graph is next replayed."""
        with self:
            self._set(step)
            self.described.refresh()

    def _set(self, step: Step) -> None:
        if self.described.stale:
            self.control.forget()
        self.control.set(step, self.capturing)

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        """As `Group.update`. A captured update uses the last `set_step`, or the tensors in ``step``."""
        self.report.check()
        parts = [part for part in parts if part.found.ids.numel()]
        if not parts:
            return
        if WAITING:
            about_to_change(*self.tables)
        marked = [table for table in self.tables if table._marks is not None]
        for table in marked:
            table._check_marks()
        if each != "sum" or any(table._budget and table._budget.collected for table in self.tables):
            self._one_by_one.update(parts, step=step, each=each)
            return
        sources = [Source(self, part) for part in parts]
        with self:
            self._set(step)
            number = self._expect(parts)
            self.describe()
            self._sums.update(self, sources, number, bool(marked))
            self._storages[0].turn.writes += 1
            if number >= 0:
                self._room.launched()

    def _expect(self, parts: Sequence[Part]) -> int:
        """Makes room for ids that may be new; returns the number of the update, -1 for a captured one."""
        if self.capturing:
            for storage in self._storages:
                storage.expect_replays()
            return -1
        need = self._need(parts[0]) if len(parts) == 1 else sum(map(self._need, parts))
        return self._room.take(need, self._make_room, parts)

    def _need(self, part: Part) -> int:
        """The most ids in a part for one table, or for tables that share their rows."""
        plan, counts, n = self.plan(part.features), part.found.counts, part.found.ids.numel()
        if len(self._storages) == 1 or plan.alone or not plan.known(counts):
            return n
        sizes = tuple(counts.tolist())
        need = plan.needs.get(sizes)
        if need is None:
            if len(plan.needs) >= _PLANS:
                plan.needs.clear()
            need = plan.needs[sizes] = max(map(sum, self._by_storage([(plan, sizes)])))
        return need

    def _by_storage(self, batches: Sequence[tuple[Plan, tuple[int, ...]]]) -> list[list[int]]:
        """The number of ids of each table of each storage."""
        counts = [[0] * storage.tables for storage in self._storages]
        for plan, sizes in batches:
            for table, size in zip(plan.tables_of, sizes, strict=True):
                place, number = self._places[table]
                counts[place][number] += size
        return counts

    def _make_room(self, parts: Sequence[Part]) -> None:
        """Makes room as if all ids were new; if that is too much, for the exact number of ids of each table."""

        def counted(wait: bool) -> list[list[int]]:
            plans = [self.plan(part.features) for part in parts]
            sizes = [plan.sizes(part.found, part.features, wait) for plan, part in zip(plans, parts, strict=True)]
            return self._by_storage(list(zip(plans, sizes, strict=True)))

        counts, least = counted(wait=False), None
        for place, storage in enumerate(self._storages):
            try:
                try:
                    storage.make_room(counts[place])
                except CapacityError:
                    least = least or counted(wait=True)
                    storage.make_room(least[place])
            except CapacityError as error:
                raise CapacityError(
                    f"{self._names}: no room for {sum(counts[place])} more ids: {error}; nothing was changed. Evict "
                    "rows, or use an optimizer with less state"
                ) from None

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _check_ids(self, ids: Tensor) -> int:
        if ids.dtype != torch.int64 or ids.device != self.device or not ids.is_contiguous():
            raise ConfigError(
                f"{self._names}: ids must be contiguous int64 on {self.device}, got {ids.dtype} on {ids.device}"
            )
        return ids.numel()

    def check_marks(self, marks: Tensor, n: int) -> None:
        shape = marks_shape(n, self.dim)
        if marks.dtype != torch.uint8 or marks.shape != shape or not marks.is_contiguous():
            raise ConfigError(
                f"{self._names}: marks must be contiguous uint8 {list(shape)}, got {marks.dtype} {list(marks.shape)}"
            )

    def _check_bags(self, plan: Plan, offsets: Tensor, weights: Tensor | None, rows: Tensor, what: str, n: int) -> int:
        """Checks the arguments; returns the number of bags."""
        bags = offsets.numel() - 1
        if bags % plan.features or bags < 0 or (n and not bags):
            raise ConfigError(
                f"{self._names}: offsets must have one more element than there are bags, and each of {plan.features} "
                f"features the same number of bags, got {offsets.numel()} elements for {n} ids"
            )
        if offsets.dtype != torch.int64 or offsets.device != self.device:
            raise ConfigError(
                f"{self._names}: offsets must be int64 on {self.device}, got {offsets.dtype} on {offsets.device}"
            )
        if rows.dtype != torch.float32 or rows.shape != (bags // plan.features, plan.width) or rows.stride(1) != 1:
            raise ConfigError(
                f"{self._names}: {what} must be float32 [{bags // plan.features}, {plan.width}], got {rows.dtype} "
                f"{list(rows.shape)}"
            )
        if weights is not None and (weights.dtype != torch.float32 or weights.numel() != n):
            raise ConfigError(
                f"{self._names}: weights must be {n} float32 numbers, got {weights.numel()} of {weights.dtype}"
            )
        return bags
