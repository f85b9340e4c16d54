"""A part of a store for one start of the ranks, whatever an earlier start left in it.

An elastic launcher starts ranks again with the store that they had: addresses and marks of processes that have ended
are still in it, and a rank that finds them connects to nobody. Here the ranks first say who they are, each with a
number of its own; rank 0 writes down whom it found, all agree to that list, and its name begins the keys of this start.
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
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """Returns the name of this start, the same on all ranks and another one at each start.

    Raises:
        DeadlineError: some ranks did not come within ``timeout_s``; rank 0 names them.
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
        if None not in found and found != roster:  # somebody came who was not yet, or came again
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
        told = json.loads(_read(store, _ROSTER) or "{}")
        name = told.get("name", "")
        if name and rank < len(told["tokens"]) and told["tokens"][rank] == mine:
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
