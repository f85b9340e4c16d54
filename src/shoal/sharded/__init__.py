"""Tables that span processes: parameter servers, all-to-all, partitioned layouts, and the queues around them."""

from importlib import import_module
from typing import Any

# Module -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "shoal.ops.sharding": ("ShardedFids", "sharding_sparse_fids"),
    "shoal.sharded.all_to_all_table": ("AllToAllHashTable",),
    "shoal.sharded.alltoall_metrics": ("flags", "set_alltoall_writer"),
    "shoal.sharded.summary": ("set_summary_writer",),
    "shoal.sharded.backend": ("AllToAll", "ProcessGroup", "SingleRank"),
    "shoal.sharded.clip": ("GradClipType",),
    "shoal.sharded.distributed_ps": ("DistributedMultiTypeHashTable",),
    "shoal.sharded.distributed_table": ("DistributedHashTable",),
    "shoal.sharded.distributed_ps_factory": (
        "create_in_worker_multi_type_hash_table",
        "create_in_worker_native_multi_hash_table",
        "create_multi_type_hash_table",
        "create_native_multi_hash_table",
        "create_partitioned_hash_table",
    ),
    "shoal.sharded.distributed_ps_sync": ("DistributedMultiTypeHashTableMpi", "early_reorder_pack"),
    "shoal.sharded.environment": ("SyncEnvironment",),
    "shoal.sharded.feature_utils": (
        "apply_gradients",
        "apply_gradients_with_var_optimizer",
        "control_ops",
        "dense_opt_ops",
    ),
    "shoal.sharded.layout_config": (
        "ParserCtx",
        "ShardingSparseFidsOpParams",
        "gen_feature_configs",
        "get_default_parser_ctx",
        "sharding_sparse_fids_with_context",
    ),
    "shoal.sharded.packing": (
        "pack_tensors",
        "pack_typed_keyed_tensors",
        "unpack_packed_tensors",
        "unpack_tensors",
    ),
    "shoal.sharded.partitioned": ("PartitionedHashTable",),
    "shoal.sharded.prefetch_queue": (
        "AsyncFunctionMgr",
        "AsyncPushHook",
        "EndOfInput",
        "EnqueueHook",
        "Stage",
        "StructureQueue",
        "enqueue_dicts_with_queue_return",
    ),
    "shoal.proto.example_pb2": ("Example", "ExampleBatch", "Feature", "FidList", "NamedFeature", "NamedFeatureList"),
    "shoal.proto.instance_pb2": ("Instance",),
    "shoal.proto.feature_configs": (
        "FeatureConfig",
        "FeatureConfigs",
        "OutConfig",
        "OutType",
        "PoolingType",
        "SliceConfig",
        "TensorShape",
    ),
    "shoal.table.merged": ("MergedMultiTypeHashTable",),
    "shoal.sharded.export": ("set_remote_predict",),
    "shoal.sharded.metrics": ("set_lookup_metrics",),
    "shoal.sharded.ps.client": ("PsClient",),
    "shoal.sharded.ps.engine": ("Durability", "Engine"),
    "shoal.sharded.ps.remote": ("RemoteHashTable", "RemoteMultiHashTable", "RemoteMultiTypeHashTable"),
    "shoal.sharded.ps.security": ("ClientKeys", "ServerKeys"),
    "shoal.sharded.ps.limits": ("Limits",),
    "shoal.sharded.ps.server": ("ParameterServer",),
    "shoal.sharded.ps.shard": ("Shard",),
    "shoal.sharded.ps.tables": ("load_tables", "ps_table"),
    "shoal.sharded.reshard": ("load_shard", "reshard_servers"),
    "shoal.table.export_mode": (
        "ExportContext",
        "ExportMode",
        "enter_export_mode",
        "get_current_export_ctx",
        "is_exporting",
        "is_exporting_distributed",
        "is_exporting_standalone",
    ),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.sharded' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
