"""`Allowance`: the memory that the storage of a table with a budget can take, requested before it is allocated."""

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
"""The largest mean number of ids per bucket. It is lower than in tables without a budget, because a table with a budget
stays full, and lookups must still be fast."""
_STEP_BYTES = 4 << 30  # the most bytes of rows allocated in advance


class Allowance:
    """Rows and bytes of one storage, whose only table has a budget. Index and rows grow together.

    A small table allocates all of its memory at once, and more buckets than its rows need: see kernels/small.py.
    """

    most_small: ClassVar[int] = MOST_SMALL.value

    def __init__(self, max_rows: int, budget: _core.Budget | None) -> None:
        self.rows = min(max_rows or MAX_ROWS - 1, MAX_ROWS - 1)
        self.small = self.rows <= self.most_small
        self.full = False
        """Whether all allowed memory is allocated: from now on rows leave."""
        self._budget = budget
        self._taken = [0]
        if budget is not None:
            weakref.finalize(self, _give_back, budget, self._taken)

    def buckets(self, rows: int) -> int:
        """The number of buckets for ``rows`` ids."""
        return max(16, self.rows) if self.small else -(-rows // IDS_OF_BUCKET) + 1

    def _stores(self, index: Index, rows: int) -> list[tuple[Store, int]]:
        """The stores that grow, with the number of elements of each for ``rows`` ids. Row 0 is never used."""
        buckets, arena = self.buckets(rows), index.arena
        slots, cells = (buckets + 1) * 8, index.cells(buckets)
        stores: list[tuple[Any, int]] = [
            (index.keys, slots), (index.rows, slots), (index.stash_keys, cells), (index.stash_rows, cells),
            (arena.words, (rows + 1) * index.layout.stride),
        ]  # fmt: skip
        stores += [(store, rows + 1) for store in (index.free_rows, arena.times, arena.epochs, arena.scores)]
        return [(store, elements) for store, elements in stores if store is not None]

    def cost(self, index: Index, rows: int) -> int:
        """The bytes of index and rows with room for ``rows`` ids."""
        return sum(store.cost(elements) for store, elements in self._stores(index, rows))

    def settle(self, index: Index) -> bool:
        """Reports the storage's current memory to the budget; False if that has not enough left."""
        more = index.bytes() - self._taken[0]
        if self._budget is not None:
            if more > 0 and not self._budget.take(more):
                return False
            if more < 0:
                self._budget.give(-more)
        self._taken[0] += more
        return True

    def grow(self, index: Index, have: int, need: int) -> int:
        """Allocates memory for ``need`` ids or more, as far as the budget allows; returns the number of ids that fit.

        Raises:
            CapacityError: the GPU is full although the budget is not; no id was lost.
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
        """The number of ids, below ``more``, that the budget has memory for."""
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
