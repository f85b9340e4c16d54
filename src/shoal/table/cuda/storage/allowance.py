"""`Allowance`: what the storage of a table with a budget may take. Every page is asked for before it is taken."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from shoal import _core
from shoal.errors import CapacityError
from shoal.table.cuda.arena import MAX_ROWS
from shoal.table.cuda.kernels.evict import MOST_SMALL
from shoal.table.cuda.memory import Store
from shoal.table.cuda.storage.index import Index

IDS_OF_BUCKET = 5
"""On average, at most. Fewer than elsewhere: a full table stays full, and is found in as quickly as one that is half
full."""
_STEP_BYTES = 4 << 30  # of rows that are taken at once, beyond what is needed


class Allowance:
    """Rows and bytes of one storage, whose only table has a budget. Index and rows grow together.

    A small table takes all of its memory at once, and more buckets than its rows need: see kernels/evict.py.
    """

    most_small: ClassVar[int] = MOST_SMALL.value

    def __init__(self, max_rows: int, budget: _core.Budget | None) -> None:
        self.rows = min(max_rows or MAX_ROWS - 1, MAX_ROWS - 1)
        self.small = self.rows <= self.most_small
        self.full = False
        """Whether all is taken that may be: from now on rows leave."""
        self._budget = budget
        self._taken = [0]
        if budget is not None:
            weakref.finalize(self, _give_back, budget, self._taken)

    def buckets(self, rows: int) -> int:
        """Buckets for so many ids."""
        return max(16, self.rows) if self.small else -(-rows // IDS_OF_BUCKET) + 1

    def _stores(self, index: Index, rows: int) -> list[tuple[Store, int]]:
        """What grows, and how many elements each has for so many ids. Row 0 is nobody's."""
        buckets, arena = self.buckets(rows), index.arena
        slots, cells = (buckets + 1) * 8, index.cells(buckets)
        stores: list[tuple[Any, int]] = [
            (index.keys, slots), (index.rows, slots), (index.stash_keys, cells), (index.stash_rows, cells),
            (arena.words, (rows + 1) * index.layout.stride),
        ]  # fmt: skip
        stores += [(store, rows + 1) for store in (index.free_rows, arena.times, arena.epochs, arena.scores)]
        return [(store, elements) for store, elements in stores if store is not None]

    def cost(self, index: Index, rows: int) -> int:
        """Bytes that index and rows take once they have room for so many ids."""
        return sum(store.cost(elements) for store, elements in self._stores(index, rows))

    def settle(self, index: Index) -> bool:
        """Has the budget know what the storage takes by now; False: that is more than is left."""
        more = index.bytes() - self._taken[0]
        if self._budget is not None:
            if more > 0 and not self._budget.take(more):
                return False
            if more < 0:
                self._budget.give(-more)
        self._taken[0] += more
        return True

    def grow(self, index: Index, have: int, need: int) -> int:
        """Takes memory for ``need`` ids and some more, or for as many as the budget allows; for how many there is now.

        Raises:
            CapacityError: the GPU is full, though the budget is not; no id has been lost.
        """
        need = min(need, self.rows)
        step = min(have, _STEP_BYTES // (4 * index.layout.stride))
        rows = self.rows if self.small else min(self.rows, max(need, have + max(step, have // 8)))
        while rows > have and not self._take(self.cost(index, rows)):
            rows = need if rows > need else self._most(index, have, rows)
        self.full = rows < need or rows <= have or rows == self.rows
        if rows <= have:
            return have
        try:
            for store, elements in self._stores(index, rows):
                store.grow(0, elements)
        except CapacityError:
            self.settle(index)
            raise
        return rows

    def _take(self, bytes_: int) -> bool:
        if self._budget is not None and not self._budget.take(bytes_ - self._taken[0]):
            return False
        self._taken[0] = bytes_
        return True

    def _most(self, index: Index, have: int, more: int) -> int:
        """Ids, fewer than ``more``, that the budget has memory for."""
        assert self._budget is not None
        left = self._budget.limit() - self._budget.used() + self._taken[0]
        while more - have > 1:
            middle = (have + more) // 2
            if self.cost(index, middle) <= left:
                have = middle
            else:
                more = middle
        return have


def _give_back(budget: _core.Budget, taken: list[int]) -> None:
    budget.give(taken[0])
