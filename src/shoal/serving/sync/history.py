"""The ids that changed at a source, by stamp: those that a replica needs that is complete up to a stamp."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.fid import distinct
from shoal.stamps import Stamp

Ids = dict[Any, np.ndarray]
"""Table, by name or number -> distinct int64 ids."""

MAX_ROUNDS = 64


class History:
    """The ids of each round, newest last.

    Holds at most ``capacity`` ids, or one round; beyond that, the oldest rounds are dropped.

    Attributes:
        floor: all changes after this stamp are here.
    """

    def __init__(self, floor: Stamp, capacity: int) -> None:
        self.floor = floor
        self._capacity = capacity
        self._rounds: list[tuple[Stamp, Ids]] = []

    def add(self, stamp: Stamp, ids: Mapping[Any, np.ndarray]) -> int:
        """Add a round; returns how many ids of older rounds were dropped for it."""
        found = {table: distinct(each) for table, each in ids.items() if len(each)}
        if found:
            self._rounds.append((stamp, found))
        if len(self._rounds) > MAX_ROUNDS or len(self) > self._capacity:
            self._join()
        dropped = 0
        while len(self._rounds) > 1 and len(self) > self._capacity:
            self.floor, oldest = self._rounds.pop(0)
            dropped += count(oldest)
        return dropped

    def _join(self) -> None:
        """Merge rounds of similar size, except the last, under the newer stamp, so that few rounds remain."""
        joined: list[tuple[Stamp, Ids]] = []
        for stamp, ids in self._rounds[:-1]:
            joined.append((stamp, ids))
            while len(joined) > 1 and count(joined[-2][1]) <= 2 * count(joined[-1][1]):
                at, newer = joined.pop()
                joined[-1] = (at, merge(joined[-1][1], newer))
        self._rounds = joined + self._rounds[-1:]

    def since(self, stamp: Stamp) -> Ids | None:
        """The ids that changed after ``stamp``; None if that is no longer known."""
        if stamp < self.floor:
            return None
        rounds = [ids for at, ids in self._rounds if at > stamp]
        return rounds[0] if len(rounds) == 1 else merge(*rounds)

    def forget(self, stamp: Stamp) -> None:
        """Drop the changes up to ``stamp``; they are not needed any more."""
        if stamp > self.floor:
            self.floor = stamp
            self._rounds = [(at, ids) for at, ids in self._rounds if at > stamp]

    def __len__(self) -> int:
        return sum(count(ids) for _, ids in self._rounds)


def merge(*groups: Ids) -> Ids:
    """The union of the ids, by table."""
    tables = dict.fromkeys(table for each in groups for table in each)
    found = {table: [each[table] for each in groups if table in each] for table in tables}
    return {table: each[0] if len(each) == 1 else distinct(np.concatenate(each)) for table, each in found.items()}


def count(ids: Ids) -> int:
    """The number of ids."""
    return sum(map(len, ids.values()))
