"""The interface of service discovery and the assembly of a cluster from it."""

import abc
import logging
import time
from enum import IntEnum
from typing import Any

from shoal.errors import DeadlineError

log = logging.getLogger(__name__)


class ServiceDiscoveryType(IntEnum):
    PRIMUS = 1
    CONSUL = 2
    ZK = 3
    MLP = 4


class ServiceDiscovery(abc.ABC):
    """Looks up the addresses of numbered services by name."""

    @abc.abstractmethod
    def register(self, name: str, index: int, addr: str) -> None:
        """Register ``addr`` as number ``index`` of ``name``."""

    @abc.abstractmethod
    def deregister(self, name: str, index: int, addr: str) -> None: ...

    @abc.abstractmethod
    def query(self, name: str) -> dict[int, str]:
        """index -> address of the registered services."""

    def close(self) -> None:
        """End threads and connections."""
        return


def wait_for_cluster(
    discovery: ServiceDiscovery, num_ps: int, *, index: int = 0, timeout: float = 3600.0, poll_secs: float = 5.0
) -> dict[str, list[str]]:
    """``{"ps": [...], "chief": [...]}`` once ``num_ps`` shards are known, ordered by index.

    Worker 0 is the chief; the other workers (``index`` > 0) also wait for it.

    Raises:
        DeadlineError: some processes did not register in time; the message names them.
    """
    end = time.monotonic() + timeout
    while True:
        ps = discovery.query("ps") if num_ps else {}
        chief = discovery.query("worker").get(0) if index else None
        if len(ps) >= num_ps and (not index or chief):
            cluster = {"ps": [ps[i] for i in sorted(ps)]}
            if chief:
                cluster["chief"] = [chief]
            return cluster
        if time.monotonic() >= end:
            missing = [i for i in range(num_ps) if i not in ps]
            raise DeadlineError(
                f"waited {timeout:.0f} s for the cluster: ps {missing} did not register"
                + ("" if chief or not index else ", nor did worker 0")
            )
        log.info("waiting for %d of %d parameter servers", num_ps - len(ps), num_ps)
        time.sleep(min(poll_secs, max(0.0, end - time.monotonic())))


def get_service_discovery(config: Any) -> ServiceDiscovery | None:
    """The discovery that a runner configuration asks for; None when it is local.

    Reads ``is_local``, ``discovery_type``, ``tf_config``, ``deep_insight_name``/``uuid`` (the job's name), ``psm``
    (the Consul id) and ``zk_server``; PRIMUS also sets ``server_type`` and ``index``.
    """
    if getattr(config, "is_local", False):
        return None
    kind = getattr(config, "discovery_type", ServiceDiscoveryType.ZK)
    if kind == ServiceDiscoveryType.PRIMUS:
        from shoal.serving.cluster.discovery.static import TfConfigServiceDiscovery

        found = TfConfigServiceDiscovery(config.tf_config)
        config.server_type, config.index = found.server_type, found.index
        return found
    if kind == ServiceDiscoveryType.CONSUL:
        from shoal.serving.cluster.discovery.consul import ConsulServiceDiscovery

        return ConsulServiceDiscovery(config.psm)
    if kind == ServiceDiscoveryType.MLP:
        from shoal.serving.cluster.discovery.static import MLPServiceDiscovery

        return MLPServiceDiscovery()
    from shoal.serving.cluster.discovery.zk import ZKServiceDiscovery

    job = getattr(config, "deep_insight_name", None) or getattr(config, "uuid", None) or "shoal"
    return ZKServiceDiscovery(job, getattr(config, "zk_server", None))
