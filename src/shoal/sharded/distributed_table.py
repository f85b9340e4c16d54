"""`DistributedHashTable`: one table whose rows are dealt out to parameter servers, or to parts in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.sharded.devices import home, host_ids, host_rows, place_of
from shoal.sharded.export import check_writable
from shoal.sharded.fan_out import fan_out
from shoal.sharded.route import RouteCache, one_dim, positions_of_shards, split_rows
from shoal.table.arguments import as_int, as_time
from shoal.table.config.entry import HashTableConfigInstance


class DistributedHashTable:
    """One table in ``ps_num`` parts; ``hash_table_factory(i, config)`` builds the part of shard ``i``.

    Ids are de-duplicated here: one row per distinct id travels, and gradients of equal ids are summed into one
    optimizer step. ``assign`` and ``assign_add`` send every occurrence in order. Parts may be local tables or
    `RemoteHashTable`; the latter are asked all at once. It can stand where a `shoal.HashTable` stands.
    """

    def __init__(
        self,
        ps_num: int,
        config: HashTableConfigInstance,
        hash_table_factory: Callable[[int, HashTableConfigInstance], Any],
    ) -> None:
        self.config = config
        self.ps_num = ps_num
        self._tables = [hash_table_factory(i, config) for i in range(max(1, ps_num))]
        self.name = getattr(self._tables[0], "name", "distributed")
        self._dim = one_dim(self._tables, f"table {self.name!r}")
        self._home = home(self._tables[0])
        self._fan = fan_out(self._tables)
        self._remote = hasattr(self._fan, "client")
        self._cache = RouteCache()

    @property
    def saved_by(self) -> str:
        """What keeps the rows, which are not in the ``state_dict`` of a module."""
        return (
            "the servers' checkpoints (PsClient.checkpoint())" if self._remote else "the save of each of table.tables"
        )

    @property
    def device(self) -> torch.device:
        """Where the parts' rows are: the CPU unless they were built on a GPU."""
        return self._home

    @property
    def tables(self) -> list[Any]:
        """The parts, by shard."""
        return list(self._tables)

    @property
    def hash_filter(self) -> Any:
        """The admission filter of the first part; modules then leave it to updates to make rows."""
        return getattr(self._tables[0], "hash_filter", None)

    @property
    def dim_size(self) -> int:
        return self._dim

    def lookup(
        self, ids: Tensor, use_multi_threads: bool = False, enable_dedup: bool = False, *,
        insert_missing: bool = False, req_time: Any = None,
    ) -> Tensor:  # fmt: skip
        """``[n, dim]``; unknown ids give zeros, or get a row with ``insert_missing``. The flags only steer speed."""
        given = ids
        ids = self._ids(ids)
        route = self._route(given, ids)
        seconds = self._time(req_time) if insert_missing else 0
        return route.gather(self._read(route, insert_missing, seconds))[0].to(place_of(given))

    @property
    def clocked(self) -> bool:
        """Whether a write without ``req_time`` takes the current time; False: 0."""
        return getattr(self._tables[0], "clocked", False)

    def _time(self, req_time: Any) -> int:
        return as_time(req_time, self.name, clocked=self.clocked)

    def _ids(self, ids: Any) -> Tensor:
        return host_ids(ids, self.name, self._home).view(-1)

    def _rows(self, values: Any, n: int, what: str) -> Tensor:
        return host_rows(values, n, self._dim, self.name, what, self._home).view(-1, self._dim)

    def _route(self, given: Any, ids: Tensor) -> Any:
        key = (
            given if isinstance(given, Tensor) and given.is_cpu and given.dim() == 1 and given.is_contiguous() else ids
        )
        return self._cache.route((), [key], len(self._tables), [self._dim])

    def _read(self, route: Any, insert_missing: bool, seconds: int) -> list[Tensor]:
        more = {"insert_missing": True, "req_time": seconds} if insert_missing else {}
        if not self._remote:
            pairs = zip(self._tables, route.ids, strict=True)
            return [part.lookup(ids.to(self._home), **more).reshape(-1).cpu() for part, ids in pairs]
        from shoal.sharded.ps.protocol import Op, as_tensor

        op = Op.INSERT if insert_missing else Op.LOOKUP
        requests = {
            i: part.request(op, route.ids[i], req_time=seconds)
            for i, part in enumerate(self._tables)
            if route.ids[i].numel()
        }
        replies = self._fan.client.read(requests)
        empty = torch.empty(0, device="cpu")
        return [
            as_tensor(replies[i].payload[0], torch.float32) if i in replies else empty for i in range(len(self._tables))
        ]

    def assign(self, ids: Tensor, values: Tensor, req_time: Any = None) -> DistributedHashTable:
        """The last of equal ids wins."""
        return self._write("assign", ids, values, req_time)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None) -> DistributedHashTable:
        """Every occurrence is added."""
        return self._write("assign_add", ids, values, req_time)

    def _write(self, verb: str, ids: Tensor, values: Tensor, req_time: Any) -> DistributedHashTable:
        check_writable(verb)
        ids = self._ids(ids)
        values = self._rows(values, ids.numel(), "values")
        seconds = self._time(req_time)
        id_parts, value_parts = split_rows(ids, values, len(self._tables))
        if not self._remote:
            for part, i, v in zip(self._tables, id_parts, value_parts, strict=True):
                getattr(part, verb)(i.to(self._home), v.to(self._home), req_time=seconds)
            return self
        from shoal.sharded.ps.protocol import Op

        parts = enumerate(zip(self._tables, id_parts, value_parts, strict=True))
        self._fan.client.write({s: t.request(Op[verb.upper()], i, v, req_time=seconds) for s, (t, i, v) in parts})
        return self

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: Any = 0, req_time: Any = None, *,
        use_multi_threads: bool = False, enable_dedup: bool = True,
    ) -> DistributedHashTable:  # fmt: skip
        """One optimizer step per distinct id with the sum of its gradients, whatever ``enable_dedup`` says."""
        check_writable("apply_gradients")
        given = ids
        ids = self._ids(ids)
        grads = self._rows(grads, ids.numel(), "grads")
        step, seconds = as_int(global_step, self.name, "global_step"), self._time(req_time)
        route = self._route(given, ids)
        flat = route.scatter([grads])
        if not self._remote:
            for part, i, floats in zip(self._tables, route.ids, route.floats, strict=True):
                rows = flat[floats].view(-1, self._dim).to(self._home)
                part.apply_gradients(i.to(self._home), rows, step, enable_dedup=False, req_time=seconds)
            return self
        from shoal.sharded.ps.protocol import Op

        rates = self._tables[0].rates([self._tables[0].name], step)
        versions = self._fan.client.versions
        requests = {
            i: part.request(
                Op.APPLY, route.ids[i], flat[route.floats[i]], req_time=seconds, global_step=step, rates=rates,
                read_version=versions[i],
            )
            for i, part in enumerate(self._tables)
        }  # fmt: skip
        self._fan.client.write(requests, wait=False)
        return self

    def contains(self, ids: Tensor) -> Tensor:
        """bool ``[n]``: which ids have a row."""
        return self._scatter_back(ids, torch.bool, lambda part, part_ids: part.contains(part_ids))

    def reinitialize(self, ids: Tensor) -> tuple[DistributedHashTable, Tensor]:
        """Fresh rows; int32 ``[n]`` in input order: 1 existed, 0 inserted."""
        check_writable("reinitialize")
        return self, self._scatter_back(ids, torch.int32, lambda part, part_ids: part.reinitialize(part_ids)[1])

    def _scatter_back(self, ids: Tensor, dtype: torch.dtype, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
        ids = self._ids(ids)
        out = torch.empty(ids.numel(), dtype=dtype, device="cpu")
        for part, at in zip(self._tables, positions_of_shards(ids, len(self._tables)), strict=True):
            out[at] = call(part, ids[at].to(self._home)).cpu()
        return out

    def size(self) -> int:
        """Rows of all parts."""
        return sum(part.size() for part in self._tables)

    def __len__(self) -> int:
        return self.size()

    def as_op(self, name: str | None = None) -> DistributedHashTable:
        """Waits until everything asked of this table has been applied."""
        for part in self._tables:
            part.as_op()
        return self

    def __repr__(self) -> str:
        return f"DistributedHashTable({self.name!r}, dim={self._dim}, parts={len(self._tables)})"
