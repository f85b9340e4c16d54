"""Discovery through ZooKeeper, or through a directory of files with the same interface."""

import logging
import threading
import time
from typing import Any

from shoal.serving.cluster.discovery.base import ServiceDiscovery
from shoal.serving.cluster.registry import open_registry, registry_of
from shoal.serving.cluster.zookeeper import KazooState

log = logging.getLogger(__name__)

REREGISTER_SECS = 1800.0


class ZKServiceDiscovery(ServiceDiscovery):
    """Ephemeral nodes ``/monolith/<job>/<name>.<index>`` whose value is the address.

    Registrations are repeated every half hour, and at once when a lost session is restored. Queries are answered from a
    cache that watches update.

    Args:
        job_name: the job.
        zk_server: ``host:port,…`` or ``dir:/path``.
        max_tries: attempts to write a registration.
        delay: seconds between them.
        zk_client: a client to use instead of creating one; it is started here.
    """

    def __init__(
        self, job_name: str, zk_server: str | None = None, max_tries: int = 3, delay: float = 5, zk_client: Any = None
    ) -> None:
        self._path = f"/monolith/{job_name}"
        self._max_tries, self._delay = max(1, max_tries), delay
        self._registry = open_registry(zk_server) if zk_client is None else registry_of(zk_client)
        self._lock = threading.RLock()
        self._cache: dict[str, dict[int, str]] = {}
        self._watched: set[str] = set()
        self._mine: dict[tuple[str, int], str] = {}
        self._again = threading.Event()
        self._lost = False
        self._stop = threading.Event()
        self._unlisten = self._registry.listen(self._on_state)
        self._registry.start()
        self._registry.watch_children(self._path, self._on_children, ensure=True)
        self._thread = threading.Thread(target=self._repeat, name="shoal-discovery", daemon=True)
        self._thread.start()

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self._lost = True
        elif state == KazooState.CONNECTED and self._lost:
            self._lost = False
            self._again.set()

    # --- registrations ----------------------------------------------------------------------------------------------

    def _node(self, name: str, index: int) -> str:
        return f"{self._path}/{name}.{index}"

    def register(self, name: str, index: int, addr: str) -> None:
        with self._lock:
            self._mine[name, index] = addr
        for attempt in range(self._max_tries):
            try:
                self._registry.put(self._node(name, index), addr.encode(), ephemeral=True)
                return
            except Exception as error:
                if attempt + 1 == self._max_tries:
                    raise
                log.warning("could not register %s.%d (%r); retrying", name, index, error)
                self._stop.wait(self._delay)

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Remove a registration; an unknown one is ignored."""
        with self._lock:
            if self._mine.pop((name, index), None) is None:
                return
        self._registry.delete(self._node(name, index))

    def _repeat(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            self._again.wait(1.0)
            if self._stop.is_set() or not (self._again.is_set() or time.monotonic() - last >= REREGISTER_SECS):
                continue
            self._again.clear()
            last = time.monotonic()
            with self._lock:
                mine = dict(self._mine)
            for (name, index), addr in mine.items():
                try:
                    self._registry.put(self._node(name, index), addr.encode(), ephemeral=True)
                except Exception as error:
                    log.error("could not register %s.%d again: %r", name, index, error)
                    self._again.set()
                    self._stop.wait(1.0)

    # --- queries ----------------------------------------------------------------------------------------------------

    def _on_children(self, children: list[str]) -> bool | None:
        if self._stop.is_set():
            return False
        with self._lock:
            fresh = [child for child in children if child not in self._watched]
            self._watched.update(fresh)
        for child in fresh:  # their own watches also report when they are removed
            self._watch(child)
        return None

    def _watch(self, child: str) -> None:
        name, dot, number = child.rpartition(".")
        if not dot or not number.lstrip("-").isdecimal():
            log.error("ignoring %s/%s: its name is not <name>.<index>", self._path, child)
            return

        def changed(data: bytes | None, event: str | None) -> bool | None:
            if self._stop.is_set():
                return False
            with self._lock:
                group = self._cache.setdefault(name, {})
                if data:
                    group[int(number)] = data.decode()
                else:
                    group.pop(int(number), None)
            return None

        self._registry.watch(f"{self._path}/{child}", changed)

    def query(self, name: str) -> dict[int, str]:
        with self._lock:
            return dict(self._cache.get(name, {}))

    def close(self) -> None:
        self._stop.set()
        self._again.set()
        self._unlisten()
        self._thread.join(timeout=5)
        self._registry.stop()
