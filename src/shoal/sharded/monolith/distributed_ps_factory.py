"""Ready-made combinations of tables: merged, distributed over servers, synchronous, partitioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.distributed_table import DistributedHashTable
from shoal.sharded.monolith.distributed_ps import DistributedMultiTypeHashTable
from shoal.sharded.monolith.distributed_ps_sync import DistributedMultiTypeHashTableMpi
from shoal.sharded.monolith.layout_config import ParserCtx, params_of
from shoal.sharded.monolith.partitioned import PartitionedHashTable
from shoal.table.config.entry import HashTableConfigInstance
from shoal.table.merged import MergedMultiTypeHashTable
from shoal.table.multi import MultiHashTable, convert_to_cached_config
from shoal.table.multi_type import MultiTypeHashTable
from shoal.table.table import hash_table_from_config

Configs = Mapping[str, HashTableConfigInstance]


def _clients(num_ps: int, sync_clients: Sequence[Any] | None, servers: Any = None) -> list[Any]:
    """One sync client per part, or none. ``servers``: the `PsClient` of tables that are not in this process."""
    pushing = [each for each in sync_clients or () if each is not None]
    if servers is not None and not all(getattr(getattr(each, "handle", each), "is_dummy", False) for each in pushing):
        raise ConfigError(
            "sync_clients push rows of tables in this process, the tables are on servers; nothing would be pushed. "
            "Leave out sync_clients, or client= to keep the tables here"
        )
    if num_ps > 0 and sync_clients and len(sync_clients) != num_ps:
        raise AssertionError(f"sync_clients must hold one sync client per server, {num_ps}, got {len(sync_clients)}")
    return list(sync_clients) if sync_clients else [None] * max(1, num_ps)


def _filters(num_ps: int, hash_filters: Sequence[Any] | None) -> list[Any]:
    filters = list(hash_filters or ())
    return filters if len(filters) >= max(1, num_ps) else [*filters, *[None] * (max(1, num_ps) - len(filters))]


def _check_servers(client: Any, filters: Sequence[Any], device: Any) -> None:
    """Tables on servers admit ids and hold rows there, so a filter or a device of this process would do nothing."""
    if client is not None and device is not None and str(device) != "cpu":
        raise ConfigError(f"device={device!r} is of this process, the tables are on servers; give client= or device=")
    if client is not None and any(f is not None and type(f).__name__ != "DummyHashFilter" for f in filters):
        raise ConfigError(
            "hash_filters are of this process, the tables are on servers; make these tables with "
            "RemoteHashTable(..., filters={'type': 'sliding_hash_filter', ...}) in place of the factory"
        )


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
    """Slots of equal configuration merged, over ``num_ps`` parts.

    With ``reduce_network_packets`` all tables of a part share one request. ``client``, a `PsClient`, puts the parts
    on its servers; otherwise they are in this process, and ``device="cuda"`` keeps their rows in GPU memory.
    """
    filters, clients = _filters(num_ps, hash_filters), _clients(num_ps, sync_clients, client)
    _check_servers(client, filters, device)

    def table(name: str, config: HashTableConfigInstance, i: int, suffix: str) -> Any:
        if client is not None:
            from shoal.sharded.ps.client.remote import RemoteHashTable

            return RemoteHashTable(client, i, f"MonolithHashTable_{suffix}", config)
        return hash_table_from_config(config, filters[i], suffix, clients[i], device=device)

    def behind(merged: dict[str, HashTableConfigInstance]) -> Any:
        if num_ps == 0:
            return MultiTypeHashTable(merged, lambda name, config: table(name, config, 0, name))
        if not reduce_network_packets:
            return MultiTypeHashTable(
                merged,
                lambda name, config: DistributedHashTable(
                    num_ps, config, lambda i, c: table(name, c, i, f"{name}_{i}")
                ),
            )

        def part(i: int, configs: Configs) -> Any:
            if client is not None:
                from shoal.sharded.ps.client.remote import RemoteMultiTypeHashTable

                return RemoteMultiTypeHashTable(client, i, configs)
            return MultiTypeHashTable(configs, lambda name, config: table(name, config, i, f"{name}_{i}"))

        return DistributedMultiTypeHashTable(num_ps, merged, part, max_rpc_deadline_millis=max_rpc_deadline_millis)

    return MergedMultiTypeHashTable(slot_to_config, behind)


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
    filters, clients = _filters(num_ps, hash_filters), _clients(num_ps, sync_clients, client)
    _check_servers(client, filters, device)
    if num_ps == 0:
        return MultiHashTable.from_configs(slot_to_config, filters[0], clients[0], device=device)
    cached = convert_to_cached_config(slot_to_config)

    def part(i: int, configs: Configs) -> Any:
        if client is not None:
            from shoal.sharded.ps.client.remote import RemoteMultiHashTable

            return RemoteMultiHashTable(client, i, configs)
        return MultiHashTable.from_cached_config(cached, filters[i], clients[i], str(i), device=device)

    return DistributedMultiTypeHashTable(num_ps, slot_to_config, part, max_rpc_deadline_millis=max_rpc_deadline_millis)


def create_in_worker_multi_type_hash_table(
    shard_num: int,
    slot_to_config: Configs,
    hash_filter: Any,
    sync_client: Any = None,
    queue_configs: Mapping[str, int] | None = None,
    *,
    device: Any = "cpu",
) -> MergedMultiTypeHashTable:
    """Synchronous, merged: every rank owns a shard of `MultiTypeHashTable`, with its rows on ``device``."""

    def behind(merged: dict[str, HashTableConfigInstance]) -> Any:
        def shard(rank: int) -> Any:
            return MultiTypeHashTable(
                merged,
                lambda name, c: hash_table_from_config(c, hash_filter, f"{name}_{rank}", sync_client, device=device),
            )

        return DistributedMultiTypeHashTableMpi(shard_num, shard, queue_configs)

    return MergedMultiTypeHashTable(slot_to_config, behind)


def create_in_worker_native_multi_hash_table(
    shard_num: int,
    slot_to_config: Configs,
    hash_filter: Any,
    sync_client: Any = None,
    queue_configs: Mapping[str, int] | None = None,
    *,
    device: Any = "cpu",
) -> DistributedMultiTypeHashTableMpi:
    """Synchronous: every rank owns a shard of `MultiHashTable`, with its rows on ``device``."""
    return DistributedMultiTypeHashTableMpi(
        shard_num,
        lambda rank: MultiHashTable.from_configs(slot_to_config, hash_filter, sync_client, str(rank), device=device),
        queue_configs,
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
    """A `PartitionedHashTable` with the settings of the parser context, so it is called inside ``with ctx:``.

    Rows are in GPU memory with ``device="cuda"``, and by default with ``enable_gpu_emb`` where there is a GPU.
    """
    if device is None:
        on_gpu = enable_gpu_emb and client is None and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    filters, clients = _filters(num_ps, hash_filters), _clients(num_ps, sync_clients, client)
    _check_servers(client, filters, device)
    native = use_native_multi_hash_table and params_of(parser_ctx).use_native_multi_hash_table
    rank = default_backend().rank if enable_gpu_emb else None

    def part(i: int, configs: Configs) -> Any:
        at = 0 if rank is not None else i
        if client is not None:
            from shoal.sharded.ps.client import remote

            kind = remote.RemoteMultiHashTable if native else remote.RemoteMultiTypeHashTable
            return kind(client, i, configs)
        if native:
            return MultiHashTable.from_configs(configs, filters[at], clients[at], str(i), device=device)
        suffix = "" if num_ps == 0 else f"_{i}"
        return MultiTypeHashTable(
            configs,
            lambda name, c: hash_table_from_config(c, filters[at], f"{name}{suffix}", clients[at], device=device),
        )

    return PartitionedHashTable(
        num_ps, part, use_native_multi_hash_table, max_rpc_deadline_millis, queue_configs, parser_ctx
    )
