"""The registry interfaces for trainers, containers and operators."""

import abc
from collections.abc import Callable
from typing import Any

from shoal.proto.serving.parameter_sync_pb2 import ClientConfig
from shoal.serving.cluster.records import Container, ContainerServiceInfo, SavedModel, SavedModelDeployConfig


class SyncBackend(abc.ABC):
    """Finds the replicas that need fresh rows."""

    @abc.abstractmethod
    def subscribe_model(self, model_name: str) -> None: ...

    @abc.abstractmethod
    def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str] | dict[str, Any]]:
        """(model name to push to, addresses or address -> ``TargetExtraInfo``)."""

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def stop(self) -> None: ...


def refresh_sync_config(sync_backend: SyncBackend, ps_index: int) -> bytes:
    """The serialised ``ClientConfig`` for the current replicas of ``ps_<ps_index>``."""
    name, replicas = sync_backend.get_sync_targets(f"ps_{ps_index}")
    config = ClientConfig(model_name=name, signature_name="hashtable_assign", timeout_in_ms=3000)
    config.targets.extend(replicas)
    if isinstance(replicas, dict):
        config.targets_extra_info.extend(replicas.values())
    return config.SerializeToString()


class AgentBackend(abc.ABC):
    """The registry operations of a serving container."""

    @abc.abstractmethod
    def report_service_info(self, container: Container, service_info: ContainerServiceInfo) -> None: ...

    @abc.abstractmethod
    def sync_available_saved_models(self, container: Container, saved_models: set[SavedModel]) -> None: ...

    @abc.abstractmethod
    def register_layout_callback(self, layout_path: str, callback: Callable) -> None: ...

    @abc.abstractmethod
    def get_service_map(self) -> dict[str, dict[str, list[ContainerServiceInfo]]]: ...

    @abc.abstractmethod
    def get_service_info(self, container: Container) -> ContainerServiceInfo | None: ...


class CtrlBackend(abc.ABC):
    """The registry operations of an operator."""

    @abc.abstractmethod
    def decl_saved_model(self, saved_model: SavedModel, deploy_config: SavedModelDeployConfig) -> None: ...

    @abc.abstractmethod
    def list_saved_models(self, model_name: str) -> list[SavedModel]: ...

    @abc.abstractmethod
    def add_to_layout(self, layout: str, saved_model: SavedModel) -> None: ...

    @abc.abstractmethod
    def remove_from_layout(self, layout: str, saved_model: SavedModel) -> None: ...

    @abc.abstractmethod
    def bzid_info(self) -> dict[str, Any]: ...
