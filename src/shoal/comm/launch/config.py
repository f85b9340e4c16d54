"""This process's rank, the number of ranks, and the start of the default process group."""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from shoal.comm.horovod import hvd_lib
from shoal.comm.launch.launch_env import launcher_value
from shoal.comm.ranks import collectives
from shoal.comm.ranks.process_group import ProcessGroupTransport
from shoal.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\[\]:\s/]+):([0-9]{1,5})")


@dataclass(frozen=True)
class DistributedConfig:
    """This rank, the number of ranks, and their rendezvous (``host:port``, IPv6 in brackets; "": torch's default).

    Example:
        >>> DistributedConfig(4, 1, "10.0.0.1:29500").to_dict()
        {'world_size': 4, 'rank': 1, 'coordinator_addr': '10.0.0.1:29500'}
    """

    world_size: int
    rank: int
    coordinator_addr: str = ""

    def __post_init__(self) -> None:
        for name in ("world_size", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"DistributedConfig: {name} must be an int, got {value!r}")
        if self.world_size < 1:
            raise ConfigError(f"DistributedConfig: world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"DistributedConfig: rank must be in 0..{self.world_size - 1}, got {self.rank}")
        if not isinstance(self.coordinator_addr, str):
            raise ConfigError(f"DistributedConfig: coordinator_addr must be text, got {self.coordinator_addr!r}")
        match = _ADDRESS.fullmatch(self.coordinator_addr)
        if self.coordinator_addr and (match is None or not 1 <= int(match[3]) <= 65535):
            raise ConfigError(
                "DistributedConfig: coordinator_addr must be '' or host:port with a port in 1..65535 (an IPv6 host in "
                f"brackets), got {self.coordinator_addr!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DistributedConfig":
        unknown = sorted(set(data) - {"world_size", "rank", "coordinator_addr"})
        missing = sorted({"world_size", "rank"} - set(data))
        if unknown or missing:
            raise ConfigError(f"DistributedConfig.from_dict: unknown keys {unknown}, missing keys {missing}")
        return cls(**data)

    @classmethod
    def from_env(cls) -> "DistributedConfig":
        """Read ``RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT``.

        If neither rank nor size is set, use Open MPI's variables; without ``mpirun``, a single process.
        """
        names = {"world_size": "WORLD_SIZE", "rank": "RANK"}
        if not any(name in os.environ for name in names.values()) and _under_mpirun():
            names = {"world_size": "OMPI_COMM_WORLD_SIZE", "rank": "OMPI_COMM_WORLD_RANK"}
        values = {}
        for field, name in names.items():
            text = os.environ.get(name)
            if text is not None:
                try:
                    values[field] = int(text)
                except ValueError:
                    raise ConfigError(f"environment variable {name} must be an integer, got {text!r}") from None
        if len(values) == 1:
            missing = next(name for field, name in names.items() if field not in values)
            raise ConfigError(f"environment variable {missing} is not set; start the ranks with torchrun, or set it")
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return cls(
            world_size=values.get("world_size", 1),
            rank=values.get("rank", 0),
            coordinator_addr=f"{host}:{port}" if host and port else "",
        )

    def init(
        self, backend: str | None = None, timeout_s: float = 1800, device: torch.device | str | None = None
    ) -> ProcessGroupTransport:
        """Start the default process group, or use an existing one of the same size, and return its transport."""
        if not collectives.is_available():
            raise ConfigError("DistributedConfig.init: this torch was built without process groups")
        backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        check_backend(backend)
        if collectives.is_started():
            have = (collectives.size_of(), collectives.rank_in())
            if have != (self.world_size, self.rank):
                raise ConfigError(
                    f"DistributedConfig.init: a process group with (world_size, rank) = {have} already exists, but "
                    f"this configuration has {(self.world_size, self.rank)}; destroy that group first"
                )
        else:
            where = self._rendezvous()
            collectives.start(
                backend,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout_s),
                **where,
            )
        return ProcessGroupTransport(device=device, default_timeout_s=min(timeout_s, 300))

    def _rendezvous(self) -> dict[str, Any]:
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if self.coordinator_addr and not (under_torchrun and self == DistributedConfig.from_env()):
            return {"init_method": f"tcp://{self.coordinator_addr}"}
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            return {"init_method": "env://"}
        if self.world_size == 1:
            return {"store": collectives.local_store()}
        if _under_mpirun():
            return hvd_lib.rendezvous(self.world_size, launcher_value("local_size"))
        raise ConfigError(
            "DistributedConfig.init: the ranks have no rendezvous; set coordinator_addr='host:port', start them with "
            "torchrun, or set MASTER_ADDR and MASTER_PORT"
        )


def _under_mpirun() -> bool:
    return "OMPI_COMM_WORLD_RANK" in os.environ and "OMPI_COMM_WORLD_SIZE" in os.environ


def check_backend(backend: str) -> None:
    """Raise ``ConfigError``, which lists the available backends, if this torch does not have all of ``backend``."""
    wanted = [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]
    missing, available = collectives.missing_backends(wanted)
    if missing:
        have = ", ".join(available)
        raise ConfigError(f"backend {backend!r}: this torch has no {', '.join(missing)}; available: {have}")
