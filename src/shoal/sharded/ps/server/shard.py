"""The tables of one parameter server and the effect of each request on them. No sockets, threads or files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.errors import ConfigError, DataError, ShoalError, UnsupportedError
from shoal.sharded.ps.protocol import DEDUP, FLOAT16, NATIVE, NOW, Op, Request, Status, as_tensor
from shoal.sharded.ps.server.initial import InitialRows
from shoal.sharded.ps.server.table_spec import build_table, change_table, check_change, parse_spec
from shoal.stamps import Stamp, new_run
from shoal.table.arguments import MAX_TIME, as_time
from shoal.table.clock import Now
from shoal.table.fused import apply_blocks, lookup_blocks
from shoal.table.table import HashTable

log = logging.getLogger("shoal.ps")

TIMED = (Op.ASSIGN, Op.ASSIGN_ADD, Op.APPLY, Op.INSERT)


class UnknownTable(ConfigError, KeyError):
    """A request names a table that the shard does not hold."""

    def __str__(self) -> str:
        return self.args[0]


def status_of(error: Exception) -> Status:
    """The status that reports an error to the sender of a request."""
    if isinstance(error, UnknownTable):
        return Status.UNKNOWN_TABLE
    if isinstance(error, UnsupportedError | NotImplementedError):
        return Status.UNSUPPORTED
    if isinstance(error, ConfigError | DataError | ValueError):
        return Status.BAD_REQUEST
    return Status.INTERNAL


class Shard:
    """The tables of shard ``index`` of ``of``. One thread writes; any thread can read meanwhile.

    The same writes in the same order give bit-identical rows: nothing here reads a clock or draws a random number
    that does not follow from the request.
    """

    def __init__(self, index: int, of: int) -> None:
        if of < 1:
            raise ConfigError(f"the number of shards must be at least 1, got {of}")
        if not 0 <= index < of:
            raise ConfigError(f"a shard's index must be 0..{of - 1} of {of}, got {index}")
        self.index = index
        self.of = of
        self.tables: dict[str, HashTable] = {}
        self._by_bytes: dict[bytes, HashTable] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        """The spec of each table, for checkpoints: its configuration in hex and its options."""
        self.version = 0
        """The number of writes applied so far."""
        self.run = new_run()
        """The run in the `Stamp` of updates: a new one at each start of the server."""
        self._initial = InitialRows()
        self.max_reply_bytes = 2 << 30
        """The most bytes of rows in one reply; requests for more are refused."""

    @property
    def stamp(self) -> Stamp:
        """The stamp of the current rows."""
        return Stamp(self.run, self.version)

    # --- reads ----------------------------------------------------------------------------------------------------

    def read(self, request: Request) -> list[Any]:
        """The payload of the reply to a request that changes nothing."""
        if request.op in (Op.LOOKUP, Op.FIND_INITIAL):
            return [self._lookup(request)]
        if request.op == Op.CONTAINS:
            parts = [table.contains(ids) for table, ids in self._with_ids(request)]
            return [torch.cat(parts) if parts else torch.empty(0, dtype=torch.bool, device="cpu")]
        if request.op == Op.ENTRIES:
            return [e for table, ids in self._with_ids(request) for e in table.lookup_entry(ids)]
        if request.op == Op.SIZES:
            return [json.dumps({name: table.size() for name, table in list(self.tables.items())}).encode()]
        if request.op == Op.SCAN:
            return self._scan(request)
        raise DataError(
            f"{request.op.name}: shard {self.index} is not part of a group; start its server with --registry"
        )

    def _scan(self, request: Request) -> list[Any]:
        """A page of rows: the next ids of a part of the table, in id order, so that concurrent writes hide none."""
        (table,) = self._find(request.names[:1]) if request.names else (None,)
        try:
            part, after = json.loads(bytes(request.values))
            limit = request.counts[0]
            if table is None or not 0 <= part < _core.Table.num_stripes or limit < 1:
                raise ValueError(f"part {part}, limit {limit}")
        except (ValueError, TypeError, IndexError) as error:
            raise DataError(f"SCAN must have one table, a limit and [part, after] as JSON ({error})") from None
        self._check_reply(limit * table.dim_size)
        ids = np.frombuffer(table._native.ids(part), np.int64)
        ids = ids if after is None else ids[ids > after]
        if len(ids) > limit:
            ids = np.partition(ids, limit - 1)[:limit]
            following = [part, int(ids[-1])]
        else:
            following = [part + 1, None] if part + 1 < _core.Table.num_stripes else None
        found = torch.from_numpy(ids.copy())
        return [json.dumps(following).encode(), found, table.lookup(found)]

    def lookup_one(self, name: bytes, ids: Any, n: int, *, initial: bool = False) -> Tensor | None:
        """The rows of ids in one table, by a fast path; None if anything about the request is unusual."""
        table = self._by_bytes.get(name)
        if table is None or len(ids) != 8 * n or 4 * n * table.dim_size > self.max_reply_bytes:
            return None
        tensor = as_tensor(ids, torch.int64)
        if initial:
            return self._initial.rows([table], [n], tensor)
        rows = torch.empty(n * table.dim_size, dtype=torch.float32, device="cpu")
        table._native.lookup(tensor.data_ptr(), n, rows.data_ptr(), 0)
        return rows

    def _lookup(self, request: Request) -> Tensor:
        ids, counts = request.ids_tensor(), request.counts
        initial = request.op == Op.FIND_INITIAL
        tables = self._find(request.names, missing_ok=bool(request.flags & NATIVE) and not initial)
        sizes = [n * table.dim_size if table is not None else 0 for n, table in zip(counts, tables, strict=True)]
        self._check_reply(sum(sizes))
        if initial:
            flat = self._initial.rows(tables, counts, ids)
        elif len(tables) > 1 and None not in tables:
            flat = lookup_blocks(tables, ids, torch.tensor(counts, dtype=torch.int64, device="cpu"), 1, sum(sizes))
        else:
            flat = empty_flat(sum(sizes))
            at_id = at = 0
            for table, n, size in zip(tables, counts, sizes, strict=True):
                if n and table is not None:
                    table._native.lookup(ids.data_ptr() + 8 * at_id, n, flat.data_ptr() + 4 * at, 0)
                at_id, at = at_id + n, at + size
        return flat.half() if request.flags & FLOAT16 else flat

    def _check_reply(self, floats: int) -> None:
        if 4 * floats > self.max_reply_bytes:
            raise ConfigError(
                f"shard {self.index}: a reply must have at most {self.max_reply_bytes} bytes, got a request for "
                f"{4 * floats} bytes of rows; split it into smaller requests"
            )

    # --- writes ---------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise for a write that could not be applied completely, before anything has changed."""
        if request.op == Op.CREATE:
            self._spec(request)
            return
        tables = self._find(request.names)
        if not 0 <= request.req_time <= MAX_TIME:
            raise DataError(f"req_time must be 0..{MAX_TIME} seconds, got {request.req_time}")
        floats = sum(n * table.dim_size for n, table in zip(request.counts, tables, strict=True))
        if request.op in (Op.ASSIGN, Op.ASSIGN_ADD, Op.APPLY):
            values = request.values_tensor()
            if values.numel() != floats:
                raise DataError(f"the values frame must have {floats} values for the ids, got {values.numel()}")
            if request.op == Op.APPLY:
                self._check_rates(request, tables)
            else:
                self._check_finite(request, tables, values)
        if request.op == Op.INSERT:
            self._check_reply(floats)
        if request.op in (Op.APPLY, Op.INSERT):
            for table in tables:
                table.check_trains(request.op.name.lower())

    def check_time(self, request: Request) -> None:
        """Raise for a time far ahead of this machine's clock, for ``clocked`` tables. A replay skips this check."""
        if request.op in TIMED and not request.flags & NOW:
            for name in request.names:
                as_time(request.req_time, name, clocked=self.tables[name].clocked)

    def _check_finite(self, request: Request, tables: Sequence[HashTable], values: Tensor) -> None:
        at = 0
        for name, table, n in zip(request.names, tables, request.counts, strict=True):
            size = n * table.dim_size
            if table.finite_values and not values[at : at + size].isfinite().all():
                raise DataError(f"table {name!r}: values must be finite, got NaN or infinity; nothing was written")
            at += size

    def _check_rates(self, request: Request, tables: Sequence[HashTable]) -> None:
        wanted = sum(len(table.table_config.entry_config.segments) for table in tables)
        if len(request.rates) != wanted:
            raise DataError(f"the request must have {wanted} learning rates, one per segment, got {len(request.rates)}")
        if not all(map(math.isfinite, request.rates)):
            raise DataError(f"learning rates must be finite, got {list(request.rates)}")

    def write(self, request: Request) -> list[Any]:
        """Apply a request that `check` passed; returns the payload of its reply."""
        op = request.op
        payload: list[Any] = []
        if op == Op.CREATE:
            self._create(self._spec(request))
        elif op in (Op.ASSIGN, Op.ASSIGN_ADD, Op.APPLY):
            self._write_rows(request)
        elif op == Op.INSERT:
            payload = [self._insert(request)]
        elif op == Op.REINITIALIZE:
            parts = []
            for table, ids in self._with_ids(request):
                existed = torch.empty(ids.numel(), dtype=torch.int32, device="cpu")
                at_least = table.clocked
                table._native.reinitialize(ids.data_ptr(), ids.numel(), request.req_time, existed.data_ptr(), at_least)
                parts.append(existed)
            payload = [torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device="cpu")]
        elif op == Op.ERASE:
            payload = [str(sum(table.erase(ids) for table, ids in self._with_ids(request))).encode()]
        elif op == Op.EVICT:
            payload = [str(sum(t.evict(request.req_time or None) for t in self._find(request.names))).encode()]
        elif op == Op.CLEAR:
            for table in self._find(request.names):
                table.clear()
        else:
            raise DataError(f"{op.name} is not a write of this server")
        self.version += 1
        return payload

    def _write_rows(self, request: Request) -> None:
        tables = self._find(request.names)
        ids, values, time = request.ids_tensor(), request.values_tensor(), request.time
        if request.op == Op.APPLY:
            counts = torch.tensor(request.counts, dtype=torch.int64, device="cpu")
            step, dedup = request.global_step, bool(request.flags & DEDUP)
            apply_blocks(tables, ids, counts, 1, values, list(request.rates), step, time, dedup)
            return
        at_id = at = 0
        for table, n in zip(tables, request.counts, strict=True):
            write = table._native.assign if request.op == Op.ASSIGN else table._native.assign_add
            write(ids.data_ptr() + 8 * at_id, n, values.data_ptr() + 4 * at, time, isinstance(time, Now))
            at_id, at = at_id + n, at + n * table.dim_size

    def _insert(self, request: Request) -> Tensor:
        parts = []
        for table, ids in self._with_ids(request):
            out = torch.empty(ids.numel(), table.dim_size, dtype=torch.float32, device="cpu")
            at_least = bool(request.flags & NOW)
            table._native.lookup_or_insert(ids.data_ptr(), ids.numel(), request.req_time, out.data_ptr(), at_least)
            parts.append(out.view(-1))
        flat = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, device="cpu")
        return flat.half() if request.flags & FLOAT16 else flat

    # --- tables ---------------------------------------------------------------------------------------------------

    def _spec(self, request: Request) -> dict[str, Any]:
        """The spec in a CREATE; raises if the rows of the existing table do not allow it."""
        spec = parse_spec(request.ids, request.values)
        chosen = spec.pop("default_seed", False)
        known = self.specs.get(spec["name"])
        if known is not None and chosen:
            spec["seed"] = known.get("seed", 0)
        if known is not None and known == spec:
            return known
        build_table(spec)
        if known is not None:
            try:
                check_change(known, spec)
            except ConfigError as error:
                raise ConfigError(f"shard {self.index}: {error}") from None
        return spec

    def has(self, request: Request) -> bool:
        """Whether the table of a CREATE already exists here with the same settings."""
        try:
            spec = self._spec(request)
        except ShoalError:
            return False
        return self.specs.get(spec["name"]) == spec

    def _create(self, spec: dict[str, Any]) -> None:
        name = spec["name"]
        if name not in self.tables:
            self.add(spec, build_table(spec))
        elif spec != self.specs[name]:
            log.info("shard %d: table %r has new settings", self.index, name)
            change_table(self.tables[name], self.specs[name], spec)
            self.specs[name] = spec

    def add(self, spec: dict[str, Any], table: HashTable) -> None:
        """Add a table."""
        name = spec["name"]
        self.specs[name] = spec
        self.tables[name] = self._by_bytes[name.encode()] = table

    def replace(self, name: str, table: HashTable) -> None:
        """Replace a table; reads of the old one that are under way continue."""
        self.add(self.specs[name], table)
        self._initial.forget()
        self.version += 1

    def _find(self, names: Sequence[str], missing_ok: bool = False) -> list[Any]:
        try:
            return [self.tables[name] for name in names]
        except KeyError as error:
            if missing_ok:
                return [self.tables.get(name) for name in names]
            raise UnknownTable(
                f"shard {self.index} has no table {error.args[0]!r}; it has {sorted(self.tables)}"
            ) from None

    def _with_ids(self, request: Request) -> list[tuple[HashTable, Tensor]]:
        ids = as_tensor(request.ids, torch.int64)
        result, at = [], 0
        for table, n in zip(self._find(request.names), request.counts, strict=True):
            result.append((table, ids[at : at + n]))
            at += n
        return result

    def status(self) -> dict[str, Any]:
        """A summary for people and dashboards."""
        return {
            "shard": self.index,
            "of": self.of,
            "version": self.version,
            "tables": {
                name: {"rows": table.size(), "bytes": table.memory_bytes(), "dim": table.dim_size}
                for name, table in list(self.tables.items())
            },
        }
