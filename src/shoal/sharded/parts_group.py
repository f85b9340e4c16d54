"""`PartsGroup`: tables whose rows are split over parts by ``id mod parts``, as one group of the table protocol."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows
from shoal.errors import ConfigError
from shoal.fid import shard_of
from shoal.sharded.bags import add_gradients, pool_rows
from shoal.sharded.devices import home
from shoal.sharded.export import check_writable
from shoal.sharded.parts import Lists, check_finite, parts_of_tables
from shoal.sharded.route import RowRoute
from shoal.table.arguments import as_int, as_time
from shoal.table.pooling import row_gradients
from shoal.table.protocol import CPU, EVERY, Features, Found, Missing, Part, Step, Traits

ONE = Features()  # a single table, read without pooling


class PartsGroup:
    """Tables of one ``dim`` in the same parts; ``columns[s]`` are the tables of part ``s``.

    `find` de-duplicates the ids of each table and routes them; a read is one request per part for all tables, and an
    update is one write per part with the summed gradient of each distinct id.
    """

    def __init__(self, tables: Sequence[Any], columns: Sequence[Sequence[Any]]) -> None:
        self.tables = tuple(tables)
        self.dim = int(tables[0].dim_size)
        self.parts, self.names = parts_of_tables(columns)  # each table's name in a `Lists`, by part
        self._shards = len(columns)
        self._clocked = bool(tables[0].clocked)
        self.traits = Traits(device=home(tables[0]), remote=self.parts.remote, pools=EVERY)

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        known = None if features.padding is None else (ids != features.padding).to(CPU)
        route = self._deal(ids.to(CPU), counts.tolist(), features.tables, known)
        return Found(ids, counts, route.packed, ids.new_empty(0))

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        route = self._route(found)
        read = self._read(route, missing)
        return self._gather(route, read, features).to(self.traits.device)

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
        route = self._route(found)
        read = self._read(route, missing)
        flat = read[0] if len(read) == 1 else torch.cat(read)
        here = Found(found.ids.to(CPU), found.counts, route.offsets, found.came)
        offsets, own = offsets.to(CPU), out.to(CPU)
        weights, marked = (None if one is None else one.detach().to(CPU) for one in (weights, marks))
        pool_rows(flat, here, features, offsets, weights, own, self.dim, marked)
        if out.device != CPU:
            out.copy_(own)
            if marks is not None and marked is not None:
                marks.copy_(marked)

    def lookup(self, ids: Tensor) -> Tensor:
        """`find` and `rows` for the first table, on the CPU; unknown ids give zeros."""
        route = self._deal(ids, [ids.numel()], (0,), None)
        return self._gather(route, self._read(route, "zeros"), ONE)

    def insert(self, ids: Tensor, seconds: int) -> Tensor:
        """Like `lookup`, but unknown ids get rows, which is a write."""
        route = self._deal(ids, [ids.numel()], (0,), None)
        return self._gather(route, [r.to(CPU) for r in self.parts.insert(self._lists(route), seconds)], ONE)

    def _read(self, route: RowRoute, missing: Missing) -> list[Tensor]:
        rows = [part.to(CPU) for part in self.parts.lookup(self._lists(route, skip_empty=True), missing=missing)]
        for number, (part, ids) in enumerate(zip(rows, route.ids, strict=True)):
            if part.numel() != ids.numel() * self.dim:
                raise ConfigError(
                    f"part {number} of table {self.tables[0].name!r} must return {ids.numel()} rows of {self.dim} "
                    f"floats, got {part.numel()} floats in total"
                )
        return rows

    def _gather(self, route: RowRoute, read: list[Tensor], features: Features) -> Tensor:
        offsets, known = route.offsets, None
        if features.padding is not None:
            known = offsets >= 0
            offsets = offsets[known]
        n = offsets.numel()
        rows = empty_rows(n, self.dim)
        if n:
            addresses = [part.data_ptr() for part in read]
            _core.gather_from_parts(addresses, route.edges, offsets.data_ptr(), n, self.dim, rows.data_ptr())
        if known is None:
            return rows
        return rows.new_zeros(known.numel(), self.dim).masked_scatter_(known[:, None], rows)

    # --- updating -----------------------------------------------------------------------------------------------------

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        if not parts:
            return
        check_writable("update")
        name = self.tables[0].name
        number, seconds = as_int(step.number, name, "step"), self._seconds(step)
        lists, flats = self._summed(parts) if each == "sum" else self._in_order(parts)
        used = sorted({table for part in parts for table in part.features.tables})
        lists = [
            Lists([one.names[t] for t in used], [one.counts[t] for t in used], one.ids) for one in lists
        ]  # leaves out tables without a gradient
        scales = None if step.lr_scale is None else [float(step.lr_scale[table]) for table in used]
        self._check_finite(lists, flats, used)
        self.parts.apply(lists, flats, number, seconds, scales=scales, each=each)

    def _seconds(self, step: Step) -> int:
        return as_time(step.time_s, self.tables[0].name, "time_s", clocked=self._clocked)

    def _summed(self, parts: Sequence[Part]) -> tuple[list[Lists], list[Tensor]]:
        """The update of each shard: distinct ids, and the summed gradient of each."""
        routes = [self._route(part.found) for part in parts]
        route, offsets = routes[0], [each.offsets for each in routes]
        if len(routes) > 1:  # route the distinct ids of all parts again, each block as a feature
            tables = tuple(range(len(self.tables))) * (self._shards * len(routes))
            counts = [n for each in routes for sizes in each.counts for n in sizes]
            route = self._deal(torch.cat([ids for each in routes for ids in each.ids]), counts, tables, None)
            begin = 0
            for number, each in enumerate(routes):
                distinct = each.edges[-1] // self.dim
                places = offsets[number].div(self.dim, rounding_mode="floor")
                moved = route.offsets[begin : begin + distinct]
                offsets[number] = torch.where(places < 0, -1, moved[places.clamp(min=0)]) if distinct else places
                begin += distinct
        here = [_on_host(part, at) for part, at in zip(parts, offsets, strict=True)]
        flat = add_gradients(here, route.edges[-1] // self.dim, self.dim)
        return self._lists(route), [flat[a:b] for a, b in itertools.pairwise(route.edges)]

    def _in_order(self, parts: Sequence[Part]) -> tuple[list[Lists], list[Tensor]]:
        """The update of each shard with every occurrence, table after table in the order of ``parts``."""
        ids: list[list[Tensor]] = [[] for _ in self.tables]
        rows: list[list[Tensor]] = [[] for _ in self.tables]
        for part in parts:
            counts, grad = part.found.counts.tolist(), row_gradients(part, self.dim).to(CPU)
            split = zip(part.features.tables, part.found.ids.to(CPU).split(counts), grad.split(counts), strict=True)
            for table, own, block in split:
                known = slice(None) if part.features.padding is None else own != part.features.padding
                ids[table].append(own[known])
                rows[table].append(block[known])
        none = torch.empty(0, dtype=torch.int64, device=CPU), torch.empty(0, self.dim, device=CPU)
        by_table = [(torch.cat([none[0], *i]), torch.cat([none[1], *r])) for i, r in zip(ids, rows, strict=True)]
        lists, flats = [], []
        for shard in range(self._shards):
            here = [shard_of(own, self._shards) == shard for own, _ in by_table]
            counts = [int(h.sum()) for h in here]
            own = torch.cat([i[h] for (i, _), h in zip(by_table, here, strict=True)])
            lists.append(Lists(self.names[shard], counts, own))
            flats.append(torch.cat([r[h] for (_, r), h in zip(by_table, here, strict=True)]).view(-1))
        return lists, flats

    def _check_finite(self, lists: Sequence[Lists], flats: Sequence[Tensor], used: Sequence[int]) -> None:
        """Raise for a bad gradient of a table that refuses it, before any part has applied its share."""
        if self.parts.remote and len(flats) < 2:
            return
        names = [self.tables[t].name for t in used]
        strict = [self.tables[t].name for t in used if getattr(self.tables[t], "on_bad_gradient", "") == "raise"]
        for one, flat in zip(lists, flats, strict=True):
            check_finite(one._replace(names=names), flat, dict.fromkeys(names, self.dim), strict)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _deal(self, ids: Tensor, counts: Sequence[int], tables: Sequence[int], known: Tensor | None) -> RowRoute:
        """Route the ids of features. ``tables`` has each feature's table; ids where ``known`` is False are left out."""
        k, n = len(self.tables), ids.numel()
        order: Tensor | None = None
        if known is not None or any(a > b for a, b in itertools.pairwise(tables)):
            blocks = torch.split(torch.arange(n, device=CPU), list(counts))
            order = torch.cat([blocks[f] for f in sorted(range(len(tables)), key=lambda f: tables[f])])
            of_table = torch.tensor(tables, device=CPU).repeat_interleave(torch.tensor(counts, device=CPU))[order]
            if known is not None:
                order, of_table = order[known[order]], of_table[known[order]]
            sizes = torch.bincount(of_table, minlength=k).tolist()
            ids = ids[order]
        else:
            sizes = [0] * k
            for table, count in zip(tables, counts, strict=True):
                sizes[table] += count
        return RowRoute.of(ids.split(sizes) if k > 1 else [ids], self._shards, self.dim, n, order)

    def _route(self, found: Found) -> RowRoute:
        return RowRoute(found.where, found.ids.numel(), self._shards, len(self.tables), self.dim)

    def _lists(self, route: RowRoute, *, skip_empty: bool = False) -> list[Lists]:
        lists = []
        for names, counts, ids in zip(self.names, route.counts, route.ids, strict=True):
            if skip_empty and not all(counts):
                some = [table for table, count in enumerate(counts) if count]
                names, counts = [names[t] for t in some], [counts[t] for t in some]
            lists.append(Lists(names, counts, ids))
        return lists


def _on_host(part: Part, where: Tensor) -> Part:
    """The part in host memory, with ``where`` as the places of its rows."""
    found = Found(part.found.ids.to(CPU), part.found.counts, where, part.found.came)
    given = [None if one is None else one.detach().to(CPU) for one in (part.grad, *part[3:])]
    return Part(found, part.features, *given)  # pyrefly: ignore[bad-argument-type]
