"""Exactly-once writes: the server's record of each worker's stream of writes."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from shoal.sharded.ps.protocol import Status, buffer_of, nbytes_of

ANSWER_OVERHEAD = 200  # bytes of a kept answer besides its payload
FORGOTTEN = "this write was handled before, but the server no longer has its answer; it was not applied again"


class Verdict(Enum):
    NEW = "new"
    DONE = "done before"
    GAP = "a write before it is missing"
    OVERLAP = "a part of it is done"


class Answer(NamedTuple):
    """The outcome of a write, so that a repeated write gets the same answer."""

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
    """One worker's writes: the last one applied, and the answers that are more than OK.

    An answer is kept until the worker confirms it, because a worker whose connection was cut repeats all writes that
    it has no answer for, not only the last one.
    """

    __slots__ = ("answers", "forgotten", "last")

    def __init__(self, last: int = 0, forgotten: int = 0) -> None:
        self.last = last
        self.forgotten = forgotten
        """The highest number whose answer was more than OK and is no longer kept."""
        self.answers: dict[int, Answer] = {}

    def answer(self, seq: int) -> Answer:
        kept = self.answers.get(seq)
        if kept is None and seq <= self.forgotten:
            return Answer(Status.INTERNAL, [FORGOTTEN.encode()])
        return kept or Answer()

    def forget_until(self, seq: int) -> int:
        """Drop the answers up to ``seq``; returns the number of bytes freed."""
        dropped = 0
        for number in [number for number in self.answers if number <= seq]:
            dropped += self.answers.pop(number).nbytes
            self.forgotten = max(self.forgotten, number)
        return dropped


class Streams:
    """The streams of all workers.

    A write is new if its number follows the last one applied, or one whose answer the worker has confirmed (a refused
    write leaves a gap). Beyond ``capacity`` the least recently used stream is dropped; its worker counts as new if it
    returns. All answers take at most ``max_answer_bytes``; beyond that those of the least recently used streams are
    dropped first. A repeated write whose answer was dropped gets an error that says so, never OK.
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

    def judge_records(self, stream: bytes, seq: int, after: int) -> Verdict:
        """The verdict on a write of the records after ``after`` up to ``seq``: each is learnt once, in order."""
        last = self.last(stream)
        if seq <= last:
            return Verdict.DONE
        return Verdict.NEW if after == last else Verdict.GAP if after > last else Verdict.OVERLAP

    def remember(self, stream: bytes, seq: int, answer: Answer, acked: int = 0) -> None:
        """Record the outcome of write ``seq``; the worker has confirmed all answers up to ``acked``."""
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
        """Drop answers until they fit; the newest answer always stays."""
        for known in self._streams.values():
            for number in sorted(known.answers):
                if self._answer_bytes <= self.max_answer_bytes or (known is newest and number == newest.last):
                    return
                self._answer_bytes -= known.forget_until(number)

    def answer(self, stream: bytes, seq: int) -> Answer:
        """The outcome of the finished write ``seq``."""
        known = self._streams.get(stream)
        return Answer() if known is None else known.answer(seq)

    def last(self, stream: bytes) -> int:
        """The number of the last applied write; 0 before the first."""
        return self._streams[stream].last if stream in self._streams else 0

    def __len__(self) -> int:
        return len(self._streams)

    def dump(self) -> dict[str, int]:
        return {stream.hex(): known.last for stream, known in self._streams.items()}

    def dump_answers(self) -> dict[str, Any]:
        """By stream: the answers that are more than OK as ``[number, status, payload]``, and ``forgotten``."""

        def encode(number: int, answer: Answer) -> list[Any]:
            return [number, int(answer.status), [base64.b64encode(buffer_of(part)).decode() for part in answer.payload]]

        return {
            stream.hex(): {"kept": [encode(*item) for item in known.answers.items()], "forgotten": known.forgotten}
            for stream, known in self._streams.items()
            if known.answers or known.forgotten
        }

    def load(self, numbers: Mapping[str, int], answers: Mapping[str, Any]) -> None:
        """Load the results of `dump` and `dump_answers`. Version 0.1 kept only the last ``[status, payload]``."""
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
