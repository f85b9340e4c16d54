"""A serving process in the registry: its registrations, its map of other replicas, and recovery from lost sessions."""

import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.proto.serving.agent_service_pb2 import ServerType
from shoal.serving.cluster.agent_config import AgentConfig
from shoal.serving.cluster.registry import registry_of
from shoal.serving.cluster.replica_updater import ReplicaUpdater
from shoal.serving.cluster.replica_watcher import ReplicaWatcher
from shoal.serving.cluster.zookeeper import KazooState


class ZKListener:
    """Handles a process's registrations when its session is lost and restored.

    LOST stops updates and polling; the next CONNECTED registers once, with the last known states, and polling resumes
    after a while.
    """

    resume_secs = 5.0

    def __init__(self, watcher: ReplicaWatcher | None, updater: ReplicaUpdater | None) -> None:
        self._watcher, self._updater = watcher, updater
        self._was_lost = False
        self._losses = 0

    def __call__(self, state: str) -> None:
        if state == KazooState.LOST:
            self._was_lost = True
            self._losses += 1
            if self._watcher is not None:
                self._watcher.suspend()
            if self._updater is not None:
                self._updater.pause()
        elif state == KazooState.CONNECTED and self._was_lost:
            self._was_lost = False
            # A listener must not block the client that calls it.
            threading.Thread(target=self._recover, args=(self._losses,), name="shoal-zk-recover", daemon=True).start()

    def _recover(self, losses: int) -> None:
        if self._updater is not None:
            self._updater.forget_nodes()
            self._updater.register()
            self._updater.unpause()
        if self._watcher is not None:
            time.sleep(self.resume_secs)
            if self._losses == losses:  # otherwise it was lost again, and the next recovery resumes polling
                self._watcher.resume()


class ReplicaManager:
    """One serving process in the registry: its own registrations and the map of other replicas."""

    def __init__(self, zk: Any, config: AgentConfig) -> None:
        self.config = config
        self._registry = registry = registry_of(zk)
        self.watcher = ReplicaWatcher(registry, config)
        self.updater = ReplicaUpdater(registry, config)
        self.watcher.own_registrations = lambda: self.updater.registrations
        self.watcher.follows_session = False  # the listener resumes polling after this process has registered again
        self._listener = ZKListener(self.watcher, self.updater)
        self._unlisten: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Register, start the watches, and start to poll the local model server."""
        self._unlisten = self._registry.listen(self._listener)
        self.updater.register()
        self.watcher.watch_data()
        self.updater.start()

    def stop(self) -> None:
        self._unlisten()
        self.updater.stop()
        self.watcher.stop()

    def is_ps_set_started(self) -> bool:
        """Whether every PS task has an available replica in this location."""
        place, tasks = self.config.place, range(self.config.num_ps)
        return all(self.watcher.get_replicas(ServerType.PS, task, *place) for task in tasks)

    def is_dense_set_started(self) -> bool:
        """Whether the dense task has an available replica in this location."""
        return bool(self.watcher.get_replicas(ServerType.DENSE, 0, *self.config.place))
