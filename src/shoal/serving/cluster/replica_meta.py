"""The records of the replica registry and their paths."""

import re
from dataclasses import dataclass, field

from shoal.proto.serving.agent_service_pb2 import ServerType
from shoal.proto.serving.tf_serving_pb2 import ModelVersionStatus
from shoal.serving.cluster.records import JsonRecord

ModelState = ModelVersionStatus.State

_NAME = r"[-_0-9A-Za-z]+"
_PATH = re.compile(
    rf"/(?P<bzid>{_NAME})/service/(?P<base_name>{_NAME})(?:/(?P<idc>{_NAME}):(?P<cluster>{_NAME}))?"
    r"/(?P<server_type>\w+):(?P<index>\d+)(?:/(?P<replica_id>\d+))?"
)


class ZKPath:
    """The parts of a task or replica path; all None for any other path."""

    def __init__(self, path: str) -> None:
        self.path = path
        found = _PATH.fullmatch(path or "")
        parts = found.groupdict() if found else dict.fromkeys(_PATH.groupindex)
        self.bzid: str | None = parts["bzid"]
        self.base_name: str | None = parts["base_name"]
        self.idc: str | None = parts["idc"]
        self.cluster: str | None = parts["cluster"]
        self.server_type: str | None = parts["server_type"]
        self.index: str | None = parts["index"]
        self.replica_id: str | None = parts["replica_id"]

    @property
    def task(self) -> str | None:
        """``type:index``."""
        return f"{self.server_type}:{self.index}" if self.server_type is not None else None

    @property
    def location(self) -> str | None:
        """``idc:cluster``."""
        return f"{self.idc}:{self.cluster}" if self.idc is not None else None

    def ship_in(self, idc: str | None, cluster: str | None) -> bool:
        """Whether the path is in a location; None for either means any."""
        return idc is None or cluster is None or (self.idc == idc and self.cluster == cluster)


def type_name(server_type: int | str) -> str:
    """``ps``, ``entry`` or ``dense``."""
    return server_type.lower() if isinstance(server_type, str) else ServerType.Name(server_type).lower()


@dataclass(slots=True)
class ReplicaMeta(JsonRecord):
    """One replica of a task: its addresses and its model's state."""

    address: str | None = None
    address_ipv6: str | None = None
    stat: int = ModelState.UNKNOWN
    model_name: str | None = None
    server_type: str | None = None
    task: int = -1
    replica: int = -1
    archon_address: str | None = None
    archon_address_ipv6: str | None = None

    def get_path(self, bzid: str) -> str:
        return f"/{bzid}/service/{self.model_name}/{self.server_type}:{self.task}/{self.replica}"

    def get_address(self, use_archon: bool = False, address_family: str = "ipv4") -> str | None:
        """The address of the preferred family if it is usable, else the other one, else None."""
        if address_family not in ("ipv4", "ipv6"):
            raise AssertionError(f"address_family must be ipv4 or ipv6, got {address_family!r}")
        v4, v6 = self.address, self.address_ipv6
        if use_archon:
            v4, v6 = self.archon_address, self.archon_address_ipv6
        v4 = None if not v4 or v4.startswith("0.0.0.0") else v4
        v6 = None if not v6 or v6.startswith("[::]") else v6
        return (v4 or v6) if address_family == "ipv4" else (v6 or v4)


@dataclass(slots=True)
class ModelMeta(JsonRecord):
    model_name: str | None = None
    model_dir: str | None = None
    ckpt: str | None = None
    num_shard: int = -1
    action: str = "NONE"
    spec_replicas: list[int] = field(default_factory=list)

    def get_path(self, base_path: str) -> str:
        return f"{base_path}/{self.model_name}"


@dataclass(slots=True)
class ResourceSpec(JsonRecord):
    address: str | None = None
    shard_id: int | None = None
    replica_id: int | None = None
    memory: int | None = None
    cpu: float = -1.0
    network: float = -1.0
    work_load: float = -1.0

    def get_path(self, base_path: str) -> str:
        return f"{base_path}/{self.shard_id}:{self.replica_id}"


class PublishType:
    LOAD = 1
    UNLOAD = 2


@dataclass(slots=True)
class PublishMeta(JsonRecord):
    shard_id: int | None = None
    replica_id: int = -1
    model_name: str | None = None
    num_ps: int | None = None
    total_publish_num: int = 1
    sub_models: dict[str, str] | None = None
    ptype: int = PublishType.LOAD
    is_spec: bool = False

    def get_path(self, base_path: str) -> str:
        return f"{base_path}/{self.shard_id}:{self.replica_id}:{self.model_name}"
