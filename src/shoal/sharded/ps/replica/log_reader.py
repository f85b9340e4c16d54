"""Reads the records of a log from any number on, while another thread appends to it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import DataError
from shoal.sharded.ps.server.log import FILE_HEAD_BYTES, HEAD_BYTES, RECORD_MAGIC, log_files, parse_record

_SIZES = struct.Struct("<IIIIQQQ")  # magic, crc, header, zero, ids, values, number


class RecordsGone(DataError):
    """The log no longer has these records, because a checkpoint has replaced them."""


class LogReader:
    """A reader that continues where it stopped, for one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self._at = self._next = 0

    def read(self, after: int, last: int, max_bytes: int) -> bytes:
        """The records after ``after`` up to ``last``, as bytes of the log: complete records, at least one, and together
        at most ``max_bytes`` if more than one.

        Raises:
            RecordsGone: the log begins later.
        """
        if self._fd < 0 or self._next != after + 1:
            self._seek(after + 1)
        parts, begin, total = [], self._at, 0
        while self._next <= last:
            head = os.pread(self._fd, HEAD_BYTES, self._at)
            if len(head) < HEAD_BYTES:  # the last record of this file was read
                parts.append(os.pread(self._fd, self._at - begin, begin))
                more, begin = self._open_file(self._next), self._at
                if not more:
                    break
                continue
            magic, _, header, _, ids, values, number = _SIZES.unpack_from(head)
            if magic != RECORD_MAGIC or number != self._next:
                raise DataError(f"the log in {self._directory} is damaged at record {self._next}")
            size = HEAD_BYTES + header + ids + values
            if total and total + size > max_bytes:
                break
            total += size
            self._at += size
            self._next += 1
        parts.append(os.pread(self._fd, self._at - begin, begin))
        return b"".join(parts)

    def _seek(self, number: int) -> None:
        files = [(first, path) for first, path in log_files(self._directory) if first <= number]
        if not files:
            raise RecordsGone(f"the log in {self._directory} begins after record {number}")
        first, path = files[-1]
        self._use(path)
        self._next = first
        while self._next < number:
            head = os.pread(self._fd, HEAD_BYTES, self._at)
            if len(head) < HEAD_BYTES:
                raise RecordsGone(f"the log in {self._directory} has no record {self._next}")
            _, _, header, _, ids, values, _ = _SIZES.unpack_from(head)
            self._at += HEAD_BYTES + header + ids + values
            self._next += 1

    def _open_file(self, first: int) -> bool:
        path = self._directory / f"log-{first:016d}.shlog"
        if not path.exists():
            return False
        self._use(path)
        return os.fstat(self._fd).st_size > FILE_HEAD_BYTES

    def _use(self, path: Path) -> None:
        self.close()
        self._fd, self._at = os.open(path, os.O_RDONLY | os.O_CLOEXEC), FILE_HEAD_BYTES

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def records(data: memoryview, first: int) -> Iterator[tuple[int, bytes, memoryview, memoryview]]:
    """Parse and check the result of `LogReader.read`; yields number, header, ids and values of each record.

    Raises:
        DataError: they are damaged, or do not begin at ``first``.
    """
    at, number = 0, first
    while at < len(data):
        found = parse_record(data, at, number)
        if found is None:
            raise DataError(f"record {number} of the leader's log was damaged on the way")
        header, ids, values, at = found
        yield number, header, ids, values
        number += 1
