"""Positions of a stream that is divided over the workers of a `DataLoader`.

Worker w of W on rank r of N reads the share of rank ``r * W + w`` of ``N * W``. Only the worker knows its position, so
its batches carry its number, and `Together` combines the positions of each worker's last batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import DataError

if TYPE_CHECKING:
    from shoal.data.stream import Stream

WORKER = "worker"
"""Key in the state of a worker's batch: the worker's number and the number of workers."""
WORKERS = "workers"
"""Key in the combined state of all workers: the state of each."""


class Together:
    """The combined position of all workers of a rank, batch by batch. ``states`` are the workers' first states."""

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._states = list(states)

    def after(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The combined position after a batch with this state. The next batch comes from the next worker."""
        number, count = state[WORKER]
        self._states[number] = {name: value for name, value in state.items() if name != WORKER}
        return joined([self._states], [(number + 1) % count], own=True)


def joined(ranks: Sequence[Sequence[Mapping[str, Any]]], turns: Sequence[int], *, own: bool) -> dict[str, Any]:
    """Combine the workers' states of one rank (``own``) or of all, and whose turn it is on each rank."""
    each = [state for states in ranks for state in states]
    return {
        "epoch": min(state["epoch"] for state in each),
        "rows": sum(state["rows"] for state in each),
        "bad": sum(state["bad"] for state in each),
        WORKERS: each,
        "turns": list(turns),
        "own": own,
    }


def of_all_ranks(states: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the states of all ranks; those that have not read anything yet are at ``first``."""
    count = next(len(state[WORKERS]) for state in states if WORKERS in state)
    ranks, turns = [], []
    for rank, state in enumerate(states):
        if WORKERS in state:
            found, turn = state[WORKERS], state["turns"][0 if state["own"] else rank]
            if not state["own"]:
                each = len(found) // len(state["turns"])
                found = found[rank * each : (rank + 1) * each]
        elif state == first:
            found, turn = [first] * count, 0
        else:
            raise DataError(f"the state of rank {rank} was saved without workers, those of other ranks with {count}")
        if len(found) != count:
            raise DataError(f"all ranks must have the same number of workers, got {count} and {len(found)}")
        ranks.append(found)
        turns.append(turn)
    return joined(ranks, turns, own=False)


def part_of(stream: Stream, number: int, count: int) -> Stream:
    """Return the share of a worker, ``number`` of ``count``: a stream of ``world * count`` ranks at its position."""
    state, part = stream.state, copy.copy(stream)
    part.rank, part.world = stream.rank * count + number, stream.world * count
    if state == stream.first:
        return part
    if WORKERS not in state:
        if stream.world > 1:
            raise DataError(
                f"the state of a stream was saved without workers, but there are {count} now; with several ranks the "
                "number of workers must not change"
            )
        part.state = part.dealt([state])
        return part
    each, ranks, own = state[WORKERS], len(state["turns"]), state["own"]
    before, mine = len(each) // ranks, 0 if own else stream.rank
    if before == count and (own or ranks == stream.world):
        number = (number + state["turns"][mine]) % count  # keeps the order of batches
        part.rank = stream.rank * count + number
        part.state = dict(each[mine * count + number])
    elif own and stream.world > 1:
        raise DataError(
            f"the state of a stream has {before} workers of rank {stream.rank}, but there are {count} now; call "
            "restart(dealt(states of all ranks))"
        )
    else:
        part.state = part.dealt(each)
    return part
