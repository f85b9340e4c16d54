"""Reference versions of admission counts and touched keys."""

from collections.abc import Iterable

MASK = (1 << 64) - 1


def hash_id(id: int) -> int:
    """The fixed hash of an id; the same as csrc/core/hash.h."""
    x = id & MASK
    for _ in range(2):
        x ^= x >> 32
        x = (x * 0xD6E8FEB86659FD93) & MASK
    return x ^ (x >> 32)


def signature(id: int) -> int:
    x = id & MASK
    return ((x >> 17) | (x << 15)) & 0xFFF


class ReferenceHashFilter:
    """Cells hold ``(signature, count)``; the array is a dict from position to cell."""

    def __init__(self, capacity: int, fill_rate: float = 1.5, max_step: int = 64) -> None:
        self.capacity = capacity
        self.total_size = int(capacity * fill_rate)
        self.max_step = max_step
        self.cells: dict[int, tuple[int, int]] = {}
        self.num_elements = 0
        self.failure_count = 0

    def find(self, id: int) -> int | None:
        """The position of the id, or a free one for it; None if there is no room."""
        home = hash_id(id) % self.total_size
        for step in range(self.max_step):
            at = (home + step) % (self.total_size + 64)
            if at not in self.cells or self.cells[at][0] == signature(id):
                return at
        return None

    def store(self, at: int, id: int, count: int) -> None:
        if at not in self.cells:
            self.num_elements = min(self.num_elements + 1, self.capacity)
        self.cells[at] = (signature(id), min(count, 15))
        if self.cells[at] == (0, 0):  # all zeros means empty
            del self.cells[at]

    def add(self, id: int, count: int = 1) -> int:
        at = self.find(id)
        if at is None:
            self.failure_count += 1
            return 15
        old = self.cells.get(at, (0, 0))[1]
        self.store(at, id, old + count)
        return old

    def get(self, id: int) -> int:
        at = self.find(id)
        return 15 if at is None else self.cells.get(at, (0, 0))[1]

    @property
    def full(self) -> bool:
        return self.num_elements >= self.capacity - 1


class ReferenceSlidingHashFilter:
    """A ring of blocks, each a `ReferenceHashFilter`; the oldest block is dropped when the newest is full."""

    def __init__(self, capacity: int, split_num: int, threshold: int = 0) -> None:
        self.capacity = max(capacity, 300)
        self.split_num = max(split_num, 5)
        self.blocks = [self._block() for _ in range(self.split_num)]
        self.head = 0
        self.head_increment = 0
        self.failure_count = 0
        self.threshold = threshold

    def _block(self) -> ReferenceHashFilter:
        return ReferenceHashFilter(self.capacity // (self.split_num - 1), 1.2, max_step=16)

    def _older(self, id: int) -> int:
        for back in range(1, min(self.head_increment, self.split_num - 2) + 1):
            block = self.blocks[(self.head - back) % self.split_num]
            at = block.find(id)
            if at is not None and at in block.cells:
                return block.cells[at][1]
        return 0

    def _usable(self, id: int) -> tuple[ReferenceHashFilter, int] | None:
        for block in (self.blocks[self.head], self.blocks[(self.head + 1) % self.split_num]):
            at = block.find(id)
            if at is not None:
                return block, at
        return None

    def add(self, id: int, count: int = 1) -> int:
        place = self._usable(id)
        if place is None:
            self.failure_count += 1
            return 15
        block, at = place
        if at in block.cells:
            return block.add(id, count)
        old = self._older(id)
        block.store(at, id, old + count)
        if self.blocks[self.head].full:
            self.head = (self.head + 1) % self.split_num
            self.head_increment += 1
            self.blocks[(self.head + 1) % self.split_num] = self._block()
        return old

    def get(self, id: int) -> int:
        place = self._usable(id)
        if place is None:
            return 15
        block, at = place
        return block.cells[at][1] if at in block.cells else self._older(id)

    def should_be_filtered(self, id: int, count: int = 1) -> bool:
        return self.threshold > 0 and self.add(id, count) < self.threshold

    @property
    def num_elements(self) -> int:
        return sum(block.num_elements for block in self.blocks)


class ReferenceTouchedKeySet:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: set[int] = set()

    def insert(self, ids: Iterable[int]) -> int:
        dropped = 0
        for id in ids:
            if len(self.keys) > self.capacity:
                dropped += len(self.keys)
                self.keys.clear()
            self.keys.add(id)
        return dropped

    def steal(self) -> set[int]:
        stolen, self.keys = self.keys, set()
        return stolen
