"""`MultiHashTable`: many named tables as one object, with one filter, one checkpoint and a raw interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.table import registry
from shoal.table.arguments import as_ids, as_rows, as_time
from shoal.table.base import sync_handle
from shoal.table.config.cached_config import CachedConfig, convert_to_cached_config
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.config.messages import MultiHashTableProto
from shoal.table.raw import RawTables
from shoal.table.table import HashTable, check_values


class MultiHashTable(RawTables):
    """Many named tables, ordered by name, that share a filter and a checkpoint.

    A read ignores names that do not exist; a write to such a name raises ``KeyError`` and changes nothing. Every write
    goes to all tables, with no ids for those that it does not name, so it advances the clock of each. Create one with
    `from_configs`.

    The raw calls take all tables at once: ids as a `Ragged` (or ``(values, row_splits)``) with one row per table,
    values as one flat float32 vector, table after table.
    """

    def __init__(
        self,
        cached_config: CachedConfig,
        *,
        name: str,
        hash_filter: Any = None,
        sync_client: Any = None,
        saver_parallel: int = -1,
        device: Any = "cpu",
        deterministic: bool = False,
    ) -> None:
        self.saver_parallel = saver_parallel
        self.hash_filter = hash_filter
        self.sync_client = sync_client
        self.cached_config = cached_config
        client = sync_handle(sync_client, name)
        tables = {
            table_name: HashTable.from_config(
                cached_config.own(table_name),
                name=table_name,
                hash_filter=hash_filter,
                device=device,
                deterministic=deterministic,
            )
            for table_name in cached_config.configs
        }
        super().__init__(name, tables)
        self.on_gpu = any(table.on_gpu for table in self._tables.values())
        if self.on_gpu:
            from shoal.table.cuda.multi import share

            share(list(self._tables.values()))  # type: ignore[arg-type]
        if client is not None:
            parts = [(table.name, table.dim_size, table._client_lookup) for table in self._tables.values()]
            attached = client.attach_multi_table(name, parts)
            for table, touched in zip(self._tables.values(), attached or (), strict=False):
                table._set_touched(*touched)

    @classmethod
    def from_configs(
        cls,
        configs: Mapping[str, HashTableConfigInstance],
        hash_filter: Any = None,
        sync_client: Any = None,
        name_suffix: str = "",
        saver_parallel: int = -1,
        device: Any = "cpu",
        deterministic: bool = False,
    ) -> MultiHashTable:
        """A registered table named ``MonolithMultiHashTable_<name_suffix>``."""
        return cls.from_cached_config(
            convert_to_cached_config(configs),
            hash_filter,
            sync_client,
            name_suffix,
            saver_parallel,
            device,
            deterministic,
        )

    @classmethod
    def from_cached_config(
        cls,
        cached_config: CachedConfig,
        hash_filter: Any = None,
        sync_client: Any = None,
        name_suffix: str = "",
        saver_parallel: int = -1,
        device: Any = "cpu",
        deterministic: bool = False,
    ) -> MultiHashTable:
        """A registered table, as with `from_configs`, from the result of `convert_to_cached_config`."""
        name = f"MonolithMultiHashTable_{name_suffix}"
        return registry.register(
            name,
            lambda: cls(
                cached_config,
                name=name,
                hash_filter=hash_filter,
                sync_client=sync_client,
                saver_parallel=saver_parallel,
                device=device,
                deterministic=deterministic,
            ),
        )

    convert_to_cached_config = staticmethod(convert_to_cached_config)

    @property
    def tables(self) -> dict[str, HashTable]:
        """Name -> table, sorted by name."""
        return dict(self._tables)

    def size(self) -> int:
        """The number of rows in all tables."""
        return sum(table.size() for table in self._tables.values())

    # --- by name ----------------------------------------------------------------------------------------------------

    def lookup(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``{name: ids}`` to ``{name: [n, dim]}``; names that do not exist are left out."""
        ids = self.get_ragged_id(slot_to_id)
        found = self.get_embeddings(ids, self.raw_lookup(ids))
        return {name: found[name] for name in slot_to_id if name in found}

    def lookup_entry(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, list[bytes]]:
        """``{name: ids}`` to ``{name: [serialized EntryDump]}``; names that do not exist are left out."""
        known = {name: ids for name, ids in slot_to_id.items() if name in self._tables}
        return {name: self._tables[name].lookup_entry(ids) for name, ids in known.items()}

    def assign(self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], req_time: Any = None) -> MultiHashTable:
        """``{name: (ids, values)}``."""
        writes, seconds = self._writes(slot_to_id_and_value, req_time, "values")
        for name, (ids, values) in writes.items():
            self._tables[name].assign(ids, values, seconds)
        return self

    def assign_add(
        self, slot_to_id_and_value: Mapping[str, tuple[Tensor, Tensor]], req_time: Any = None
    ) -> MultiHashTable:
        """``{name: (ids, values)}``."""
        writes, seconds = self._writes(slot_to_id_and_value, req_time, "values")
        for name, (ids, values) in writes.items():
            self._tables[name].assign_add(ids, values, seconds)
        return self

    def apply_gradients(
        self, slot_to_id_and_grad: Mapping[str, tuple[Tensor, Tensor]], global_step: Any = 0, req_time: Any = None
    ) -> MultiHashTable:
        """``{name: (ids, grads)}``; every occurrence of an id makes a separate optimizer step."""
        writes, seconds = self._writes(slot_to_id_and_grad, req_time, "grads")
        ids = self._join_ids([ids for ids, _ in writes.values()])
        flat = self._join([grads.view(-1) for _, grads in writes.values()], torch.float32)
        return self.raw_apply_gradients(ids, flat, global_step, seconds)

    def reinitialize(self, name: str, ids: Tensor) -> tuple[MultiHashTable, Tensor]:
        """Resets rows; int32 ``[n]``: 1 if the id existed, 0 if it was inserted, -1 for all ids of an unknown table."""
        if name not in self._tables:
            n = as_ids(ids, self.name, device=self.device).numel()
            return self, torch.full((n,), -1, dtype=torch.int32, device=self.device)
        return self, self._tables[name].reinitialize(ids)[1]

    def evict(self, max_update_time: Any = None) -> int:
        """`HashTable.evict` on every table; returns the number of rows removed."""
        return sum(table.evict(max_update_time) for table in self._tables.values())

    def clear(self) -> MultiHashTable:
        """Removes all rows of all tables."""
        for table in self._tables.values():
            table.clear()
        return self

    # --- checkpoints and the rest -----------------------------------------------------------------------------------

    def save(self, basename: str, random_sleep_ms: int = 0) -> MultiHashTable:
        """Writes all rows that have not expired; training can continue meanwhile."""
        from shoal.table.checkpoint import save_multi_table

        save_multi_table(self, basename, random_sleep_ms=random_sleep_ms)
        return self

    def restore(self, basename: str, *, strict: bool = True) -> MultiHashTable:
        """Replaces the rows of the tables in the checkpoint; if any of its files is damaged, nothing changes."""
        from shoal.table.checkpoint import restore_multi_table

        restore_multi_table(self, basename, strict=strict)
        return self

    def feature_stat(self, basename: str) -> dict[str, int]:
        """Table name -> the number of its rows in a checkpoint."""
        from shoal.table.checkpoint import feature_stat

        return feature_stat(basename)

    def to_proto(self) -> MultiHashTableProto:
        """A handle with which `from_proto` finds this table in this process."""
        return MultiHashTableProto(
            dims=self.get_table_dim_sizes(),
            slot_expire_time_config=self.cached_config.slot_expire_time_config,
            table_names=self.table_names,
            learning_rate_tensor=self.name,
            shared_name=self.name,
            saver_parallel=self.saver_parallel,
            initializer_op=self.name,
            handle_tensor=self.name,
        )

    @staticmethod
    def from_proto(proto: MultiHashTableProto) -> MultiHashTable:
        """The registered table of a handle."""
        return registry.find(proto.shared_name or proto.handle_tensor)

    def get_queue_hooks(self) -> list[Any]:
        """Hooks that a training loop calls; a local table has none."""
        return []

    def as_op(self, name: str | None = None) -> MultiHashTable:
        """Waits until all calls on these tables have been applied; CPU tables never wait."""
        for table in self._tables.values():
            table.as_op()
        return self

    def close(self) -> None:
        """Stops background eviction. The tables stay usable."""
        for table in self._tables.values():
            table.close()

    def __repr__(self) -> str:
        return f"MultiHashTable({self.name!r}, tables={len(self._tables)}, rows={self.size()})"

    def _writes(
        self, writes: Mapping[str, tuple[Tensor, Tensor]], req_time: Any, what: str
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
        """The checked writes for all tables, in table order."""
        self._check_names(writes)
        seconds = as_time(req_time, self.name)
        checked = {}
        for name, table in self._tables.items():
            ids, values = writes.get(name, ((), ()))
            ids = as_ids(ids, name, device=self.device).view(-1)
            checked[name] = ids, as_rows(values, ids.numel(), table.dim_size, name, what, self.device)
            if what == "values":
                check_values(table, checked[name][1])
        return checked, seconds
