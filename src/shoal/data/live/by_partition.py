"""`ByPartition`: forms batches from one partition each, for servers that track their learning by partition."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from shoal.data.live.protocol import Chunk


class _Queue:
    def __init__(self, source: Any, number: Callable[[Any], int], cuts: Iterable[int]) -> None:
        self.source, self.number, self.cuts = source, number, deque(cuts)
        self.chunks: deque[Chunk] = deque()
        self.records = 0
        self.since = 0.0

    def add(self, chunk: Chunk, now: float) -> None:
        if not self.chunks:
            self.since = now
        self.chunks.append(chunk)
        self.records += len(chunk)

    def upto_cut(self) -> int | None:
        """The number of records before the next cut; None if there is no cut or it was not reached yet."""
        while self.cuts and self.chunks and self.number(self.chunks[0].positions[0]) > self.cuts[0]:
            self.cuts.popleft()  # already passed
        if not self.cuts:
            return None
        count = 0
        for chunk in self.chunks:
            if self.number(chunk.positions[-1]) < self.cuts[0]:
                count += len(chunk)
                continue
            return count + sum(self.number(position) <= self.cuts[0] for position in chunk.positions)
        return None

    def take(self, count: int, now: float) -> list[Chunk]:
        taken: list[Chunk] = []
        while count and self.chunks:
            chunk = self.chunks.popleft()
            if len(chunk) > count:
                self.chunks.appendleft(chunk.part(count, len(chunk)))
                chunk = chunk.part(0, count)
            taken.append(chunk)
            count -= len(chunk)
            self.records -= len(chunk)
        self.since = now
        return taken


class ByPartition:
    """Makes batches of records of one partition each. Records that have waited longest come first.

    Args:
        batch_size: records per batch.
        max_wait_s: how long records wait for a batch to fill.
    """

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self._size, self._max_wait_s = batch_size, max_wait_s
        self._queues: dict[tuple[int, str], _Queue] = {}

    def follow(self, source: Any, partition: str, number: Callable[[Any], int], cuts: Iterable[int] = ()) -> None:
        """Register a partition; a batch ends at each of ``cuts``."""
        self._queues[id(source), partition] = _Queue(source, number, cuts)

    def add(self, source: Any, chunk: Chunk, now: float) -> None:
        self._queues[id(source), chunk.partition].add(chunk, now)

    def __len__(self) -> int:
        return sum(queue.records for queue in self._queues.values())

    @property
    def room(self) -> int:
        """How many more records to accept; with that many, some partition has a full batch."""
        return max(0, len(self._queues) * self._size - len(self))

    def wait_s(self, now: float) -> float:
        """Seconds until the records that have waited longest become a batch."""
        waits = [queue.since + self._max_wait_s - now for queue in self._queues.values() if queue.records]
        return max(0.0, min(waits, default=float("inf")))

    def take(self, now: float, ended: bool) -> tuple[Any, list[Chunk]] | None:
        """Return the next batch's source and records, if there is one; ``ended``: no more records will come."""
        for queue in sorted(self._queues.values(), key=lambda one: one.since):
            cut = queue.upto_cut() if queue.records else None
            most = self._size if cut is None else min(self._size, cut)
            full = queue.records >= self._size or cut is not None
            if queue.records and (full or ended or now - queue.since >= self._max_wait_s):
                return queue.source, queue.take(most, now)
        return None
