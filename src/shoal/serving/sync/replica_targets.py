"""How a publisher finds its replicas: fixed addresses, or those that a registry lists."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shoal.errors import ConfigError
from shoal.serving.cluster.zk_backend import ZKBackend

BZID = "shoal"
SUB_GRAPHS = ("entry", "ps_0")  # names under which a model that is served as a whole is registered


class RegistryTargets:
    """Callable that returns the current addresses of a model's live replicas in a registry."""

    def __init__(self, registry: str, model: str) -> None:
        self.registry, self.model = registry, model
        self._backend = ZKBackend(BZID, registry)
        self._backend.start()
        self._backend.subscribe_model(model)

    def __call__(self) -> list[str]:
        return sorted({address for graph in SUB_GRAPHS for address in self._backend.get_sync_targets(graph)[1]})

    def close(self) -> None:
        """End the registry session."""
        self._backend.stop()


def absolute(registry: str) -> str:
    """A registry's address in a form that is valid in any working directory."""
    if registry.startswith("dir:"):
        return f"dir:{os.path.abspath(registry.removeprefix('dir:').replace('//', '/', 1))}"
    return os.path.abspath(registry) if os.path.isdir(registry) else registry


class FixedTargets:
    """Callable that returns fixed addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        if isinstance(addresses, str) or not all(isinstance(one, str) and ":" in one for one in addresses):
            raise ConfigError(f"targets must be addresses such as ['127.0.0.1:8500'], got {addresses!r}")
        self._addresses = list(addresses)

    def __call__(self) -> list[str]:
        return list(self._addresses)

    def close(self) -> None:
        pass
