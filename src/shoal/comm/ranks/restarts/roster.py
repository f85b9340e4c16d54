"""A separate key prefix in the store for each start of the ranks.

An elastic launcher restarts ranks with the same store, which still holds addresses and marks of processes that have
exited; a rank that reads those cannot connect. So every rank first publishes a random number, rank 0 writes the list of
ranks that it found, all confirm that list, and its name is the key prefix of this start.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.errors import DeadlineError

POLL_S = 0.02
_ROSTER = "shoal.roster"


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that are used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Return the name of this start: the same on all ranks, and new at each start.

    Raises:
        DeadlineError: some ranks did not appear within ``timeout_s``; rank 0 names them.
    """
    deadline = time.monotonic() + timeout_s
    mine = secrets.token_hex(8)
    store.set(_hello(rank), mine)
    return _lead(store, world_size, deadline, timeout_s) if rank == 0 else _follow(
        store, rank, mine, deadline, timeout_s)  # fmt: skip


def _lead(store: Store, world_size: int, deadline: float, timeout_s: float) -> str:
    name, roster = "", []
    while True:
        found = [_read(store, _hello(rank)) for rank in range(world_size)]
        if None not in found and found != roster:  # a rank is new, or has restarted
            name, roster = secrets.token_hex(8), found
            store.set(_ROSTER, json.dumps({"name": name, "tokens": roster}))
        agreed = [rank == 0 or bool(name and store.check([_agreed(name, rank)])) for rank in range(world_size)]
        if all(agreed):
            store.set(_begun(name), "1")
            return name
        missing = [rank for rank, yes in enumerate(agreed) if not yes]
        _wait(deadline, f"rank 0 waited {timeout_s:g} s for rank(s) {missing} to start; see their logs", missing)


def _follow(store: Store, rank: int, mine: str, deadline: float, timeout_s: float) -> str:
    agreed = ""
    while True:
        roster = json.loads(_read(store, _ROSTER) or "{}")
        name = roster.get("name", "")
        if name and rank < len(roster["tokens"]) and roster["tokens"][rank] == mine:
            if name != agreed:
                store.set(_agreed(name, rank), "1")
                agreed = name
            if store.check([_begun(name)]):
                return name
        _wait(deadline, f"rank {rank} waited {timeout_s:g} s for the ranks to start; see the log of rank 0", [0])


def _wait(deadline: float, why: str, missing: Sequence[int]) -> None:
    if time.monotonic() > deadline:
        raise DeadlineError(why, ranks=missing)
    time.sleep(POLL_S)


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _hello(rank: int) -> str:
    return f"shoal.hello/{rank}"


def _agreed(name: str, rank: int) -> str:
    return f"shoal.agreed/{name}/{rank}"


def _begun(name: str) -> str:
    return f"shoal.begun/{name}"
