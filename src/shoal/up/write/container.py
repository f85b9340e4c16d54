"""The processes of a system in containers: one shared volume, fixed ports, process names as hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from shoal.errors import ConfigError
from shoal.up.config import Online
from shoal.up.plan import PORTS, Kind, Place, Process, check_network, names_of, plan

DATA = "/data"
"""The volume that all containers share: checkpoints, exports, registry, rows of the servers."""
CONFIG = "/etc/shoal/online.toml"
_PORTS: Mapping[str, int] = {"rows": 7100, "http": 9100, "grpc": 8500, "rest": 8501}


def containers(online: Online) -> list[Process]:
    """The commands that `shoal up` runs, in containers named after the processes.

    Raises:
        ConfigError: the file does not allow traffic over a network, or uses a path that containers do not have.
    """
    _check(online)
    inside = replace(
        online, file=CONFIG, up=replace(online.up, dir=DATA),
        content={
            **online.content, "out": _without(online, "out"), "serve": _without(online, "serve"),
            **({"join": _without(online, "join")} if "join" in online.content else {}),
        },
    )  # fmt: skip
    places = {name: _place(name, kind) for name, kind in names_of(inside).items()}
    return plan(inside, places)


def _place(name: str, kind: Kind) -> Place:
    return Place(listen="0.0.0.0", host=name, ports={port: _PORTS[port] for port in PORTS[kind]})


def _without(online: Online, section: str) -> dict[str, object]:
    """A section without this machine's folders; in containers, they are in the volume."""
    given = online.content.get(section)
    return {key: value for key, value in dict(given or {}).items() if key not in ("dir", "registry", "state")}


def _check(online: Online) -> None:
    check_network(online, "containers communicate over a network")
    for name in _addresses(online):
        if re.match(r"\w+://(?:[^/@]*@)?(?:localhost|127\.)", name):
            raise ConfigError(
                f"{online.file}: in a container, {name} is the container itself; use the broker's name in that network"
            )
    out = online.given("join", "out")
    if isinstance(out, str) and out.startswith("dir:"):
        raise ConfigError(f"{online.file}: [join] out must be a stream that containers share, got {out}")
    for name in _files(online):
        if os.path.isabs(name):
            raise ConfigError(
                f"{online.file}: [data] has the path {name}, which a container does not have; use a stream, or a path "
                f"relative to the file, and mount it in {os.path.dirname(CONFIG)}"
            )


def _addresses(online: Online) -> list[str]:
    """Streams that are read or written, and the registry."""
    sides = [online.given("join", side) for side in ("impressions", "actions")]
    found = [online.given("join", "out"), *(one.get("from") for one in sides if isinstance(one, Mapping))]
    found += [*_sources(online), online.registry.url]
    return [each for each in found if isinstance(each, str) and "://" in each]


def _files(online: Online) -> list[str]:
    return [each for each in _sources(online) if "://" not in each]


def _sources(online: Online) -> list[str]:
    found: list[str] = []
    for name in ("train", "eval"):
        given = online.given("data", name)
        found += [given] if isinstance(given, str) else [each for each in given or () if isinstance(each, str)]
    return found
