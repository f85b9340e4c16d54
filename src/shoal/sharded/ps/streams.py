"""Exactly once: what the server remembers of each worker's stream of writes."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from shoal.sharded.ps.protocol import Status, buffer_of


class Verdict(Enum):
    NEW = "new"
    DONE = "done before"
    GAP = "a write before it is missing"


class Answer(NamedTuple):
    """How a write ended, so that one that is sent again is told the same."""

    status: Status = Status.OK
    payload: Sequence[Any] = ()


class Streams:
    """The last write applied of every stream, and what it gave back.

    A write is new when its number follows the last one applied, or one that the worker says it had an answer for (a
    write that was refused leaves a gap). The least recently used stream is forgotten beyond ``capacity``; a worker
    that comes back after that is taken as new.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.capacity = capacity
        self.forgotten = 0
        self._last: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()

    def judge(self, stream: bytes, seq: int, acked: int) -> Verdict:
        last = self.last(stream)
        if seq <= last:
            return Verdict.DONE
        return Verdict.NEW if seq - 1 <= max(last, acked) else Verdict.GAP

    def remember(self, stream: bytes, seq: int, answer: Answer) -> None:
        self._last[stream] = (seq, answer)
        self._last.move_to_end(stream)
        while len(self._last) > self.capacity:
            self._last.popitem(last=False)
            self.forgotten += 1

    def answer(self, stream: bytes, seq: int) -> Answer:
        """How write ``seq`` ended, as far as it is remembered: that of the last one."""
        last, answer = self._last.get(stream, (0, Answer()))
        return answer if last == seq else Answer()

    def last(self, stream: bytes) -> int:
        """The number of the last write applied, 0 before the first."""
        return self._last[stream][0] if stream in self._last else 0

    def __len__(self) -> int:
        return len(self._last)

    def dump(self) -> dict[str, int]:
        return {stream.hex(): seq for stream, (seq, _) in self._last.items()}

    def dump_answers(self) -> dict[str, Any]:
        """The answers that say more than that all is well."""
        return {
            stream.hex(): [int(answer.status), [base64.b64encode(buffer_of(part)).decode() for part in answer.payload]]
            for stream, (_, answer) in self._last.items()
            if answer != Answer()
        }

    def load(self, numbers: Mapping[str, int], answers: Mapping[str, Any]) -> None:
        """What `dump` and `dump_answers` gave."""
        self._last = OrderedDict()
        for stream, seq in numbers.items():
            status, parts = answers.get(stream, (Status.OK, ()))
            answer = Answer(Status(status), tuple(map(base64.b64decode, parts)))
            self._last[bytes.fromhex(stream)] = (seq, answer)
