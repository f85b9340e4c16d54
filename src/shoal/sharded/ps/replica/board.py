"""Who leads a shard: the state that its servers agree on in a registry, and the rules by which it changes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from shoal.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """What a shard's servers have agreed on."""

    term: int
    """Counts the leaders."""
    leader: str
    """The name of the server that leads."""
    in_sync: tuple[str, ...]
    """The servers that have every write that was acknowledged, the leader among them. One of them may lead next."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> ShardState:
        try:
            given = json.loads(data)
            return cls(term=int(given["term"]), leader=str(given["leader"]), in_sync=tuple(map(str, given["in_sync"])))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise DataError(f"the registry's state of a shard is damaged ({error!r}): {data[:80]!r}") from None


class Board(Protocol):
    """What a server needs of a registry. Any method may raise while the registry cannot be reached."""

    def join(self, member: str, address: str) -> float:
        """Shows this server until its session ends, again after a session was lost.

        Returns:
            For how many seconds from the beginning of this call the session cannot end, so that nobody else can lead.
        """
        ...

    def members(self) -> dict[str, str]:
        """The servers that are there, with their addresses."""
        ...

    def read(self) -> ShardState | None:
        """The state; None before the first leader."""
        ...

    def change(self, before: ShardState | None, after: ShardState) -> bool:
        """Writes a state in place of ``before``; False where it is another one meanwhile."""
        ...

    def is_member(self) -> bool:
        """Whether the session of the last `join` has not ended, as far as is known here."""
        ...

    def close(self) -> None: ...


def claim(state: ShardState | None, me: str, members: Mapping[str, str]) -> tuple[ShardState | None, str]:
    """The state in which ``me`` leads, or None where it may not; and the reason."""
    if state is None:
        return ShardState(term=1, leader=me, in_sync=(me,)), "nobody has led this shard before"
    after = ShardState(term=state.term + 1, leader=me, in_sync=(me,))
    if state.leader == me:
        return after, "it led before and has come back first"
    if state.leader in members:
        return None, f"{state.leader} leads"
    if me in state.in_sync:
        return after, f"{state.leader} has gone, and this server has all that was acknowledged"
    waits_for = " or ".join(sorted({state.leader, *state.in_sync}))
    return None, (
        f"{state.leader} has gone, and this server lacks writes that were acknowledged; waiting for {waits_for}. If "
        "their disks are lost, start this server with --force-lead and lose those writes"
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
    """The state in which a follower that has everything leads by its leader's wish."""
    return ShardState(term=state.term + 1, leader=to, in_sync=(to,))


class LoneBoard:
    """For a leader without a registry: followers may copy its log, and nobody takes its place by itself."""

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
    """For a follower without a registry: it copies the log of the server at ``address`` and never leads by itself.

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
