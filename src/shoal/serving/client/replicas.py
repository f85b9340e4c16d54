"""The replicas that a client may call: their addresses, recent failures, and the choice of the next one."""

import logging
import random
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from shoal.serving.cluster.registry import open_registry
from shoal.serving.cluster.zk_backend import ZKBackend

log = logging.getLogger(__name__)

FIRST_REST_SECS, LONGEST_REST_SECS = 0.05, 2.0
REFRESH_SECS = 0.5


@dataclass(slots=True, eq=False)
class Replica:
    """The state of one server, as seen by a client."""

    address: str
    in_flight: int = 0
    answers: int = 0
    failures: int = 0
    """Calls that failed since the last answer."""
    last_error: str = ""
    rests_until: float = 0.0
    """Other replicas are preferred until this time."""

    def answered(self) -> None:
        self.answers += 1
        self.failures, self.rests_until = 0, 0.0

    def failed(self, now: float, error: str) -> None:
        self.failures += 1
        self.last_error = error
        self.rests_until = now + min(LONGEST_REST_SECS, FIRST_REST_SECS * 2 ** min(self.failures - 1, 10))


class ReplicaSet:
    """The current replicas. Used by one thread."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._replicas = {address: Replica(address) for address in addresses}

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Any:
        return iter(list(self._replicas.values()))

    @property
    def addresses(self) -> list[str]:
        return list(self._replicas)

    def replace(self, addresses: Iterable[str]) -> bool:
        """Replace the addresses; those that stay keep their state. Returns whether anything changed."""
        fresh = {address: self._replicas.get(address) or Replica(address) for address in addresses}
        changed = fresh.keys() != self._replicas.keys()
        self._replicas = fresh
        return changed

    def pick(self, now: float, tried: Collection[str] = ()) -> Replica | None:
        """The replica to call next: not tried yet, preferably no recent failure, fewest calls in progress."""
        left = [each for each in self._replicas.values() if each.address not in tried]
        if not left:
            return None
        return min(left, key=lambda each: (each.rests_until > now, each.in_flight, random.random()))


class RegistryWatch:
    """Watches a registry from its own thread and reports a model's replicas, now and at every change.

    While the registry cannot be reached, the last list stays valid.

    Args:
        registry: an address for ``open_registry``, or a registry.
        changed: called with the addresses; once before the constructor returns.
    """

    def __init__(self, registry: Any, bzid: str, model: str, changed: Callable[[list[str]], None]) -> None:
        self._model, self._changed = model, changed
        self._registry = open_registry(registry) if isinstance(registry, str) else registry
        self._backend = ZKBackend(bzid, zk_client=self._registry)
        self._bzid = bzid
        self.models: list[str] = []
        """Models that had replicas in the registry when this one last had none."""
        self._last: list[str] | None = None
        self._failing = False
        self._stop = threading.Event()
        self._backend.start()
        self._backend.subscribe_model(model)
        self.refresh()
        self._thread = threading.Thread(target=self._loop, name="shoal-client-registry", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        addresses: list[str] = []
        for sub_graph in ("entry", "ps_0"):  # a distributed model is called at its entry; others are one sub-graph
            addresses = self._backend.get_sync_targets(sub_graph)[1]
            if addresses:
                break
        addresses = sorted(set(addresses))
        if not addresses:
            self.models = self._listed()
        if addresses != self._last:
            self._last = addresses
            self._changed(addresses)

    def _listed(self) -> list[str]:
        names = self._registry.children(f"/{self._bzid}/binding")
        return sorted(name for name in names if self._registry.children(f"/{self._bzid}/binding/{name}"))

    def _loop(self) -> None:
        while not self._stop.wait(REFRESH_SECS):
            try:
                self.refresh()
                self._failing = False
            except Exception as error:
                if not self._failing:
                    log.warning(
                        "cannot ask the registry for %s (%r); using the last known replicas", self._model, error
                    )
                self._failing = True

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._backend.stop()
