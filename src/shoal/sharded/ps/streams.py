"""Exactly once: what the server remembers of each worker's stream of writes."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any


class Verdict(Enum):
    NEW = "new"
    DONE = "done before"
    GAP = "a write before it is missing"


class Streams:
    """The last write applied of every stream, and what it gave back.

    A write is new when its number follows the last one applied, or one that the worker says it had an answer for (a
    write that was refused leaves a gap). The least recently used stream is forgotten beyond ``capacity``; a worker
    that comes back after that is taken as new.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity
        self.forgotten = 0
        self._last: OrderedDict[bytes, tuple[int, list[Any]]] = OrderedDict()

    def judge(self, stream: bytes, seq: int, acked: int) -> Verdict:
        last = self._last.get(stream, (0, []))[0]
        if seq <= last:
            return Verdict.DONE
        return Verdict.NEW if seq - 1 <= max(last, acked) else Verdict.GAP

    def remember(self, stream: bytes, seq: int, payload: list[Any]) -> None:
        self._last[stream] = (seq, payload)
        self._last.move_to_end(stream)
        while len(self._last) > self.capacity:
            self._last.popitem(last=False)
            self.forgotten += 1

    def answer(self, stream: bytes, seq: int) -> list[Any]:
        """What write ``seq`` gave back, as far as it is remembered: that of the last one."""
        last, payload = self._last.get(stream, (0, []))
        return payload if last == seq else []

    def expected(self, stream: bytes) -> int:
        return self._last.get(stream, (0, []))[0] + 1

    def __len__(self) -> int:
        return len(self._last)

    def dump(self) -> dict[str, int]:
        return {stream.hex(): seq for stream, (seq, _) in self._last.items()}

    def load(self, dumped: dict[str, int]) -> None:
        self._last = OrderedDict((bytes.fromhex(stream), (seq, [])) for stream, seq in dumped.items())
