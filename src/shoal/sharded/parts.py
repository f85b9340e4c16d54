"""Calls all parts of some tables: one after another in this process, concurrently on parameter servers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ragged import Ragged
from shoal.sharded.devices import home
from shoal.sharded.metrics import lookup_timer
from shoal.table.protocol import CPU, Features, Missing, Part, Step, groups_of

Each = Literal["sum", "occurrence"]


class Lists(NamedTuple):
    """The request to one part: ``counts[i]`` of ``ids`` belong to the table ``names[i]``, in that order."""

    names: Sequence[Any]
    counts: Sequence[int]
    ids: Tensor


class Parts(Protocol):
    """All parts of some tables. Calls take one `Lists` per part; rows and gradients are flat float32 tensors.

    Ids and gradients are on the CPU; rows are returned on the part's device.
    """

    remote: bool
    saved_by: str
    """How the rows are saved; they are not in a module's ``state_dict``."""

    def lookup(self, lists: Sequence[Lists], *, missing: Missing = "zeros", float16: bool = False) -> list[Tensor]: ...
    def insert(self, lists: Sequence[Lists], seconds: int) -> list[Tensor]: ...
    def apply(
        self, lists: Sequence[Lists], grads: Sequence[Tensor], step: int, seconds: int, *, float16: bool = False,
        scales: Sequence[float] | None = None, each: Each = "sum",
    ) -> None: ...  # fmt: skip
    def write(self, verb: str, lists: Sequence[Lists], values: Sequence[Tensor], seconds: int) -> None: ...


def check_finite(asked: Lists, flat: Tensor, dims: Mapping[str, int], strict: Sequence[str]) -> None:
    """Raise for a bad gradient of the tables ``strict`` of one part, before any part has applied its share."""
    if not strict or math.isfinite(float(flat.sum())):
        return
    for name, rows in zip(asked.names, _rows_by_table(asked, flat, dims), strict=True):
        if name in strict and not bool(rows.isfinite().all()):
            raise ConfigError(
                f"table {name!r}: a gradient holds NaN or infinity; nothing was applied. Clip it, or set "
                "on_bad_gradient='skip'"
            )


def _rows_by_table(asked: Lists, flat: Tensor, dims: Mapping[str, int]) -> list[Tensor]:
    """The rows of each table of a request, ``[n, dim]``."""
    widths = [dims[name] for name in asked.names]
    blocks = torch.split(flat, [n * width for n, width in zip(asked.counts, widths, strict=True)])
    return [block.view(-1, width) for block, width in zip(blocks, widths, strict=True)]


def parts_of(parts: Sequence[Any], dims: Mapping[str, int], *, raw: bool = False) -> Parts:
    """The `Parts` of tables by name. ``raw``: a local part takes one call for all its tables."""
    if _client([[part] for part in parts]) is None:
        return LocalParts([NamedTables(part, dims, raw) for part in parts])
    from shoal.sharded.ps.client.parts import RemoteParts

    return RemoteParts(parts)


def parts_of_tables(columns: Sequence[Sequence[Any]]) -> tuple[Parts, list[list[Any]]]:
    """The `Parts` of single tables, ``columns[s]`` being those of part ``s``; and the tables' names in a `Lists`."""
    client = _client(columns)
    if client is None:
        return LocalParts([Tables(column) for column in columns]), [list(range(len(column))) for column in columns]
    from shoal.sharded.ps.client.parts import RemoteParts
    from shoal.sharded.ps.client.remote import RemoteMultiTypeHashTable

    remote = [
        RemoteMultiTypeHashTable(client, column[0].shard, {t.name: t.config for t in column}, create=False)
        for column in columns
    ]
    return RemoteParts(remote), [[table.name for table in column] for column in columns]


def _client(columns: Sequence[Sequence[Any]]) -> Any:
    """The client shared by all tables, if every column is on a different server; otherwise None."""
    client = getattr(columns[0][0], "client", None)
    for column in columns:
        if any(
            getattr(t, "client", None) is not client or client is None or t.shard != column[0].shard for t in column
        ):
            return None
    return client if len({column[0].shard for column in columns}) == len(columns) else None


# --- in this process --------------------------------------------------------------------------------------------------


class LocalParts:
    """Parts in this process, called one after another: each already uses several threads."""

    remote = False
    saved_by = "the save of each of table.tables"

    def __init__(self, parts: Sequence[Tables | NamedTables]) -> None:
        self._parts = parts

    def lookup(self, lists: Sequence[Lists], *, missing: Missing = "zeros", float16: bool = False) -> list[Tensor]:
        result = []
        for number, (part, asked) in enumerate(zip(self._parts, lists, strict=True)):
            begin = time.perf_counter()
            found = part.lookup(asked, missing)
            result.append(found.half().float() if float16 else found)
            lookup_timer(number, time.perf_counter() - begin)
        return result

    def insert(self, lists: Sequence[Lists], seconds: int) -> list[Tensor]:
        return [part.insert(asked, seconds) for part, asked in zip(self._parts, lists, strict=True)]

    def apply(
        self, lists: Sequence[Lists], grads: Sequence[Tensor], step: int, seconds: int, *, float16: bool = False,
        scales: Sequence[float] | None = None, each: Each = "sum",
    ) -> None:  # fmt: skip
        flats = [flat.half().float() if float16 else flat for flat in grads]
        if len(self._parts) > 1:
            for part, asked, flat in zip(self._parts, lists, flats, strict=True):
                part.check_finite(asked, flat)
        for part, asked, flat in zip(self._parts, lists, flats, strict=True):
            part.apply(asked, flat, Step(step, seconds, scales), each)

    def write(self, verb: str, lists: Sequence[Lists], values: Sequence[Tensor], seconds: int) -> None:
        for part, asked, flat in zip(self._parts, lists, values, strict=True):
            part.write(verb, asked, flat, seconds)


class Tables:
    """Single tables, called through their groups. A `Lists` refers to them by position."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tables
        self._groups = groups_of(tables)

    def lookup(self, asked: Lists, missing: Missing) -> Tensor:
        if not asked.names:
            return torch.empty(0, device=CPU)
        blocks: dict[int, Tensor] = {}
        for group, places, features, counts, ids in self._work(asked):
            rows = group.rows(group.find(ids, counts, features, missing=missing), features, missing=missing)
            if len(places) == len(asked.names):
                return rows.view(-1)
            blocks.update(zip(places, torch.split(rows, counts.tolist()), strict=True))
        return torch.cat([blocks[place].reshape(-1) for place in range(len(asked.names))])

    def insert(self, asked: Lists, seconds: int) -> Tensor:
        rows = [
            self._tables[name].lookup(ids.to(home(self._tables[name])), insert_missing=True, req_time=seconds)
            for name, ids in zip(asked.names, torch.split(asked.ids, list(asked.counts)), strict=True)
        ]
        return torch.cat([r.reshape(-1) for r in rows])

    def check_finite(self, asked: Lists, flat: Tensor) -> None:
        """Nothing is left to check: `PartsGroup` has checked the gradients."""

    def apply(self, asked: Lists, flat: Tensor, step: Step, each: Each) -> None:
        for group, places, features, counts, ids in self._work(asked):
            rows = _blocks(flat.view(-1, group.dim), asked.counts, places).to(group.traits.device)
            scales = None
            if step.lr_scale is not None:  # in the order of ``asked.names``
                given = {table: float(step.lr_scale[at]) for table, at in zip(features.tables, places, strict=True)}
                scales = [given.get(table, 1.0) for table in range(len(group.tables))]
            found = group.find(ids, counts, features, missing="initial")
            group.update([Part(found, features, rows)], step=Step(step.number, step.time_s, scales), each=each)

    def write(self, verb: str, asked: Lists, flat: Tensor, seconds: int) -> None:
        at = 0
        for name, ids in zip(asked.names, torch.split(asked.ids, list(asked.counts)), strict=True):
            table = self._tables[name]
            rows = flat[at : at + ids.numel() * table.dim_size].view(-1, table.dim_size)
            at += rows.numel()
            getattr(table, verb)(ids.to(home(table)), rows.to(home(table)), req_time=seconds)

    def _work(self, asked: Lists) -> Any:
        """Yield each group, the places of its tables in ``asked``, and the arguments of its ``find``."""
        for group, own in self._groups:
            places = [place for place, name in enumerate(asked.names) if name in own]
            if places:
                features = Features(tables=tuple(own.index(asked.names[place]) for place in places))
                counts = torch.tensor([asked.counts[place] for place in places], dtype=torch.int64, device=CPU)
                yield group, places, features, counts, _blocks(asked.ids, asked.counts, places).to(group.traits.device)


def _blocks(flat: Tensor, counts: Sequence[int], places: Sequence[int]) -> Tensor:
    """The blocks at ``places`` of a tensor that consists of blocks of ``counts`` rows."""
    if len(places) == len(counts):
        return flat
    blocks = torch.split(flat, list(counts))
    return torch.cat([blocks[place] for place in places])


class NamedTables:
    """Tables by name as one part: a `MultiTypeHashTable`, or with ``raw`` a `MultiHashTable`."""

    def __init__(self, part: Any, dims: Mapping[str, int], raw: bool) -> None:
        self._part, self._dims, self._raw = part, dims, raw

    def lookup(self, asked: Lists, missing: Missing) -> Tensor:
        ids = asked.ids.to(home(self._part))
        if self._raw:
            return self._part.raw_lookup(Ragged.from_row_lengths(ids, asked.counts))
        rows = self._part.lookup(dict(zip(asked.names, torch.split(ids, list(asked.counts)), strict=True)))
        return torch.cat([rows[name].reshape(-1) for name in asked.names]) if rows else torch.empty(0, device=CPU)

    def insert(self, asked: Lists, seconds: int) -> Tensor:
        raise NotImplementedError("insert_missing must be False for a MultiTypeHashTable or a MultiHashTable, got True")

    def check_finite(self, asked: Lists, flat: Tensor) -> None:
        tables: Mapping[str, Any] = getattr(self._part, "tables", {})
        strict = [name for name in asked.names if getattr(tables.get(name), "on_bad_gradient", "") == "raise"]
        check_finite(asked, flat, self._dims, strict)

    def apply(self, asked: Lists, flat: Tensor, step: Step, each: Each) -> None:
        if self._raw:
            ragged = Ragged.from_row_lengths(asked.ids.to(home(self._part)), asked.counts)
            self._part.raw_apply_gradients(ragged, flat.to(home(self._part)), step.number, step.time_s)
        elif asked.names:
            self._part.apply_gradients(self._pairs(asked, flat), step.number, req_time=step.time_s)

    def write(self, verb: str, asked: Lists, flat: Tensor, seconds: int) -> None:
        getattr(self._part, verb)(self._pairs(asked, flat), req_time=seconds)

    def _pairs(self, asked: Lists, flat: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        there = home(self._part)
        ids = torch.split(asked.ids.to(there), list(asked.counts))
        rows = _rows_by_table(asked, flat.to(there), self._dims)
        return dict(zip(asked.names, zip(ids, rows, strict=True), strict=True))
