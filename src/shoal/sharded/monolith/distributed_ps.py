"""Tables by slot whose rows are split over parameter servers, or over parts in this process, by ``id mod num_ps``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.host import as_tensor
from shoal.sharded import export
from shoal.sharded.devices import home, host_ids, host_rows, place_of
from shoal.sharded.distributed_table import DistributedHashTable
from shoal.sharded.monolith.prefetch_queue import hooks_of
from shoal.sharded.parts import Lists, parts_of
from shoal.sharded.route import Route, check_slots, part_count, positions_of_shards, split_rows
from shoal.table.arguments import as_int, as_time
from shoal.table.config.entry import HashTableConfigInstance, infer_dim_size
from shoal.table.export_mode import is_exporting_distributed

__all__ = ["DistributedHashTable", "DistributedMultiTypeHashTable"]

RAW_METHODS = ("raw_lookup", "raw_apply_gradients", "raw_assign")
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_NO_ROWS = torch.empty(0, device="cpu")


def _lists(names: list[str], route: Route) -> list[Lists]:
    return [Lists(names, counts, ids) for counts, ids in zip(route.counts, route.ids, strict=True)]


class DistributedMultiTypeHashTable:
    """Tables by slot, each in ``num_ps`` parts; ``table_factory(i, slot_to_config)`` builds part ``i`` of all of them.

    A part is a `MultiTypeHashTable`, a `MultiHashTable`, or one of their remote forms. If all parts have the raw
    interface and ``transfer_float16`` is off, a call is one flat request over all tables per part, and lookups ignore
    unknown slots. Otherwise an unknown slot raises ``KeyError``.

    Args:
        transfer_float16: rows and summed gradients are sent as float16, in half the bytes.
        max_rpc_deadline_millis: the deadline of a remote lookup of an exported model.
    """

    def __init__(
        self,
        num_ps: int,
        slot_to_config: Mapping[str, HashTableConfigInstance],
        table_factory: Callable[[int, Mapping[str, HashTableConfigInstance]], Any],
        transfer_float16: bool = False,
        max_rpc_deadline_millis: int = 30,
    ) -> None:
        self.num_ps = num_ps
        self.transfer_float16 = transfer_float16
        self.max_rpc_deadline_millis = max_rpc_deadline_millis
        self._configs = {slot: slot_to_config[slot] for slot in sorted(slot_to_config)}
        self._dims = {slot: infer_dim_size(config.table_config) for slot, config in self._configs.items()}
        self._tables = [table_factory(i, slot_to_config) for i in range(part_count(num_ps))]
        self.native = all(hasattr(part, method) for part in self._tables for method in RAW_METHODS)
        self._raw = self.native and not transfer_float16
        self._home = home(self._tables[0])
        self._parts = parts_of(self._tables, self._dims, raw=self._raw)
        if is_exporting_distributed():
            export.export_parts(self._tables, self._dims, native=self.native)

    @property
    def device(self) -> torch.device:
        """The device of the parts' rows: the CPU unless they were built on a GPU."""
        return self._home

    @property
    def tables(self) -> list[Any]:
        """The parts, by shard."""
        return list(self._tables)

    def get_table_dim_sizes(self) -> list[int]:
        """The tables' dimensions, by sorted slot name."""
        return list(self._dims.values())

    def lookup(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``{slot: ids}`` to ``{slot: [n, dim]}``; one round trip to each part."""
        if not self._raw:
            check_slots(slot_to_id, self._dims)
        known = [slot for slot in slot_to_id if slot in self._dims]
        if not known:
            return {}
        names, route = self._route({slot: slot_to_id[slot] for slot in known})
        if is_exporting_distributed():
            parts = export.remote_lookup(self, route, names, model_native=self._raw)
        else:
            found = self._parts.lookup(_lists(names, route), float16=self.transfer_float16)
            parts = [rows.cpu() for rows in found]
        rows = dict(zip(names, route.gather(parts), strict=True))
        return {slot: rows[slot].to(place_of(slot_to_id[slot])) for slot in known}

    def _route(self, slot_to_id: Mapping[str, Tensor]) -> tuple[list[str], Route]:
        names = list(self._dims) if self._raw else sorted(slot_to_id)
        lists = []
        for name in names:
            ids = slot_to_id.get(name)
            if ids is None:
                lists.append(_NO_IDS)
            else:
                flat = host_ids(ids, name, self._home)
                lists.append(flat if flat.dim() == 1 else flat.view(-1))
        dims = [self._dims[name] for name in names]
        return names, Route(lists, len(self._tables), dims)

    def assign(
        self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], req_time: Any = None
    ) -> DistributedMultiTypeHashTable:
        """Set rows from ``{slot: (ids, values)}``; the last of equal ids wins."""
        return self._write("assign", slot_to_id_and_value, req_time)

    def assign_add(
        self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], req_time: Any = None
    ) -> DistributedMultiTypeHashTable:
        """Add to rows from ``{slot: (ids, values)}``; every occurrence counts."""
        return self._write("assign_add", slot_to_id_and_value, req_time)

    def _write(
        self, verb: str, writes: Mapping[str, tuple[Tensor, Tensor]], req_time: Any
    ) -> DistributedMultiTypeHashTable:
        check_slots(writes, self._dims)
        export.check_writable(verb)
        seconds = as_time(req_time, "slots")
        names = list(self._dims) if self.native else sorted(writes)  # a native part takes all its tables in one write
        split = []
        for name in names:
            ids, rows = writes.get(name, (_NO_IDS, ()))
            ids = host_ids(ids, name, self._home).view(-1)
            values = host_rows(rows, ids.numel(), self._dims[name], name, "values", self._home)
            split.append(split_rows(ids, values.view(-1, self._dims[name]), len(self._tables)))
        lists, flats = [], []
        for part in range(len(self._tables)):
            ids = [id_parts[part] for id_parts, _ in split]
            lists.append(Lists(names, [i.numel() for i in ids], torch.cat([_NO_IDS, *ids])))
            flats.append(torch.cat([_NO_ROWS, *(value_parts[part].reshape(-1) for _, value_parts in split)]))
        self._parts.write(verb, lists, flats, seconds)
        return self

    def apply_gradients(
        self, slot_to_id_and_grad: Mapping[str, tuple[Tensor, Tensor]], global_step: Any = 0, req_time: Any = None
    ) -> DistributedMultiTypeHashTable:
        """``{slot: (ids, grads)}``: one optimizer step per slot and distinct id with the sum of its gradients."""
        check_slots(slot_to_id_and_grad, self._dims)
        export.check_writable("apply_gradients")
        step, seconds = as_int(global_step, "slots", "global_step"), as_time(req_time, "slots")
        if not slot_to_id_and_grad and not self._raw:
            return self
        names, route = self._route({slot: pair[0] for slot, pair in slot_to_id_and_grad.items()})
        grads = []
        for name in names:
            ids, rows = slot_to_id_and_grad.get(name, (_NO_IDS, ()))
            grads.append(host_rows(rows, as_tensor(ids).numel(), self._dims[name], name, "grads", self._home))
        flat = route.scatter([g.view(-1, self._dims[n]) for g, n in zip(grads, names, strict=True)])
        grads_of_parts = [flat[floats] for floats in route.floats]
        self._parts.apply(_lists(names, route), grads_of_parts, step, seconds, float16=self.transfer_float16)
        return self

    def reinitialize(self, slot: str, ids: Tensor) -> tuple[DistributedMultiTypeHashTable, Tensor]:
        """Give ids fresh rows; int32 ``[n]`` in input order: 1 existed, 0 inserted, -1 if the slot is unknown."""
        if not self.native:
            raise NotImplementedError("reinitialize needs a native table (MultiHashTable) in every part")
        export.check_writable("reinitialize")
        ids = host_ids(ids, slot, self._home).view(-1)
        status = torch.full((ids.numel(),), -1, dtype=torch.int32, device="cpu")
        if slot in self._dims:
            for part, at in zip(self._tables, positions_of_shards(ids, len(self._tables)), strict=True):
                status[at] = part.reinitialize(slot, ids[at].to(self._home))[1].cpu()
        return self, status

    def get_queue_hooks(self) -> list[Any]:
        """The hooks of the parts."""
        return hooks_of(self._tables)

    def size(self) -> int:
        return sum(part.size() for part in self._tables)

    def as_op(self, name: str | None = None) -> DistributedMultiTypeHashTable:
        """Wait until all writes to these tables have been applied."""
        for part in self._tables:
            part.as_op()
        return self

    def __repr__(self) -> str:
        return f"DistributedMultiTypeHashTable({', '.join(self._dims)}; parts={len(self._tables)})"
