"""Cuts bytes that arrive in blocks into TFRecord frames, each with the offset of its end."""

from __future__ import annotations

from collections import deque

from shoal import _core
from shoal.data.live.protocol import REST, Damaged

_MAX_FRAME = 1 << 30


class Frames:
    """The complete frames in the bytes added so far; ``offset`` is where the first frame not taken begins.

    A frame with a wrong checksum is a `Damaged` record. If frame borders are lost, the rest is one such record.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._rest = b""
        self._ready: deque[tuple[bytes, int]] = deque()  # with the offset of its end
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
            self.give_up(str(error))
            return
        if len(self._rest) - consumed > _MAX_FRAME:
            self.give_up(f"a record has more than {_MAX_FRAME} bytes")
            return
        for payload, end in zip(payloads, [*offsets[1:], consumed], strict=False):
            record = Damaged("the record's checksum does not match") if payload is None else payload
            self._ready.append((record, self._end + end))
        self._end += consumed
        self._rest = self._rest[consumed:]

    def finish(self) -> None:
        """Mark the end of the input."""
        if self._rest:
            self.give_up("the file ends inside a record")

    def give_up(self, why: str) -> None:
        """Mark the end of what can be read."""
        self._rest, self._end = b"", REST
        self._ready.append((Damaged.rest(why), REST))

    def take(self, count: int) -> tuple[list[bytes], list[int]]:
        """Take at most ``count`` records, and the offset of each one's end; a damaged record is returned alone."""
        records: list[bytes] = []
        ends: list[int] = []
        while self._ready and len(records) < count:
            damaged = isinstance(self._ready[0][0], Damaged)
            if damaged and records:
                break
            record, end = self._ready.popleft()
            records.append(record)
            ends.append(end)
            if damaged:
                break
        self.offset = ends[-1]
        return records, ends
