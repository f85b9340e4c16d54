"""Inserts into a table with a budget: launches that find rows, evict others and assign rows to new ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.errors import UnsupportedError
from shoal.table.clock import Now
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.budgets.arrivals import Sent
from shoal.table.cuda.budgets.budget import GpuBudget, score_codes
from shoal.table.cuda.budgets.collected import NOT_COLLECTED
from shoal.table.cuda.kernels import evict as ek
from shoal.table.cuda.kernels import hold as hk
from shoal.table.cuda.kernels import policy as pk
from shoal.table.cuda.kernels import settle as sk
from shoal.table.cuda.kernels import small
from shoal.table.cuda.launch import cdiv, launch, power_of_2
from shoal.table.cuda.shapes import (
    hold_shape,
    let_go_shape,
    place_shape,
    prepare_shape,
    replace_shape,
    settle_shape,
    start_shape,
    weigh_shape,
)

if TYPE_CHECKING:
    from shoal.table.cuda.stored import StoredTable

HEAD = hk.HEAD.value
SMALL_WORK = 3 * (ek.MOST_SMALL.value + 1)


def cell_count(n: int) -> int:
    """Words of work space for ``n`` ids: head words, and the cells that find equal ids; see kernels/hold.py."""
    return HEAD + power_of_2(2 * max(n, 1))


def insert(
    table: StoredTable,
    budget: GpuBudget,
    ids: Tensor,
    *,
    time: int = 0,
    only_new: bool = False,
    drop: Tensor | None = None,
    gate: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """As `Storage.insert`; also -1 for a new id if no row can leave for it. Does not wait once the table is full.

    Raises:
        CapacityError: the GPU is full although the budget is not; the storage is unchanged.
    """
    storage, n = table._storage, ids.numel()
    arena, device = storage.arena, storage.device
    captured = capturing(device)
    out = torch.empty(n, dtype=torch.int32, device=device)
    if n == 0:
        return out
    if time and not arena.timed:
        if captured:  # each replay would forget the times
            raise UnsupportedError(
                "the first write with a time cannot be captured; run the step once before the capture"
            )
        arena.keep_times()
    storage.make_room([n])
    described = budget.described(table, captured)
    words, origin = described.words, described.origin
    given = scores is not None
    if scores is not None:
        bad = scores.isnan().sum().view(1)
        table._judge.report(bad, what="scores")
        gate = bad if gate is None else gate + bad
    if given and budget.chooses and budget.small:
        drop = _not_better(table, budget, ids, scores, drop)
    cells = torch.empty(cell_count(n), dtype=torch.int64, device=device)
    comers = torch.empty(n, dtype=torch.int64, device=device)
    listed = budget.collected is not None or table.reports_removed
    if captured:
        if budget.collected is not None:
            raise UnsupportedError(NOT_COLLECTED.format(name=table.name))
        storage.expect_replays()
        listed = False
    gone = torch.empty((3, n), dtype=torch.int64, device=device) if listed else comers
    lru, stamped, tracked = budget.lru and not only_new, arena.timed, arena.tracked
    block, warps = prepare_shape()
    launch(
        hk.prepare, cdiv(cells.numel(), block), cells, words, origin, cells, cells.numel(), 1, int(time),
        TABLES=1, GROUP=False, TIMES_AT=0, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    block, warps, registers = hold_shape()
    launch(
        hk.hold, cdiv(n, block), ids, ids if drop is None else drop, ids if gate is None else gate, words, origin,
        cells, comers, out, n, cells.numel() - HEAD - 1, int(time),
        DROP=drop is not None, GATE=gate is not None, LRU_=lru, STAMP=int(stamped and not only_new),
        LATER=isinstance(time, Now), TRACK=int(tracked and not only_new), BLOCK=block, num_warps=warps,
        maxnreg=registers,
    )  # fmt: skip
    work = comers
    if budget.small:
        work = torch.full((SMALL_WORK,), -1, dtype=torch.int64, device=device)
        make_exact_room(words, origin, budget.zero, 1, work, cells, gone, n, given, listed)
    rest = torch.empty_like(comers)
    chosen = {"GIVEN": given, "LIST": listed, "AGED": budget.aged, "LRU_": budget.lru, "WIDE": False}
    handed = {"GROUP": False, "STAMP": int(stamped), "TRACK": int(tracked)}
    numbers = scores if given else out
    block, warps, most, registers = replace_shape()
    launch(
        ek.replace, min(most, cdiv(n, block)), ids, words, origin, cells, cells, comers, rest, numbers, out, gone,
        comers, comers, comers, n, int(time),
        **chosen, **handed, BLOCK=block, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    block, warps, most = place_shape()
    if not budget.small:
        launch(
            ek.borrow, min(most, cdiv(n, block)), ids, words, origin, cells, rest, numbers, out, gone, n,
            **chosen, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    launch(
        ek.place, min(most, cdiv(n, block)), ids, words, origin, cells, cells, rest, budget.zero, work, out, comers,
        comers, comers, int(time), EXACT=budget.small, **handed, WIDE=False, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if listed:
        _report_evicted(table, budget, cells, gone)
    block, warps = settle_shape()
    launch(
        sk.settle, cdiv(n, block), out, ids, cells, words, origin, cells, numbers, n, 1, 0,
        SINGLE=True, TABLES=1, GROUP=False, LRU_=lru, GIVEN=given, ONLY_NEW=only_new, WIDE=False, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    if not captured:
        budget.sampled.wrote(n)
    if not captured and not storage.at_limit:
        storage.counts.add([n], arena.room)
        for account in storage.turn.accounts():
            account.spend(n)
    return out


def make_exact_room(
    words: Tensor, origin: Tensor, smalls: Tensor, tables: int, work: Tensor, cells: Tensor, gone: Tensor, n: int,
    given: bool, listed: bool,
) -> None:  # fmt: skip
    """Evicts rows of the small tables with the numbers ``smalls``."""
    block, programs, warps = weigh_shape()
    launch(
        small.weigh, tables * programs, words, origin, smalls, work, tables, GIVEN=given, BLOCK=block, num_warps=warps
    )
    block, span, programs, warps = let_go_shape()
    launch(
        small.let_go, tables * programs, words, origin, smalls, work, cells, gone, tables, n, LIST=listed, BLOCK=block,
        SPAN=span, num_warps=warps,
    )  # fmt: skip


def _report_evicted(table: StoredTable, budget: GpuBudget, cells: Tensor, gone: Tensor) -> None:
    """Reports the rows that left, before they are reused."""
    count = cells[hk.GONE.value : hk.GONE.value + 1]
    ids, packed, times = gone.unbind()
    if budget.collected is not None:
        n, arena, words = ids.numel(), table._storage.arena, table._layout.words
        rows = torch.empty(n, words, dtype=torch.float32, device=ids.device)
        width = power_of_2(words)
        block, warps, most = start_shape(width)
        launch(
            ek.copy_gone, min(most, cdiv(n, block)), cells, packed, arena.tensor, rows,
            D=words, WIDTH=width, STRIDE=table._layout.stride, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        budget.collected.add(count, ids, times, rows)
    if table.reports_removed:
        table.expect_removed(Sent((count, ids, packed)), 0)


def _not_better(
    table: StoredTable, budget: GpuBudget, ids: Tensor, scores: Tensor | None, drop: Tensor | None
) -> Tensor:
    """uint8: which new ids of a small table are rejected, because they score lower than the rows that would leave.

    The best new ids are compared with the lowest rows, one by one. Does not wait.
    """
    storage = table._storage
    assert scores is not None
    assert storage.arena.scores is not None
    row, n = storage.find(ids, 0, "rows"), ids.numel()
    code = score_codes(scores) >> pk.SHIFT.value
    comes = row < 0 if drop is None else (row < 0) & (drop == 0)
    # Equal ids count as one, with the best of their scores.
    ordered, order = ids.sort(stable=True)
    number = torch.empty_like(order)
    number[order] = torch.cat([order.new_zeros(1), (ordered[1:] != ordered[:-1]).long()]).cumsum(0)
    best = torch.full_like(code, -1).scatter_reduce_(0, number, torch.where(comes, code, -1), "amax")
    place = torch.empty_like(order)
    place[torch.argsort(best, descending=True)] = torch.arange(n, device=ids.device)
    # The rows that can leave, lowest first.
    kept = storage.arena.scores.tensor[0, : storage.arena.room]
    held = torch.zeros(kept.numel() + 1, dtype=torch.bool, device=ids.device)
    held[row.long()] = True  # -1 is the last entry, which belongs to no row
    may = ((kept & (pk.HELD.value | pk.PINNED.value)) == 0) & ~held[:-1]
    lowest = torch.where(may, (kept.long() >> pk.SHIFT.value) & pk.VALUE.value, 1 << 40).sort().values
    left = storage.counts.rows_left()
    rival = lowest[(place - left).clamp(0, lowest.numel() - 1)]
    worse = (best >= 0) & (place >= left) & ((rival > best) | (place - left >= lowest.numel()))
    budget.words[pk.REFUSED.value] += worse.sum()
    refused = worse[number].to(torch.uint8)
    return refused if drop is None else refused | drop
