"""The online training loop: the targets of pushes, their interval, and the thread that sends them."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.errors import ConfigError
from shoal.serving.cluster.agent_config import AgentConfig
from shoal.serving.cluster.backends import SyncBackend, refresh_sync_config
from shoal.serving.cluster.registry import open_registry, registry_of
from shoal.serving.cluster.replica_watcher import ReplicaWatcher, ReplicaWatcherSync
from shoal.serving.cluster.zk_backend import ZKBackend
from shoal.serving.sync.monolith.client import ParameterSyncClient, create_parameter_sync_clients
from shoal.serving.sync.monolith.handle import SyncClientHandle

log = logging.getLogger(__name__)

SYNC_PERIOD_SECS = 10.0
CONFIG_REFRESH_SECS = 100.0
ROUND_BUDGET_SECS = 60.0
DENSE_ONLY_CHECKPOINT_SECS = 1800


@dataclass(kw_only=True)
class OnlineTrainingConfig:
    """Additional trainer settings for online training."""

    enable_realtime_training: bool = False
    enable_parameter_sync: bool | None = None
    """Another name for ``enable_realtime_training``."""
    bzid: str | None = None
    base_name: str | None = None
    model_name: str | None = None
    metric_name: str | None = None
    """The name by which replicas are found if ``model_name`` is not set."""
    zk_server: str | None = None
    """``host:port,…`` or ``dir:/path``; None = the environment's ``zk_servers``."""
    unified_serving: bool = True
    num_ps: int = 1
    dc_aware: bool = False
    zk_watch_address_family: str = "ipv4"
    force_shutdown_ps: bool = False
    catch_up: bool = False

    partial_recovery: bool | None = field(default=None)
    dense_only_save_checkpoints_secs: int | None = field(default=None)
    tolerate_checkpoint_errors: bool | None = field(default=None)

    def __post_init__(self) -> None:
        if self.enable_parameter_sync is not None:
            self.enable_realtime_training = self.enable_parameter_sync
        self.enable_parameter_sync = self.enable_realtime_training
        if not self.enable_realtime_training:
            return
        if not self.bzid or not self.base_name:
            raise ConfigError(
                f"bzid and base_name must be set for realtime training, got {self.bzid!r} and {self.base_name!r}"
            )
        self.zk_server = self.zk_server or os.environ.get("zk_servers")  # noqa: SIM112 (its name)
        self.partial_recovery = True if self.partial_recovery is None else self.partial_recovery
        if self.dense_only_save_checkpoints_secs is None:
            self.dense_only_save_checkpoints_secs = DENSE_ONLY_CHECKPOINT_SECS
        if self.tolerate_checkpoint_errors is None:
            self.tolerate_checkpoint_errors = True

    @property
    def ps_outlives_chief(self) -> bool:
        """Whether parameter servers keep running after the chief has ended."""
        return self.enable_realtime_training and not self.force_shutdown_ps

    @property
    def subscribed_model(self) -> str:
        name = self.model_name or self.metric_name
        if not name:
            raise ConfigError("realtime training needs model_name, or the model's metric_name, to find the replicas")
        return name


class _WatcherBackend(ReplicaWatcherSync):
    """A replica watcher as a backend, together with the registry that it watches."""

    def __init__(self, config: OnlineTrainingConfig, zk_client: Any) -> None:
        self._registry = open_registry(config.zk_server) if zk_client is None else registry_of(zk_client)
        agent = AgentConfig(
            bzid=config.bzid,
            base_name=config.base_name,
            deploy_type="ps",
            num_ps=config.num_ps,
            dc_aware=config.dc_aware,
            zk_servers=config.zk_server,
        )
        family = config.zk_watch_address_family
        super().__init__(ReplicaWatcher(self._registry, agent, zk_watch_address_family=family))

    def start(self) -> None:
        self._registry.start()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._registry.stop()


def create_sync_backend(config: OnlineTrainingConfig, zk_client: Any = None) -> SyncBackend:
    """The backend for a configuration; start it, then subscribe to the model."""
    if config.unified_serving:
        return ZKBackend(str(config.bzid), config.zk_server, zk_client)
    return _WatcherBackend(config, zk_client)


def _refreshed(backend: SyncBackend, index: int, last: bytes) -> bytes:
    """The current targets, or the last known ones while the backend (such as a registry) is unreachable."""
    try:
        return refresh_sync_config(backend, index)
    except Exception:
        if not last:
            raise
        log.exception("cannot look up the targets of shard %d; pushing to the last known ones", index)
        return last


class SyncLoop:
    """Refreshes the targets and pushes, once per period, on its own thread. Errors are logged and do not end it.

    Args:
        backend: a started backend with a subscribed model.
        ps_index: the shard that this process trains.
        client: the client that the tables are attached to; None = that of ``ps_index``.
        period_secs: from the start of one round to the start of the next.
        before_round: called first in every round.
    """

    def __init__(
        self,
        backend: SyncBackend,
        ps_index: int,
        client: SyncClientHandle | None = None,
        period_secs: float = SYNC_PERIOD_SECS,
        before_round: Callable[[], Any] | None = None,
    ) -> None:
        self._before_round = before_round
        handle = client if client is not None else create_parameter_sync_clients(ps_index + 1)[ps_index]
        self.client = ParameterSyncClient(handle)
        self.last_result = ""
        self.rounds = 0
        self._backend, self._index, self._period = backend, ps_index, period_secs
        self._config = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-sync-{ps_index}", daemon=True)

    def start(self) -> "SyncLoop":
        self.client.handle.touched.begin()
        self._thread.start()
        return self

    def run_once(self) -> str:
        """Run one round; returns the result as JSON."""
        if self._before_round is not None:
            self._before_round()
        self._config = _refreshed(self._backend, self._index, self._config)
        self.last_result = self.client.create_sync_op(self._config)[0]
        self.rounds += 1
        return self.last_result

    def stop(self, final_round: bool = True) -> None:
        """End the thread; by default after one more round, so that all trained rows are pushed."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=ROUND_BUDGET_SECS + 5)
        if final_round:
            try:
                self.run_once()
            except Exception:
                log.exception("the last sync round of shard %d failed", self._index)

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                self.run_once()
            except Exception:
                log.exception("a sync round of shard %d failed", self._index)
            self._stop.wait(max(0.0, self._period - (time.monotonic() - begin)))


class ParameterSyncHook(SessionRunHook):
    """Pushes during synchronous training, from a background thread, with at most one round in flight.

    By default it uses the client with the empty suffix.

    Args:
        backend: provides the targets of ``ps_<ps_index>``.
        ps_index: this process's rank.
        refresh_interval: seconds between refreshes of the targets.
        sync_interval_secs: seconds between rounds; 0 = after every step.
        client: the handle that the tables are attached to, if it is another one.
    """

    def __init__(
        self,
        backend: SyncBackend,
        ps_index: int,
        refresh_interval: float = CONFIG_REFRESH_SECS,
        *,
        sync_interval_secs: float = SYNC_PERIOD_SECS,
        client: SyncClientHandle | None = None,
    ) -> None:
        self._backend, self._index = backend, ps_index
        self._refresh_secs, self._sync_secs = refresh_interval, sync_interval_secs
        self.client = ParameterSyncClient(client if client is not None else create_parameter_sync_clients(0)[0])
        self.last_result = ""
        self.rounds = 0
        self._config = b""
        self._refreshed = self._synced = float("-inf")
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shoal-sync-hook", daemon=True)
            self._thread.start()

    def before_run(self, ctx: Any = None) -> None:
        """Does nothing; rounds begin after a step."""

    def after_run(self, ctx: Any = None, values: Any = None) -> None:
        """Request a round if one is due and none is running. Returns at once."""
        self.begin()
        if self._idle.is_set() and time.monotonic() - self._synced >= self._sync_secs:
            self._idle.clear()
            self._wake.set()

    def end(self, ctx: Any = None) -> None:
        """Wait for the round in flight, then push the remaining rows, within the round's time limit."""
        if self._thread is None:
            return
        self._idle.wait(ROUND_BUDGET_SECS)
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=ROUND_BUDGET_SECS)
        self._thread = None
        self._stop.clear()
        self._round()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._stop.is_set():
                return
            self._round()
            self._idle.set()

    def _round(self) -> None:
        try:
            now = time.monotonic()
            if now - self._refreshed >= self._refresh_secs:
                self._config = _refreshed(self._backend, self._index, self._config)
                self._refreshed = now
            self._synced = now
            self.last_result = self.client.create_sync_op(self._config)[0]
            self.rounds += 1
        except Exception:
            log.exception("a sync round of rank %d failed", self._index)
