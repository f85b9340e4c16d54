"""Serving: export, model server, remote predict, parameter sync, discovery."""

from importlib import import_module
from typing import Any

# Module -> the public names that live in it; imported on first use.
_PUBLIC: dict[str, tuple[str, ...]] = {
    "shoal.proto.serving.parameter_sync_pb2": ("ClientConfig", "PushRequest", "PushResponse", "PushResult"),
    "shoal.proto.serving.agent_service_pb2": (
        "AddressList",
        "GetReplicasRequest",
        "GetReplicasResponse",
        "GetResourceRequest",
        "GetResourceResponse",
        "HeartBeatRequest",
        "HeartBeatResponse",
        "ServerType",
    ),
    "shoal.proto.serving.export_pb2": ("ServingEntry", "ServingModelState"),
    "shoal.proto.serving.tensor_pb2": ("DataType", "SignatureDef", "TensorInfo", "TensorProto", "TensorShapeProto"),
    "shoal.proto.serving.tf_serving_pb2": (
        "FileSystemStoragePathSourceConfig",
        "GetModelMetadataRequest",
        "GetModelMetadataResponse",
        "GetModelStatusRequest",
        "GetModelStatusResponse",
        "ModelConfig",
        "ModelConfigList",
        "ModelServerConfig",
        "ModelSpec",
        "ModelVersionStatus",
        "PredictRequest",
        "PredictResponse",
        "ReloadConfigRequest",
        "ReloadConfigResponse",
        "SignatureDefMap",
        "StatusProto",
    ),
    "shoal.serving.addresses": ("AgentHeartbeat", "set_address_table"),
    "shoal.serving.agent": ("UnifiedAgent",),
    "shoal.serving.agent_config": ("AgentConfig", "DeployType", "read_config_file", "replica_id_from_pod_name"),
    "shoal.serving.agent_service": ("AgentDataProvider", "AgentService", "ReplicaMirror"),
    "shoal.serving.agent_utils": (
        "gen_model_config",
        "gen_model_spec",
        "parse_sub_model_name",
        "pasre_sub_model_name",
    ),
    "shoal.serving.backends": ("AgentBackend", "CtrlBackend", "SyncBackend", "refresh_sync_config"),
    "shoal.serving.directory": ("DirectoryClient",),
    "shoal.serving.discovery.base": (
        "ServiceDiscovery",
        "ServiceDiscoveryType",
        "get_service_discovery",
        "wait_for_cluster",
    ),
    "shoal.serving.discovery.consul": ("ConsulServiceDiscovery",),
    "shoal.serving.discovery.static": ("MLPServiceDiscovery", "TfConfigServiceDiscovery"),
    "shoal.serving.discovery.zk": ("ZKServiceDiscovery",),
    "shoal.serving.dummy": ("DummySyncServer", "create_dummy_sync_server"),
    "shoal.serving.export": ("ModelExporter",),
    "shoal.serving.export_plan": ("plan_export",),
    "shoal.serving.export_tables": ("export_ps",),
    "shoal.serving.fake_tfs": ("FakeTFServing",),
    "shoal.serving.fake_zk": ("FakeKazooClient",),
    "shoal.serving.layout_filters": ("LayoutFilters", "normalize_regex"),
    "shoal.serving.manager": ("SyncClientManager",),
    "shoal.serving.manifest": ("Manifest",),
    "shoal.metrics": ("PrometheusSink", "set_metrics_sink"),
    "shoal.serving.net_utils": (
        "AddressFamily",
        "NodeAliveChecker",
        "check_port_open",
        "concat_ip_and_port",
        "find_free_port",
        "get_local_ip",
        "get_local_server_addr",
        "is_ipv4_supported",
        "is_ipv6_address",
    ),
    "shoal.serving.online": ("OnlineTrainingConfig", "ParameterSyncHook", "SyncLoop", "create_sync_backend"),
    "shoal.serving.program": ("Feature",),
    "shoal.serving.push": ("push_request_to_predict",),
    "shoal.serving.records": ("Container", "ContainerServiceInfo", "SavedModel", "SavedModelDeployConfig"),
    "shoal.serving.remote": ("remote_predict", "remote_predict_async", "remote_predict_with_status"),
    "shoal.serving.remote_helper": ("RemotePredictHelper",),
    "shoal.serving.replica_manager": ("ReplicaManager", "ZKListener"),
    "shoal.serving.replica_meta": (
        "ModelMeta",
        "ModelState",
        "PublishMeta",
        "PublishType",
        "ReplicaMeta",
        "ResourceSpec",
        "ZKPath",
    ),
    "shoal.serving.replica_updater": ("ReplicaUpdater", "choose_version_status"),
    "shoal.serving.replica_watcher": ("ReplicaWatcher",),
    "shoal.serving.retention": (
        "delete_old_exports",
        "get_export_saver_listener_state",
        "get_global_step",
        "overwrite_export_saver_listener_state",
    ),
    "shoal.serving.rollout": ("ModelManager", "declare_saved_model", "map_model_to_layout"),
    "shoal.serving.security": ("ClientSecurity", "ServerSecurity", "set_client_security"),
    "shoal.serving.server": ("ModelServer",),
    "shoal.serving.serving_agent": ("ServingAgent",),
    "shoal.serving.split": ("RequestSplitter",),
    "shoal.serving.status": ("StatusError",),
    "shoal.serving.sync_client": (
        "ParameterSyncClient",
        "create_dummy_sync_client",
        "create_parameter_sync_clients",
        "parameter_sync_client_from_config",
        "reset_sync_clients",
    ),
    "shoal.serving.sync_source": ("SyncSource", "follow_source"),
    "shoal.serving.tensors": ("tensor_from_proto", "tensor_to_proto"),
    "shoal.serving.zk_backend": ("ZKBackend",),
    "shoal.table.export_mode": (
        "ExportContext",
        "ExportMode",
        "enter_export_mode",
        "get_current_export_ctx",
        "is_dry_run_or_exporting",
        "is_exporting",
        "is_exporting_distributed",
        "is_exporting_standalone",
    ),
    "shoal.table.touched": ("TouchedKeySet",),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'shoal.serving' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
