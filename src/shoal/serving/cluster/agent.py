"""The agent of a unified cluster, whose container serves the sub-graphs in a layout."""

import logging
import threading
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from shoal.errors import ConfigError
from shoal.proto.serving.tf_serving_pb2 import ModelServerConfig, ModelVersionStatus
from shoal.serving.cluster.agent_config import AgentConfig
from shoal.serving.cluster.agent_service import AgentDataProvider, AgentService
from shoal.serving.cluster.agent_utils import gen_model_config
from shoal.serving.cluster.layout_filters import LayoutFilters
from shoal.serving.cluster.records import Container, ContainerServiceInfo, SavedModel
from shoal.serving.net_utils import concat_ip_and_port, get_local_ip
from shoal.serving.security import ServerSecurity

log = logging.getLogger(__name__)

SERVICE_INFO_SECS = 60.0
BINDINGS_SECS = 30.0


class UnifiedAgent:
    """One container of a unified cluster: serves the sub-graphs in its layout (agent version 3).

    Args:
        config: ``bzid``, ``layout_pattern`` and ``layout_filters`` determine what is served.
        backend: a ``ZKBackend``; it is started here.
        server: a ``ModelServer`` without models; it is reloaded when the layout changes.
    """

    service_info_secs = SERVICE_INFO_SECS
    bindings_secs = BINDINGS_SECS

    def __init__(self, config: AgentConfig, backend: Any, server: Any, *, agent_address: str | None = None,
                 security: ServerSecurity | None = None) -> None:  # fmt: skip
        if config.layout_path is None:
            raise ConfigError("a unified agent needs layout_pattern, the layout that it serves")
        self.config, self._backend, self._server = config, backend, server
        self.container = Container(config.container_cluster, config.container_id)
        self._filters = LayoutFilters(config.layout_filters, config.shard_id, config.num_shard or 1)
        self._agent = AgentService(AgentDataProvider(self._addresses), config, address=agent_address, security=security)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._threads: list[threading.Thread] = []
        self.model_config = ModelServerConfig()

    def start(self) -> "UnifiedAgent":
        self._backend.start()
        self._agent.start()
        self._backend.report_service_info(self.container, self._service_info())
        self._backend.register_layout_callback(self.config.layout_path, self._on_layout)
        for name, loop in (("info", self._report_info), ("models", self._report_models), ("load", self._load)):
            thread = threading.Thread(target=loop, name=f"shoal-agent-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=10)
        self._agent.stop()
        self._backend.stop()

    @property
    def agent_port(self) -> int:
        return self._agent.port

    def _service_info(self) -> ContainerServiceInfo:
        ip = get_local_ip()
        rest = self._server.rest_port
        return ContainerServiceInfo(
            grpc=concat_ip_and_port(ip, self._server.port),
            http=concat_ip_and_port(ip, rest) if rest else None,
            agent=concat_ip_and_port(ip, self._agent.port),
            idc=self.config.idc,
        )

    def _addresses(self) -> dict[str, list[str]]:
        found = {}
        for model, subs in self._backend.get_service_map().items():
            for sub, infos in subs.items():
                found[f"{model}:{sub}"] = [info.grpc for info in infos if info.grpc]
        return found

    def _on_layout(self, models: list) -> None:
        config = ModelServerConfig()
        config.model_config_list.SetInParent()
        for saved, deploy in models:
            if not self._filters.accepts(saved.sub_graph):
                continue
            try:
                if not deploy.model_base_path:
                    raise ValueError("its declaration has no model_base_path")
                entry = gen_model_config(str(saved), deploy.model_base_path, deploy.version_policy or "latest")
            except ValueError as error:  # one bad declaration must not affect the others
                log.error("layout %s: skipping %s: %s", self.config.layout_path, saved, error)
                continue
            config.model_config_list.config.append(entry)
        self.model_config = config
        self._wake.set()

    def write_model_config(self, path: str | Path) -> None:
        """Write the accepted layout as a text ``ModelServerConfig``, for a model server that reads files."""
        Path(path).write_text(text_format.MessageToString(self.model_config))

    def _load(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._server.reload(self.model_config)
                self.report_models()
            except Exception:
                log.exception("could not apply the layout %s", self.config.layout_path)

    def report_models(self) -> None:
        """Bind the container to every configured model that has an available version."""
        available = set()
        for entry in self.model_config.model_config_list.config:
            try:
                states = [status.state for status in self._server.model(entry.name).statuses()]
            except Exception as error:
                log.warning("model %s is not available yet: %s", entry.name, error)
                continue
            if ModelVersionStatus.AVAILABLE in states:
                name, _, sub_graph = entry.name.rpartition(":")
                available.add(SavedModel(name, sub_graph))
        self._backend.sync_available_saved_models(self.container, available)

    def _report_info(self) -> None:
        while not self._stop.wait(self.service_info_secs):
            try:
                self._backend.report_service_info(self.container, self._service_info())
            except Exception:
                log.exception("could not report the service info")

    def _report_models(self) -> None:
        while not self._stop.wait(self.bindings_secs):
            try:
                self.report_models()
            except Exception:
                log.exception("could not report the available models")
