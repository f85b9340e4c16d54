"""The durable log of a parameter server: requests in the order they were applied, checked record by record.

A file ``log-<first number>.shlog`` starts with 16 bytes of magic and the number of its first record. A record is::

    magic u32 | crc u32 | header u32 | (zero) u32 | ids u64 | values u64 | number u64 | durable u64 | frames

where ``crc`` is zlib's CRC-32 of all that follows it and ``durable`` is the length of this file that was known to be on
the disk when the record was written. A bad record counts as a torn tail and is cut off, unless a later record shows
that it was durable: then the disk has lost acknowledged data, and the log cannot be opened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import _core
from shoal.durable import sync_folder
from shoal.errors import DataError
from shoal.sharded.ps.protocol import nbytes_of

FILE_MAGIC = b"SHLOG\x001\n"
RECORD_MAGIC = 0x4C434552
_HEAD = struct.Struct("<II")
_LENGTHS = struct.Struct("<IIQQQQ")
HEAD_BYTES = _HEAD.size + _LENGTHS.size
FILE_HEAD_BYTES = 16


class Log:
    """Appends records to the newest file in ``directory``. One thread appends; `sync` can run in another."""

    def __init__(self, directory: str | os.PathLike[str], next_number: int = 1) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.next_number = next_number
        self.durable_number = next_number - 1
        """Records up to this one are on the disk."""
        self.bytes_written = 0
        self._lock = threading.Lock()
        self._fd = -1
        self._end = self._durable = 0
        self.rotate()

    def append(self, frames: Sequence[Any]) -> int:
        """Write one request; returns its number. It is durable after the next `sync`.

        Raises:
            OSError: the disk is full, or failed. The file then ends where it ended before.
        """
        given = [memoryview(f).cast("B") if nbytes_of(f) else b"" for f in frames]
        header, ids, values = (*given, b"", b"")[:3]
        lengths = _LENGTHS.pack(len(header), 0, len(ids), len(values), self.next_number, self._durable)
        crc = zlib.crc32(lengths)
        for frame in (header, ids, values):
            crc = crc32(frame, crc)
        parts = [_HEAD.pack(RECORD_MAGIC, crc) + lengths, header, ids, values]
        self._write(parts, HEAD_BYTES + len(header) + len(ids) + len(values))
        number, self.next_number = self.next_number, self.next_number + 1
        return number

    def _write(self, parts: list[Any], total: int) -> None:
        written = 0
        try:
            while written < total:
                written += os.pwritev(self._fd, _after(parts, written), self._end + written)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += total
        self.bytes_written += total

    def sync(self) -> None:
        """Wait until everything appended before this call is on the disk."""
        with self._lock:
            number = self.next_number - 1  # read first: its record is in the file
            end = self._end
            if end != self._durable:
                os.fdatasync(self._fd)
                self._durable = end
            self.durable_number = number

    def rotate(self) -> int:
        """Continue in a new file; returns the number of its first record. All earlier records are durable."""
        if self._fd >= 0:
            self.sync()
        path = self.directory / f"log-{self.next_number:016d}.shlog"
        if self._fd >= 0 and path.exists():
            return self.next_number  # the current file is still empty
        fd = _new_file(path, FILE_MAGIC + struct.pack("<Q", self.next_number))
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._end, self._durable = fd, FILE_HEAD_BYTES, FILE_HEAD_BYTES
        return self.next_number

    def drop_before(self, number: int) -> None:
        """Remove the files whose records all have smaller numbers."""
        files = log_files(self.directory)
        for (_, path), (following, _) in itertools.pairwise(files):
            if following <= number:
                path.unlink()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.fdatasync(self._fd)
                os.close(self._fd)
                self._fd = -1


def _new_file(path: Path, head: bytes) -> int:
    """Create a file with its head on the disk. If that fails, the file is removed, because it would count as a log."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, head) != len(head):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fdatasync(fd)
        sync_folder(path.parent)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def crc32(data: Any, crc: int = 0) -> int:
    """zlib's CRC-32, by a faster implementation for large data."""
    if len(data) < 4096:
        return zlib.crc32(data, crc)
    return _core.crc32(np.frombuffer(data, np.uint8).ctypes.data, len(data), crc)


def _after(parts: list[Any], written: int) -> list[Any]:
    if not written:
        return parts
    rest = []
    for part in parts:
        view = memoryview(part)
        if written < view.nbytes:
            rest.append(view[written:])
        written = max(0, written - view.nbytes)
    return rest


def log_files(directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """The log's files by the number of their first record."""
    found = []
    for path in Path(directory).glob("log-*.shlog"):
        with contextlib.suppress(ValueError):
            found.append((int(path.stem.removeprefix("log-")), path))
    return sorted(found)


def replay(
    directory: str | os.PathLike[str], after: int, *, cut: bool = True
) -> Iterator[tuple[int, bytes, memoryview, memoryview]]:
    """Yield the records after number ``after``: number, header, ids, values. Views are valid until the next one.

    The torn tail of the last file is cut off, unless ``cut`` is False, for callers that only read.

    Raises:
        DataError: a record that had been durable is damaged, or records are missing.
    """
    files = log_files(directory)
    expected = None
    for position, (first, path) in enumerate(files):
        following = files[position + 1][0] if position + 1 < len(files) else None
        if following is not None and following <= after + 1:
            continue
        if expected is None:
            if first > after + 1:
                raise DataError(f"log {path}: starts at record {first}, but the checkpoint ends at {after}")
        elif first != expected:
            raise DataError(f"log {path}: starts at record {first}, record {expected} is missing")
        expected = first
        for number, header, ids, values in _read_file(path, first, last=following is None, cut=cut):
            expected = number + 1
            if number > after:
                yield number, header, ids, values


def _read_file(path: Path, first: int, *, last: bool, cut: bool) -> Iterator[tuple[int, bytes, memoryview, memoryview]]:
    size = path.stat().st_size
    if size < FILE_HEAD_BYTES:
        if last:  # the process died while creating the file
            return
        raise DataError(f"log {path}: has {size} bytes, less than a file's head")
    with open(path, "r+b" if cut else "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            if data[:8] != FILE_MAGIC or struct.unpack_from("<Q", data, 8)[0] != first:
                raise DataError(f"log {path}: is not a log that starts at record {first}")
            at, number = FILE_HEAD_BYTES, first
            while at < size:
                record = parse_record(view, at, number)
                if record is None:
                    if not last or _later_says_durable(data, view, at):
                        raise DataError(
                            f"log {path}: record {number} at byte {at} is damaged although it had been on the disk; "
                            "restore the shard from a checkpoint"
                        )
                    break
                header, ids, values, end = record
                try:
                    yield number, header, ids, values
                finally:  # also if the caller stops early
                    ids.release(), values.release()
                at, number = end, number + 1
        finally:
            view.release()
        if at < size and cut:
            file.truncate(at)
        if last and cut:  # a killed process may have left it only in the page cache
            os.fsync(file.fileno())


def parse_record(view: memoryview, at: int, number: int) -> tuple[bytes, memoryview, memoryview, int] | None:
    if at + HEAD_BYTES > len(view):
        return None
    magic, crc = _HEAD.unpack_from(view, at)
    header, _, ids, values, stored, _ = _LENGTHS.unpack_from(view, at + _HEAD.size)
    begin = at + HEAD_BYTES
    end = begin + header + ids + values
    if magic != RECORD_MAGIC or end > len(view) or stored != number:
        return None
    with view[at + _HEAD.size : end] as checked:
        if crc32(checked) != crc:
            return None
    middle = begin + header
    return bytes(view[begin:middle]), view[middle : middle + ids], view[middle + ids : end], end


def _later_says_durable(data: mmap.mmap, view: memoryview, bad: int) -> bool:
    """Whether an intact record after the bad one shows that the bad one had reached the disk."""
    magic = struct.pack("<I", RECORD_MAGIC)
    at = data.find(magic, bad + 1)
    while at >= 0:
        if at + HEAD_BYTES <= len(view):
            stored, durable = struct.unpack_from("<QQ", view, at + HEAD_BYTES - 16)
            record = parse_record(view, at, stored)
            if record is not None:
                record[1].release(), record[2].release()
                if durable > bad:
                    return True
        at = data.find(magic, at + 1)
    return False
