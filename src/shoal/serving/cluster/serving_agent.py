"""The agent of a one-model cluster: it starts model servers, registers them and gives them each other's addresses."""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import ConfigError, DeadlineError
from shoal.observe.security import ServerSecurity
from shoal.serving.cluster.agent_config import AgentConfig, DeployType
from shoal.serving.cluster.agent_service import AgentService
from shoal.serving.cluster.agent_utils import parse_sub_model_name
from shoal.serving.cluster.registry import registry_of
from shoal.serving.cluster.replica_manager import ReplicaManager, ZKListener
from shoal.serving.cluster.replica_updater import ReplicaUpdater
from shoal.serving.net_utils import find_free_port, is_open

log = logging.getLogger(__name__)

PORT_CHECK_SECS = 10.0
START_TIMEOUT_SECS = 3600.0


@dataclass(slots=True)
class _Server:
    """A model server to start: its sub-graph, its configuration, and the condition for starting it."""

    name: str
    server_type: str
    config: AgentConfig
    may_start: Callable[[], bool]


def dense_configs(config: AgentConfig) -> list[AgentConfig]:
    """A configuration for each of the ``dense_service_num`` processes that run the net on a host.

    Process i is replica ``replica_id * dense_service_num + i``; the first one has the configured ports, the others free
    ones.
    """
    names = ("tfs_dense_port", "tfs_dense_http_port", "tfs_dense_archon_port")
    count = max(1, config.dense_service_num)
    made = []
    for index in range(count):
        replica = config.replica_id if config.replica_id in (None, -1) else config.replica_id * count + index
        ports: dict[str, Any] = {name: find_free_port() for name in names} if index else {}
        made.append(replace(config, deploy_type="dense", stand_alone_serving=False, replica_id=replica, **ports))
    return made


class ServingAgent:
    """One process of a one-model cluster (agent version 1): starts and registers model servers, and runs the agent.

    Mixed processes start embedding shards, then dense, then the entry, each when its dependencies are available. The
    net runs in ``dense_service_num`` processes. If a child dies, all are ended.
    """

    port_check_secs = PORT_CHECK_SECS
    start_timeout_secs = START_TIMEOUT_SECS

    def __init__(
        self,
        config: AgentConfig,
        zk: Any,
        *,
        agent_address: str | None = None,
        security: ServerSecurity | None = None,
    ) -> None:
        if not config.base_path:
            raise ConfigError("an agent needs base_path, the exported_models directory")
        self.config = config
        self._registry = registry = registry_of(zk)
        self.replicas = ReplicaManager(registry, replace(config, dense_alone=False))
        self.dense: list[ReplicaUpdater] = []
        if config.dense_alone and config.deploy_type in (DeployType.DENSE, DeployType.MIXED):
            self.dense = [ReplicaUpdater(registry, each) for each in dense_configs(config)]
        self.replicas.watcher.own_registrations = self._registrations
        self._unlisten: list[Callable[[], None]] = []
        self._agent = AgentService(self.replicas.watcher, config, address=agent_address, security=security)
        self._children: dict[str, subprocess.Popen] = {}

    def _registrations(self) -> dict[str, bytes]:
        found = dict(self.replicas.updater.registrations)
        for updater in self.dense:
            found |= updater.registrations
        return found

    def servers(self) -> list[_Server]:
        """The model servers of this process, in the order in which they start."""
        conf = self.config
        always = lambda: True  # noqa: E731
        dense = [_Server(f"dense {index}", "dense", updater.config, always) for index, updater in enumerate(self.dense)]
        shards = _Server("ps", "ps", self.replicas.config, always)
        entry = _Server("entry", "entry", self.replicas.config, self._entry_may_start)
        return {
            DeployType.PS: [shards],
            DeployType.DENSE: dense,
            DeployType.ENTRY: [entry],
            DeployType.MIXED: [shards, *dense, entry],
        }.get(DeployType(conf.deploy_type), [])

    def command(self, server_type: str, config: AgentConfig | None = None) -> list[str]:
        """The command line of the model server for ``ps``, ``dense`` or ``entry``."""
        conf = config if config is not None else self.config
        names = [
            name
            for name in ReplicaUpdater(self._registry, conf).model_names
            if parse_sub_model_name(name)[0] == server_type
        ]
        poll = conf.file_system_poll_wait_seconds_ps if server_type == "ps" else conf.file_system_poll_wait_seconds
        command = [sys.executable, "-m", "shoal", "serve", str(conf.base_path)]
        command += ["--port", str(conf.grpc_port(server_type)), "--poll-seconds", str(poll)]
        command += ["--agent-port", str(self._agent.port)]
        return [*command, "--sub-graph", *names]

    def run(self, stop: threading.Event | None = None) -> int:
        """Start everything and wait; returns the exit code: 0 when asked to stop, 1 when a child died."""
        stop = stop or threading.Event()
        self._agent.start()
        try:
            self.replicas.start()
            for updater in self.dense:
                self._unlisten.append(self._registry.listen(ZKListener(None, updater)))
                updater.register()
                updater.start()
            for server in self.servers():
                self._wait(server.may_start, stop, f"the dependencies of {server.name}")
                if stop.is_set():
                    return 0
                self._children[server.name] = subprocess.Popen(self.command(server.server_type, server.config))
                port = server.config.grpc_port(server.server_type)
                self._wait(lambda port=port: is_open(f"127.0.0.1:{port}"), stop, f"{server.name} to listen on {port}")
            while not stop.wait(1.0):
                if dead := [name for name, child in self._children.items() if child.poll() is not None]:
                    log.error("model server %s exited with %s; ending the others", dead, self._children[dead[0]].poll())
                    return 1
            return 0
        finally:
            self.end()

    def _entry_may_start(self) -> bool:
        ready = self.replicas.is_ps_set_started()
        return ready and (not self.config.dense_alone or self.replicas.is_dense_set_started())

    def _wait(self, ready: Callable[[], bool], stop: threading.Event, what: str) -> None:
        end = time.monotonic() + self.start_timeout_secs
        pause = min(self.port_check_secs, 2 * self.config.update_model_status_interval)
        while not ready():
            if any(child.poll() is not None for child in self._children.values()):
                raise DeadlineError(f"a model server ended while waiting for {what}")
            if time.monotonic() >= end:
                raise DeadlineError(f"waited {self.start_timeout_secs:.0f} s for {what}")
            if stop.wait(pause):
                return

    def end(self) -> None:
        """Terminate the children, then kill them if necessary, and remove the registrations."""
        for child in self._children.values():
            if child.poll() is None:
                child.terminate()
        for child in self._children.values():
            try:
                child.wait(timeout=15)
            except subprocess.TimeoutExpired:
                child.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=15)
        for unlisten in self._unlisten:
            unlisten()
        for updater in self.dense:
            updater.stop()
        self.replicas.stop()
        self._agent.stop()
