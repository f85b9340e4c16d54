"""The leader of each shard in a group of parameter servers, in a registry."""

from __future__ import annotations

import threading
import time
from typing import Any

from shoal.errors import ConfigError
from shoal.serving.cluster.registry import Registry, open_registry
from shoal.serving.cluster.zookeeper import KazooState
from shoal.sharded.ps.replica.board import ShardState

LEASE_S = 5.0
"""Upper limit of the lease: ZooKeeper may grant a shorter session than requested without reporting it."""


def _path(group: str, shard: int) -> str:
    return f"/shoal/ps/{group}/shard-{shard:05d}"


class RegistryBoard:
    """A `shoal.sharded.ps.replica.board.Board` in a registry.

    Args:
        registry: not started yet; the constructor starts it, `close` stops it.
        group: the name shared by the servers of one model.
        session_timeout: timeout of the registry session in seconds. A lease is half of it, at most 5 s.
    """

    def __init__(self, registry: Registry, group: str, shard: int, session_timeout: float) -> None:
        self._registry, self._root = registry, _path(group, shard)
        self._lease_s = min(session_timeout / 2, LEASE_S)
        self._joined: tuple[str, str] | None = None
        self._mutex = threading.Lock()
        registry.listen(self._on_state)
        registry.start()

    def _on_state(self, state: str) -> None:
        if state == KazooState.LOST:
            self._joined = None

    def join(self, member: str, address: str) -> float:
        path = f"{self._root}/members/{member}"
        registered = self._registry.get(path)
        if self._joined != (member, address) or registered is None:
            self._registry.put(path, address.encode(), ephemeral=True)
            self._joined = member, address
        return self._lease_s

    def members(self) -> dict[str, str]:
        path = f"{self._root}/members"
        found = {name: self._registry.get(f"{path}/{name}") for name in self._registry.children(path)}
        return {name: address.decode() for name, address in found.items() if address is not None}

    def read(self) -> ShardState | None:
        value = self._registry.get(f"{self._root}/state")
        return ShardState.decode(value) if value else None

    def change(self, before: ShardState | None, after: ShardState) -> bool:
        with self._mutex:
            return self._registry.swap(f"{self._root}/state", before.encode() if before else None, after.encode())

    def is_member(self) -> bool:
        return self._joined is not None

    def close(self) -> None:
        joined, self._joined = self._joined, None
        try:
            if joined is not None:
                self._registry.delete(f"{self._root}/members/{joined[0]}")
        finally:
            self._registry.stop()


def group_addresses(registry: str, group: str, *, deadline_s: float = 30.0) -> list[str]:
    """The addresses of a group's shards, for `shoal.sharded.ps.PsClient`: all servers of a shard, its leader first.

    Raises:
        ConfigError: shards are missing, or have no leader, for longer than ``deadline_s``.
    """
    opened: Any = open_registry(registry)
    opened.start()
    try:
        until = time.monotonic() + deadline_s
        while True:
            found, missing = _look(opened, group)
            if found and not missing:
                return found
            if time.monotonic() > until:
                without = ", ".join(missing) or "any shard"
                raise ConfigError(
                    f"the group {group!r} in {registry} has no leader for {without} after {deadline_s:g} s; start its "
                    f"servers with `shoal ps --registry {registry} --group {group} …`"
                )
            time.sleep(0.1)
    finally:
        opened.stop()


def _look(registry: Registry, group: str) -> tuple[list[str], list[str]]:
    shards = sorted(registry.children(f"/shoal/ps/{group}"))
    found, missing = [], []
    for number, name in enumerate(shards):
        root = f"/shoal/ps/{group}/{name}"
        value = registry.get(f"{root}/state")
        members = {each: registry.get(f"{root}/members/{each}") for each in registry.children(f"{root}/members")}
        addresses = {each: address.decode() for each, address in members.items() if address is not None}
        leader = ShardState.decode(value).leader if value else ""
        if name != f"shard-{number:05d}" or leader not in addresses:
            missing.append(f"shard {number}")
            continue
        rest = sorted(address for each, address in addresses.items() if each != leader)
        found.append("|".join([addresses[leader], *rest]))
    return found, missing
