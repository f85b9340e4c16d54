"""Bytes that arrive in blocks, as TFRecord frames with the offset behind each."""

from __future__ import annotations

from collections import deque

from shoal import _core
from shoal.data.live.protocol import Damaged

_MAX_FRAME = 1 << 30
REST = 1 << 62
"""The offset behind a file whose rest cannot be read."""


class Frames:
    """The whole frames of what was added; ``offset`` is where the first one that was not taken begins.

    A frame with a wrong checksum is a `Damaged` record, and so is all that follows where frames cannot be told apart.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._rest = b""
        self._ready: deque[tuple[bytes, int]] = deque()  # with the offset behind it
        self._end = offset

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, block: bytes) -> None:
        if self._end == REST:
            return
        self._rest += block
        try:
            payloads, offsets, consumed = _core.read_frames(self._rest, 0, len(self._rest))
        except ValueError as error:
            self._give_up(str(error))
            return
        if len(self._rest) - consumed > _MAX_FRAME:
            self._give_up(f"a record has more than {_MAX_FRAME} bytes")
            return
        for payload, end in zip(payloads, [*offsets[1:], consumed], strict=False):
            record = Damaged("the record's checksum does not match") if payload is None else payload
            self._ready.append((record, self._end + end))
        self._end += consumed
        self._rest = self._rest[consumed:]

    def finish(self) -> None:
        """What was added ends here."""
        if self._rest:
            self._give_up("the file ends inside a record")

    def _give_up(self, why: str) -> None:
        self._rest, self._end = b"", REST
        self._ready.append((Damaged(f"the file is damaged ({why}); its rest is skipped"), REST))

    def take(self, count: int) -> tuple[list[bytes], list[int]]:
        """At most so many records, and the offset behind each; a damaged one comes alone."""
        records: list[bytes] = []
        behind: list[int] = []
        while self._ready and len(records) < count:
            damaged = isinstance(self._ready[0][0], Damaged)
            if damaged and records:
                break
            record, end = self._ready.popleft()
            records.append(record)
            behind.append(end)
            if damaged:
                break
        self.offset = behind[-1]
        return records, behind
