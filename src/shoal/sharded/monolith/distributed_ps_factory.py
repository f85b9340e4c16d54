"""Ready-made combinations of tables: merged, distributed over servers, synchronous, partitioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.sharded.distributed_table import DistributedHashTable
from shoal.sharded.monolith.distributed_ps import DistributedMultiTypeHashTable
from shoal.sharded.monolith.distributed_ps_sync import DistributedMultiTypeHashTableMpi
from shoal.sharded.monolith.layout_config import ParserCtx, params_of
from shoal.sharded.monolith.partitioned import PartitionedHashTable
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.merged import MergedMultiTypeHashTable
from shoal.table.multi import MultiHashTable
from shoal.table.multi_type import MultiTypeHashTable
from shoal.table.table import hash_table_from_config

Configs = Mapping[str, HashTableConfigInstance]
Given = Sequence[Any] | None


class _Here:
    """Builds the parts of tables in this process."""

    def __init__(
        self, num_ps: int, filters: Sequence[Any] | None, sync_clients: Sequence[Any] | None, device: Any
    ) -> None:
        parts = max(1, num_ps)
        self.device = device
        self.filters = [*(filters or ()), *[None] * parts]
        self.clients = list(sync_clients or [None] * parts)

    def table(self, config: HashTableConfigInstance, i: int, suffix: str) -> Any:
        return hash_table_from_config(config, self.filters[i], suffix, self.clients[i], device=self.device)

    def multi_type(self, i: int, configs: Configs, suffix: str) -> Any:
        return MultiTypeHashTable(configs, lambda name, config: self.table(config, i, f"{name}{suffix}"))

    def multi(self, i: int, configs: Configs, suffix: str) -> Any:
        return MultiHashTable.from_configs(configs, self.filters[i], self.clients[i], suffix, device=self.device)


class _OnServers:
    """Builds the parts of tables on a client's servers.

    Ids are admitted and rows are held there, so filters, sync clients and a device of this process are refused.
    """

    def __init__(
        self, client: Any, filters: Sequence[Any] | None, sync_clients: Sequence[Any] | None, device: Any
    ) -> None:
        pushing = [each for each in sync_clients or () if each is not None]
        if not all(getattr(getattr(each, "handle", each), "is_dummy", False) for each in pushing):
            raise ConfigError(
                "sync_clients push rows of tables in this process, but client= puts the tables on servers; leave out "
                "sync_clients, or leave out client= to keep the tables here"
            )
        if device is not None and str(device) != "cpu":
            raise ConfigError(
                f"device={device!r} is for tables in this process, but client= puts tables on servers; leave out one"
            )
        if any(f is not None and type(f).__name__ != "DummyHashFilter" for f in filters or ()):
            raise ConfigError(
                "hash_filters are for tables in this process, but client= puts the tables on servers; instead of "
                "calling the factory, use RemoteHashTable(..., filters={'type': 'sliding_hash_filter', ...})"
            )
        from shoal.sharded.ps.client import remote

        self.client, self.remote = client, remote

    def table(self, config: HashTableConfigInstance, i: int, suffix: str) -> Any:
        return self.remote.RemoteHashTable(self.client, i, f"MonolithHashTable_{suffix}", config)

    def multi_type(self, i: int, configs: Configs, suffix: str) -> Any:
        return self.remote.RemoteMultiTypeHashTable(self.client, i, configs)

    def multi(self, i: int, configs: Configs, suffix: str) -> Any:
        return self.remote.RemoteMultiHashTable(self.client, i, configs)


def _place(num_ps: int, filters: Given, sync_clients: Given, client: Any, device: Any) -> _Here | _OnServers:
    here = client is None
    place = _Here(num_ps, filters, sync_clients, device) if here else _OnServers(client, filters, sync_clients, device)
    if num_ps > 0 and sync_clients and len(sync_clients) != num_ps:
        raise AssertionError(f"sync_clients must have one sync client per server, {num_ps}, got {len(sync_clients)}")
    return place


def create_multi_type_hash_table(
    num_ps: int,
    slot_to_config: Configs,
    hash_filters: Sequence[Any] | None,
    sync_clients: Sequence[Any] | None = None,
    reduce_network_packets: bool = False,
    max_rpc_deadline_millis: int = 30,
    *,
    client: Any = None,
    device: Any = "cpu",
) -> MergedMultiTypeHashTable:
    """Tables in ``num_ps`` parts; slots of equal configuration share one table.

    With ``reduce_network_packets`` all tables of a part share one request. ``client``, a `PsClient`, puts the parts
    on its servers; otherwise they are in this process, and ``device="cuda"`` keeps their rows in GPU memory.
    """
    place = _place(num_ps, hash_filters, sync_clients, client, device)

    def build(merged: dict[str, HashTableConfigInstance]) -> Any:
        if num_ps == 0:
            return MultiTypeHashTable(merged, lambda name, config: place.table(config, 0, name))
        if not reduce_network_packets:
            return MultiTypeHashTable(
                merged,
                lambda name, config: DistributedHashTable(
                    num_ps, config, lambda i, c: place.table(c, i, f"{name}_{i}")
                ),
            )
        return DistributedMultiTypeHashTable(
            num_ps,
            merged,
            lambda i, configs: place.multi_type(i, configs, f"_{i}"),
            max_rpc_deadline_millis=max_rpc_deadline_millis,
        )

    return MergedMultiTypeHashTable(slot_to_config, build)


def create_native_multi_hash_table(
    num_ps: int,
    slot_to_config: Configs,
    hash_filters: Sequence[Any] | None,
    sync_clients: Sequence[Any] | None = None,
    max_rpc_deadline_millis: int = 30,
    *,
    client: Any = None,
    device: Any = "cpu",
) -> Any:
    """One `MultiHashTable` (``num_ps`` 0), or one per part behind a `DistributedMultiTypeHashTable`.

    ``client`` and ``device`` are those of `create_multi_type_hash_table`.
    """
    place = _place(num_ps, hash_filters, sync_clients, client, device)
    if num_ps == 0:
        return place.multi(0, slot_to_config, "")
    return DistributedMultiTypeHashTable(
        num_ps,
        slot_to_config,
        lambda i, configs: place.multi(i, configs, str(i)),
        max_rpc_deadline_millis=max_rpc_deadline_millis,
    )


def create_in_worker_multi_type_hash_table(
    shard_num: int,
    slot_to_config: Configs,
    hash_filter: Any,
    sync_client: Any = None,
    queue_configs: Mapping[str, int] | None = None,
    *,
    device: Any = "cpu",
) -> MergedMultiTypeHashTable:
    """Synchronous tables, with slots of equal configuration merged; every rank owns a shard on ``device``."""
    here = _Here(1, [hash_filter], [sync_client], device)

    def build(merged: Configs) -> Any:
        return DistributedMultiTypeHashTableMpi(
            shard_num, lambda rank: here.multi_type(0, merged, f"_{rank}"), queue_configs
        )

    return MergedMultiTypeHashTable(slot_to_config, build)


def create_in_worker_native_multi_hash_table(
    shard_num: int,
    slot_to_config: Configs,
    hash_filter: Any,
    sync_client: Any = None,
    queue_configs: Mapping[str, int] | None = None,
    *,
    device: Any = "cpu",
) -> DistributedMultiTypeHashTableMpi:
    """Synchronous tables; every rank owns a shard on ``device``, a `MultiHashTable`."""
    here = _Here(1, [hash_filter], [sync_client], device)
    return DistributedMultiTypeHashTableMpi(
        shard_num, lambda rank: here.multi(0, slot_to_config, str(rank)), queue_configs
    )


def create_partitioned_hash_table(
    num_ps: int,
    use_native_multi_hash_table: bool,
    max_rpc_deadline_millis: int = 30,
    hash_filters: Sequence[Any] | None = None,
    sync_clients: Sequence[Any] | None = None,
    enable_gpu_emb: bool = False,
    queue_configs: Mapping[str, int] | None = None,
    *,
    parser_ctx: ParserCtx | None = None,
    client: Any = None,
    device: Any = None,
) -> PartitionedHashTable:
    """A `PartitionedHashTable` with the settings of the parser context; call it inside ``with ctx:``.

    Rows are in GPU memory with ``device="cuda"``, the default with ``enable_gpu_emb`` on a machine with a GPU.
    """
    if enable_gpu_emb and client is not None:
        raise ConfigError("client must be None with enable_gpu_emb, which keeps each rank's rows in its own process")
    if device is None:
        on_gpu = enable_gpu_emb and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    place = _place(num_ps, hash_filters, sync_clients, client, device)
    native = use_native_multi_hash_table and params_of(parser_ctx).use_native_multi_hash_table

    def part(i: int, configs: Configs) -> Any:
        at = 0 if enable_gpu_emb else i
        if native:
            return place.multi(at, configs, str(i))
        return place.multi_type(at, configs, "" if num_ps == 0 else f"_{i}")

    return PartitionedHashTable(
        num_ps, part, use_native_multi_hash_table, max_rpc_deadline_millis, queue_configs, parser_ctx
    )
