"""Which ids changed at a source, and when: what a replica that has everything up to a stamp still lacks."""

from collections.abc import Mapping

import numpy as np

from shoal.stamps import Stamp

Ids = dict[str, np.ndarray]
"""table -> distinct int64 ids, rising"""


class History:
    """The ids of each round, newest last. Holds at most ``capacity`` ids; beyond, the oldest rounds are forgotten.

    Attributes:
        floor: everything that changed after it is here.
    """

    def __init__(self, floor: Stamp, capacity: int) -> None:
        self.floor = floor
        self._capacity = capacity
        self._rounds: list[tuple[Stamp, Ids]] = []

    def add(self, stamp: Stamp, ids: Mapping[str, np.ndarray]) -> bool:
        """Adds a round; False where older ones had to be forgotten for it."""
        found = {table: np.unique(each) for table, each in ids.items() if len(each)}
        if found:
            self._rounds.append((stamp, found))
        if len(self) > self._capacity:
            self._join()
        kept = True
        while len(self) > self._capacity:
            self.floor = self._rounds.pop(0)[0]
            kept = False
        return kept

    def _join(self) -> None:
        """Makes rounds of like size one, dated as the newer, so that ids are held about once."""
        joined: list[tuple[Stamp, Ids]] = []
        for stamp, ids in self._rounds:
            joined.append((stamp, ids))
            while len(joined) > 1 and count(joined[-2][1]) <= 2 * count(joined[-1][1]):
                at, newer = joined.pop()
                joined[-1] = (at, merge(joined[-1][1], newer))
        self._rounds = joined

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
    return {table: each[0] if len(each) == 1 else np.unique(np.concatenate(each)) for table, each in found.items()}


def count(ids: Ids) -> int:
    """How many there are."""
    return sum(map(len, ids.values()))
