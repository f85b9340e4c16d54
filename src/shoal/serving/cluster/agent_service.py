"""`AgentService`: the agent's gRPC service for the serving processes on its machine."""

import os
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from shoal.errors import ConfigError
from shoal.proto.serving.agent_service_pb2 import (
    GetReplicasRequest,
    GetReplicasResponse,
    GetResourceRequest,
    GetResourceResponse,
    HeartBeatRequest,
    HeartBeatResponse,
    ServerType,
)
from shoal.serving.cluster.agent_config import AgentConfig
from shoal.serving.cluster.replica_meta import type_name
from shoal.serving.cluster.replica_watcher import ReplicaWatcher
from shoal.serving.grpc_server import add_health_and_reflection, unary
from shoal.serving.net_utils import concat_ip_and_port, get_local_ip
from shoal.serving.security import MAX_MESSAGE_BYTES, ServerSecurity, bind, caller

SERVICE = "monolith.serving.agent_service.AgentService"


class AgentDataProvider:
    """The addresses of a unified cluster: ``addrs_fn()`` returns ``{"<model>:<sub_graph>": [address]}``."""

    def __init__(self, addrs_fn: Callable[[], dict[str, list[str]]]) -> None:
        self._addrs_fn = addrs_fn

    def __call__(self) -> dict[str, list[str]]:
        return self._addrs_fn()


class ReplicaMirror:
    """Replicas of many models in memory: model -> ``type:task`` -> addresses (agent version 2)."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, list[str]]] = {}

    def update(self, model_name: str, server_type: int | str, task: int, addresses: list[str]) -> None:
        key = f"{type_name(server_type)}:{task}"
        self._models.setdefault(model_name, {})[key] = list(addresses)

    def get_all_replicas(self, server_type: int | str) -> dict[str, list[str]]:
        """``<model>:<type>:<task>`` -> addresses."""
        prefix = f"{type_name(server_type)}:"
        return {
            f"{model}:{key}": list(addresses)
            for model, tasks in self._models.items()
            for key, addresses in tasks.items()
            if key.startswith(prefix)
        }

    def get_replicas(self, model_name: str, server_type: int | str, task: int) -> list[str]:
        return list(self._models.get(model_name, {}).get(f"{type_name(server_type)}:{task}", ()))


def free_memory() -> int:
    """Bytes that a new allocation could use."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class AgentService:
    """The agent's gRPC server.

    Args:
        source: a ``ReplicaWatcher`` (agent version 1), a ``ReplicaMirror`` (2) or an ``AgentDataProvider`` (3).
        conf: the agent's configuration; None = that of the watcher.
        port: None = the configuration's ``agent_port``, 0 = a free one.
        address: ``host:port``, instead of ``port``, which listens on loopback only.
        security: the credentials that clients must present; required unless the address is loopback.
    """

    def __init__(
        self,
        source: Any,
        conf: AgentConfig | None = None,
        port: int | None = None,
        max_workers: int = 10,
        *,
        address: str | None = None,
        security: ServerSecurity | None = None,
    ) -> None:
        self._source = source
        self.conf = conf if conf is not None else getattr(source, "config", None)
        if port is None:
            if self.conf is None:
                raise ConfigError("AgentService: either conf (for its agent_port) or port must be given")
            port = self.conf.agent_port
        self._security = security if security is not None else ServerSecurity()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(max_workers, "shoal-agent"),
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
        )
        handlers = {
            "GetReplicas": unary(self._guard(self._get_replicas), GetReplicasRequest, GetReplicasResponse),
            "GetResource": unary(self._guard(self._get_resource), GetResourceRequest, GetResourceResponse),
            "HeartBeat": unary(self._guard(self._heart_beat), HeartBeatRequest, HeartBeatResponse),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        add_health_and_reflection(self._server, (SERVICE,))
        self.port = bind(self._server, address if address is not None else f"127.0.0.1:{port}", self._security)

    def start(self) -> "AgentService":
        self._server.start()
        return self

    def stop(self, grace: float | None = None) -> None:
        self._server.stop(grace).wait((grace or 0) + 10)

    def wait_for_termination(self, timeout: float | None = None) -> None:
        self._server.wait_for_termination(timeout)

    @property
    def version(self) -> int:
        if isinstance(self._source, ReplicaWatcher):
            return 1
        return 3 if isinstance(self._source, AgentDataProvider) else 2

    def _guard(self, handler: Callable) -> Callable:
        def guarded(request: Any, context: Any) -> Any:
            if caller(context, self._security) is None:
                context.abort(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "the token is missing or unknown to this agent; send authorization: Bearer …",
                )
            kind = getattr(request, "server_type", ServerType.PS)
            if self.version != 3 and kind not in ServerType.values():
                known = ", ".join(f"{number} ({name})" for name, number in ServerType.items())
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"server_type must be one of {known}, got {kind}")
            return handler(request, context)

        return guarded

    def _place(self) -> tuple[str | None, str | None]:
        return self.conf.place if self.conf is not None else (None, None)

    def _heart_beat(self, request: HeartBeatRequest, context: Any) -> HeartBeatResponse:
        if self.version == 1:
            addresses: dict[str, list[str]] = {}
            for key, value in self._source.get_all_replicas(request.server_type, *self._place()).items():
                # If this process's location is unknown, the replicas of all locations are returned.
                addresses.setdefault(key.rpartition("/")[2], []).extend(value)
        elif self.version == 2:
            addresses = self._source.get_all_replicas(request.server_type)
        else:
            addresses = self._source()
        response = HeartBeatResponse()
        for key, value in addresses.items():
            response.addresses[key].address.extend(value)
        return response

    def _get_replicas(self, request: GetReplicasRequest, context: Any) -> GetReplicasResponse:
        if self.version == 3:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "GetReplicas does not support unified clusters; use HeartBeat")
        if self.version == 1:
            found = self._source.get_replicas(request.server_type, request.task, *self._place())
        else:
            found = self._source.get_replicas(request.model_name, request.server_type, request.task)
        response = GetReplicasResponse()
        response.address_list.address.extend(found)
        return response

    def _get_resource(self, request: GetResourceRequest, context: Any) -> GetResourceResponse:
        if self.version == 1:
            return GetResourceResponse()
        conf = self.conf
        replica = conf.replica_id if conf is not None and conf.replica_id is not None else -1
        return GetResourceResponse(
            address=concat_ip_and_port(get_local_ip(), (conf.agent_port if conf else None) or self.port),
            shard_id=conf.shard_id if conf else -1,
            replica_id=replica if replica < 2**31 else -1,  # an id from a pod name has 40 bits, the field 32
            memory=free_memory(),
            cpu=-1.0,
            network=-1.0,
            work_load=-1.0,
        )
