"""Which ids changed at a source, and when: what one who has everything up to a stamp still lacks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.fid import distinct
from shoal.stamps import Stamp

Ids = dict[Any, np.ndarray]
"""table, by name or number -> distinct int64 ids"""

MANY = 64


class History:
    """The ids of each round, newest last.

    Holds at most ``capacity`` ids, or one round; beyond, the oldest rounds are forgotten.

    Attributes:
        floor: everything that changed after it is here.
    """

    def __init__(self, floor: Stamp, capacity: int) -> None:
        self.floor = floor
        self._capacity = capacity
        self._rounds: list[tuple[Stamp, Ids]] = []

    def add(self, stamp: Stamp, ids: Mapping[Any, np.ndarray]) -> int:
        """Adds a round; how many ids of older ones had to be forgotten for it."""
        found = {table: distinct(each) for table, each in ids.items() if len(each)}
        if found:
            self._rounds.append((stamp, found))
        if len(self._rounds) > MANY or len(self) > self._capacity:
            self._join()
        dropped = 0
        while len(self._rounds) > 1 and len(self) > self._capacity:
            self.floor, oldest = self._rounds.pop(0)
            dropped += count(oldest)
        return dropped

    def _join(self) -> None:
        """Makes rounds of like size one, dated as the newer, but for the last: they are few then, and ids held once."""
        joined: list[tuple[Stamp, Ids]] = []
        for stamp, ids in self._rounds[:-1]:
            joined.append((stamp, ids))
            while len(joined) > 1 and count(joined[-2][1]) <= 2 * count(joined[-1][1]):
                at, newer = joined.pop()
                joined[-1] = (at, merge(joined[-1][1], newer))
        self._rounds = joined + self._rounds[-1:]

    def since(self, stamp: Stamp) -> Ids | None:
        """What changed after ``stamp``; None where that is not known any more."""
        if stamp < self.floor:
            return None
        rounds = [ids for at, ids in self._rounds if at > stamp]
        return rounds[0] if len(rounds) == 1 else merge(*rounds)

    def forget(self, stamp: Stamp) -> None:
        """Everything up to ``stamp`` is not asked for any more."""
        if stamp > self.floor:
            self.floor = stamp
            self._rounds = [(at, ids) for at, ids in self._rounds if at > stamp]

    def __len__(self) -> int:
        return sum(count(ids) for _, ids in self._rounds)


def merge(*groups: Ids) -> Ids:
    """The ids of all of them."""
    tables = dict.fromkeys(table for each in groups for table in each)
    found = {table: [each[table] for each in groups if table in each] for table in tables}
    return {table: each[0] if len(each) == 1 else distinct(np.concatenate(each)) for table, each in found.items()}


def count(ids: Ids) -> int:
    """How many there are."""
    return sum(map(len, ids.values()))
