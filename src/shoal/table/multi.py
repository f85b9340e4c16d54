"""`MultiHashTable`: many named tables as one object, with one filter, one checkpoint and a raw interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.ragged import Ragged
from shoal.table import registry
from shoal.table.arguments import as_ids, as_int, as_rows, as_time
from shoal.table.entry import HashTableConfigInstance, infer_dim_size
from shoal.table.fused import apply_blocks, fused_apply_gradient, fused_lookup, lookup_blocks
from shoal.table.messages import EmbeddingHashTableConfig, MultiEmbeddingHashTableConfig, MultiHashTableProto
from shoal.table.multi_type import concatenated_rates
from shoal.table.table import HashTable


@dataclass(frozen=True)
class CachedConfig:
    """The configurations of a `MultiHashTable`, worked out once for many."""

    configs: dict[str, HashTableConfigInstance]
    """Sorted by name."""
    serialized: bytes
    """A `MultiEmbeddingHashTableConfig`."""
    dims: list[int]
    slot_expire_time_config: bytes
    """Of the first table that has one; it is also used for tables without one."""


def convert_to_cached_config(configs: Mapping[str, HashTableConfigInstance]) -> CachedConfig:
    """What `MultiHashTable.from_cached_config` builds tables from."""
    ordered = {name: configs[name] for name in sorted(configs)}
    messages = [config.table_config for config in ordered.values()]
    expiry = [m.slot_expire_time_config for m in messages if m.HasField("slot_expire_time_config")]
    return CachedConfig(
        configs=ordered,
        serialized=MultiEmbeddingHashTableConfig(names=list(ordered), configs=messages).SerializeToString(),
        dims=[infer_dim_size(message) for message in messages],
        slot_expire_time_config=expiry[0].SerializeToString() if expiry else b"",
    )


class MultiHashTable:
    """Many named tables, ordered by name, that share a filter and a checkpoint.

    A read ignores names that do not exist; a write to one raises ``KeyError`` and changes nothing. Every write is a
    write of all tables, those not named getting no ids, so it moves the clock of each. Make it with `from_configs`.

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
        self.name = name
        self.saver_parallel = saver_parallel
        self.hash_filter = hash_filter
        self.sync_client = sync_client
        self.cached_config = cached_config
        self._tables: dict[str, HashTable] = {}
        for table_name, config in cached_config.configs.items():
            own = HashTableConfigInstance(
                _with_expiry(config.table_config, cached_config.slot_expire_time_config),
                config.learning_rate_fns,
                config.extra_restore_names,
            )
            self._tables[table_name] = HashTable.from_config(
                own, name=table_name, hash_filter=hash_filter, device=device, deterministic=deterministic
            )
        self.device = next((table.device for table in self._tables.values()), torch.device("cpu"))
        self.on_gpu = any(table.on_gpu for table in self._tables.values())
        if self.on_gpu:
            from shoal.table.cuda.multi import share

            share(list(self._tables.values()))  # type: ignore[arg-type]
        if sync_client is not None:
            client = getattr(sync_client, "handle", sync_client)
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
        """The same from what `convert_to_cached_config` worked out."""
        table = cls(
            cached_config,
            name=f"MonolithMultiHashTable_{name_suffix}",
            hash_filter=hash_filter,
            sync_client=sync_client,
            saver_parallel=saver_parallel,
            device=device,
            deterministic=deterministic,
        )
        registry.register(table)
        return table

    convert_to_cached_config = staticmethod(convert_to_cached_config)

    @property
    def tables(self) -> dict[str, HashTable]:
        """Name -> table, sorted by name."""
        return dict(self._tables)

    @property
    def table_names(self) -> list[str]:
        return list(self._tables)

    def get_table_dim_sizes(self) -> list[int]:
        """The tables' dimensions, by sorted name."""
        return [table.dim_size for table in self._tables.values()]

    def size(self) -> int:
        """Rows of all tables."""
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
        """``{name: (ids, grads)}``; every occurrence of an id is a step of its own."""
        writes, seconds = self._writes(slot_to_id_and_grad, req_time, "grads")
        ids = Ragged.from_row_lengths(
            torch.cat([ids for ids, _ in writes.values()]) if writes else torch.empty(0, dtype=torch.int64),
            [ids.numel() for ids, _ in writes.values()],
        )
        flat = torch.cat([grads.view(-1) for _, grads in writes.values()]) if writes else torch.empty(0)
        return self.raw_apply_gradients(ids, flat, global_step, seconds)

    def reinitialize(self, name: str, ids: Tensor) -> tuple[MultiHashTable, Tensor]:
        """Fresh rows; int32 ``[n]``: 1 existed, 0 inserted, -1 for all ids if there is no such table."""
        if name not in self._tables:
            return self, torch.full(
                (as_ids(ids, self.name, device=self.device).numel(),), -1, dtype=torch.int32, device=self.device
            )
        return self, self._tables[name].reinitialize(ids)[1]

    def evict(self, max_update_time: Any = None) -> int:
        """`HashTable.evict` of every table; the rows removed."""
        return sum(table.evict(max_update_time) for table in self._tables.values())

    def clear(self) -> MultiHashTable:
        """Removes all rows of all tables."""
        for table in self._tables.values():
            table.clear()
        return self

    # --- raw --------------------------------------------------------------------------------------------------------

    def get_ragged_id(self, slot_to_id: Mapping[str, Tensor]) -> Ragged:
        """The ids of all T tables, one row per table in name order; names that do not exist are left out."""
        ids = [as_ids(slot_to_id.get(name, ()), name, device=self.device).view(-1) for name in self._tables]
        values = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=self.device)
        return Ragged.from_row_lengths(values, [part.numel() for part in ids])

    def get_flat_value(self, slot_to_value: Mapping[str, Tensor]) -> Tensor:
        """The values of all tables as one vector in the same order."""
        self._check_names(slot_to_value)
        parts = []
        for name in self._tables:
            values = torch.as_tensor(slot_to_value.get(name, ()), dtype=torch.float32, device=self.device)
            parts.append(as_rows(values, values.numel(), 1, name, device=self.device).view(-1))
        return torch.cat(parts) if parts else torch.empty(0, device=self.device)

    def get_embeddings(self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor) -> dict[str, Tensor]:
        """``{name: [n, dim]}`` of all tables from what `raw_lookup` gave for one request."""
        floats, flat = self._flat(self._ragged(ragged_id), flat)
        parts = torch.split(flat, floats)
        return {
            name: part.view(-1, table.dim_size) for (name, table), part in zip(self._tables.items(), parts, strict=True)
        }

    def raw_lookup(self, ragged_id: Ragged | tuple[Tensor, Tensor]) -> Tensor:
        """Flat float32, table after table; several requests may be glued together (``T * R`` rows)."""
        ids = self._ragged(ragged_id)
        requests, rest = divmod(ids.nrows(), len(self._tables)) if self._tables else (0, ids.nrows())
        if rest or (self._tables and requests == 0):
            rows = f"a multiple of {len(self._tables)} rows of ids"
            raise ConfigError(f"table {self.name!r}: raw_lookup takes {rows}, got {ids.nrows()}")
        sizes = ids.row_lengths().contiguous()
        dims = torch.tensor(self.get_table_dim_sizes(), dtype=torch.int64).repeat(requests)
        values = as_ids(ids.values, self.name, device=self.device).view(-1)
        return lookup_blocks(list(self._tables.values()), values, sizes, requests, int((sizes * dims).sum()))

    def raw_assign(
        self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor, req_time: Any = None
    ) -> MultiHashTable:
        """`assign` of all tables."""
        ids = self._ragged(ragged_id)
        values = self.get_embeddings(ids, flat)
        parts = torch.split(as_ids(ids.values, self.name, device=self.device).view(-1), ids.row_lengths().tolist())
        return self.assign(dict(zip(self._tables, zip(parts, values.values(), strict=True), strict=True)), req_time)

    def raw_apply_gradients(
        self, ragged_id: Ragged | tuple[Tensor, Tensor], flat: Tensor, global_step: Any = 0, req_time: Any = None
    ) -> MultiHashTable:
        """`apply_gradients` of all tables."""
        ids = self._ragged(ragged_id)
        _, flat = self._flat(ids, flat)
        step, seconds = as_int(global_step, self.name, "global_step"), as_time(req_time, self.name)
        tables = list(self._tables.values())
        apply_blocks(
            tables,
            as_ids(ids.values, self.name, device=self.device).view(-1),
            ids.row_lengths().contiguous(),
            1,
            flat,
            concatenated_rates(tables, step),
            step,
            seconds,
            False,
        )
        return self

    # --- fused ------------------------------------------------------------------------------------------------------

    def fused_lookup(
        self, ids: Tensor, fused_slot_size: Tensor, num_of_shards: int, req_time: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """`shoal.table.fused_lookup` over all tables, by sorted name."""
        return fused_lookup(list(self._tables.values()), ids, fused_slot_size, num_of_shards, req_time)

    def fused_apply_gradient(
        self,
        ids: Tensor,
        indices: Tensor | None,
        fused_slot_size: Tensor,
        id_grads: Tensor,
        id_offsets: Tensor | None,
        grad_offsets: Tensor | None,
        global_step: Any,
        req_time: Any,
        num_of_shards: int,
        enable_grad_accumulation: bool = False,
    ) -> MultiHashTable:
        """`shoal.table.fused_apply_gradient` over all tables with the rates of ``global_step``."""
        tables = list(self._tables.values())
        fused_apply_gradient(
            tables,
            ids,
            indices,
            fused_slot_size,
            id_grads,
            id_offsets,
            grad_offsets,
            concatenated_rates(tables, global_step),
            req_time,
            global_step,
            num_of_shards,
            enable_grad_accumulation,
        )
        return self

    # --- checkpoints and the rest -----------------------------------------------------------------------------------

    def save(self, basename: str, random_sleep_ms: int = 0) -> MultiHashTable:
        """Writes all rows that have not expired; training may go on meanwhile."""
        from shoal.table.checkpoint import save_multi_table

        save_multi_table(self, basename, random_sleep_ms=random_sleep_ms)
        return self

    def restore(self, basename: str, *, strict: bool = True) -> MultiHashTable:
        """Replaces the rows of the tables that the checkpoint has; if any of its files is bad nothing changes."""
        from shoal.table.checkpoint import restore_multi_table

        restore_multi_table(self, basename, strict=strict)
        return self

    def feature_stat(self, basename: str) -> dict[str, int]:
        """Table -> its rows in a checkpoint."""
        from shoal.table.checkpoint import feature_stat

        return feature_stat(basename)

    def to_proto(self) -> MultiHashTableProto:
        """A handle that `from_proto` finds this table by, in this process."""
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
        """The registered table that a handle names."""
        return registry.find(proto.shared_name or proto.handle_tensor)

    def get_queue_hooks(self) -> list[Any]:
        """Hooks that a training loop calls; a local table has none."""
        return []

    def as_op(self) -> MultiHashTable:
        """Waits until everything asked of these tables has been applied, which is at once on a CPU."""
        for table in self._tables.values():
            table.as_op()
        return self

    def close(self) -> None:
        """Stops background eviction. The tables stay usable."""
        for table in self._tables.values():
            table.close()

    def __repr__(self) -> str:
        return f"MultiHashTable({self.name!r}, tables={len(self._tables)}, rows={self.size()})"

    def _ragged(self, ragged_id: Any) -> Ragged:
        if isinstance(ragged_id, Ragged):
            return ragged_id
        values, row_splits = ragged_id
        return Ragged(as_ids(values, self.name, device=self.device).view(-1), row_splits)

    def _flat(self, ids: Ragged, flat: Tensor) -> tuple[list[int], Tensor]:
        """The floats of each table for one request, and all of them as a checked vector."""
        sizes = ids.row_lengths().tolist()
        if len(sizes) != len(self._tables):
            raise ConfigError(f"table {self.name!r}: a request has {len(self._tables)} rows of ids, got {len(sizes)}")
        floats = [size * dim for size, dim in zip(sizes, self.get_table_dim_sizes(), strict=True)]
        return floats, as_rows(flat, sum(floats), 1, self.name, device=self.device).view(-1)

    def _check_names(self, names: Mapping[str, Any]) -> None:
        for name in names:
            if name not in self._tables:
                known = ", ".join(self._tables) or "none"
                raise KeyError(f"table {self.name!r}: there is no table {name!r}; there are {known}")

    def _writes(
        self, writes: Mapping[str, tuple[Tensor, Tensor]], req_time: Any, what: str
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
        """The writes of all tables in order, checked."""
        self._check_names(writes)
        seconds = as_time(req_time, self.name)
        checked = {}
        for name, table in self._tables.items():
            ids, values = writes.get(name, ((), ()))
            ids = as_ids(ids, name, device=self.device).view(-1)
            checked[name] = ids, as_rows(values, ids.numel(), table.dim_size, name, what, self.device)
        return checked, seconds


def _with_expiry(config: EmbeddingHashTableConfig, fallback: bytes) -> EmbeddingHashTableConfig:
    if config.HasField("slot_expire_time_config") or not fallback:
        return config
    own = EmbeddingHashTableConfig()
    own.CopyFrom(config)
    own.slot_expire_time_config.ParseFromString(fallback)
    return own
