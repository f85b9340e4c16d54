"""`MultiTypeHashTable`: tables of different kinds, one per slot name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.arguments import CPU, as_ids, as_int, as_rows, as_time, device_of
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.fused import FusedCalls
from shoal.table.table import HashTable, check_values


class MultiTypeHashTable(FusedCalls):
    """One table per slot name, built by ``hash_table_factory(name, config)``.

    Slots are ordered by name wherever an order matters. A call affects only the slots that it names, and all of a write
    is checked before anything changes.
    """

    def __init__(
        self,
        slot_to_config: Mapping[str, HashTableConfigInstance],
        hash_table_factory: Callable[[str, HashTableConfigInstance], Any],
    ) -> None:
        self._configs = {slot: slot_to_config[slot] for slot in sorted(slot_to_config)}
        self._tables = {slot: hash_table_factory(slot, config) for slot, config in self._configs.items()}

    @property
    def tables(self) -> dict[str, Any]:
        """Slot name -> its table, sorted by name."""
        return dict(self._tables)

    @property
    def device(self) -> torch.device:
        """The device of the tables' tensors, taken from the first table."""
        return next(map(device_of, self._tables.values()), CPU)

    def get_table_dim_sizes(self) -> list[int]:
        """The tables' dimensions, by sorted slot name."""
        return [table.dim_size for table in self._tables.values()]

    def size(self) -> int:
        """The number of rows in all tables."""
        return sum(table.size() for table in self._tables.values())

    def lookup(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``{slot: ids}`` to ``{slot: [n, dim]}``."""
        tables = {slot: self._table(slot) for slot in slot_to_id}
        checked = {
            slot: as_ids(ids, _name(tables[slot], slot), device=device_of(tables[slot]))
            for slot, ids in slot_to_id.items()
        }
        return {slot: tables[slot].lookup(ids) for slot, ids in checked.items()}

    def assign(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """``{slot: (ids, values)}``; further arguments (``req_time``) as for one table."""
        for slot, (ids, values) in self._check(slot_to_id_and_value, "values", *args, **kwargs).items():
            self._tables[slot].assign(ids, values, *args, **kwargs)
        return self

    def assign_add(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
        """``{slot: (ids, values)}``; further arguments (``req_time``) as for one table."""
        for slot, (ids, values) in self._check(slot_to_id_and_value, "values", *args, **kwargs).items():
            self._tables[slot].assign_add(ids, values, *args, **kwargs)
        return self

    def apply_gradients(
        self,
        slot_to_id_and_grad: Mapping[str, tuple[Tensor, Tensor]],
        global_step: Any = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``{slot: (ids, grads)}``; further arguments as for one table."""
        checked = self._check(slot_to_id_and_grad, "grads", kwargs.get("req_time", args[2] if len(args) > 2 else None))
        for slot, (_, grads) in checked.items():
            check_gradients(self._tables[slot], grads, global_step)
        for slot, (ids, grads) in checked.items():
            self._tables[slot].apply_gradients(ids, grads, global_step, *args, **kwargs)
        return self

    def reinitialize(self, slot: str, ids: Tensor) -> tuple[Any, Tensor]:
        """Resets rows; int32 ``[n]``: 1 if the id existed, 0 if it was inserted, -1 for all ids of an unknown slot."""
        if slot not in self._tables:
            return self, torch.full(
                (as_ids(ids, slot, device=self.device).numel(),), -1, dtype=torch.int32, device=self.device
            )
        return self, self._tables[slot].reinitialize(ids)[1]

    def get_queue_hooks(self) -> list[Any]:
        """The hooks of the tables; local tables have none."""
        return [
            h for t in self._tables.values() for h in (t.get_queue_hooks() if hasattr(t, "get_queue_hooks") else ())
        ]

    def as_op(self, name: str | None = None) -> Any:
        """Waits until all calls on these tables have been applied."""
        for table in self._tables.values():
            table.as_op()
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._tables)})"

    def _table(self, slot: str) -> Any:
        if slot not in self._tables:
            raise KeyError(f"there is no slot {slot!r}; slots are {', '.join(self._tables) or 'none'}")
        return self._tables[slot]

    def _check(
        self, writes: Mapping[str, tuple[Tensor, Tensor]], what: str, req_time: Any = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        checked = {}
        for slot in sorted(writes):
            table = self._table(slot)
            name = _name(table, slot)
            ids, values = writes[slot]
            ids = as_ids(ids, name, device=device_of(table))
            checked[slot] = ids, as_rows(values, ids.numel(), table.dim_size, name, what, device_of(table))
            as_time(req_time, name, clocked=getattr(table, "clocked", False))
            if what == "values" and isinstance(table, HashTable):
                check_values(table, checked[slot][1])
        return checked


def check_gradients(table: Any, grads: Tensor, global_step: Any) -> None:
    """Raises the error that ``apply_gradients`` of a local table would raise for these gradients."""
    if not isinstance(table, HashTable):
        return
    step = as_int(global_step, table.name, "global_step")
    table.check_trains("apply_gradients")
    table._check_step(step)
    table.rates(step)
    if table.on_bad_gradient == "raise" and not bool(torch.isfinite(grads).all()):
        raise ConfigError(f"table {table.name!r}: a gradient holds NaN or infinity; nothing was applied")


def _name(table: Any, slot: str) -> str:
    return getattr(table, "name", slot)
