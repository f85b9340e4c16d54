"""Standard input, line by line."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Mapping
from typing import Any

from shoal.data.live.address import log
from shoal.data.live.lines import Lines
from shoal.data.live.protocol import Chunk, Lag

_BLOCK = 1 << 20
_PARTITION = "stdin"


class StdinReader:
    """Reads standard input. A position is a byte offset. A pipe cannot rewind: a restart reads what follows."""

    def __init__(self, file: int | None = None) -> None:
        self._file = sys.stdin.fileno() if file is None else file
        self._lines = Lines()
        self._closed = False
        self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)

    @property
    def ended(self) -> bool:
        return self._closed and not self._lines

    def open(self, positions: Mapping[str, Any] | None = None) -> None:
        offset = int((positions or {}).get(_PARTITION, 0))
        if self._regular:
            os.lseek(self._file, offset, os.SEEK_SET)
        elif offset:
            log.warning("standard input is a pipe and cannot rewind: continuing with the data that arrives now")
        self._lines = Lines(offset)
        self._closed = False

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        deadline = time.monotonic() + timeout_s
        while not self._lines and not self._closed:
            left = max(0.0, deadline - time.monotonic())
            if not self._regular and not select.select([self._file], [], [], left)[0]:
                return []
            block = os.read(self._file, _BLOCK)
            self._lines.add(block)
            if not block:
                self._closed = True
                self._lines.finish()
        records, positions = self._lines.take(max_records)
        return [Chunk(_PARTITION, records, positions)] if records else []

    def positions(self) -> dict[str, Any]:
        return {_PARTITION: self._lines.offset}

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        return None

    def lag(self) -> Lag:
        return Lag()

    def close(self) -> None:
        return None
