"""Cuts bytes that arrive in blocks into lines, each with the offset of its end."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from shoal.data.live.protocol import REST, Damaged
from shoal.errors import DataError

_MAX_LINE = 1 << 28


class Lines:
    """The complete lines in the bytes added so far, without newlines; ``offset`` is where the first line not taken
    begins."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._ready: deque[bytes] = deque()
        self._damaged: Damaged | None = None

    def __bool__(self) -> bool:
        return bool(self._ready) or self._damaged is not None

    def add(self, block: bytes) -> None:
        cut = block.rfind(b"\n")
        if cut >= 0:
            self._ready.extend(b"".join((*self._rest, block[:cut])).split(b"\n"))
            block = block[cut + 1 :]
            self._rest, self._rest_bytes = [], 0
        if block:
            self._rest.append(block)
            self._rest_bytes += len(block)
            if self._rest_bytes > _MAX_LINE:
                raise DataError(f"a line must have at most {_MAX_LINE} bytes; is it text?")

    def finish(self) -> None:
        """Mark the end of the input; the last line needs no newline."""
        if self._rest:
            self._ready.append(b"".join(self._rest))
            self._rest, self._rest_bytes = [], 0

    def give_up(self, why: str) -> None:
        """Mark the end of what can be read."""
        self._rest, self._rest_bytes = [], 0
        self._damaged = Damaged.rest(why)

    def take(self, count: int) -> tuple[list[bytes], list[int]]:
        """Take at most ``count`` lines, and the offset of each one's end; a damaged rest is returned alone."""
        if not self._ready and self._damaged is not None:
            damaged, self._damaged, self.offset = self._damaged, None, REST
            return [damaged], [REST]
        if count >= len(self._ready):
            lines = list(self._ready)
            self._ready.clear()
        else:
            lines = [self._ready.popleft() for _ in range(count)]
        ends = list(accumulate((len(line) + 1 for line in lines), initial=self.offset))
        self.offset = ends[-1]
        return lines, ends[1:]
