"""The records stored in registries, and their JSON."""

import json
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SavedModel:
    model_name: str
    sub_graph: str

    def __str__(self) -> str:
        return f"{self.model_name}:{self.sub_graph}"


@dataclass(frozen=True, slots=True)
class Container:
    ctx_cluster: str
    ctx_id: str

    def __str__(self) -> str:
        return f"{self.ctx_cluster}:{self.ctx_id}"


class JsonRecord:
    """A dataclass stored as JSON: its fields in order, unknown keys ignored when read."""

    def to_json(self) -> str:
        """All fields as JSON, in order; unset ones are ``null``."""
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)}, ensure_ascii=False)  # pyrefly: ignore

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Raises ValueError for anything but a JSON object with texts and numbers where they belong; null fits all."""
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a {cls.__name__} must be a JSON object, got {type(content).__name__}")
        known: dict[str, Any] = {each.name: each.type for each in fields(cls)}  # pyrefly: ignore
        given = {key: value for key, value in content.items() if key in known}
        for key, value in given.items():
            kind = known[key]
            if value is not None and kind in (str, str | None, int, int | None) and not isinstance(value, kind):
                what = "an integer" if kind in (int, int | None) else "a string"
                raise ValueError(f"{key} of a {cls.__name__} must be {what}, got {value!r}")
        return cls(**given)

    def serialize(self) -> bytes:
        """`to_json` as bytes, as a registry stores it."""
        return self.to_json().encode()

    @classmethod
    def deserialize(cls, data: bytes | str) -> Self:
        """:meth:`from_json` of what a registry has."""
        return cls.from_json(data)


@dataclass(slots=True)
class SavedModelDeployConfig(JsonRecord):
    model_base_path: str | None = None
    version_policy: str | None = None


@dataclass(slots=True)
class ContainerServiceInfo(JsonRecord):
    grpc: str | None = None
    http: str | None = None
    archon: str | None = None
    agent: str | None = None
    idc: str | None = None
    debug_info: str | None = None
