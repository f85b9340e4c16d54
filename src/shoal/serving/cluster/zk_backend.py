"""`ZKBackend`: the registry of unified clusters, for containers, operators and trainers."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from shoal.serving.cluster.agent_config import layout_path as layout_path_of
from shoal.serving.cluster.backends import AgentBackend, CtrlBackend, SyncBackend
from shoal.serving.cluster.records import Container, ContainerServiceInfo, SavedModel, SavedModelDeployConfig
from shoal.serving.cluster.registry import open_registry, registry_of
from shoal.serving.cluster.zookeeper import KazooException, KazooState

log = logging.getLogger(__name__)


class ZKBackend(AgentBackend, CtrlBackend, SyncBackend):
    """The registry of one business id.

    Args:
        bzid: the first level of every path.
        zk_servers: ``host:port,…``, or ``dir:/path`` for a directory of files.
        zk_client: a client to use instead of creating one.
    """

    def __init__(self, bzid: str, zk_servers: str | None = None, zk_client: Any = None) -> None:
        self.bzid = bzid
        self._registry = open_registry(zk_servers) if zk_client is None else registry_of(zk_client)
        self._lock = threading.RLock()
        self._restarting = threading.Lock()
        self._binding = threading.RLock()
        """Held while bindings are written; not ``_lock``, which the registry's watches take, also during a write."""
        self._lost = threading.Event()
        self._available: set[SavedModel] = set()
        self._subscribed: set[str] = set()  # models whose bindings are watched
        self._watched: set[str] = set()  # paths with a live watch
        self._bindings: dict[str, dict[str, list[Container]]] = {}
        self._infos: dict[Container, ContainerServiceInfo] = {}  # last known, used while the registry is unreachable
        self._model: str | None = None
        self._unlisten: Callable[[], None] = lambda: None

    # --- session ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._unlisten = self._registry.listen(self._on_state)
        self._registry.start()

    def stop(self) -> None:
        self._unlisten()
        self._registry.stop()
        with self._binding:  # the nodes of this session are gone; a second start writes them again
            self._available = set()
        self._lost.clear()

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self._lost.set()

    def _restart(self) -> None:
        """Start a new session, which has none of the old one's ephemeral nodes.

        Never call it under ``_lock``: restarting waits for running watches, which take the lock.
        """
        with self._restarting:
            if self._lost.is_set():
                self._registry.restart()
                with self._binding:
                    self._available = set()
                self._lost.clear()

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _put(self, path: str, value: bytes, ephemeral: bool) -> bool:
        """Create or overwrite a node; on failure logs a line and returns False."""
        try:
            self._registry.put(path, value, ephemeral=ephemeral)
        except Exception as error:
            log.error("cannot write %s: %r", path, error)
            return False
        return True

    def _remove(self, path: str) -> bool:
        try:
            self._registry.delete(path)
        except Exception as error:
            log.error("cannot delete %s: %r", path, error)
            return False
        return True

    def _binding_path(self, container: Container, model: SavedModel) -> str:
        return f"/{self.bzid}/binding/{model.model_name}/{model.sub_graph}:{container}"

    # --- container --------------------------------------------------------------------------------------------------

    def report_service_info(self, container: Container, service_info: ContainerServiceInfo) -> None:
        self._put(f"/{self.bzid}/container_service/{container}", service_info.serialize(), True)

    def sync_available_saved_models(self, container: Container, saved_models: Iterable[SavedModel]) -> None:
        """Bind this container to the models that it can serve now; only changes since the last call are written.

        After the session was lost, a call only starts a new session; the next call writes everything again.
        """
        if self._lost.is_set():
            self._restart()
            return
        with self._binding:
            wanted, remembered = set(saved_models), set(self._available)
            for model in wanted - self._available:
                if self._put(self._binding_path(container, model), b"", True):
                    remembered.add(model)
            for model in self._available - wanted:
                if self._remove(self._binding_path(container, model)):
                    remembered.discard(model)
            self._available = remembered

    def register_layout_callback(self, layout_path: str, callback: Callable[[list], Any]) -> None:
        """Call ``callback([(SavedModel, SavedModelDeployConfig)])`` now and on every change, until it returns False.

        ``layout_path``: a path, or the name of a layout of this business id.
        """
        path = layout_path_of(self.bzid, layout_path)

        def changed(children: list[str]) -> bool | None:
            models = []
            for child in children:
                name, colon, sub_graph = child.partition(":")
                data = self._registry.get(f"/{self.bzid}/saved_models/{name}/{sub_graph}") if colon else None
                try:
                    deploy = SavedModelDeployConfig.deserialize(data or b"")
                except ValueError:
                    log.error("layout %s: skipping %s, which is not declared", layout_path, child)
                    continue
                models.append((SavedModel(name, sub_graph), deploy))
            self._subscribe({model.model_name for model, _ in models})
            return callback(models)

        self._registry.watch_children(path, changed, ensure=True)

    def _subscribe(self, models: set[str]) -> None:
        with self._lock:
            if self._model is not None:
                models = models | {self._model}
            self._subscribed = set(models)
            self._bindings = {name: subs for name, subs in self._bindings.items() if name in models}
        for model in sorted(models):
            self._watch_bindings(model)

    def _watch_bindings(self, model: str) -> None:
        path = f"/{self.bzid}/binding/{model}"
        with self._lock:
            live = path in self._watched
            self._watched.add(path)
        if live:  # the watch may have reported while the model was not subscribed
            self._on_bindings(model, self._registry.children(path))
            return

        def changed(children: list[str]) -> bool | None:
            with self._lock:
                if model not in self._subscribed:
                    self._watched.discard(path)
                    return False
            self._on_bindings(model, children)
            return None

        try:
            self._registry.watch_children(path, changed, ensure=True)
        except BaseException:
            with self._lock:
                self._watched.discard(path)
            raise

    def _on_bindings(self, model: str, children: list[str]) -> None:
        subs: dict[str, list[Container]] = {}
        for child in children:
            parts = child.split(":", 2)
            if len(parts) != 3:
                log.error("skipping binding %s of model %s: it is not sub_graph:cluster:id", child, model)
                continue
            subs.setdefault(parts[0], []).append(Container(parts[1], parts[2]))
        with self._lock:
            if model in self._subscribed:
                self._bindings[model] = subs

    def get_service_map(self) -> dict[str, dict[str, list[ContainerServiceInfo]]]:
        """model -> sub-graph -> the containers that serve it, with the addresses they report now.

        A sub-graph is omitted if no container has reported addresses for it.
        """
        with self._lock:
            bindings = {model: dict(subs) for model, subs in self._bindings.items()}
        return {
            model: {sub: infos for sub, containers in subs.items() if (infos := self._resolve(containers))}
            for model, subs in bindings.items()
        }

    def _resolve(self, containers: list[Container]) -> list[ContainerServiceInfo]:
        infos = []
        for container in containers:
            info = self.get_service_info(container)
            if info is None:
                log.error("skipping container %s: it is bound but has not reported its service info", container)
            else:
                infos.append(info)
        return infos

    def get_service_info(self, container: Container) -> ContainerServiceInfo | None:
        try:
            data = self._registry.get(f"/{self.bzid}/container_service/{container}")
        except (KazooException, TimeoutError, OSError) as error:
            log.warning("cannot look up container %s (%r); using its last known addresses", container, error)
            return self._infos.get(container)
        if not data:
            self._infos.pop(container, None)
            return None
        try:
            info = ContainerServiceInfo.deserialize(data)
        except ValueError as error:
            log.error("container %s reported %.100r, which is not service info: %s", container, data, error)
            return None
        self._infos[container] = info
        return info

    # --- operator ---------------------------------------------------------------------------------------------------

    def decl_saved_model(self, saved_model: SavedModel, deploy_config: SavedModelDeployConfig) -> None:
        path = f"/{self.bzid}/saved_models/{saved_model.model_name}/{saved_model.sub_graph}"
        self._put(path, deploy_config.serialize(), False)

    def list_saved_models(self, model_name: str) -> list[SavedModel]:
        return [
            SavedModel(model_name, sub) for sub in self._registry.children(f"/{self.bzid}/saved_models/{model_name}")
        ]

    def add_to_layout(self, layout: str, saved_model: SavedModel) -> None:
        self._put(f"{layout_path_of(self.bzid, layout)}/{saved_model}", b"", False)

    def remove_from_layout(self, layout: str, saved_model: SavedModel) -> None:
        self._remove(f"{layout_path_of(self.bzid, layout)}/{saved_model}")

    def bzid_info(self) -> dict[str, Any]:
        """A readable summary of this business id: models, containers and layouts."""
        models: dict[str, dict[str, Any]] = {}
        containers: dict[str, dict[str, dict[str, Any]]] = {}
        root = f"/{self.bzid}"
        for child in self._registry.children(f"{root}/container_service"):
            cluster, _, ident = child.partition(":")
            text = (self._registry.get(f"{root}/container_service/{child}") or b"").decode()
            containers.setdefault(cluster, {}).setdefault(ident, {})["service_info"] = text
        for model in self._registry.children(f"{root}/saved_models"):
            for sub in self._registry.children(f"{root}/saved_models/{model}"):
                info = models.setdefault(model, {})
                info["sub_graphs_total"] = info.get("sub_graphs_total", 0) + 1
                text = (self._registry.get(f"{root}/saved_models/{model}/{sub}") or b"").decode()
                info.setdefault(sub, {})["deploy_config"] = text
        for model in self._registry.children(f"{root}/binding"):
            for child in self._registry.children(f"{root}/binding/{model}"):
                sub, cluster, ident = (*child.split(":", 2), "", "")[:3]
                entry = models.setdefault(model, {}).setdefault(sub, {})
                if "bindings" not in entry:
                    models[model]["sub_graphs_available"] = models[model].get("sub_graphs_available", 0) + 1
                entry.setdefault("bindings", []).append(f"{cluster}:{ident}")
                container = containers.setdefault(cluster, {}).setdefault(ident, {})
                container.setdefault("saved_models", []).append(f"{model}:{sub}")
        layouts = {
            layout: sorted(self._registry.children(f"{root}/layouts/{layout}"))
            for layout in self._registry.children(f"{root}/layouts")
        }
        return {"model_info": models, "container_info": containers, "layout_info": layouts}

    # --- trainer ----------------------------------------------------------------------------------------------------

    def subscribe_model(self, model_name: str) -> None:
        """Track the bindings of one model; subscribing to a second one is an error."""
        if self._model == model_name:
            return
        if self._model is not None:
            raise ValueError(f"ZKBackend is subscribed to {self._model!r}; create another backend for {model_name!r}")
        with self._lock:
            self._subscribed.add(model_name)
        self._watch_bindings(model_name)
        self._model = model_name

    def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
        if self._model is None:
            raise ValueError(f"ZKBackend: call subscribe_model before asking for the targets of {sub_graph!r}")
        if self._lost.is_set():
            self._restart()
        with self._lock:
            containers = list(self._bindings.get(self._model, {}).get(sub_graph, ()))
        addresses = [info.grpc for info in self._resolve(containers)]
        return f"{self._model}:{sub_graph}", [address for address in addresses if address]
