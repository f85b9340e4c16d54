"""`DistributedHashTable`: one table whose rows are split over parameter servers, or over parts in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor

from shoal.sharded.devices import home, host_ids, host_rows, place_of
from shoal.sharded.export import check_writable
from shoal.sharded.parts import Lists
from shoal.sharded.parts_group import ONE, PartsGroup
from shoal.sharded.route import one_dim, part_count, positions_of_shards, split_rows
from shoal.table.arguments import as_int, as_time, check_rates
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.protocol import Part, Step, group_of


class DistributedHashTable:
    """One table in ``ps_num`` parts; ``hash_table_factory(i, config)`` builds the part of shard ``i``.

    Ids are de-duplicated here: one row per distinct id is sent, and gradients of equal ids are summed into one
    optimizer step. ``assign`` and ``assign_add`` send every occurrence in order. Parts can be local tables or
    `RemoteHashTable`; requests to the latter run concurrently. It can be used in place of a `shoal.HashTable`.
    """

    def __init__(
        self,
        ps_num: int,
        config: HashTableConfigInstance,
        hash_table_factory: Callable[[int, HashTableConfigInstance], Any],
    ) -> None:
        self.config = config
        self.ps_num = ps_num
        self._tables = [hash_table_factory(i, config) for i in range(part_count(ps_num))]
        self.name = getattr(self._tables[0], "name", "distributed")
        self._dim = one_dim(self._tables, f"table {self.name!r}")
        self._home = home(self._tables[0])

    # --- the table protocol -------------------------------------------------------------------------------------------

    def group_key(self) -> Hashable:
        """Tables whose parts are on the same servers, or all in this process, form one group."""
        places = [(id(getattr(part, "client", None)), getattr(part, "shard", None)) for part in self._tables]
        return "parts", tuple(places), self._dim, self._home, self.clocked

    @staticmethod
    def make_group(tables: tuple[DistributedHashTable, ...]) -> PartsGroup:
        return PartsGroup(tables, list(zip(*(table.tables for table in tables), strict=True)))

    @functools.cached_property
    def _group(self) -> PartsGroup:
        return cast(PartsGroup, group_of([self]))

    @property
    def saved_by(self) -> str:
        """How the rows are saved; they are not in a module's ``state_dict``."""
        return self._group.parts.saved_by

    def rates(self, step: int) -> list[float]:
        """The learning rates of a step, one per segment."""
        return check_rates(self.config.call_learning_rate_fns_fewer_ops(step), self.name)

    @property
    def on_bad_gradient(self) -> str:
        """The treatment of a NaN or infinite gradient."""
        return getattr(self._tables[0], "on_bad_gradient", "raise")

    @property
    def device(self) -> torch.device:
        """The device of the parts' rows: the CPU unless they were built on a GPU."""
        return self._home

    @property
    def tables(self) -> list[Any]:
        """The parts, by shard."""
        return list(self._tables)

    @property
    def hash_filter(self) -> Any:
        """The admission filter of the first part; with one, rows are created by updates, not by modules' lookups."""
        return getattr(self._tables[0], "hash_filter", None)

    @property
    def dim_size(self) -> int:
        return self._dim

    def lookup(
        self, ids: Tensor, use_multi_threads: bool = False, enable_dedup: bool = False, *,
        insert_missing: bool = False, req_time: Any = None,
    ) -> Tensor:  # fmt: skip
        """``[n, dim]``; unknown ids give zeros, or get a row with ``insert_missing``. The flags affect only speed."""
        if insert_missing:
            check_writable("lookup(insert_missing=True)")
        place = place_of(ids)
        ids = self._ids(ids)
        rows = self._group.insert(ids, self._time(req_time)) if insert_missing else self._group.lookup(ids)
        return rows.to(place)

    @property
    def clocked(self) -> bool:
        """Whether a write without ``req_time`` takes the current time; if False, it takes 0."""
        return getattr(self._tables[0], "clocked", False)

    def _time(self, req_time: Any) -> int:
        return as_time(req_time, self.name, clocked=self.clocked)

    def _ids(self, ids: Any) -> Tensor:
        return host_ids(ids, self.name, self._home).view(-1)

    def _rows(self, values: Any, n: int, what: str) -> Tensor:
        return host_rows(values, n, self._dim, self.name, what, self._home).view(-1, self._dim)

    def assign(self, ids: Tensor, values: Tensor, req_time: Any = None) -> DistributedHashTable:
        """Set rows; the last of equal ids wins."""
        return self._write("assign", ids, values, req_time)

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = None) -> DistributedHashTable:
        """Add to rows; every occurrence counts."""
        return self._write("assign_add", ids, values, req_time)

    def _write(self, verb: str, ids: Tensor, values: Tensor, req_time: Any) -> DistributedHashTable:
        check_writable(verb)
        ids = self._ids(ids)
        values = self._rows(values, ids.numel(), "values")
        seconds = self._time(req_time)
        id_parts, value_parts = split_rows(ids, values, len(self._tables))
        lists = [Lists(names, [i.numel()], i) for names, i in zip(self._group.names, id_parts, strict=True)]
        self._group.parts.write(verb, lists, [v.reshape(-1) for v in value_parts], seconds)
        return self

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: Any = 0, req_time: Any = None, *,
        use_multi_threads: bool = False, enable_dedup: bool = True,
    ) -> DistributedHashTable:  # fmt: skip
        """Make one optimizer step per distinct id with the sum of its gradients; ``enable_dedup`` has no effect."""
        check_writable("apply_gradients")
        ids = self._ids(ids)
        grads = self._rows(grads, ids.numel(), "grads")
        step = Step(as_int(global_step, self.name, "global_step"), self._time(req_time))
        counts = torch.tensor([ids.numel()], dtype=torch.int64, device="cpu")
        found = self._group.find(ids, counts, ONE, missing="initial")
        self._group.update([Part(found, ONE, grads)], step=step)
        return self

    def contains(self, ids: Tensor) -> Tensor:
        """bool ``[n]``: which ids have a row."""
        return self._scatter_back(ids, torch.bool, lambda part, part_ids: part.contains(part_ids))

    def reinitialize(self, ids: Tensor) -> tuple[DistributedHashTable, Tensor]:
        """Give ids fresh rows; int32 ``[n]`` in input order: 1 if the id existed, 0 if it was inserted."""
        check_writable("reinitialize")
        return self, self._scatter_back(ids, torch.int32, lambda part, part_ids: part.reinitialize(part_ids)[1])

    def _scatter_back(self, ids: Tensor, dtype: torch.dtype, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
        ids = self._ids(ids)
        out = torch.empty(ids.numel(), dtype=dtype, device="cpu")
        for part, at in zip(self._tables, positions_of_shards(ids, len(self._tables)), strict=True):
            out[at] = call(part, ids[at].to(self._home)).cpu()
        return out

    def erase(self, ids: Tensor) -> int:
        """Remove ids; returns the number of rows removed."""
        check_writable("erase")
        id_parts, _ = split_rows(self._ids(ids), None, len(self._tables))
        return sum(part.erase(i.to(self._home)) for part, i in zip(self._tables, id_parts, strict=True))

    def clear(self) -> DistributedHashTable:
        """Remove all rows of all parts."""
        check_writable("clear")
        for part in self._tables:
            part.clear()
        return self

    def size(self) -> int:
        """The number of rows in all parts."""
        return sum(part.size() for part in self._tables)

    def __len__(self) -> int:
        return self.size()

    def as_op(self, name: str | None = None) -> DistributedHashTable:
        """Wait until all writes to this table have been applied."""
        for part in self._tables:
            part.as_op()
        return self

    def __repr__(self) -> str:
        return f"DistributedHashTable({self.name!r}, dim={self._dim}, parts={len(self._tables)})"
