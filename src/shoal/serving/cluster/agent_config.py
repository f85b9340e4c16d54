"""`AgentConfig`: the configuration of a serving process, from its file and its environment."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.serving.cluster.expressions import evaluate_number
from shoal.serving.net_utils import find_free_port, get_local_ip


class DeployType(StrEnum):
    ENTRY = "entry"
    PS = "ps"
    DENSE = "dense"
    MIXED = "mixed"
    UNIFIED = "unified"


def replica_id_from_pod_name() -> int:
    """A replica id from ten hex digits of the MD5 of ``MY_POD_NAME``; -1 if that is not set."""
    pod = os.environ.get("MY_POD_NAME")
    return int(hashlib.md5(pod.encode(), usedforsecurity=False).hexdigest()[10:20], 16) if pod else -1


def _env(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


@dataclass(kw_only=True)
class AgentConfig:
    """The configuration of one process in a serving cluster. Fields that are not given default to the environment."""

    bzid: str | None = None
    base_name: str | None = None
    base_path: str | None = None
    num_ps: int = 1
    num_shard: int | None = None
    deploy_type: str = "unified"
    replica_id: int | None = None
    stand_alone_serving: bool = False
    zk_servers: str | None = None
    dense_alone: bool = False
    dense_service_num: int = 3
    update_model_status_interval: int = 1
    agent_version: int = 1
    version_policy: str = "latest"
    version_data: int | list[int] = 1
    fetch_ps_timeout_ms: int = 200
    fetch_ps_retry: int = 2
    file_system_poll_wait_seconds: int = 1
    file_system_poll_wait_seconds_ps: int = 0
    dc_aware: bool = False
    layout_pattern: str | None = None
    layout_filters: list[str] = field(default_factory=list)
    use_metrics: bool = True
    max_waiting_sec: int = 1200

    enable_batching: bool = False
    batching_parameters_file: str | None = None
    num_load_threads: int = 0
    num_unload_threads: int = 0
    max_num_load_retries: int = 5
    load_retry_interval_micros: int = 60 * 1000 * 1000
    platform_config_file: str | None = None
    ssl_config_file: str | None = None
    saved_model_tags: str | None = None
    grpc_channel_arguments: str | None = None
    grpc_max_threads: int = 0
    enable_model_warmup: bool = True
    per_process_gpu_memory_fraction: float = 0
    allow_growth: bool = True

    agent_port: int | None = None
    tfs_port_grpc: int | None = None
    tfs_port_http: int | None = None
    tfs_port_archon: int | None = None
    tfs_entry_port: int | None = None
    tfs_entry_http_port: int | None = None
    tfs_entry_archon_port: int | None = None
    tfs_ps_port: int | None = None
    tfs_ps_http_port: int | None = None
    tfs_ps_archon_port: int | None = None
    tfs_dense_port: int | None = None
    tfs_dense_http_port: int | None = None
    tfs_dense_archon_port: int | None = None

    shard_id: int = field(init=False)
    idc: str | None = field(init=False)
    cluster: str | None = field(init=False)
    container_cluster: str = field(init=False)
    container_id: str = field(init=False)

    def __post_init__(self) -> None:
        try:
            self.deploy_type = (
                DeployType.MIXED if self.stand_alone_serving else DeployType(str(self.deploy_type).lower())
            )
        except ValueError:
            raise ConfigError(f"deploy_type must be one of {', '.join(DeployType)}, got {self.deploy_type!r}") from None
        if isinstance(self.layout_filters, str):
            self.layout_filters = [self.layout_filters]
        if self.num_shard is None:
            self.num_shard = int(_env("MONOLITH_HOST_SHARD_N") or 1)
        if self.num_ps < 0 or self.num_shard < 1:
            raise ConfigError(f"num_ps must be >= 0 and num_shard >= 1, got {self.num_ps} and {self.num_shard}")
        self.shard_id = int(_env("SHARD_ID") or -1)
        idc, cluster = _env("TCE_INTERNAL_IDC"), _env("TCE_LOGICAL_CLUSTER", "TCE_CLUSTER", "TCE_PHYSICAL_CLUSTER")
        self.idc, self.cluster = idc.lower() if idc else None, cluster.lower() if cluster else None
        if self.replica_id is None:
            given = _env("REPLICA_ID") if self.agent_version != 1 else None
            self.replica_id = int(given) if given else replica_id_from_pod_name()
        self.container_cluster = ";".join(part or "unknown" for part in (_env("TCE_PSM"), self.idc, self.cluster))
        self.container_id = _env("MY_POD_NAME") or get_local_ip()
        self._set_ports()

    def _set_ports(self) -> None:
        main = {
            DeployType.PS: "tfs_ps_{}port",
            DeployType.DENSE: "tfs_dense_{}port",
            DeployType.UNIFIED: None,
        }.get(DeployType(self.deploy_type), "tfs_entry_{}port")
        wanted = {"agent_port": "PORT2"}
        if main is None:
            wanted |= {"tfs_port_archon": "PORT", "tfs_port_grpc": "PORT3", "tfs_port_http": "PORT4"}
        else:
            wanted |= {main.format("archon_"): "PORT", main.format(""): "PORT3", main.format("http_"): "PORT4"}
        if self.deploy_type == DeployType.MIXED:
            names = ("tfs_ps_port", "tfs_ps_http_port", "tfs_ps_archon_port")
            names += ("tfs_dense_port", "tfs_dense_http_port", "tfs_dense_archon_port")
            wanted |= {name: f"PORT{5 + index}" for index, name in enumerate(names)}
        taken = {getattr(self, name) for name in wanted}
        for name, variable in wanted.items():
            if getattr(self, name) is None:
                port = int(_env(variable) or 0)
                while not port or (port in taken and not _env(variable)):
                    port = find_free_port()
                taken.add(port)
                setattr(self, name, port)

    @property
    def location(self) -> str | None:
        """``idc:cluster``, or None when either is unknown."""
        return f"{self.idc}:{self.cluster}" if self.idc and self.cluster else None

    @property
    def place(self) -> tuple[str | None, str | None]:
        """``(idc, cluster)`` of the replicas that this process uses; without ``dc_aware`` ``(None, None)``: any."""
        return (self.idc, self.cluster) if self.dc_aware else (None, None)

    @property
    def path_prefix(self) -> str:
        """The registry path of this process's replicas."""
        base = f"/{self.bzid}/service/{self.base_name}"
        return f"{base}/{self.location}" if self.dc_aware and self.location else base

    @property
    def layout_path(self) -> str | None:
        return layout_path(self.bzid or "", self.layout_pattern) if self.layout_pattern else None

    def grpc_port(self, server_type: str) -> int | None:
        """The gRPC port of this process's ``entry``, ``ps`` or ``dense``."""
        return getattr(self, f"tfs_{server_type}_port") or self.tfs_port_grpc

    def archon_port(self, server_type: str) -> int | None:
        return getattr(self, f"tfs_{server_type}_archon_port") or self.tfs_port_archon

    @classmethod
    def from_file(cls, path: str | Path) -> "AgentConfig":
        """Read a file of ``key value`` lines; see :func:`read_config_file`."""
        return cls.from_items(read_config_file(path), str(path))

    @classmethod
    def from_items(cls, items: Mapping[str, list[str]], where: str = "agent config") -> "AgentConfig":
        known = {each.name: each for each in fields(cls) if each.init}
        given: dict[str, Any] = {}
        for key, values in items.items():
            name = "deploy_type" if key == "server_type" else key
            if name not in known:
                raise ConfigError(f"{where}: unknown key {key!r}; known keys are {', '.join(sorted(known))}")
            try:
                kind = known[name].type
                given[name] = _convert(kind.__name__ if isinstance(kind, type) else str(kind), values)
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"{where}: {key}: {error}") from None
        return cls(**given)


def layout_path(bzid: str, pattern: str) -> str:
    """The pattern itself if it starts with ``/``, otherwise ``/<bzid>/layouts/<pattern>``."""
    return pattern if pattern.startswith("/") else f"/{bzid}/layouts/{pattern}"


_TRUE, _FALSE = ("true", "y", "t", "yes", "1"), ("false", "n", "f", "no", "0")


def _convert(kind: str, values: list[str]) -> Any:
    if kind.startswith("list"):
        return [value for value in values if value.lower() != "none"]
    if len(values) > 1 and "list[int]" in kind:
        return [_convert("int", [value]) for value in values]
    if len(values) > 1:
        raise ValueError(f"the key must have one value, got {values}")
    text = values[0]
    if text.lower() == "none" and "None" in kind:
        return None
    if kind.startswith("bool"):
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"the value must be one of {', '.join(_TRUE + _FALSE)}, got {text!r}")
        return text.lower() in _TRUE
    if kind.startswith("int"):
        number = evaluate_number(text)
        if int(number) != number:
            raise ValueError(f"the value must be a whole number, got {text!r}")
        return int(number)
    if kind.startswith("float"):
        return float(evaluate_number(text))
    return text


def read_config_file(path: str | Path) -> dict[str, list[str]]:
    """Read ``key value`` lines as key -> all its values, in order.

    The separator is any run of spaces, tabs and ``=``; ``#`` starts a comment; ``include <file>`` reads another file,
    relative to this one.
    """
    return _read(Path(path), ())


def _read(path: Path, including: tuple[Path, ...]) -> dict[str, list[str]]:
    path = path.resolve()
    if path in including:
        raise ConfigError(f"{path} includes itself")
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    items: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        end = next((i for i, char in enumerate(line) if char in " \t="), len(line))
        key, value = line[:end], line[end:].lstrip(" \t=")
        if not value:
            raise ConfigError(f"{path}:{number}: {key!r} has no value")
        if key == "include":
            for inner, values in _read(path.parent / value, (*including, path)).items():
                items.setdefault(inner, []).extend(values)
        else:
            items.setdefault(key, []).append(value)
    return items
