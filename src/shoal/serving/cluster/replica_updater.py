"""`ReplicaUpdater`: registers a process's sub-models and keeps their published states up to date."""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc

from shoal.metrics import emit_store
from shoal.proto.serving.tf_serving_pb2 import GetModelStatusRequest, GetModelStatusResponse, ModelVersionStatus
from shoal.serving.cluster.agent_config import AgentConfig, DeployType
from shoal.serving.cluster.agent_utils import parse_sub_model_name
from shoal.serving.cluster.registry import registry_of
from shoal.serving.cluster.replica_meta import ModelState, ReplicaMeta
from shoal.serving.net_utils import resolve
from shoal.serving.predict import GET_MODEL_STATUS
from shoal.serving.security import open_channel
from shoal.serving.status import StatusError, from_rpc_error

log = logging.getLogger(__name__)

METRICS_SECS = 60.0


def choose_version_status(statuses: Sequence[ModelVersionStatus]) -> ModelVersionStatus:
    """The status that represents a model: the highest version that is AVAILABLE, else the highest.

    Without versions, a status with state UNKNOWN.
    """
    if not statuses:
        return ModelVersionStatus(state=ModelState.UNKNOWN)
    available = [status for status in statuses if status.state == ModelState.AVAILABLE]
    return max(available or statuses, key=lambda status: status.version)


class ReplicaUpdater:
    """Runs next to a model server. ``register()`` creates ephemeral nodes for sub-models, ``start()`` tracks states."""

    def __init__(self, zk_client: Any, config: AgentConfig) -> None:
        self._registry = registry_of(zk_client)
        self.config = config
        self._lock = threading.RLock()
        self._meta: dict[str, ReplicaMeta] = {}  # sub-model -> its published record
        self._paths: dict[str, str] = {}  # sub-model -> its node
        self._versions: dict[str, tuple[int, float]] = {}  # sub-model -> (version, when it changed)
        self._channels: dict[int, tuple[Any, Any]] = {}
        self._stop = threading.Event()
        self._paused = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def model_names(self) -> list[str]:
        """The sub-models of this process."""
        conf, names = self.config, []
        if conf.deploy_type in (DeployType.PS, DeployType.MIXED):
            names += [f"ps_{task}" for task in range(conf.num_ps) if task % conf.num_shard == conf.shard_id]  # pyrefly: ignore
        if conf.deploy_type in (DeployType.ENTRY, DeployType.MIXED):
            names.append("entry")
        if conf.dense_alone and conf.deploy_type in (DeployType.DENSE, DeployType.MIXED):
            names.append("dense_0")
        return names

    @property
    def registrations(self) -> dict[str, bytes]:
        """path -> value of this process's nodes."""
        with self._lock:
            return {self._paths[name]: meta.serialize() for name, meta in self._meta.items() if name in self._paths}

    # --- registration -----------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Register every sub-model with its last published state (UNKNOWN at first)."""
        for name in self.model_names:
            try:
                self._register(name)
            except Exception:
                log.exception("could not register sub-model %s", name)

    def _register(self, name: str, meta: ReplicaMeta | None = None) -> None:
        kind, task = parse_sub_model_name(name)
        with self._lock:
            meta = meta or self._meta.get(name) or self._new_meta(kind)
            replica = self.config.replica_id
            base = f"{self.config.path_prefix}/{kind}:{task}"
            if kind == "entry" and replica == -1:
                path = self._registry.put(f"{base}/0", meta.serialize(), ephemeral=True, numbered=True)
                self.config.replica_id = int(path.rpartition("/")[2])
            else:
                if replica == -1:
                    log.error(
                        "%s has no replica id; processes without one overwrite each other's entry at %s/-1", name, base
                    )
                path = f"{base}/{replica:011d}" if kind == "entry" else f"{base}/{replica}"
                self._registry.put(path, meta.serialize(), ephemeral=True)
            self._meta[name], self._paths[name] = meta, path

    def _new_meta(self, kind: str) -> ReplicaMeta:
        host = os.environ.get("MY_HOST_IP") or resolve(socket.gethostname(), socket.AF_INET) or "0.0.0.0"
        v6 = os.environ.get("MY_HOST_IPV6") or resolve(socket.gethostname(), socket.AF_INET6) or "::"
        v6 = v6.strip("[]")
        port, archon = self.config.grpc_port(kind), self.config.archon_port(kind)
        return ReplicaMeta(
            address=f"{host}:{port}",
            address_ipv6=f"[{v6}]:{port}",
            stat=ModelState.UNKNOWN,
            archon_address=f"{host}:{archon}",
            archon_address_ipv6=f"[{v6}]:{archon}",
        )

    def forget_nodes(self) -> None:
        """Forget the nodes of a lost session; metadata is kept for the next :meth:`register`."""
        with self._lock:
            self._paths = {}

    # --- states -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to poll the model server every ``update_model_status_interval``."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._loop, name="shoal-replica-updater", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)
        with self._lock:
            for channel, _ in self._channels.values():
                channel.close()
            self._channels = {}

    def pause(self) -> None:
        """Stop updates until :meth:`unpause`."""
        self._paused.set()

    def unpause(self) -> None:
        self._paused.clear()

    def _loop(self) -> None:
        emitted = time.monotonic()
        while not self._stop.wait(self.config.update_model_status_interval):
            if not self._paused.is_set():
                self.update()
            if self.config.use_metrics and time.monotonic() - emitted >= METRICS_SECS:
                emitted = time.monotonic()
                self.emit_metrics()

    def update(self) -> None:
        """Check every sub-model once; an error in one does not affect the others."""
        for name in self.model_names:
            try:
                self._update(name)
            except Exception as error:
                log.error("could not update the state of %s: %r", name, error)

    def get_model_status(self, name: str) -> ModelVersionStatus:
        """The status of a sub-model on the local model server.

        Raises:
            StatusError: the server cannot be reached, or the model has an error.
        """
        kind, _ = parse_sub_model_name(name)
        request = GetModelStatusRequest()
        request.model_spec.name = name
        try:
            response = self._stub(self.config.grpc_port(kind) or 0)(request, timeout=5)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        status = choose_version_status(response.model_version_status)
        if status.status.error_code:
            raise StatusError(status.status.error_code, f"{name}: {status.status.error_message}")
        return status

    def _stub(self, port: int) -> Any:
        with self._lock:
            if port not in self._channels:
                channel = open_channel(f"127.0.0.1:{port}")
                call = channel.unary_unary(
                    GET_MODEL_STATUS, GetModelStatusRequest.SerializeToString, GetModelStatusResponse.FromString
                )
                self._channels[port] = (channel, call)
            return self._channels[port][1]

    def _update(self, name: str) -> None:
        problem: StatusError | None = None
        try:
            status = self.get_model_status(name)
            state = status.state
            if status.version != self._versions.get(name, (None, 0))[0]:
                self._versions[name] = (status.version, time.time())
                self._emit(name, "update_ts", int(time.time()))
        except StatusError as error:
            problem, state = error, ModelState.UNKNOWN
        with self._lock:
            meta = self._meta.get(name)
            if meta is None:
                self._register(name)
                meta = self._meta[name]
            if meta.stat != state:
                self._publish(name, replace(meta, stat=state))
        if problem is not None:
            log.error("sub-model %s: %d %s", name, problem.code, problem.message)

    def _publish(self, name: str, meta: ReplicaMeta) -> None:
        """Publish a state; it counts as published only after it was written, so a failed write is retried."""
        path = self._paths.get(name)
        if path is None:
            self._register(name, meta)
            return
        self._registry.put(path, meta.serialize(), ephemeral=True)
        self._meta[name] = meta

    def _emit(self, name: str, what: str, value: float) -> None:
        if self.config.use_metrics:
            conf = self.config
            tags = (
                f"model_name={name}|idc={conf.idc}|replica_id={conf.replica_id}|shard_id={conf.shard_id}"
                f"|base_name={conf.base_name}"
            )
            emit_store(f"serving_model.{what}", value, tags)

    def emit_metrics(self) -> None:
        """Emit the version of each sub-model and its age."""
        for name, (version, since) in list(self._versions.items()):
            self._emit(name, "latest_version", version)
            self._emit(name, "since_last_update", time.time() - since)
