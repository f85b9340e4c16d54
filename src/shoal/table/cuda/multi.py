"""Several GPU tables in one launch: tables with the same row layout share a `Storage`, which takes all their ids."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CapacityError
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.storage import Storage
from shoal.table.cuda.table import CudaHashTable
from shoal.table.cuda.updates import Update, count_bad, update_rows

_PLANS = 16  # the most plans kept, one per division of a batch into blocks


def share(tables: Sequence[CudaHashTable]) -> None:
    """Moves tables with the same row layout into a shared storage.

    Tables whose steps depend on other data of the table than its rates (scales, the noise of rounding) are excluded,
    and so are tables with budgets, which need rows of their own.
    """
    alike: dict[Any, list[CudaHashTable]] = defaultdict(list)
    for table in tables:
        layout = table._layout
        if layout.plain and not table.has_budget and not any(s.native.stochastic_rounding for s in layout.segments):
            key = table.table_config.entry_config.SerializeToString(deterministic=True), table.seed
            alike[key].append(table)
    for members in alike.values():
        if len(members) > 1:
            storage = Storage(members[0]._layout, members[0].device, len(members))
            for number, table in enumerate(members):
                table.join(storage, number)


class _Part:
    """The blocks of one source that belong to one storage, and their positions among all blocks.

    Tables are identified by their position in the call and their number in the storage, so that none is kept alive.
    """

    def __init__(self, storage: Storage, blocks: list[tuple[int, int, slice, slice]]) -> None:
        self.storage = storage
        self.places = [block[0] for block in blocks]
        self.numbers = [block[1] for block in blocks]
        self.ids = [block[2] for block in blocks]
        self.floats = [block[3] for block in blocks]
        self.size = sum(ids.stop - ids.start for ids in self.ids)
        self.counts = [0] * storage.tables
        for number, ids in zip(self.numbers, self.ids, strict=True):
            self.counts[number] += ids.stop - ids.start
        self._joined_ids, self.joined_floats = _joined(self.ids), _joined(self.floats)
        self.alone = len(blocks) == 1
        self._table_of: int | Tensor | None = self.numbers[0] if self.alone else None
        self._made_on: int | None = None

    def table_of(self) -> int | Tensor:
        """The table number of every id in the storage: one number, or an int32 tensor."""
        if self._table_of is None:
            sizes = [ids.stop - ids.start for ids in self.ids]
            pinned = torch.tensor([self.numbers, sizes], device="cpu", pin_memory=self.storage.device.type == "cuda")
            both = self.storage.hold(pinned).to(self.storage.device, non_blocking=True)
            made = torch.repeat_interleave(both[0].int(), both[1], output_size=self.size)
            if capturing(self.storage.device):  # not cached: it is empty until the graph runs
                return made
            self._table_of, self._made_on = made, self.storage.stream
        elif self._made_on != self.storage.stream and isinstance(self._table_of, Tensor):
            self._table_of.record_stream(torch.cuda.current_stream(self.storage.device))
        return self.storage.hold(self._table_of)

    def ids_of(self, ids: Tensor) -> Tensor:
        return _take(ids, self._joined_ids, self.ids)

    def floats_of(self, floats: Tensor) -> Tensor:
        return _take(floats, self.joined_floats, self.floats)


def _joined(ranges: list[slice]) -> slice | None:
    """One range that covers all of them, if they are adjacent."""
    if all(a.stop == b.start for a, b in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return None


def _take(flat: Tensor, joined: slice | None, ranges: list[slice]) -> Tensor:
    return flat[joined] if joined is not None else torch.cat([flat[part] for part in ranges])


class _Plan:
    """The assignment of a call's blocks to storages."""

    def __init__(self, tables: Sequence[CudaHashTable], sizes: Sequence[int], sources: int) -> None:
        self.members = [(table._storage, table._number) for table in tables]
        self.parts: list[_Part] = []
        at = floats = 0
        for source in range(sources):
            blocks: dict[int, list[Any]] = {}
            for k, (storage, number) in enumerate(self.members):
                end = at + sizes[source * len(tables) + k]
                floats_end = floats + (end - at) * storage.layout.dim
                blocks.setdefault(id(storage), []).append((k, number, slice(at, end), slice(floats, floats_end)))
                at, floats = end, floats_end
            self.parts += [_Part(self.members[of_group[0][0]][0], of_group) for of_group in blocks.values()]
        segments = [0, *itertools.accumulate(len(storage.layout.segments) for storage, _ in self.members)]
        self.rates = [slice(begin, end) for begin, end in itertools.pairwise(segments)]
        """The positions of each table's learning rates among all rates."""
        self.needed: dict[int, tuple[Storage, list[int]]] = {}
        """Storage -> the most ids in a call with several parts."""
        for part in self.parts if len(self.parts) > 1 else ():  # a single part makes room for itself
            if not tables[part.places[0]].grows:
                continue
            _, counts = self.needed.setdefault(id(part.storage), (part.storage, [0] * part.storage.tables))
            counts[:] = map(sum, zip(counts, part.counts, strict=True))

    def fits(self, tables: Sequence[CudaHashTable]) -> bool:
        return len(tables) == len(self.members) and all(
            table._shared is storage and table._number == number
            for table, (storage, number) in zip(tables, self.members, strict=True)
        )


def _plan(tables: Sequence[CudaHashTable], sizes: Tensor, sources: int) -> _Plan:
    """A plan for these blocks, cached for calls with the same division."""
    plans: dict[Any, _Plan] = tables[0]._plans
    key = (sources, *sizes.tolist())
    found = plans.get(key)
    if found is None or not found.fits(tables):
        if len(plans) >= _PLANS:
            plans.clear()
        found = plans[key] = _Plan(tables, key[1:], sources)
    return found


def lookup_blocks(tables: Sequence[Any], ids: Tensor, sizes: Tensor, sources: int, floats: int) -> Tensor:
    """`shoal.table.fused.lookup_blocks` on the GPU."""
    pieces = []
    for part in _plan(tables, sizes, sources).parts:
        own = part.ids_of(ids)
        if part.alone:
            rows = tables[part.places[0]]._lookup(own, False, 0)
        else:
            with part.storage:
                rows = part.storage.find(own, part.table_of(), "weights")
        pieces.append((part, rows.view(-1)))
    if len(pieces) == 1:
        return pieces[0][1]
    out = torch.empty(floats, dtype=torch.float32, device=ids.device)
    for part, rows in pieces:
        taken = 0
        for place in part.floats:
            out[place] = rows[taken : taken + place.stop - place.start]
            taken += place.stop - place.start
    return out


def apply_blocks(
    tables: Sequence[Any],
    ids: Tensor,
    sizes: Tensor,
    sources: int,
    grads: Tensor,
    rates: Sequence[float],
    step: int,
    seconds: int,
    dedup: bool,
) -> None:
    """`shoal.table.fused.apply_blocks` on the GPU. With bad gradients the call changes nothing, or they are skipped.

    Raises:
        CapacityError: the GPU does not have enough memory for all ids; nothing has changed.
    """
    plan = _plan(tables, sizes, sources)
    for table in tables:
        table._judge.check()
        table._check_marks()
    _make_room(plan, tables)
    with tables[0]._storage:
        gate = _gate(tables, plan.parts, grads)
    for part in plan.parts:
        own = [tables[place] for place in part.places]
        own_rates = [list(rates[plan.rates[place]]) for place in part.places]
        if part.alone or any(t._host.has_filter() or t.on_bad_gradient == "skip" for t in own):
            for table, rate, where, floats in zip(own, own_rates, part.ids, part.floats, strict=True):
                table._apply(ids[where], grads[floats], rate, step, dedup, seconds, gate=gate, judged=True)
            continue
        for table in own:
            table._host.raise_max_update_time(seconds)
            table._version += 1
        if part.size:
            _apply_part(part, own, part.ids_of(ids), part.floats_of(grads), own_rates, step, seconds, dedup, gate)


def _apply_part(
    part: _Part,
    tables: list[CudaHashTable],
    ids: Tensor,
    grads: Tensor,
    rates: list[list[float]],
    step: int,
    seconds: int,
    dedup: bool,
    gate: Tensor | None,
) -> None:
    """One launch for several tables."""
    storage, first = part.storage, tables[0]
    every_rate = [[0.0] * len(storage.layout.segments)] * storage.tables
    for number, of_table in zip(part.numbers, rates, strict=True):
        every_rate[number] = of_table
    update = Update(every_rate, first._host.scales(), step, 0, first._seed)
    with storage:
        where = part.table_of()
        rows = storage.insert(ids, where, counts=part.counts, time=seconds, gate=gate)
        update_rows(storage, ids, rows, where, grads, update, dedup, False, first.deterministic)
        begin = 0
        for table, at in zip(tables, part.ids, strict=True):
            end = begin + at.stop - at.start
            if table._marks is not None:
                table._mark(ids[begin:end], rows[begin:end])
            begin = end


def _make_room(plan: _Plan, tables: Sequence[CudaHashTable]) -> None:
    """Allocates memory for all ids of a call before anything changes."""
    for storage, counts in plan.needed.values():
        with storage:
            try:
                storage.make_room(counts)
            except CapacityError as error:
                names = ", ".join(repr(table.name) for table in tables if table._storage is storage)
                raise CapacityError(
                    f"tables {names}: no room for {sum(counts)} more ids: {error}; nothing was changed. Evict rows, or "
                    "use an optimizer with less state"
                ) from None


def _gate(tables: Sequence[CudaHashTable], parts: Sequence[_Part], grads: Tensor) -> Tensor | None:
    """A number that is not 0 if a table with ``on_bad_gradient="raise"`` has gradients with NaN or infinity.

    The first table reports it later.
    """
    bad = None
    for part in parts:
        dim, wanted = part.storage.layout.dim, [tables[place].on_bad_gradient == "raise" for place in part.places]
        if not any(wanted) or not part.size:
            continue
        joined = part.joined_floats if all(wanted) else None
        for floats in [joined] if joined else itertools.compress(part.floats, wanted):
            bad = count_bad(grads[floats], dim, None, bad)
    if bad is not None:
        names = [table.name for table in tables]
        tables[0]._judge.report(bad, f"fused tables {', '.join(names[:3])}{', ...' if names[3:] else ''}")
        if any(table._host.has_filter() for table in tables):  # filters count, so they must not see rejected ids
            tables[0]._judge.check(wait=True)
    return bad


class StagedMulti:
    """Tables in host memory that files of several GPU tables are read into."""

    on_gpu = False

    def __init__(self, multi: Any) -> None:
        self.name = multi.name
        self.saver_parallel = multi.saver_parallel
        self._targets: dict[str, CudaHashTable] = multi.tables
        self.tables = {name: table.staging() for name, table in self._targets.items()}
        self._epochs = {name: staged._native.begin_epoch() for name, staged in self.tables.items()}

    def adopt(self) -> None:
        """Replaces the rows of the tables that files were read for."""
        for name, staged in self.tables.items():
            if staged._native.oldest_epoch() > self._epochs[name]:  # its rows were replaced
                self._targets[name].adopt(staged._native)
