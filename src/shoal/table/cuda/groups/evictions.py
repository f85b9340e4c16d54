"""`Evictions`: the additional launches of a group's update if tables have budgets (kernels/evict.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.table.cuda.budgets.arrivals import Sent
from shoal.table.cuda.budgets.evicting import HEAD, SMALL_WORK, cell_count, make_exact_room
from shoal.table.cuda.groups.plan import jump_of
from shoal.table.cuda.kernels import evict as ek
from shoal.table.cuda.kernels import hold as hk
from shoal.table.cuda.kernels import located as lk
from shoal.table.cuda.kernels import settle as sk
from shoal.table.cuda.launch import cdiv, power_of_2
from shoal.table.cuda.shapes import place_shape, prepare_shape, replace_shape, settle_shape

if TYPE_CHECKING:
    from shoal.table.cuda.groups.fused import FusedGroup


class Evictions:
    """The evictions of a group in which some tables have budgets; rows leave for new ids without a wait."""

    def __init__(self, group: FusedGroup) -> None:
        numbers = [number for number, table in enumerate(group.tables) if table._budget and table._budget.small]
        places = [numbers.index(number) if number in numbers else 0 for number in range(len(group.tables))]
        self._smalls = len(numbers)
        self._larges = any(table._budget and not table._budget.small for table in group.tables)
        self._small, self._small_of = (
            torch.tensor(values or [0], dtype=torch.int32, device=group.device) for values in (numbers, places)
        )
        self.lru = all(table._budget.lru for table in group.tables if table._budget)
        """Whether all tables with budgets evict by `Lru`."""
        self._aged = any(table._budget.aged for table in group.tables if table._budget)
        self._single = len(group.tables) == 1
        self._jump = jump_of(len(group.tables))
        self._tables = power_of_2(len(group.tables))
        self.cells = self.comers = self.ids = torch.empty(0, dtype=torch.int64, device=group.device)

    def begin(self, group: FusedGroup, ids: list[Tensor]) -> None:
        """Allocates the lists for one update of these ids."""
        self.ids = ids[0] if len(ids) == 1 else torch.cat(ids)
        self.cells = torch.empty(cell_count(self.ids.numel()), dtype=torch.int64, device=group.device)
        self.comers = torch.empty_like(self.ids)
        block, warps = prepare_shape()
        kernel = group._kernels.get("prepare") or group.kernel("prepare", hk.prepare, {
            "TABLES": self._tables, "GROUP": True, "TIMES_AT": lk.TABLES_AT.value, "BLOCK": block, "num_warps": warps,
        })  # fmt: skip
        described = group.described
        kernel(
            cdiv(self.cells.numel(), block), self.cells, described.words, described.origin, group.control.words,
            self.cells.numel(), len(group.tables), 0,
        )  # fmt: skip

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """All ids, the hash cells that detect equal ones, and space for the list of new ones."""
        return self.ids, self.cells, self.comers

    @property
    def mask(self) -> int:
        """The mask for positions of cells."""
        return self.cells.numel() - HEAD - 1

    def finish(self, group: FusedGroup, keys: Tensor, workspace: Tensor, room: int, tally: Tensor, stamp: bool) -> None:
        """Assigns rows to the new ids that `claim` has listed, then releases all rows that it held."""
        n, described = self.ids.numel(), group.described
        words, origin, cells = described.words, described.origin, self.cells
        listed = not group.capturing and any(table.reports_removed for table in group.tables if table._budget)
        gone = torch.empty((3, n), dtype=torch.int64, device=group.device) if listed else self.comers
        work = self.comers
        if self._smalls:
            work = torch.full((self._smalls * SMALL_WORK,), -1, dtype=torch.int64, device=group.device)
            make_exact_room(words, origin, self._small, self._smalls, work, cells, gone, n, False, listed)
        wide, rest = described.wide, torch.empty_like(self.comers)
        chosen = {"GIVEN": False, "LIST": listed, "AGED": self._aged, "LRU_": self.lru, "WIDE": wide}
        handed = {"GROUP": True, "STAMP": int(stamp), "TRACK": 0}
        fresh = (workspace[room:], workspace[2 * room :], tally)
        tables = (self.ids, words, origin, group.control.words, cells)
        block, warps, most, registers = replace_shape()
        key = ("replace", wide, listed, stamp)
        kernel = group._kernels.get(key) or group.kernel(
            key, ek.replace, {**chosen, **handed, "BLOCK": block, "num_warps": warps, "maxnreg": registers}
        )
        kernel(min(most, cdiv(n, block)), *tables, self.comers, rest, keys, keys, gone, *fresh, n, 0)
        block, warps, most = place_shape()
        if self._larges:
            key = ("borrow", wide, listed)
            kernel = group._kernels.get(key) or group.kernel(
                key, ek.borrow, {**chosen, "BLOCK": block, "num_warps": warps}
            )
            kernel(min(most, cdiv(n, block)), self.ids, words, origin, cells, rest, keys, keys, gone, n)
        key = ("place", wide, stamp)
        kernel = group._kernels.get(key) or group.kernel(
            key, ek.place, {"EXACT": self._smalls > 0, **handed, "WIDE": wide, "BLOCK": block, "num_warps": warps}
        )
        kernel(min(most, cdiv(n, block)), *tables, rest, self._small_of, work, keys, *fresh, 0)
        if listed:
            self._report(group, gone)
        block, warps = settle_shape()
        key = ("settle", wide)
        kernel = group._kernels.get(key) or group.kernel(key, sk.settle, {
            "SINGLE": self._single, "TABLES": self._tables, "GROUP": True, "LRU_": self.lru, "GIVEN": False,
            "ONLY_NEW": False, "WIDE": wide, "BLOCK": block, "num_warps": warps,
        })  # fmt: skip
        kernel(
            cdiv(n, block), keys, self.ids, described.bases, words, origin, cells, keys, n, len(group.tables),
            self._jump,
        )  # fmt: skip
        self.cells = self.comers = self.ids = self.ids[:0]
        if not group.capturing:
            for table in group.tables:
                if table._budget is not None:
                    table._budget.sampled.wrote(n // len(group.tables))

    def _report(self, group: FusedGroup, gone: Tensor) -> None:
        """Reports the evicted ids, table by table, once the device has sent them."""
        sent = Sent((self.cells[hk.GONE.value : hk.GONE.value + 1], gone[0], gone[1]))
        for number, table in enumerate(group.tables):
            if table._budget is not None and table.reports_removed:
                table.expect_removed(sent, number)
