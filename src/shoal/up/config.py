"""`Online`: the file of `shoal up`, a configuration of `shoal train` with sections for the other processes."""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from shoal.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """``[servers]``: parameter servers, which hold the rows. Without this section, the trainer holds them."""

    count: int = 1
    durability: Literal["none", "checkpoint", "log"] = "log"
    """What survives a crash of a server: nothing, its last checkpoint, or everything that was acknowledged."""
    checkpoint_every: str = "10m"
    evict_every: str = "0"
    threads: int = 2
    insecure: bool = False
    """Listen beyond one machine without keys: with `--on ray` on several machines, or in containers."""
    options: tuple[str, ...] = ()
    """Further flags of `shoal ps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """``[replicas]``: processes that answer predictions."""

    count: int = 1
    rest_port: int = 0
    """REST port of the first replica; the others use the next ports. 0: the operating system chooses."""
    port: int = 0
    """gRPC port of the first replica, in the same way."""
    host: str = "127.0.0.1"
    wait_s: float = 600.0
    """How long a replica waits for the first export."""
    insecure: bool = False
    """Listen beyond one machine without TLS or tokens."""
    options: tuple[str, ...] = ()
    """Further flags of `shoal serve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """``[registry]``: the registry in which replicas are found."""

    url: str | None = None
    """``dir:PATH`` or ``zk://host:port``; by default a folder in ``[up] dir``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainers:
    """``[trainers]``: the ranks of `shoal train`."""

    ranks: int = 1
    insecure: bool = False
    """Serve the status pages of trainer and joiner beyond one machine without TLS and tokens; ``[replicas] insecure``
    has the same effect."""
    options: tuple[str, ...] = ()
    """Further flags of `shoal train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """``[up]``: how processes are kept running."""

    dir: str | None = None
    """Folder for logs and state, and by default for checkpoints, exports and registry. Default: the file's name with
    ``.run``."""
    start_s: float = 120.0
    """How long a process may take to be ready."""
    stop_s: float = 60.0
    """How long a process may take to end after SIGTERM; then it is killed."""
    max_restarts: int = 5
    """Restarts after consecutive failures before a process counts as failed. The count starts again once a process was
    ready for ``stable_s``."""
    stable_s: float = 60.0
    backoff_s: float = 0.5
    """Wait before the first restart; it doubles with each further one."""
    max_backoff_s: float = 30.0
    cpus: float = 1.0
    """CPUs that `--on ray` reserves for each process."""
    log_bytes: int = 10_000_000
    """Size at which a log is rotated."""
    log_files: int = 3
    """Rotated logs to keep for each process."""
    page: str = "127.0.0.1:0"
    """``host:port`` of the system's status page; port 0 picks a free one, ``off`` disables the page."""
    tls_cert: str | None = None
    """Certificate chain (PEM) of the page. Beyond loopback, the page must have TLS, and tokens or a client CA."""
    tls_key: str | None = None
    tls_client_ca: str | None = None
    tokens: str | None = None
    """File of lines ``identity token``."""
    insecure: bool = False
    """Serve the page beyond loopback even without TLS and tokens."""


_SECTIONS: dict[str, type] = {
    "servers": Servers, "replicas": Replicas, "registry": Registry, "trainers": Trainers, "up": Up
}  # fmt: skip
_OTHERS = ("data", "features", "table", "model", "train", "eval", "out", "serve", "join")
"""The sections of `shoal train` and `shoal join`, which check their settings themselves."""
_AT_LEAST = {
    "count": 0, "rest_port": 0, "port": 0, "wait_s": 0, "ranks": 1, "start_s": 1, "stop_s": 0, "max_restarts": 0,
    "stable_s": 0, "backoff_s": 0, "max_backoff_s": 0, "log_bytes": 1024, "log_files": 0, "threads": 1, "cpus": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Online:
    """The configuration of a system. Paths are relative to the working directory, or absolute."""

    file: str
    servers: Servers | None
    """None: the trainer holds the rows."""
    replicas: Replicas
    registry: Registry
    trainers: Trainers
    up: Up
    content: Mapping[str, Any] = field(repr=False)
    """All sections, as the file has them."""

    @property
    def base(self) -> str:
        """The folder of the file."""
        return os.path.dirname(self.file)

    def path(self, name: str) -> str:
        """Convert a path in the file, relative to the file, to one relative to the working directory."""
        return os.path.join(self.base, name)

    @property
    def dir(self) -> str:
        """The folder of the system's files."""
        return self.path(self.up.dir) if self.up.dir is not None else f"{os.path.splitext(self.file)[0]}.run"

    def given(self, section: str, name: str) -> Any:
        """A setting of the training run; None if the file does not have it."""
        inner = self.content.get(section)
        return inner.get(name) if isinstance(inner, Mapping) else None

    @property
    def open_pages(self) -> bool:
        """Whether the pages of trainer and joiner may be served on a network without TLS."""
        return self.trainers.insecure or self.replicas.insecure

    @property
    def model(self) -> str:
        """The name under which replicas serve the model."""
        named = self.given("serve", "model")
        if isinstance(named, str):
            return named
        folder = self.given("serve", "dir")
        return os.path.basename(os.path.abspath(folder)) if isinstance(folder, str) else Path(self.file).stem

    @property
    def checkpoints(self) -> str:
        """``[out] dir``."""
        named = self.given("out", "dir")
        return self.path(named) if isinstance(named, str) else os.path.join(self.dir, "checkpoints")

    @property
    def exports(self) -> str:
        """``[serve] dir``."""
        named = self.given("serve", "dir")
        return self.path(named) if isinstance(named, str) else os.path.join(self.dir, "exports", self.model)

    @property
    def registry_url(self) -> str:
        """The address of the registry."""
        url = self.registry.url or self.given("serve", "registry")
        if url is None:
            return f"dir:{os.path.join(self.dir, 'registry')}"
        if url.startswith("dir:"):
            return f"dir:{self.path(url.removeprefix('dir:').removeprefix('//'))}"
        return url


def load_online(file: str | Path) -> Online:
    """Read a file. `shoal train` itself checks the sections of the training run.

    Raises:
        ConfigError: the file cannot be read, a section is unknown, or a section for the other processes has an unknown
            or invalid setting.
    """
    path = os.fspath(file)
    try:
        with open(path, "rb") as opened:
            content = tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path!r} ({error.strerror or error})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    sections = (*_OTHERS, *_SECTIONS)
    if unknown := sorted(set(content) - set(sections)):
        hint = did_you_mean(unknown[0], sections)
        raise ConfigError(f"{path}: there is no section [{unknown[0]}]{hint}; sections are {', '.join(sections)}")
    made = {name: _section(kind, content.get(name, {}), name, path) for name, kind in _SECTIONS.items()}
    if "servers" not in content or made["servers"].count == 0:
        made["servers"] = None
    for section, value in (("registry", made["registry"].url), ("serve", (content.get("serve") or {}).get("registry"))):
        if value == "":
            raise ConfigError(f"{path}: [{section}] must not have an empty registry; leave it out instead")
    return Online(file=path, content=content, **made)


def _section(kind: type[T], content: Any, name: str, where: str) -> T:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: [{name}] must be a section, got {content!r}")
    hints = typing.get_type_hints(kind)
    names = [one.name for one in fields(kind)]  # pyrefly: ignore[bad-argument-type]
    for key in content:
        if key not in names:
            hint = did_you_mean(key, names)
            raise ConfigError(f"{where}: [{name}] has no setting {key!r}{hint}; it has {', '.join(names)}")
    return kind(**{key: _value(value, hints[key], f"{where}: [{name}] {key}", key) for key, value in content.items()})


def _value(value: Any, hint: Any, where: str, name: str) -> Any:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(one for one in inner if one is not type(None))
    if typing.get_origin(hint) is Literal:
        if value not in inner:
            raise ConfigError(f"{where} must be one of {', '.join(map(repr, inner))}, got {value!r}")
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{where} must be a list of texts, got {value!r}")
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        raise ConfigError(f"{where} must be {words.get(hint, hint)}, got {value!r}")
    if name in _AT_LEAST and value < _AT_LEAST[name]:
        raise ConfigError(f"{where} must be at least {_AT_LEAST[name]}, got {value}")
    return value
