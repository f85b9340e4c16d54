"""`ReplicaWatcher`: the live map of which replicas serve each task of a cluster."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from shoal.proto.serving.agent_service_pb2 import ServerType
from shoal.proto.serving.parameter_sync_pb2 import ClientConfig
from shoal.serving.cluster.agent_config import AgentConfig
from shoal.serving.cluster.backends import SyncBackend
from shoal.serving.cluster.registry import registry_of
from shoal.serving.cluster.replica_meta import ModelState, ReplicaMeta, ZKPath, type_name
from shoal.serving.cluster.zookeeper import EventType, KazooState
from shoal.serving.net_utils import resolve

log = logging.getLogger(__name__)

POLL_SECS = 60.0

Replicas = dict[str, dict[str, ReplicaMeta]]


def is_ipv6_only() -> bool:
    """Whether this host has only IPv6, according to ``MY_HOST_IP``, ``MY_POD_IP``, ``MY_HOST_IPV6`` or its name."""
    if any(name in os.environ for name in ("MY_HOST_IP", "MY_POD_IP", "MY_HOST_IPV6")):
        return not (os.environ.get("MY_HOST_IP") or os.environ.get("MY_POD_IP"))
    return resolve(socket.gethostname(), socket.AF_INET) is None


class ReplicaWatcher:
    """Watches ``/<bzid>/service/<base_name>``; queries are answered from memory.

    Args:
        zk_client: a started client.
        config: its ``bzid``, ``base_name`` and ``dc_aware`` say what to watch.
        use_archon: return archon addresses.
        zk_watch_address_family: ``ipv4`` or ``ipv6``, the family to prefer.

    Attributes:
        replicas: task path -> replica id (a decimal text) -> ``ReplicaMeta``.
    """

    def __init__(
        self, zk_client: Any, config: AgentConfig, use_archon: bool = False, zk_watch_address_family: str = "ipv4"
    ) -> None:
        self._registry = registry_of(zk_client)
        self._unlisten: Callable[[], None] = lambda: None
        self.config = config
        self._use_archon = use_archon
        self._family = "ipv6" if is_ipv6_only() else str(zk_watch_address_family)
        self.replicas: Replicas = {}
        self.own_registrations: Callable[[], dict[str, bytes]] = dict
        """Returns path -> value of this process's own nodes; the poll restores missing ones."""
        self.poll_secs = POLL_SECS
        self._lock = threading.RLock()
        self._watch_calls = 0
        self._watched: dict[str, object] = {}  # path -> token of its current watch
        self.follows_session = True
        """Whether polling pauses and resumes with the client's state; False if another object controls that."""
        self._lost = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def base(self) -> str:
        return f"/{self.config.bzid}/service/{self.config.base_name}"

    # --- watching ---------------------------------------------------------------------------------------------------

    def watch_data(self) -> None:
        """Start the watches, whose first calls fill the map, and the poll that repairs missed changes."""
        self._stop.clear()
        if self.follows_session:
            self._unlisten = self._registry.listen(self._on_state)
        token = self._watched[self.base] = object()
        self._watch_children(self.base, token, self._watch_location if self.config.dc_aware else self._watch_task)
        self._thread = threading.Thread(target=self._poll_loop, name="shoal-replica-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the poll and clear the map."""
        self._stop.set()
        self._unlisten()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        with self._lock:
            self.replicas = {}
            self._watched.clear()

    def suspend(self) -> None:
        """Stop polling until :meth:`resume`."""
        self._lost.set()

    def resume(self) -> None:
        self._lost.clear()

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self.suspend()
        elif state == KazooState.CONNECTED:
            self.resume()

    def _is_live(self, path: str, token: object) -> bool:
        """Whether ``token`` is of the path's current watch; a path that is removed and created again gets a new one."""
        return not self._stop.is_set() and self._watched.get(path) is token

    def _watch_children(self, path: str, token: object, watch_child: Callable[[str, object], None]) -> None:
        def changed(children: list[str]) -> bool | None:
            with self._lock:
                if not self._is_live(path, token):
                    return False
                present = {f"{path}/{child}" for child in children}
                for each in [each for each in self._watched if each.startswith(f"{path}/")]:
                    if _child(path, each) not in present:
                        del self._watched[each]
                fresh = {child: object() for child in sorted(present) if child not in self._watched}
                self._watched.update(fresh)
            for child, its_token in fresh.items():
                watch_child(child, its_token)
            return None

        self._registry.watch_children(path, changed, ensure=path == self.base)

    def _watch_location(self, path: str, token: object) -> None:
        self._watch_children(path, token, self._watch_task)

    def _watch_task(self, path: str, token: object) -> None:
        self._watch_children(path, token, self._watch_replica)

    def _watch_replica(self, path: str, token: object) -> None:
        task, _, name = path.rpartition("/")
        try:
            replica = str(int(name))
        except ValueError:
            log.error("ignoring replica %s: its name is not a number", path)
            return

        def changed(data: bytes | None, event: str | None) -> bool | None:
            if not self._is_live(path, token):
                if event == EventType.DELETED and path not in self._watched and not self._stop.is_set():
                    self._on_data(task, replica, data, event)  # the parent's watch was called first
                return False
            self._on_data(task, replica, data, event)
            return None

        self._registry.watch(path, changed)

    def _on_data(self, task: str, replica: str, data: bytes | None, event: str | None) -> None:
        meta = _parse(f"{task}/{replica}", data) if data else None
        with self._lock:
            self._watch_calls += 1
            known = self.replicas.get(task, {}).get(replica)
            if meta is not None and event != EventType.NONE:
                self.replicas.setdefault(task, {})[replica] = meta
            elif known is not None:
                known.stat = ModelState.UNKNOWN
                if event == EventType.DELETED:
                    del self.replicas[task][replica]
                    if not self.replicas[task]:
                        del self.replicas[task]

    # --- polling ----------------------------------------------------------------------------------------------------

    def _poll_loop(self) -> None:
        while not self._stop.wait(self.poll_secs):
            if not self._lost.is_set():
                self.poll()

    def poll(self) -> None:
        """Rebuild the map from the registry and restore this process's missing registrations. Errors are logged.

        If a watch is called meanwhile, its data may be newer than what was read, so the map is left unchanged.
        """
        try:
            before = self._watch_calls
            fresh: Replicas = {}
            places = [self.base]
            if self.config.dc_aware:
                places = [f"{self.base}/{child}" for child in self._registry.children(self.base)]
            for place in places:
                for task in self._registry.children(place):
                    found = self._read_task(f"{place}/{task}")
                    if found:
                        fresh[f"{place}/{task}"] = found
            with self._lock:
                if not self._stop.is_set() and self._watch_calls == before:
                    self.replicas = fresh
            self._restore_own()
        except Exception:
            log.exception("could not poll the replicas of %s", self.base)

    def _read_task(self, path: str) -> dict[str, ReplicaMeta]:
        found: dict[str, ReplicaMeta] = {}
        for name in self._registry.children(path):
            try:
                replica = str(int(name))
            except ValueError:
                continue
            data = self._registry.get(f"{path}/{name}")
            meta = _parse(f"{path}/{name}", data) if data else None
            if meta is not None:
                found[replica] = meta
        return found

    def _restore_own(self) -> None:
        for path, value in self.own_registrations().items():
            if self._registry.get(path) is None:
                log.warning("this process's registration %s is gone; registering it again", path)
                self._registry.put(path, value, ephemeral=True)

    # --- queries ----------------------------------------------------------------------------------------------------

    def _tasks(self, server_type: int | str, task: int | None, idc: str | None, cluster: str | None) -> list:
        kind = type_name(server_type)
        with self._lock:
            found = []
            for path, replicas in sorted(self.replicas.items()):
                where = ZKPath(path)
                if where.server_type != kind or not where.ship_in(idc, cluster):
                    continue
                if task is None or int(where.index or -1) == task:
                    found.append((where, sorted(replicas.items(), key=lambda item: int(item[0]))))
            return found

    def _addresses(self, replicas: list[tuple[str, ReplicaMeta]]) -> list[tuple[str, str]]:
        """(replica id, address) of the available replicas."""
        found = []
        for replica, meta in replicas:
            if meta.stat == ModelState.AVAILABLE:
                address = meta.get_address(self._use_archon, self._family)
                if address:
                    found.append((replica, address))
        return found

    def get_all_replicas(
        self, server_type: int | str, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, list[str]]:
        """``type:task`` (``idc:cluster/type:task`` when dc_aware) -> addresses; a task may have none."""
        result = {}
        for where, replicas in self._tasks(server_type, None, idc, cluster):
            key = f"{where.location}/{where.task}" if self.config.dc_aware and where.location else where.task
            result[key] = [address for _, address in self._addresses(replicas)]
        return result

    def get_replicas(
        self, server_type: int | str, task: int, idc: str | None = None, cluster: str | None = None
    ) -> list[str]:
        """Addresses of a task, over all locations that match."""
        tasks = self._tasks(server_type, task, idc, cluster)
        return [address for _, replicas in tasks for _, address in self._addresses(replicas)]

    def get_replica(
        self, server_type: int | str, task: int, replica: int, idc: str | None = None, cluster: str | None = None
    ) -> str | list[str] | None:
        """The address of one replica; a list if several locations have it, None if none does."""
        wanted = str(int(replica))
        found = [
            address
            for _, replicas in self._tasks(server_type, task, idc, cluster)
            for name, address in self._addresses(replicas)
            if name == wanted
        ]
        return found[0] if len(found) == 1 else found or None

    def get_replicas_with_extra_info(
        self, server_type: int | str, task: int, idc: str | None = None, cluster: str | None = None
    ) -> dict[str, ClientConfig.TargetExtraInfo]:
        """address -> its location and replica id."""
        result = {}
        for where, replicas in self._tasks(server_type, task, idc, cluster):
            for replica, address in self._addresses(replicas):
                info = result[address] = ClientConfig.TargetExtraInfo(replica_id=int(replica))
                if where.location is not None:
                    info.idc, info.cluster = where.idc, where.cluster
        return result

    def to_sync_wrapper(self) -> "ReplicaWatcherSync":
        """This watcher as a trainer's ``SyncBackend``."""
        return ReplicaWatcherSync(self)


def _child(parent: str, path: str) -> str:
    """The child of ``parent`` that is ``path`` or one of its ancestors."""
    return f"{parent}/{path[len(parent) + 1 :].partition('/')[0]}"


def _parse(path: str, data: bytes) -> ReplicaMeta | None:
    try:
        return ReplicaMeta.deserialize(data)
    except (ValueError, TypeError, AttributeError) as error:
        log.error("replica %s does not contain a ReplicaMeta: %s", path, error)
        return None


class ReplicaWatcherSync(SyncBackend):
    """A ``ReplicaWatcher`` as a trainer's backend: clusters that serve one model, whose servables are ``ps_0``, …"""

    def __init__(self, watcher: ReplicaWatcher) -> None:
        self._watcher = watcher
        self.model_name: str | None = None

    def subscribe_model(self, model_name: str) -> None:
        self.model_name = model_name

    def get_sync_targets(self, sub_graph: str) -> tuple[str, dict[str, ClientConfig.TargetExtraInfo]]:
        kind, _, index = sub_graph.partition("_")
        if kind != "ps" or not index.isdecimal():
            raise AssertionError(f"a sub-graph that receives rows must be ps_<number>, got {sub_graph!r}")
        return sub_graph, self._watcher.get_replicas_with_extra_info(ServerType.PS, int(index))

    def start(self) -> None:
        self._watcher.watch_data()

    def stop(self) -> None:
        self._watcher.stop()
