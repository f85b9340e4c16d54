"""Tables that span processes: parameter servers, all-to-all, partitioned layouts, and the queues around them."""

from shoal.lazy import exports

__all__, __getattr__, __dir__ = exports(
    __name__,
    {
        "shoal.ops.sharding": (
            "ShardedFids",
            "sharding_sparse_fids",
        ),
        "shoal.proto.example_pb2": (
            "Example",
            "ExampleBatch",
            "Feature",
            "FidList",
            "NamedFeature",
            "NamedFeatureList",
        ),
        "shoal.proto.feature_configs": (
            "FeatureConfig",
            "FeatureConfigs",
            "OutConfig",
            "OutType",
            "PoolingType",
            "SliceConfig",
            "TensorShape",
        ),
        "shoal.proto.instance_pb2": ("Instance",),
        "shoal.sharded.all_to_all.backend": (
            "AllToAll",
            "ProcessGroup",
            "SingleRank",
        ),
        "shoal.sharded.all_to_all.metrics": (
            "flags",
            "set_alltoall_writer",
        ),
        "shoal.sharded.all_to_all.table": ("AllToAllHashTable",),
        "shoal.sharded.distributed_table": ("DistributedHashTable",),
        "shoal.sharded.environment": ("SyncEnvironment",),
        "shoal.sharded.export": ("set_remote_predict",),
        "shoal.sharded.metrics": ("set_lookup_metrics",),
        "shoal.sharded.monolith.clip": ("GradClipType",),
        "shoal.sharded.monolith.distributed_ps": ("DistributedMultiTypeHashTable",),
        "shoal.sharded.monolith.distributed_ps_factory": (
            "create_in_worker_multi_type_hash_table",
            "create_in_worker_native_multi_hash_table",
            "create_multi_type_hash_table",
            "create_native_multi_hash_table",
            "create_partitioned_hash_table",
        ),
        "shoal.sharded.monolith.distributed_ps_sync": (
            "DistributedMultiTypeHashTableMpi",
            "early_reorder_pack",
        ),
        "shoal.sharded.monolith.feature_utils": (
            "apply_gradients",
            "apply_gradients_with_var_optimizer",
            "control_ops",
            "dense_opt_ops",
        ),
        "shoal.sharded.monolith.layout_config": (
            "ParserCtx",
            "ShardingSparseFidsOpParams",
            "gen_feature_configs",
            "get_default_parser_ctx",
            "sharding_sparse_fids_with_context",
        ),
        "shoal.sharded.monolith.packing": (
            "pack_tensors",
            "pack_typed_keyed_tensors",
            "unpack_packed_tensors",
            "unpack_tensors",
        ),
        "shoal.sharded.monolith.partitioned": ("PartitionedHashTable",),
        "shoal.sharded.monolith.prefetch_queue": (
            "AsyncFunctionMgr",
            "AsyncPushHook",
            "EndOfInput",
            "EnqueueHook",
            "Stage",
            "StructureQueue",
            "enqueue_dicts_with_queue_return",
        ),
        "shoal.sharded.ps.client.client": ("PsClient",),
        "shoal.sharded.ps.client.remote": (
            "RemoteHashTable",
            "RemoteMultiHashTable",
            "RemoteMultiTypeHashTable",
        ),
        "shoal.sharded.ps.client.tables": (
            "load_tables",
            "ps_table",
        ),
        "shoal.sharded.ps.limits": ("Limits",),
        "shoal.sharded.ps.reshard": (
            "load_shard",
            "reshard_servers",
        ),
        "shoal.sharded.ps.security": (
            "ClientKeys",
            "ServerKeys",
        ),
        "shoal.sharded.ps.server.engine": (
            "Durability",
            "Engine",
        ),
        "shoal.sharded.ps.server.server": ("ParameterServer",),
        "shoal.sharded.ps.server.shard": ("Shard",),
        "shoal.sharded.summary": ("set_summary_writer",),
        "shoal.table.export_mode": (
            "ExportContext",
            "ExportMode",
            "enter_export_mode",
            "get_current_export_ctx",
            "is_exporting",
            "is_exporting_distributed",
            "is_exporting_standalone",
        ),
        "shoal.table.merged": ("MergedMultiTypeHashTable",),
    },
)
