"""`Sums`: the launches that apply the gradients of bags and rows to the rows of a group's tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.cuda.backend import interpreted
from shoal.table.cuda.groups.evictions import Evictions
from shoal.table.cuda.groups.plan import jump_of
from shoal.table.cuda.kernels import aimed as ak
from shoal.table.cuda.kernels import changed as ck
from shoal.table.cuda.launch import cdiv, power_of_2
from shoal.table.cuda.layout import Segment
from shoal.table.cuda.shapes import claim_shape, crossing_shape, pool_shape, row_shape, start_shape, summed_shape
from shoal.table.protocol import SUM, Part

if TYPE_CHECKING:
    from shoal.table.cuda.groups.fused import FusedGroup

_JUDGES = {"raise": ck.RAISE.value, "skip": ck.SKIP.value, "ignore": -1}


class Source:
    """A checked part and the location of its gradients."""

    __slots__ = ("aimed", "bags", "each", "grad", "kind", "n", "offsets", "part", "plan", "width")

    def __init__(self, group: FusedGroup, part: Part) -> None:
        self.part, self.plan = part, group.plan(part.features)
        self.n = group._check_ids(part.found.ids)
        grad = part.grad if part.grad.stride(-1) == 1 and part.grad.stride(0) >= part.grad.shape[1] else None
        self.grad: Tensor = part.grad.contiguous() if grad is None else grad
        if part.offsets is None:
            if self.grad.dtype != torch.float32 or self.grad.shape != (self.n, group.dim):
                raise ConfigError(
                    f"{group._names}: gradients of rows must be float32 [{self.n}, {group.dim}], got {part.grad.dtype} "
                    f"{list(part.grad.shape)}"
                )
            self.bags, self.each, self.kind = self.n, self.n, SUM
        else:
            self.bags = group._check_bags(self.plan, part.offsets, part.weights, self.grad, "gradients", self.n)
            self.each, self.kind = self.bags // self.plan.features, self.plan.kind
        self.offsets = part.offsets
        self.aimed = part.offsets is not None and self.plan.aimed
        """Whether gradients differ from row to row of a bag."""
        if self.aimed and self.plan.largest.count:
            if part.marks is None:
                raise ConfigError(f"{group._names}: the gradient of max needs the marks of its forward")
            group.check_marks(part.marks, self.n)
        self.width = self.grad.stride(0)

    @property
    def factored(self) -> bool:
        """Whether rows have factors."""
        return self.part.weights is not None or (self.plan.divides if self.aimed else self.kind != SUM)

    @property
    def unit(self) -> int:
        return 4 if self.width % 4 == 0 and (self.offsets is None or self.plan.unit == 4) else 1


class Sums:
    """Updates of a group. Kernels count in ``tally``, which the last of them resets for the next update."""

    def __init__(self, group: FusedGroup) -> None:
        self._now: FusedGroup | None = None  # only set during an update, because the group owns this object
        self.tally = torch.zeros(4, dtype=torch.int64, device=group.device)
        table = group.tables[0]
        self._how = _JUDGES[table.on_bad_gradient]
        self._deterministic = table.deterministic
        self._single = len(group.tables) == 1
        self._jump = jump_of(len(group.tables))
        self._tables = power_of_2(len(group.tables))
        self._number = -1
        segments = group.layout.segments
        self._adds = all(s.kind == "sgd" for s in segments) and not self._deterministic
        self._evictions = Evictions(group) if any(table._budget is not None for table in group.tables) else None

    @property
    def _group(self) -> FusedGroup:
        assert self._now is not None
        return self._now

    def update(self, group: FusedGroup, sources: list[Source], number: int, marked: bool) -> None:
        """Makes one step on every distinct row. Must be called in the group's turn.

        The device reports ``number`` when the update ends. ``marked``: some tables must report the ids written.
        """
        self._now, self._number = group, number
        n = sum(source.n for source in sources)
        marks = group.no_marks
        if any(source.aimed for source in sources):
            marks = self._share(sources)
        base = sources[0].grad
        unit = min(source.unit for source in sources)
        if any((source.grad.data_ptr() - base.data_ptr()) % (4 * unit) for source in sources):
            unit = 1
        tiles = max(cdiv(n, summed_shape(s.width)[0]) * s.width for s in group.layout.segments)
        room = (n + 15) & ~15
        words = 4 * room + (0 if self._adds else tiles)
        workspace = torch.empty(words, dtype=torch.int64, device=group.device)
        keys = torch.empty(n, dtype=torch.int64 if group.described.wide else torch.int32, device=group.device)
        try:
            self._launch(sources, workspace, keys, base, marks, unit, n, room)
            if marked:
                self._mark(sources, keys)
        except BaseException:
            if not group.capturing:
                self.tally[:2].zero_()
            raise
        finally:
            self._now = None

    def _mark(self, sources: list[Source], keys: Tensor) -> None:
        """Reports written ids to sync clients."""
        start = 0
        for source in sources:
            sizes = source.part.found.sizes(source.part.features)
            for number, ids, rows in zip(
                source.plan.tables_of, source.part.found.ids.split(sizes),
                keys[start : start + source.n].split(sizes), strict=True,
            ):  # fmt: skip
                self._group.tables[number]._mark(ids, rows)
            start += source.n

    def _launch(
        self, sources: list[Source], workspace: Tensor, keys: Tensor, base: Tensor, marks: Tensor, unit: int, n: int,
        room: int,
    ) -> None:  # fmt: skip
        aimed = any(source.aimed for source in sources)
        factored = any(source.factored for source in sources)
        seen, start = [], 0
        for source in sources:
            if source.aimed:
                seen.append(self._aim(source, workspace, base, marks[start:], unit, start, room))
            else:
                seen.append(self._survey(source))
            start += source.n
        evictions, start = self._evictions, 0
        if evictions is not None:
            evictions.begin(self._group, [source.part.found.ids for source in sources])
        for source, of in zip(sources, seen, strict=True):
            self._claim(source, of, workspace, keys, base, unit, start, room, aimed)
            start += source.n
        if evictions is not None:
            evictions.finish(self._group, keys, workspace, room, self.tally, self._adds)
        for s in self._group.layout.segments:
            self._start(s, workspace, n, room)
        if factored and len(sources) > 1:
            self._plain_factors(sources, workspace, room)
        if self._adds:
            for s in self._group.layout.segments:
                self._add(s, keys, workspace, base, marks, unit, n, room, aimed, factored)
            return
        ordered, order = torch.sort(keys, stable=True) if not self._deterministic else self._by_id(sources, keys)
        for s in self._group.layout.segments:
            self._step(s, ordered, order, workspace, base, marks, unit, n, room, aimed, factored)

    def _plain_factors(self, sources: list[Source], workspace: Tensor, room: int) -> None:
        """Writes factors of 1 for parts without factors, because other parts have them."""
        factors, start = workspace[3 * room : 4 * room].view(torch.float32), 0
        for source in sources:
            if not source.factored:
                factors[start : start + source.n].fill_(1.0)
            start += source.n

    def _by_id(self, sources: list[Source], keys: Tensor) -> tuple[Tensor, Tensor]:
        """Sorts by table and id, so that equal batches are summed in the same order whatever rows their ids have."""
        ids = torch.cat([source.part.found.ids for source in sources])
        order = torch.sort(ids, stable=True)[1]
        bases = self._group.described.bases[: len(self._group.tables)]
        table = torch.searchsorted(bases, keys[order].long(), right=True)  # 0 for skipped ids, which come first
        order = order[torch.sort(table, stable=True)[1]]
        return keys[order], order

    # --- kernels ------------------------------------------------------------------------------------------------------

    def _share(self, sources: list[Source]) -> Tensor:
        """Divides the gradient of a maximum among the rows that share it; returns the marks of all sources."""
        group, marks = self._group, []
        for source in sources:
            own = source.part.marks if source.aimed and source.plan.largest.count else None
            if own is None:
                marks.append(group.no_marks.new_empty(source.n, group.mark_bytes))
                continue
            marks.append(own)
            source.grad, plan, unit = source.grad.clone(memory_format=torch.contiguous_format), source.plan, source.unit
            source.width = source.grad.stride(0)
            width = power_of_2(group.dim)
            block, warps = pool_shape(width)
            key = ("share", unit)
            kernel = group._kernels.get(key) or group.kernel(key, ak.share, {
                "D": group.dim, "WIDTH": width, "BYTES": group.mark_bytes, "UNIT": unit, "BAGS": block,
                "num_warps": warps,
            })  # fmt: skip
            kernel(
                plan.largest.count * cdiv(source.each, block), source.grad, source.offsets, source.part.found.where,
                own, plan.columns[unit], plan.largest.numbers, source.n, plan.largest.count, source.each,
                source.width // unit,
            )  # fmt: skip
        return marks[0] if len(marks) == 1 else torch.cat(marks)

    def _aim(
        self, source: Source, workspace: Tensor, base: Tensor, marks: Tensor, unit: int, start: int, room: int
    ) -> Tensor:
        """Finds the gradient of each id of a part with max or firstn; returns the argument ``seen`` of `_claim`."""
        group, part, plan, where = self._group, source.part, source.plan, source.part.found.where
        pad, judge = part.features.padding is not None, self._how >= 0
        before = where
        if pad:
            kept = (where != ck.PADDING.value).cumsum(0, dtype=torch.int32)
            before = torch.nn.functional.pad(kept, (1, 0))
        width = power_of_2(group.dim)
        block, warps = row_shape(width)
        weighted = part.weights is not None
        key = ("aim", pad, weighted, source.factored, unit)
        kernel = group._kernels.get(key) or group.kernel(key, ak.aim, {
            "PAD": pad, "WEIGHTED": weighted, "FACTOR": source.factored, "JUDGE": judge,
            "COUNT": self._how == ck.RAISE.value, "DIM": group.dim, "WIDTH": width, "BYTES": group.mark_bytes,
            "UNIT": unit, "BLOCK": block, "num_warps": warps,
        })  # fmt: skip
        begins_at = (source.grad.data_ptr() - base.data_ptr()) // (4 * unit)
        kernel(
            cdiv(source.n, block), base, source.offsets, where, before, part.weights if weighted else part.found.ids,
            marks, plan.columns[unit], plan.combiners, plan.lengths, workspace, self.tally, source.n, start, room,
            source.bags, source.each, jump_of(source.bags), source.width // unit, begins_at,
        )  # fmt: skip
        return where

    def _survey(self, source: Source) -> Tensor:
        """The result of `ck.survey` for the bags of a part; empty if it is not needed."""
        group, part, how = self._group, source.part, self._how
        judge = how >= 0
        if not judge and source.kind == SUM:
            return part.found.where
        seen = torch.empty(2 * source.bags, dtype=torch.float32, device=group.device)
        width = power_of_2(group.dim)
        block, warps = row_shape(width)
        rows, pad = source.offsets is None, part.features.padding is not None
        count = how == ck.RAISE.value and part.weights is None
        unit = source.unit
        key = ("survey", rows, pad, source.kind, judge, count, unit)
        kernel = group._kernels.get(key) or group.kernel(key, ck.survey, {
            "ROWS_": rows, "PAD": pad, "KIND": source.kind, "JUDGE": judge, "COUNT": count, "D": group.dim,
            "WIDTH": width, "UNIT": unit, "BAGS": block, "num_warps": warps,
        })  # fmt: skip
        plan, where = source.plan, part.found.where
        features = 1 if rows else plan.features
        kernel(
            features * cdiv(source.each, block), source.grad, where if rows else source.offsets, where,
            plan.columns[unit], plan.combiners, seen, self.tally, source.n, features, source.each, source.width // unit,
        )  # fmt: skip
        if part.weights is not None and how == ck.RAISE.value and not rows:
            block, warps = claim_shape()[:2]
            key = ("weigh", pad, source.kind)
            kernel = group._kernels.get(key) or group.kernel(
                key, ck.weigh, {"PAD": pad, "KIND": source.kind, "BLOCK": block, "num_warps": warps}
            )
            kernel(
                cdiv(source.n, block), source.offsets, where, part.weights, seen, self.tally, source.n, source.bags,
                jump_of(source.bags),
            )  # fmt: skip
        return seen

    def _claim(
        self, source: Source, seen: Tensor, workspace: Tensor, keys: Tensor, base: Tensor, unit: int, start: int,
        room: int, aimed: bool,
    ) -> None:  # fmt: skip
        group, part, plan = self._group, source.part, source.plan
        described = group.described
        found, rows = part.found, source.offsets is None
        weighted = part.weights is not None and not rows
        block, warps, registers = claim_shape()
        evictions = self._evictions
        key = ("claim", described.wide, plan.alone, rows, weighted, source.kind, aimed, source.aimed, unit)
        kernel = group._kernels.get(key) or group.kernel(key, ck.claim, {
            "SINGLE": plan.alone, "ROWS_": rows, "WEIGHTED": weighted, "KIND": source.kind, "AIMED": aimed,
            "OWN": source.aimed, "JUDGE": self._how, "STAMP": self._adds, "UNIT": unit, "WIDE": described.wide,
            "EVICT": evictions is not None, "LRU_": evictions is not None and evictions.lru, "BLOCK": block,
            "num_warps": warps, "maxnreg": registers,
        })  # fmt: skip
        if not rows:
            places, jump = source.offsets, jump_of(source.bags)
        else:
            places, jump = (
                (found.ids if plan.alone else plan.begins(found.counts, source.n, group.capturing)),
                plan.jump,
            )
        begins_at = (source.grad.data_ptr() - base.data_ptr()) // (4 * unit)
        kernel(
            cdiv(source.n, block), found.ids, places, found.where, found.came, part.weights if weighted else found.ids,
            seen, plan.tables, plan.columns[unit], described.words, described.origin, group.control.words,
            described.origin, workspace, keys, self.tally,
            *((found.ids,) * 3 if evictions is None else evictions.lists), source.n, start, room, plan.only,
            plan.features, source.bags, source.each, jump, source.width // unit, begins_at,
            0 if evictions is None else evictions.mask,
        )  # fmt: skip

    def _start(self, s: Segment, workspace: Tensor, n: int, room: int) -> None:
        group = self._group
        block, warps, most = start_shape(s.width)
        key = ("start", s.index)
        kernel = group._kernels.get(key) or group.kernel(key, ck.start, {
            "INIT": s.init, "INDEX": s.index, "D": s.dim, "WIDTH": s.width, "STRIDE": group.layout.stride,
            "WEIGHT": s.weight, "STATE_": s.state, "VECTORS": s.vectors, "TAIL": s.tail, "BLOCK": block,
            "num_warps": warps,
        })  # fmt: skip
        kernel(
            min(most, cdiv(n, block)), workspace, self.tally, group.described.words, group.described.origin, room,
            *s.first, s.accumulator, s.native.beta1, s.native.beta2,
        )  # fmt: skip

    def _last(self, s: Segment) -> bool:
        return s.index == len(self._group.layout.segments) - 1

    def _add(
        self, s: Segment, keys: Tensor, workspace: Tensor, base: Tensor, marks: Tensor, unit: int, n: int, room: int,
        aimed: bool, factored: bool,
    ) -> None:  # fmt: skip
        group, described = self._group, self._group.described
        block, warps = row_shape(s.width)
        key = ("add", described.wide, aimed, factored, unit, s.index)
        kernel = group._kernels.get(key) or group.kernel(key, ck.add, {
            "SINGLE": self._single, "TABLES": self._tables, "WIDE": described.wide, "AIMED": aimed,
            "FACTOR": factored, "LAST": self._last(s), "INDEX": s.index, "D": s.dim, "WIDTH": s.width,
            "STRIDE": group.layout.stride, "WEIGHT": s.weight, "BYTES": group.mark_bytes, "UNIT": unit,
            "BLOCK": block, "num_warps": warps,
        })  # fmt: skip
        kernel(
            cdiv(n, block), keys, workspace, base, marks, described.bases, described.words, described.origin,
            group.control.rates, self.tally, group.report.count, n, room, len(group.tables), self._jump,
            group.control.segments, self._number,
        )  # fmt: skip

    def _step(
        self, s: Segment, keys: Tensor, order: Tensor, workspace: Tensor, base: Tensor, marks: Tensor, unit: int,
        n: int, room: int, aimed: bool, factored: bool,
    ) -> None:  # fmt: skip
        group, described, control = self._group, self._group.described, self._group.control
        tile, warps = summed_shape(s.width)
        at_once, span, crossing_warps = crossing_shape(s.width)
        tiles = cdiv(n, tile)
        key = ("step", described.wide, aimed, factored, unit, s.index)
        within, across = group._kernels.get((*key, 0)), group._kernels.get((*key, 1))
        if within is None or across is None:
            held = 0 if interpreted() else s.held
            shared: dict[str, Any] = {
                "SINGLE": self._single, "WIDE": described.wide, "STAMP": s.index == 0, "OPT": s.native.opt,
                "NESTEROV": s.native.nesterov, "DECOUPLED": s.native.decoupled, "INDEX": s.index, "D": s.dim,
                "WIDTH": s.width, "STRIDE": group.layout.stride, "WEIGHT": s.weight, "STATE_": s.state, "HELD": held,
                "LINES": power_of_2(cdiv(max(held, s.dim), 32) + 1), "enable_fp_fusion": s.fp_fusion,
            }  # fmt: skip
            within = group.kernel(
                (*key, 0), ck.step_within,
                {**shared, "AIMED": aimed, "FACTOR": factored, "BYTES": group.mark_bytes, "UNIT": unit, "BLOCK": tile,
                 "num_warps": warps},
            )  # fmt: skip
            across = group.kernel((*key, 1), ck.step_across, {
                **shared, "TABLES": self._tables, "LAST": self._last(s), "TILE": tile, "TILES": at_once, "SPAN": span,
                "num_warps": crossing_warps,
            })  # fmt: skip
        numbers = s.numbers(0.0, 1.0)
        which = (n, room, len(group.tables), self._jump, control.segments, numbers)
        within(
            tiles, keys, order, workspace, base, marks, described.bases, described.words, described.origin,
            control.words, control.rates, *which,
        )  # fmt: skip
        across(
            cdiv(tiles, at_once), keys, workspace, described.bases, described.words, described.origin, control.words,
            control.rates, self.tally, group.report.count, *which, self._number,
        )  # fmt: skip
