"""Bytes that arrive in blocks, as lines with the offset behind each."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from shoal.errors import DataError

_MAX_LINE = 1 << 28


class Lines:
    """The whole lines of what was added, without their newlines; ``offset`` is where the first one that was not taken
    begins."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._rest: list[bytes] = []
        self._rest_bytes = 0
        self._ready: deque[bytes] = deque()

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def end(self) -> int:
        """The offset behind everything that was added."""
        return self.offset + sum(len(line) + 1 for line in self._ready) + self._rest_bytes

    def add(self, block: bytes) -> None:
        cut = block.rfind(b"\n")
        if cut >= 0:
            whole = b"".join((*self._rest, block[:cut]))
            self._ready.extend(whole.split(b"\n"))
            block = block[cut + 1 :]
            self._rest, self._rest_bytes = [], 0
        if block:
            self._rest.append(block)
            self._rest_bytes += len(block)
            if self._rest_bytes > _MAX_LINE:
                raise DataError(f"a line must have at most {_MAX_LINE} bytes; is it text?")

    def finish(self) -> None:
        """What was added ends here: the last line needs no newline."""
        if self._rest:
            self._ready.append(b"".join(self._rest))
            self._rest, self._rest_bytes = [], 0

    def take(self, count: int) -> tuple[list[bytes], list[int]]:
        """At most so many lines, and the offset behind each."""
        if count >= len(self._ready):
            lines = list(self._ready)
            self._ready.clear()
        else:
            lines = [self._ready.popleft() for _ in range(count)]
        behind = list(accumulate((len(line) + 1 for line in lines), initial=self.offset))
        self.offset = behind[-1]
        return lines, behind[1:]
