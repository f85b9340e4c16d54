"""Exactly once: what the server remembers of each worker's stream of writes."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from shoal.sharded.ps.protocol import Status, buffer_of, nbytes_of

ANSWER_OVERHEAD = 200  # bytes that a kept answer takes besides its payload
FORGOTTEN = "this write ended with an answer that the server no longer keeps; it was not applied again"


class Verdict(Enum):
    NEW = "new"
    DONE = "done before"
    GAP = "a write before it is missing"
    OVERLAP = "a part of it is done"


class Answer(NamedTuple):
    """How a write ended, so that one that is sent again is told the same."""

    status: Status = Status.OK
    payload: Sequence[Any] = ()

    @property
    def is_plain(self) -> bool:
        """Whether it says OK and nothing else."""
        return self.status == Status.OK and not self.payload

    @property
    def nbytes(self) -> int:
        return ANSWER_OVERHEAD + sum(nbytes_of(part) for part in self.payload)


class Stream:
    """One worker's writes: the last that was applied, and the answers that say more than OK.

    An answer is kept until the worker says that it has it, since a worker whose connection was cut sends all writes
    again that it has no answer for, not the last one alone.
    """

    __slots__ = ("answers", "forgotten", "last")

    def __init__(self, last: int = 0, forgotten: int = 0) -> None:
        self.last = last
        self.forgotten = forgotten
        """The highest number whose answer said more than OK and is not kept any more."""
        self.answers: dict[int, Answer] = {}

    def answer(self, seq: int) -> Answer:
        kept = self.answers.get(seq)
        if kept is None and seq <= self.forgotten:
            return Answer(Status.INTERNAL, [FORGOTTEN.encode()])
        return kept or Answer()

    def forget_until(self, seq: int) -> int:
        """Drops the answers up to ``seq``; their bytes."""
        dropped = 0
        for number in [number for number in self.answers if number <= seq]:
            dropped += self.answers.pop(number).nbytes
            self.forgotten = max(self.forgotten, number)
        return dropped


class Streams:
    """The streams of all workers.

    A write is new when its number follows the last one applied, or one that the worker says it had an answer for (a
    write that was refused leaves a gap). The least recently used stream is forgotten beyond ``capacity``; a worker
    that comes back after that is taken as new. Answers take at most ``max_answer_bytes`` in all; beyond that the
    answers of the least recently used streams go first, and a write whose answer is gone is told so, never OK.
    """

    def __init__(self, capacity: int = 1 << 16, max_answer_bytes: int = 256 << 20) -> None:
        self.capacity = capacity
        self.max_answer_bytes = max_answer_bytes
        self.forgotten = 0
        self._answer_bytes = 0
        self._streams: OrderedDict[bytes, Stream] = OrderedDict()

    def judge(self, stream: bytes, seq: int, acked: int) -> Verdict:
        last = self.last(stream)
        if seq <= last:
            return Verdict.DONE
        return Verdict.NEW if seq - 1 <= max(last, acked) else Verdict.GAP

    def judge_records(self, stream: bytes, seq: int, behind: int) -> Verdict:
        """Of a write that is of the records behind one number up to ``seq``: records are learnt once and in order."""
        last = self.last(stream)
        if seq <= last:
            return Verdict.DONE
        return Verdict.NEW if behind == last else Verdict.GAP if behind > last else Verdict.OVERLAP

    def remember(self, stream: bytes, seq: int, answer: Answer, acked: int = 0) -> None:
        """Write ``seq`` was applied or failed; the worker has the answers of all up to ``acked``."""
        known = self._streams.setdefault(stream, Stream())
        self._streams.move_to_end(stream)
        self._answer_bytes -= known.forget_until(acked)
        known.last = seq
        if not answer.is_plain:
            known.answers[seq] = answer
            self._answer_bytes += answer.nbytes
            self._make_room(known)
        while len(self._streams) > self.capacity:
            _, gone = self._streams.popitem(last=False)
            self._answer_bytes -= gone.forget_until(gone.last)
            self.forgotten += 1

    def _make_room(self, newest: Stream) -> None:
        """Drops answers until they fit; the newest answer always stays."""
        for known in self._streams.values():
            for number in sorted(known.answers):
                if self._answer_bytes <= self.max_answer_bytes or (known is newest and number == newest.last):
                    return
                self._answer_bytes -= known.forget_until(number)

    def answer(self, stream: bytes, seq: int) -> Answer:
        """How write ``seq``, which is done, ended."""
        known = self._streams.get(stream)
        return Answer() if known is None else known.answer(seq)

    def last(self, stream: bytes) -> int:
        """The number of the last write applied, 0 before the first."""
        return self._streams[stream].last if stream in self._streams else 0

    def __len__(self) -> int:
        return len(self._streams)

    def dump(self) -> dict[str, int]:
        return {stream.hex(): known.last for stream, known in self._streams.items()}

    def dump_answers(self) -> dict[str, Any]:
        """By stream: the answers that say more than OK as ``[number, status, payload]``, and what is not kept."""

        def encode(number: int, answer: Answer) -> list[Any]:
            return [number, int(answer.status), [base64.b64encode(buffer_of(part)).decode() for part in answer.payload]]

        return {
            stream.hex(): {"kept": [encode(*item) for item in known.answers.items()], "forgotten": known.forgotten}
            for stream, known in self._streams.items()
            if known.answers or known.forgotten
        }

    def load(self, numbers: Mapping[str, int], answers: Mapping[str, Any]) -> None:
        """What `dump` and `dump_answers` gave; version 0.1 kept ``[status, payload]`` of the last write alone."""
        self._streams = OrderedDict()
        self._answer_bytes = 0
        for stream, last in numbers.items():
            given = answers.get(stream, {})
            if isinstance(given, list):
                given = {"kept": [[last, *given]]}
            known = Stream(last, given.get("forgotten", 0))
            for number, status, parts in given.get("kept", ()):
                answer = Answer(Status(status), tuple(map(base64.b64decode, parts)))
                known.answers[number] = answer
                self._answer_bytes += answer.nbytes
            self._streams[bytes.fromhex(stream)] = known
