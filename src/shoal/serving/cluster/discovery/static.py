"""Discovery without a server: a host list (TF_CONFIG) and the environment that MLP sets."""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError, DeadlineError
from shoal.serving.cluster.discovery.base import ServiceDiscovery
from shoal.serving.net_utils import is_open


class TfConfigServiceDiscovery(ServiceDiscovery):
    """``{"cluster": {"chief": […], "worker": […], "ps": […]}, "task": {"type": …, "index": …}}``, or its JSON."""

    def __init__(self, tf_config: Mapping[str, Any] | str) -> None:
        try:
            config = json.loads(tf_config) if isinstance(tf_config, str | bytes) else dict(tf_config)
            self._cluster: dict[str, list[str]] = {key: list(value) for key, value in config["cluster"].items()}
            self._task = config.get("task") or {}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"TF_CONFIG must have 'cluster', a dict of host lists: {error!r}") from None

    def register(self, name: str, index: int, addr: str) -> None:
        """Does nothing: the list is fixed."""

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Does nothing: the list is fixed."""

    def query(self, name: str) -> dict[int, str]:
        if name == "ps":
            return dict(enumerate(self._cluster.get("ps", ())))
        if name == "worker":
            return dict(enumerate([*self._cluster.get("chief", ()), *self._cluster.get("worker", ())]))
        raise ValueError(f"the name must be ps or worker, got {name!r}")

    @property
    def server_type(self) -> str:
        """``ps`` or ``worker``; the chief counts as a worker."""
        kind = self._task["type"]
        return "worker" if kind == "chief" else kind

    @property
    def addr(self) -> str:
        return self._cluster[self._task["type"]][int(self._task["index"])]

    @property
    def index(self) -> int:
        """Its number among the processes of its type; workers come after the chief."""
        index = int(self._task["index"])
        return index + 1 if self._task["type"] == "worker" and self._cluster.get("chief") else index


def _clean(name: str) -> str | None:
    value = os.environ.get(name)
    return value.strip().strip("\"'").strip() if value is not None else None


ROLES = ("ps", "worker", "chief")


class MLPServiceDiscovery(ServiceDiscovery):
    """Addresses from ``MLP_*`` variables, also under MPI, where every rank is a worker of its node."""

    port_wait_secs = 3600.0

    def __init__(self) -> None:
        self._hidden: set[tuple[str, int]] = set()

    @property
    def _mpi(self) -> bool:
        return _clean("MLP_ROLE") is not None and self.server_type == "worker" and "OMPI_COMM_WORLD_RANK" in os.environ

    @property
    def server_type(self) -> str:
        return (_clean("MLP_ROLE") or "").lower()

    @property
    def index(self) -> int:
        return int(_clean("OMPI_COMM_WORLD_RANK" if self._mpi else "MLP_ROLE_INDEX") or 0)

    @property
    def port(self) -> int:
        return int(_clean("MLP_PORT") or 0) + (self.index if self._mpi else 0)

    @property
    def addr(self) -> str | None:
        own = self._address(self.server_type, self.index)
        if own is None and (host := self._host(self.server_type, self.index)):
            return f"{host}:{self.port}"
        return own

    def _count(self, role: str) -> int:
        if role == "worker" and self._mpi:
            return int(_clean("OMPI_COMM_WORLD_SIZE") or 0)
        return int(_clean(f"MLP_{role.upper()}_NUM") or 0)

    def _host(self, role: str, index: int) -> str | None:
        prefix = f"MLP_{role.upper()}_{index}"
        return _clean(f"{prefix}_PRIMARY_HOST") or _clean(f"{prefix}_HOST")

    def _address(self, role: str, index: int) -> str | None:
        if role == "worker" and self._mpi:
            host = self._host(role, index // int(_clean("OMPI_COMM_WORLD_LOCAL_SIZE") or 1))
            port = int(_clean("MLP_WORKER_0_PORT") or 0) + index
        else:
            host, port = self._host(role, index), _clean(f"MLP_{role.upper()}_{index}_PORT")
        return f"{host}:{port}" if host and port else None

    def register(self, name: str, index: int, addr: str) -> None:
        """Make a service of any role in the environment visible to queries of this process.

        Raises:
            ConfigError: an unknown role, an index out of range, or an address that differs from the environment's.
        """
        self._check(name, index, addr)
        self._hidden.discard((name, index))

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Hide a service in the environment from queries of this process.

        Raises:
            ConfigError: as for :meth:`register`.
        """
        self._check(name, index, addr)
        self._hidden.add((name, index))

    def _check(self, name: str, index: int, addr: str) -> None:
        if name not in ROLES:
            raise ConfigError(f"MLP: the role must be one of {', '.join(ROLES)}, got {name!r}")
        if not 0 <= index < self._count(name):
            raise ConfigError(f"MLP: {name} {index} is out of range; MLP_{name.upper()}_NUM is {self._count(name)}")
        expected = self._address(name, index)
        if addr != expected:
            raise ConfigError(f"MLP: the address of {name} {index} must be {expected}, got {addr}")

    def deregister_all(self) -> None:
        for name in ROLES:
            self._hidden.update((name, index) for index in range(self._count(name)))

    def query(self, name: str, skip_port_check: bool = False) -> dict[int, str]:
        """The visible services; for ps, wait until each port accepts connections, unless ``skip_port_check``."""
        found: dict[int, str] = {}
        for index in range(self._count(name)):
            address = self._address(name, index)
            if address is None or (name, index) in self._hidden:
                continue
            if name == "ps" and not skip_port_check:
                self._wait(address)
            found[index] = address
        return found

    def query_all(self) -> dict[str, dict[int, str]]:
        return {name: self.query(name) for name in ROLES}

    def _wait(self, address: str) -> None:
        end = time.monotonic() + self.port_wait_secs
        while not is_open(address):
            if time.monotonic() >= end:
                raise DeadlineError(f"waited {self.port_wait_secs:.0f} s for ps {address} to accept connections")
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
