"""Tables on a parameter server, with the methods of local tables: the parts of a distributed table."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ragged import Ragged
from shoal.sharded.parts_group import PartsGroup
from shoal.sharded.ps.client.client import PsClient
from shoal.sharded.ps.protocol import DEDUP, FLOAT16, NATIVE, NOW, Op, Reply, Request, as_tensor
from shoal.table.arguments import as_flat, as_ids, as_int, as_rows, as_time, check_rates
from shoal.table.clock import Now
from shoal.table.config.entry import HashTableConfigInstance, infer_dim_size


def create_tables(
    client: PsClient,
    configs: Mapping[str, HashTableConfigInstance],
    *,
    shards: Sequence[int] | None = None,
    seed: int | None = None,
    on_bad_gradient: str = "raise",
    filters: Mapping[str, Any] | None = None,
    clocked: bool = False,
) -> None:
    """Create tables on the servers. Existing tables keep their rows, and take new settings if the rows allow them.

    Without a ``seed`` a new table takes torch's; a table that another worker created can have any.
    """
    default_seed = seed is None
    seed = (torch.initial_seed() if seed is None else seed) & ((1 << 64) - 1)
    for name in sorted(configs):
        config = configs[name]
        options: dict[str, Any] = {"name": name, "seed": seed, "on_bad_gradient": on_bad_gradient}
        if default_seed:
            options["default_seed"] = True
        if config.extra_restore_names:
            options["extra_restore_names"] = list(config.extra_restore_names)
        if filters:
            options["filter"] = filters
        if clocked:
            options["clocked"] = True
        for shard in range(client.num_ps) if shards is None else shards:
            client.write({shard: create_request(config, options)})


def create_request(config: HashTableConfigInstance, options: Mapping[str, Any]) -> Request:
    """The request that creates a table."""
    return Request(
        Op.CREATE,
        ids=config.table_config.SerializeToString(deterministic=True),
        values=json.dumps(options, sort_keys=True).encode(),
    )


def _time_flag(seconds: int) -> int:
    """The flag of a request's time: for a `Now` the server takes its own clock."""
    return NOW if isinstance(seconds, Now) else 0


class RemoteTables:
    """Tables on server ``shard``, in the order of their names: the base of the classes below."""

    def __init__(self, client: PsClient, shard: int, configs: Mapping[str, HashTableConfigInstance]) -> None:
        if not 0 <= shard < client.num_ps:
            raise ConfigError(f"a remote table's shard must be 0..{client.num_ps - 1}, got {shard}")
        self.client, self.shard = client, shard
        self.configs = {name: configs[name] for name in sorted(configs)}
        self.dims = {name: infer_dim_size(config.table_config) for name, config in self.configs.items()}

    def rates_of(self, names: Sequence[str], step: int, scales: Sequence[float] | None = None) -> list[float]:
        """The learning rates of a step, computed here so that all servers use the same."""
        return [
            rate * scale
            for name, scale in zip(names, scales or [1.0] * len(names), strict=True)
            for rate in check_rates(self.configs[name].call_learning_rate_fns_fewer_ops(step), name)
        ]

    def _read(self, request: Request, deadline: timedelta | None = None) -> Reply:
        return self.client.read({self.shard: request}, deadline)[self.shard]

    def _write(self, request: Request) -> Reply:
        return self.client.write({self.shard: request})[self.shard]

    def as_op(self, name: str | None = None) -> Any:
        """Wait until the server has answered every write of this worker."""
        self.client.flush()
        return self


class RemoteHashTable(RemoteTables):
    """One table on one server, with the methods of `shoal.HashTable`."""

    def __init__(
        self, client: PsClient, shard: int, name: str, config: HashTableConfigInstance, *, create: bool = True,
        seed: int | None = None, on_bad_gradient: str = "raise", filters: Mapping[str, Any] | None = None,
        clocked: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(client, shard, {name: config})
        self.clocked = clocked
        """Whether a write without ``req_time`` takes the server's time; if False, it takes 0."""
        self.name, self.config, self.dim_size = name, config, self.dims[name]
        self.on_bad_gradient = on_bad_gradient
        self.hash_filter = dict(filters) if filters and filters.get("type") != "no_filter" else None
        """The description of the server's admission filter."""
        if create:
            create_tables(
                client, self.configs, shards=[shard], seed=seed, on_bad_gradient=on_bad_gradient, filters=filters,
                clocked=clocked,
            )  # fmt: skip

    def request(self, op: Op, ids: Tensor, values: Any = b"", *, flags: int = 0, **fields: Any) -> Request:
        flags |= _time_flag(fields.get("req_time", 0))
        return Request(op, flags=flags, counts=[ids.numel()], names=(self.name,), ids=ids, values=values, **fields)

    def rates(self, step: int) -> list[float]:
        """The learning rates of a step, one per segment."""
        return self.rates_of([self.name], step)

    def group_key(self) -> Hashable:
        return "remote table", id(self.client), self.shard, self.dim_size, self.clocked

    @staticmethod
    def make_group(tables: tuple[RemoteHashTable, ...]) -> PartsGroup:
        return PartsGroup(tables, [list(tables)])

    def _time(self, req_time: Any) -> int:
        return as_time(req_time, self.name, clocked=self.clocked)

    def lookup(
        self, ids: Tensor, use_multi_threads: bool = False, enable_dedup: bool = False, *,
        insert_missing: bool = False, req_time: Any = None,
    ) -> Tensor:  # fmt: skip
        """``[n, dim]``; unknown ids give zeros, or get a row with ``insert_missing``."""
        ids = as_ids(ids, self.name).view(-1)
        op = Op.INSERT if insert_missing else Op.LOOKUP
        reply = self._read(self.request(op, ids, req_time=self._time(req_time) if insert_missing else 0))
        return as_tensor(reply.payload[0], torch.float32).view(-1, self.dim_size)

    def contains(self, ids: Tensor) -> Tensor:
        ids = as_ids(ids, self.name).view(-1)
        return as_tensor(self._read(self.request(Op.CONTAINS, ids)).payload[0], torch.bool)

    def lookup_entry(self, ids: Tensor) -> list[bytes]:
        ids = as_ids(ids, self.name).view(-1)
        return [bytes(entry) for entry in self._read(self.request(Op.ENTRIES, ids)).payload]

    def size(self) -> int:
        return json.loads(bytes(self._read(Request(Op.SIZES)).payload[0]))[self.name]

    def assign(self, ids: Tensor, values: Tensor, req_time: Any = None) -> RemoteHashTable:
        return self._write_rows(Op.ASSIGN, ids, values, req_time=req_time)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None) -> RemoteHashTable:
        return self._write_rows(Op.ASSIGN_ADD, ids, values, req_time=req_time)

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: Any = 0, use_multi_threads: bool = False,
        enable_dedup: bool = False, req_time: Any = None,
    ) -> RemoteHashTable:  # fmt: skip
        step = as_int(global_step, self.name, "global_step")
        return self._write_rows(
            Op.APPLY, ids, grads, req_time=req_time, global_step=step, rates=self.rates(step),
            flags=DEDUP if enable_dedup else 0,
        )  # fmt: skip

    def _write_rows(self, op: Op, ids: Tensor, values: Tensor, *, req_time: Any, **fields: Any) -> RemoteHashTable:
        ids = as_ids(ids, self.name).view(-1)
        values = as_rows(values, ids.numel(), self.dim_size, self.name)
        self._write(self.request(op, ids, values, req_time=self._time(req_time), **fields))
        return self

    def reinitialize(self, ids: Tensor) -> tuple[RemoteHashTable, Tensor]:
        reply = self._write(self.request(Op.REINITIALIZE, as_ids(ids, self.name).view(-1)))
        return self, as_tensor(reply.payload[0], torch.int32)

    def erase(self, ids: Tensor) -> int:
        return int(bytes(self._write(self.request(Op.ERASE, as_ids(ids, self.name).view(-1))).payload[0]))

    def evict(self, max_update_time: Any = None) -> int:
        request = Request(Op.EVICT, counts=[0], names=(self.name,), req_time=as_time(max_update_time, self.name))
        return int(bytes(self._write(request).payload[0]))

    def clear(self) -> RemoteHashTable:
        self._write(Request(Op.CLEAR, counts=[0], names=(self.name,)))
        return self

    def __repr__(self) -> str:
        return f"RemoteHashTable({self.name!r}, dim={self.dim_size}, shard={self.shard})"


class RemoteMultiTypeHashTable(RemoteTables):
    """Tables by slot on one server, with the methods of `shoal.table.MultiTypeHashTable`."""

    native = False

    def __init__(
        self, client: PsClient, shard: int, configs: Mapping[str, HashTableConfigInstance], *, create: bool = True,
        seed: int | None = None, filters: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(client, shard, configs)
        self.on_bad_gradient = "raise" if create else ""
        """The treatment of a NaN or infinite gradient; empty if it was set by whoever created the tables."""
        if create:
            create_tables(client, self.configs, shards=[shard], seed=seed, filters=filters)

    def get_table_dim_sizes(self) -> list[int]:
        return list(self.dims.values())

    def lookup_request(
        self, names: Sequence[str], counts: Sequence[int], ids: Tensor, *, float16: bool = False, op: Op = Op.LOOKUP
    ) -> Request:
        """``op``: LOOKUP returns zeros for unknown ids, FIND_INITIAL initial rows."""
        flags = (FLOAT16 if float16 else 0) | (NATIVE if self.native else 0)
        return Request(op, flags=flags, counts=counts, names=tuple(names), ids=ids)

    def insert_request(self, names: Sequence[str], counts: Sequence[int], ids: Tensor, *, seconds: int) -> Request:
        flags = _time_flag(seconds)
        return Request(Op.INSERT, flags=flags, counts=counts, names=tuple(names), ids=ids, req_time=seconds)

    def write_request(
        self, op: Op, names: Sequence[str], counts: Sequence[int], ids: Tensor, values: Tensor, *, step: int = 0,
        seconds: int = 0, float16: bool = False, scales: Sequence[float] | None = None,
    ) -> Request:  # fmt: skip
        rates = self.rates_of(names, step, scales) if op == Op.APPLY else ()
        return Request(
            op, flags=(FLOAT16 if float16 else 0) | _time_flag(seconds), counts=counts, names=tuple(names), ids=ids,
            values=values.half() if float16 else values, global_step=step, req_time=seconds, rates=rates,
        )  # fmt: skip

    def lookup(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``{slot: ids}`` to ``{slot: [n, dim]}`` in one round trip."""
        if self.native:
            slot_to_id = {slot: ids for slot, ids in slot_to_id.items() if slot in self.dims}
        names = list(slot_to_id)
        ids = [as_ids(slot_to_id[name], name).view(-1) for name in names]
        if not names:
            return {}
        flat = torch.cat(ids)
        reply = self._read(self.lookup_request(names, [i.numel() for i in ids], flat, float16=False))
        values = as_tensor(reply.payload[0], torch.float32)
        parts = torch.split(values, [i.numel() * self.dims[n] for n, i in zip(names, ids, strict=True)])
        return {name: part.view(-1, self.dims[name]) for name, part in zip(names, parts, strict=True)}

    def assign(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], req_time: Any = None) -> Any:
        return self._write_rows(Op.ASSIGN, slot_to_id_and_value, 0, req_time)

    def assign_add(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], req_time: Any = None) -> Any:
        return self._write_rows(Op.ASSIGN_ADD, slot_to_id_and_value, 0, req_time)

    def apply_gradients(
        self, slot_to_id_and_grad: Mapping[str, tuple[Tensor, Tensor]], global_step: Any = 0, req_time: Any = None
    ) -> Any:
        return self._write_rows(Op.APPLY, slot_to_id_and_grad, as_int(global_step, "slots", "global_step"), req_time)

    def _write_rows(self, op: Op, writes: Mapping[str, tuple[Tensor, Tensor]], step: int, req_time: Any) -> Any:
        for slot in writes:
            if slot not in self.dims:
                raise KeyError(f"there is no slot {slot!r}; slots are {', '.join(self.dims) or 'none'}")
        names = list(self.dims) if self.native else sorted(writes)
        ids, values = [], []
        for name in names:
            i, v = writes.get(name, ((), ()))
            ids.append(as_ids(i, name).view(-1))
            values.append(as_rows(v, ids[-1].numel(), self.dims[name], name).view(-1))
        if names:
            counts = [i.numel() for i in ids]
            seconds = as_time(req_time, "slots")
            self._write(
                self.write_request(op, names, counts, torch.cat(ids), torch.cat(values), step=step, seconds=seconds)
            )
        return self

    def size(self) -> int:
        """The number of rows in all tables."""
        rows = json.loads(bytes(self._read(Request(Op.SIZES)).payload[0]))
        return sum(rows[name] for name in self.dims)

    def get_queue_hooks(self) -> list[Any]:
        return []

    def reinitialize(self, slot: str, ids: Tensor) -> tuple[Any, Tensor]:
        ids = as_ids(ids, slot).view(-1)
        if slot not in self.dims:
            return self, torch.full((ids.numel(),), -1, dtype=torch.int32, device="cpu")
        reply = self._write(Request(Op.REINITIALIZE, counts=[ids.numel()], names=(slot,), ids=ids))
        return self, as_tensor(reply.payload[0], torch.int32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.dims)}; shard={self.shard})"


class RemoteMultiHashTable(RemoteMultiTypeHashTable):
    """Tables on one server with the raw interface of `shoal.table.MultiHashTable`."""

    native = True

    def raw_lookup(self, ragged_id: Ragged | tuple[Tensor, Tensor]) -> Tensor:
        ids = ragged_id if isinstance(ragged_id, Ragged) else Ragged(*ragged_id)
        counts = ids.row_lengths().tolist()
        names = list(self.dims) * (len(counts) // max(1, len(self.dims)))
        reply = self._read(self.lookup_request(names, counts, as_ids(ids.values, "ids"), float16=False))
        return as_tensor(reply.payload[0], torch.float32)

    def raw_apply_gradients(
        self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor, global_step: Any = 0, req_time: Any = None
    ) -> RemoteMultiHashTable:
        self._raw_write(Op.APPLY, ragged_id, flat, as_int(global_step, "slots", "global_step"), req_time)
        return self

    def raw_assign(
        self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor, req_time: Any = None
    ) -> RemoteMultiHashTable:
        self._raw_write(Op.ASSIGN, ragged_id, flat, 0, req_time)
        return self

    def _raw_write(self, op: Op, ragged_id: Any, flat: Tensor, step: int, req_time: Any) -> None:
        ids = ragged_id if isinstance(ragged_id, Ragged) else Ragged(*ragged_id)
        values = as_flat(flat, flat.numel(), "slots")
        seconds = as_time(req_time, "slots")
        self._write(
            self.write_request(
                op, list(self.dims), ids.row_lengths().tolist(), as_ids(ids.values, "ids"), values, step=step,
                seconds=seconds,
            )
        )  # fmt: skip
