"""Turns the file of an online system into its processes, each a `shoal` command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shoal.data.joining.config import load_join
from shoal.data.live.address import is_live, parse_address
from shoal.errors import ConfigError
from shoal.up.config import Online

Kind = Literal["server", "joiner", "trainer", "replica"]
STOP_ORDER: tuple[Kind, ...] = ("trainer", "joiner", "replica", "server")
"""The trainer stops first, so that it saves while all others run; processes that others depend on stop last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the system."""

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    """The arguments after ``shoal``."""
    probe: str
    """A URL that answers 200 when the process is ready."""
    metrics: str
    """``host:port`` of /metrics."""
    after: tuple[str, ...] = ()
    """Processes that must be ready before this one starts."""
    finishes: bool = False
    """Whether exit code 0 means that it is done; otherwise it is restarted."""
    patience_s: float = 0.0
    """Additional time that it may take to become ready."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Its ports, by purpose."""

    @property
    def page(self) -> str:
        """The URL of its status page."""
        return f"{self.probe.rpartition('/')[0]}/"

    @property
    def command(self) -> str:
        """The command as a shell line."""
        return shlex.join(("shoal", *self.arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address on which a process listens, and the name under which others reach it."""

    listen: str = "127.0.0.1"
    """The address that it binds to."""
    host: str = "127.0.0.1"
    """The name by which others reach it."""
    ports: Mapping[str, int]

    def at(self, port: str) -> str:
        """``host:port`` for others."""
        return f"{self.host}:{self.ports[port]}"


Places = Mapping[str, Place]
PORTS: dict[Kind, tuple[str, ...]] = {
    "server": ("rows", "http"), "joiner": ("http",), "trainer": ("http",), "replica": ("grpc", "rest")
}  # fmt: skip
"""The ports that each kind of process needs."""


def names_of(online: Online) -> dict[str, Kind]:
    """The processes of a system, in the order in which they start."""
    servers = 0 if online.servers is None else online.servers.count
    found: dict[str, Kind] = {f"server-{i}": "server" for i in range(servers)}
    if "join" in online.content:
        found["joiner"] = "joiner"
    found["trainer"] = "trainer"
    for i in range(online.replicas.count):
        found[f"replica-{i}"] = "replica"
    return found


def plan(online: Online, places: Places) -> list[Process]:
    """The processes, in the order in which they start.

    Args:
        places: the place of each process in `names_of`.
    """
    made: list[Process] = []
    for name, kind in names_of(online).items():
        make = _MAKERS[kind]
        made.append(make(online, name, places[name], places))
    return made


def _server(online: Online, name: str, place: Place, places: Places) -> Process:
    servers = online.servers
    assert servers is not None
    shard = name.rpartition("-")[2]
    arguments = [
        "ps", "--shard", shard, "--of", str(servers.count), "--host", place.listen, "--port", str(place.ports["rows"]),
        "--http-host", place.listen, "--http-port", str(place.ports["http"]), "--durability", servers.durability,
        "--dir", os.path.join(online.dir, "servers"), "--checkpoint-every", servers.checkpoint_every,
        "--evict-every", servers.evict_every, "--threads", str(servers.threads),
    ]  # fmt: skip
    if servers.insecure and place.listen != "127.0.0.1":
        arguments.append("--allow-insecure")
    return _process(name, "server", [*arguments, *servers.options], place, secure="--tls-cert" in servers.options)


def _joiner(online: Online, name: str, place: Place, places: Places) -> Process:
    arguments = ["join", online.file, "--metrics", f"{place.listen}:{place.ports['http']}"]
    if online.given("join", "state") is None:
        arguments += ["--state", os.path.join(online.dir, "join")]
    if online.open_pages and place.listen != "127.0.0.1":
        arguments.append("--allow-insecure")
    return _process(name, "joiner", arguments, place, finishes=True)


def _trainer(online: Online, name: str, place: Place, places: Places) -> Process:
    servers = [other for other, kind in names_of(online).items() if kind == "server"]
    defaults: dict[str, Any] = {
        "out.dir": online.checkpoints, "out.every_s": 60, "out.keep": 5, "out.log_steps": 100,
        "serve.dir": online.exports, "serve.model": online.model, "serve.registry": online.registry_url,
        "serve.every_s": 600, "serve.push_every_s": 1, "serve.at_start": True,
    }  # fmt: skip
    if online.open_pages and place.listen != "127.0.0.1":
        defaults["out.metrics_insecure"] = True
    if servers:
        defaults["train.ps"] = [places[other].at("rows") for other in servers]
    given = [
        f"{key}={_toml(value)}"
        for key, value in defaults.items()
        if online.given(*key.split(".")) is None or (key == "serve.registry" and online.registry.url is not None)
    ]
    train = ["train", online.file, "--metrics", f"{place.listen}:{place.ports['http']}", *online.trainers.options]
    ranks = online.trainers.ranks
    launch = ["launch", "-n", str(ranks), "-m", "shoal"] if ranks > 1 else []
    joiner = ("joiner",) if "join" in online.content else ()
    return _process(
        name,
        "trainer",
        [*launch, *train, "--set", *given],
        place,
        after=(*servers, *joiner),
        finishes=True,
        secure=online.given("out", "metrics_tls_cert") is not None,
    )


def _replica(online: Online, name: str, place: Place, places: Places) -> Process:
    replicas = online.replicas
    arguments = [
        "serve", online.exports, "--name", online.model, "--host", place.listen, "--port", str(place.ports["grpc"]),
        "--rest-port", str(place.ports["rest"]), "--registry", online.registry_url, "--wait-s", f"{replicas.wait_s:g}",
    ]  # fmt: skip
    if place.listen != place.host:
        arguments += ["--advertise", place.at("grpc")]
    if replicas.insecure and place.listen != "127.0.0.1":
        arguments.append("--allow-insecure")
    made = _process(name, "replica", [*arguments, *replicas.options], place, secure="--tls-cert" in replicas.options)
    return replace(made, patience_s=replicas.wait_s)


_MAKERS: dict[Kind, Callable[[Online, str, Place, Places], Process]] = {
    "server": _server, "joiner": _joiner, "trainer": _trainer, "replica": _replica
}  # fmt: skip


def _process(
    name: str, kind: Kind, arguments: Sequence[str], place: Place, *, after: Sequence[str] = (),
    finishes: bool = False, secure: bool = False,
) -> Process:  # fmt: skip
    port = place.ports["rest" if kind == "replica" else "http"]
    metrics = f"{place.host}:{port}"
    scheme = "https" if secure else "http"
    return Process(
        name=name, kind=kind, arguments=tuple(arguments), probe=f"{scheme}://{metrics}/healthz", metrics=metrics,
        after=tuple(after), finishes=finishes, ports=dict(place.ports),
    )  # fmt: skip


def _toml(value: Any) -> str:
    """Format a value for ``--set``."""
    return json.dumps(value) if not isinstance(value, str) else value


def check_network(online: Online, where: str) -> None:
    """Raise ConfigError if processes would use a network without authentication, unless the file allows it.

    Args:
        where: why they use a network, for the message.
    """
    needs: list[tuple[str, bool, set[str], str]] = [
        ("replicas", online.replicas.insecure, {"--tls-cert", "--tokens"} - {*online.replicas.options},
         'options = ["--tls-cert", …, "--tls-key", …, "--tokens", …]'),
        ("trainers", online.open_pages or online.given("out", "metrics_tls_cert") is not None, {"metrics_tls_cert"},
         "[out] metrics_tls_cert, metrics_tls_key, metrics_tokens"),
    ]  # fmt: skip
    if online.servers is not None:
        missing = {"--keys", "--tls-cert"} - {*online.servers.options}
        keys = 'options = ["--keys", …, "--tls-cert", …, "--tls-key", …, "--tokens", …]'
        needs.insert(1, ("servers", online.servers.insecure, missing, keys))
    for section, allowed, missing, otherwise in needs:
        client_ca = section != "trainers" and "--tls-client-ca" in getattr(online, section).options
        if not allowed and missing - ({"--tokens"} if client_ca else set()):
            raise ConfigError(
                f"{online.file}: {where}: set [{section}] insecure = true if only you use that network, or give the "
                f"processes keys ({otherwise})"
            )


def _check_source(text: Any, where: str) -> None:
    if not isinstance(text, str) or not is_live(text):  # the trainer checks files
        return
    try:
        scheme = parse_address(text).scheme
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if scheme == "stdin":
        raise ConfigError(
            f"{where} must not be standard input, which the processes of `shoal up` do not have, got {text!r}; "
            "write to a folder and use dir:PATH, or run `shoal train` directly"
        )


def check(online: Online) -> None:
    """Raise ConfigError for a system that cannot work, before anything is started."""
    train = online.given("data", "train")
    sources = [("[data] train", one) for one in ([train] if isinstance(train, str) else train or [])]
    if "join" in online.content:
        joined = load_join(online.file, os.path.join(online.dir, "join"))
        if not joined.out:
            raise ConfigError(f'{online.file}: [join] out = "ADDRESS" must say where samples go')
        sources += [("[join] from", one.source) for one in (joined.impressions, joined.actions)]
    for where, one in sources:
        _check_source(one, f"{online.file}: {where}")
    if train is None and "join" not in online.content:
        raise ConfigError(f'{online.file}: [data] must have train = ["FILE", …]')
    if online.given("train", "ps") is not None and online.servers is not None:
        raise ConfigError(f"{online.file}: [train] ps names servers that already run; remove it or [servers]")
