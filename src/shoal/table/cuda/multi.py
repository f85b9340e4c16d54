"""Several GPU tables in one launch: tables of equal layout share a `Group`, which takes the ids of all of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.table.cuda.group import Group
from shoal.table.cuda.table import CudaHashTable, update_rows
from shoal.table.cuda.updates import Update, count_bad


def share(tables: Sequence[CudaHashTable]) -> None:
    """Puts tables of equal rows into one group each.

    Not those whose steps depend on numbers of their own table beside the rates: scales, and the noise of rounding.
    """
    alike: dict[Any, list[CudaHashTable]] = defaultdict(list)
    for table in tables:
        layout = table._layout
        if layout.plain and not any(s.native.stochastic_rounding for s in layout.segments):
            key = table.table_config.entry_config.SerializeToString(deterministic=True), table.seed
            alike[key].append(table)
    for members in alike.values():
        if len(members) > 1:
            group = Group(members[0]._layout, members[0].device, len(members))
            for number, table in enumerate(members):
                table.join(group, number)


class _Part:
    """The blocks of one source that belong to one group, and where they lie among all."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tables: list[CudaHashTable] = []
        self.ids: list[tuple[int, int]] = []
        self.floats: list[tuple[int, int]] = []

    def add(self, table: CudaHashTable, ids: tuple[int, int], floats: tuple[int, int]) -> None:
        self.tables.append(table)
        self.ids.append(ids)
        self.floats.append(floats)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in self.ids)

    @property
    def counts(self) -> list[int]:
        counts = [0] * self.group.tables
        for table, size in zip(self.tables, self.sizes, strict=True):
            counts[table._number] += size
        return counts

    def table_of(self) -> int | Tensor:
        """The table of every id: one number, or an int32 tensor that is kept for batches cut alike."""
        if len(self.tables) == 1:
            return self.tables[0]._number
        cache: dict[Any, Tensor] = self.group.__dict__.setdefault("_table_of", {})
        key = tuple((t._number, s) for t, s in zip(self.tables, self.sizes, strict=True))
        if key not in cache:
            if len(cache) >= 16:
                cache.clear()
            numbers = torch.tensor([t._number for t in self.tables], dtype=torch.int32)
            made = torch.repeat_interleave(numbers, torch.tensor(self.sizes))
            cache[key] = made.to(self.group.device, non_blocking=True)
        return cache[key]

    def take(self, flat: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
        """The ranges of a flat tensor, one after another; a view when they are neighbours."""
        if all(a[1] == b[0] for a, b in itertools.pairwise(ranges)):
            return flat[ranges[0][0] : ranges[-1][1]]
        return torch.cat([flat[begin:end] for begin, end in ranges])


def _parts(
    tables: Sequence[CudaHashTable], sizes: Sequence[int], source: int, at: int, floats: int
) -> tuple[Any, int, int]:
    """The parts of one source's blocks, and where the next source begins."""
    parts: dict[int, _Part] = {}
    for k, table in enumerate(tables):
        size = sizes[source * len(tables) + k]
        end, floats_end = at + size, floats + size * table.dim_size
        group = table._group
        parts.setdefault(id(group), _Part(group)).add(table, (at, end), (floats, floats_end))
        at, floats = end, floats_end
    return list(parts.values()), at, floats


def lookup_blocks(tables: Sequence[Any], ids: Tensor, sizes: Tensor, sources: int, floats: int) -> Tensor:
    """`shoal.table.fused.lookup_blocks` on the GPU."""
    listed, at, begin, pieces = sizes.tolist(), 0, 0, []
    for source in range(sources):
        parts, at, begin = _parts(tables, listed, source, at, begin)
        for part in parts:
            with part.group:
                rows = part.group.find(part.take(ids, part.ids), part.table_of(), "weights")
            if not part.group.layout.plain:
                rows = part.tables[0]._read(rows)
            pieces.append((part, rows.view(-1)))
    if len(pieces) == 1:
        return pieces[0][1]
    out = torch.empty(floats, dtype=torch.float32, device=ids.device)
    for part, rows in pieces:
        taken = 0
        for first, last in part.floats:
            out[first:last] = rows[taken : taken + last - first]
            taken += last - first
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
    """`shoal.table.fused.apply_blocks` on the GPU. Bad gradients make the whole call change nothing, or are skipped."""
    table_rates: dict[str, list[float]] = {}
    begin = 0
    for table in tables:
        segments = len(table._layout.segments)
        table_rates[table.name] = list(rates[begin : begin + segments])
        begin += segments
    listed, at, begin, parts = sizes.tolist(), 0, 0, []
    for source in range(sources):
        of_source, at, begin = _parts(tables, listed, source, at, begin)
        parts += of_source
    for table in tables:
        table._check_bad()
    gate = _gate(tables[0], parts, grads)
    for part in parts:
        part_ids, part_grads = part.take(ids, part.ids), part.take(grads, part.floats)
        alone = len(part.tables) == 1 or any(t._host.has_filter() or t._touched for t in part.tables)
        if alone or any(t.on_bad_gradient == "skip" for t in part.tables):
            for table, ids_at, floats_at in zip(part.tables, part.ids, part.floats, strict=True):
                own_ids, own_grads = ids[slice(*ids_at)], grads[slice(*floats_at)]
                table._apply(own_ids, own_grads, table_rates[table.name], step, dedup, seconds, gate=gate, judged=True)
            continue
        for table in part.tables:
            table._host.raise_max_update_time(seconds)
            table._version += 1
        if part_ids.numel() == 0:
            continue
        group, where = part.group, part.table_of()
        every_rate: list[list[float]] = [[0.0] * len(group.layout.segments)] * group.tables
        for table in part.tables:
            every_rate[table._number] = table_rates[table.name]
        update = Update(every_rate, part.tables[0]._host.scales(), step, 0, part.tables[0]._seed)
        with group:
            rows = group.insert(part_ids, where, counts=part.counts, time=seconds, gate=gate)
            update_rows(group, part_ids, rows, where, part_grads, update, dedup, False, part.tables[0].deterministic)


def _gate(told: CudaHashTable, parts: Sequence[_Part], grads: Tensor) -> Tensor | None:
    """Not 0 when gradients of a table that raises hold NaN or infinity; the first table tells of it later."""
    bad = None
    for part in parts:
        for table, floats in zip(part.tables, part.floats, strict=True):
            if table.on_bad_gradient == "raise" and floats[1] > floats[0]:
                found = count_bad(grads[slice(*floats)], table.dim_size, None)
                bad = found if bad is None else bad + found
    if bad is not None:
        told._tell(bad)
    return bad


class StagedMulti:
    """Copies of several GPU tables in host memory, for the writer and the reader of files."""

    on_gpu = False

    def __init__(self, multi: Any, *, empty: bool = False) -> None:
        self.name = multi.name
        self.saver_parallel = multi.saver_parallel
        self._targets: dict[str, CudaHashTable] = multi.tables
        self.tables = {name: table.staging() if empty else table.staged() for name, table in self._targets.items()}
        self._epochs = {name: staged._native.begin_epoch() for name, staged in self.tables.items()}

    def adopt(self) -> None:
        """Replaces the rows of the tables that files were read for."""
        for name, staged in self.tables.items():
            if staged._native.oldest_epoch() > self._epochs[name]:  # its contents were replaced
                self._targets[name].adopt(staged._native)
