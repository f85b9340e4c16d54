"""The leader of a shard: the state that its servers share in a registry, and the rules by which it changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from shoal.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """The state that a shard's servers agree on."""

    term: int
    """Increases with each change of the leader."""
    leader: str
    """The name of the server that leads."""
    in_sync: tuple[str, ...]
    """The servers that have every acknowledged write, including the leader. One of them can lead next."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> ShardState:
        try:
            given = json.loads(data)
            return cls(term=int(given["term"]), leader=str(given["leader"]), in_sync=tuple(map(str, given["in_sync"])))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise DataError(f"the state of the shard in the registry is damaged ({error!r}): {data[:80]!r}") from None


class Board(Protocol):
    """The registry as a server uses it. Any method can raise while the registry cannot be reached."""

    def join(self, member: str, address: str) -> float:
        """Register this server until its session ends; call it again after a session was lost.

        Returns:
            The number of seconds from the beginning of this call during which the session cannot end, so that no other
            server can lead.
        """
        ...

    def members(self) -> dict[str, str]:
        """The servers that are running, with their addresses."""
        ...

    def read(self) -> ShardState | None:
        """The state; None before the first leader."""
        ...

    def change(self, before: ShardState | None, after: ShardState) -> bool:
        """Replace the state ``before`` with ``after``; False if the state has changed in the meantime."""
        ...

    def is_member(self) -> bool:
        """Whether the session of the last `join` is, as far as this server knows, still alive."""
        ...

    def close(self) -> None: ...


def claim(state: ShardState | None, me: str, members: Mapping[str, str]) -> tuple[ShardState | None, str]:
    """The state in which ``me`` leads, or None if it must not lead; and the reason."""
    if state is None:
        return ShardState(term=1, leader=me, in_sync=(me,)), "no server has led this shard before"
    after = ShardState(term=state.term + 1, leader=me, in_sync=(me,))
    if state.leader == me:
        return after, "it was the last leader"
    if state.leader in members:
        return None, f"{state.leader} leads"
    if me in state.in_sync:
        return after, f"{state.leader} is gone, and this server has all acknowledged writes"
    waits_for = " or ".join(sorted({state.leader, *state.in_sync}))
    return None, (
        f"{state.leader} is gone, and this server does not have all acknowledged writes; waiting for {waits_for}. If "
        "their disks are lost, start this server with --force-lead, which loses those writes"
    )


def without(state: ShardState, lost: str) -> ShardState:
    """The state after a follower has fallen behind: writes are acknowledged without it, and it cannot lead."""
    return ShardState(
        term=state.term, leader=state.leader, in_sync=tuple(name for name in state.in_sync if name != lost)
    )


def joined(state: ShardState, follower: str) -> ShardState:
    """The state after a follower has caught up."""
    return ShardState(term=state.term, leader=state.leader, in_sync=tuple(sorted({*state.in_sync, follower})))


def handed_over(state: ShardState, to: str) -> ShardState:
    """The state after the leader has handed over to a follower."""
    return ShardState(term=state.term + 1, leader=to, in_sync=(to,))


class LoneBoard:
    """The board of a leader without a registry: followers can copy its log, but none takes over automatically."""

    def __init__(self, name: str, term: int) -> None:
        self._state = ShardState(term=term, leader=name, in_sync=(name,))
        self._members: dict[str, str] = {}

    def join(self, member: str, address: str) -> float:
        self._members[member] = address
        return math.inf

    def members(self) -> dict[str, str]:
        return dict(self._members)

    def read(self) -> ShardState | None:
        return self._state

    def change(self, before: ShardState | None, after: ShardState) -> bool:
        if before != self._state:
            return False
        self._state = after
        return True

    def is_member(self) -> bool:
        return True

    def close(self) -> None:
        pass


class FollowingBoard:
    """The board of a follower without a registry: it copies the log of the server at ``address`` and never leads.

    To have it lead, start it without ``--replica-of``.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def join(self, member: str, address: str) -> float:
        return math.inf

    def members(self) -> dict[str, str]:
        return {"the leader": self._address}

    def read(self) -> ShardState | None:
        return ShardState(term=0, leader="the leader", in_sync=())

    def change(self, before: ShardState | None, after: ShardState) -> bool:
        return False

    def is_member(self) -> bool:
        return True

    def close(self) -> None:
        pass
