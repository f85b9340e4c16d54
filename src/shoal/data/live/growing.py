"""A directory in which files appear and grow, read record by record in the order of file names."""

from __future__ import annotations

import fnmatch
import gzip
import os
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.live.address import Address, bad_from, log, remaining
from shoal.data.live.frames import Frames
from shoal.data.live.lines import Lines
from shoal.data.live.protocol import REST, Chunk, Lag
from shoal.data.live.rows import REST_ROW, ParquetPart
from shoal.data.source import Unpacked, is_gzip, open_bytes
from shoal.errors import ConfigError, DataError
from shoal.metrics import emit_counter

_BLOCK = 1 << 20
_PAUSE_S = 0.05
_LIST_S = 0.2
_FILE_BYTES = 1 << 26
_WRITTEN = re.compile(r"part-(\d{8})\.txt")


class Folder:
    """The files of a growing directory, by name. A file is finished when one with a later name exists, so files must
    appear in the order of their names; one that appears too late is counted (``stream_late_files_total``) and not read.

    Names that begin with ``.`` or ``_``, or end with ``.tmp``, are ignored: write under such a name, then rename.
    """

    def __init__(self, address: Address, *, rank: int = 0, world: int = 1) -> None:
        self.path, self._address = address.name, address
        self._pattern = address.options.get("pattern", "*")
        self._share = rank, world
        self.names: list[str] = []
        self._known: set[str] = set()
        self._listed_s = float("-inf")
        if not os.path.isdir(self.path):
            raise ConfigError(f"{address}: there is no directory {self.path!r}; create it, or correct the address")

    def refresh(self, current: str | None, *, force: bool = False) -> None:
        """List the directory again, unless that was just done."""
        now = time.monotonic()
        if not force and now - self._listed_s < _LIST_S:
            return
        self._listed_s = now
        with os.scandir(self.path) as entries:
            found = {one.name for one in entries if self._ours(one.name) and one.is_file()}
        for name in sorted(found - self._known):
            if current is not None and self._known and name < current:
                emit_counter("stream_late_files_total", 1, f"source={self._address}")
                log.warning(
                    "%s: %s is not read, since it appeared after %s; files must appear in the order of their names",
                    self._address, name, current,
                )  # fmt: skip
        self._known = found
        self.names = sorted(found)

    def _ours(self, name: str) -> bool:
        if name[0] in "._" or name.endswith(".tmp") or not fnmatch.fnmatch(name, self._pattern):
            return False
        return self._share[1] == 1 or zlib.crc32(name.encode()) % self._share[1] == self._share[0]

    def after(self, current: str | None) -> str | None:
        """Return the next file; None if there is none yet."""
        return next((name for name in self.names if current is None or name > current), None)

    def full(self, name: str) -> str:
        return os.path.join(self.path, name)


class Offsets(Sequence[Any]):
    """The positions of consecutive lines of a file, each created on access."""

    def __init__(self, name: str | None, offsets: Sequence[int]) -> None:
        self._name, self._offsets = name, offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Offsets(self._name, self._offsets[index])
        return [self._name, self._offsets[index]]


class Tail:
    """A file that can still grow, cut into records; offsets in a gzip file are those of the decompressed bytes."""

    def __init__(self, path: str, cut: Lines | Frames) -> None:
        self._path, self._cut = path, cut
        self._file: Any = None
        self._read_to = cut.offset
        self._is_gzip, self._size_unpacked = False, 0
        self._unpack_error = ""  # until the file grows
        self.take = cut.take

    def __bool__(self) -> bool:
        return bool(self._cut)

    @property
    def offset(self) -> int:
        """Where the next record begins."""
        return self._cut.offset

    def read(self) -> bool:
        """Read more; return whether there was anything."""
        try:
            if self._file is None and not self._open():
                return False
            block = self._file.read(_BLOCK)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self._unpack_error = str(error)
            self.close()
            return False
        self._read_to += len(block)
        if block:
            self._cut.add(block)
        elif self._is_gzip:
            self._size_unpacked = os.fstat(self._file.fileno()).st_size
        return bool(block)

    def _open(self) -> bool:
        if self._cut.offset >= REST:
            return False
        try:
            size = os.path.getsize(self._path)
            if size == self._size_unpacked:  # nothing is new; it is not known yet whether an empty file is gzip
                return False
            self._file = open_bytes(self._path)
        except (ConfigError, OSError):
            if os.path.exists(self._path):
                raise
            return False  # it was deleted
        self._size_unpacked, self._is_gzip, self._unpack_error = size, isinstance(self._file, Unpacked), ""
        self._file.seek(self._read_to)
        return True

    def finish(self) -> None:
        """Mark the end of the input."""
        if self._unpack_error:
            self._cut.give_up(self._unpack_error)
            self._unpack_error = ""
        else:
            self._cut.finish()

    def waits(self) -> bool:
        """Whether it has data that was not taken yet."""
        size = os.path.getsize(self._path)
        return size > (self._size_unpacked if self._is_gzip else self._cut.offset) or self._read_to > self._cut.offset

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class GrowingReader:
    """Reads a growing directory. A position is ``[file, offset]``, in bytes, or in rows for Parquet files.

    Args:
        framing: the kind of files: ``lines``, ``records`` (TFRecord) or ``parquet``.
        columns: the columns of Parquet files to read.
    """

    def __init__(
        self, address: Address, *, rank: int = 0, world: int = 1, framing: str = "lines", columns: Sequence[str] = ()
    ) -> None:
        self._folder = Folder(address, rank=rank, world=world)
        self._address, self._framing, self._columns = address, framing, tuple(columns)
        self._partition = "files" if world == 1 else f"files-{rank}-of-{world}"
        self._current: str | None = None
        self._part: Tail | ParquetPart | None = None
        self.ended = False

    def open(self, positions: Mapping[str, Any] | None = None) -> None:
        self._folder.refresh(None, force=True)
        given = (positions or {}).get(self._partition)
        if given is None:
            given = self._first()
        try:
            name, offset = given[0], int(given[1])
        except (TypeError, ValueError, LookupError):
            raise DataError(f"{self._address}: a position must be [file, offset], got {given!r}") from None
        self._enter(name, offset)
        if name is not None and offset and name not in self._folder.names:
            log.warning("%s: %s was deleted; continuing with the next file", self._address, name)

    def _enter(self, name: str | None, offset: int) -> None:
        self.close()
        self._current = name
        if name is None:
            return
        path = self._folder.full(name)
        if self._framing == "parquet":
            self._part = ParquetPart(path, offset, self._columns)
        else:
            self._part = Tail(path, Lines(offset) if self._framing == "lines" else Frames(offset))

    def _first(self) -> list[Any]:
        text = self._address.options.get("from", "beginning")
        names = self._folder.names
        if text == "beginning":
            return [None, 0]
        if text == "end":
            if not names:
                return [None, 0]
            if self._framing == "parquet":
                return [names[-1], REST_ROW]
            last = self._folder.full(names[-1])
            return [names[-1], REST if is_gzip(last) else os.path.getsize(last)]
        if text not in names:
            raise (
                bad_from(self._address, "the name of a file to begin with")
                if not names
                else ConfigError(
                    f"{self._address}: from must be beginning, end or the name of one of its files, got {text!r}"
                )
            )
        return [text, 0]

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        deadline = time.monotonic() + timeout_s
        while not self._part:
            left = deadline - time.monotonic()  # before the look, so that the last one is not early
            if self._read():
                continue
            if left <= 0:
                return []
            time.sleep(min(left, _PAUSE_S))
        name = self._current
        records, offsets = self._part.take(max_records)
        return [Chunk(self._partition, records, Offsets(name, offsets))]

    def _read(self) -> bool:
        """Read more; return whether there was anything."""
        if self._part is not None and self._part.read():
            return True
        self._folder.refresh(self._current)
        following = self._folder.after(self._current)
        if following is None:
            return False
        if self._part is not None:
            if self._part.read():  # what was written before the next file appeared
                return True
            self._part.finish()
            if self._part:
                return True
        self._enter(following, 0)
        return True

    def positions(self) -> dict[str, Any]:
        return {self._partition: [self._current, 0 if self._part is None else self._part.offset]}

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        return None

    def lag(self) -> Lag:
        """Return, as seconds, the time since the current file was written to, if it or a later file has unread data."""
        self._folder.refresh(self._current)
        following = self._folder.after(self._current)
        try:
            waits = following is not None or (self._part is not None and self._part.waits())
            if not waits:
                return Lag(0, 0.0)
            changed = os.path.getmtime(self._folder.full(self._current or str(following)))
        except OSError:
            return Lag(reachable=False)
        return Lag(None, max(0.0, time.time() - changed))

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part = None


class GrowingWriter:
    """Appends lines to files ``part-00000000.txt`` … of about 64 MiB each; data is on disk when `append` returns.

    Raises:
        ConfigError: the folder contains other files, so lines could be read out of order.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        os.makedirs(address.name, exist_ok=True)
        self._counts: dict[str, tuple[int, int]] = {}  # file -> its size in bytes and its lines
        names = self._names()
        for name in names:
            if not _WRITTEN.fullmatch(name):
                raise ConfigError(
                    f"{address}: an output folder must contain only files such as part-00000000.txt, got {name!r}; "
                    "name an empty folder"
                )
        self._name = names[-1] if names else "part-00000000.txt"
        path = os.path.join(address.name, self._name)
        self._file = open(path, "a+b")  # noqa: SIM115  closed by `close`
        self._cut_torn_line()

    def _names(self) -> list[str]:
        return sorted(name for name in os.listdir(self._address.name) if name[0] not in "._")

    def _cut_torn_line(self) -> None:
        """Remove an unterminated line left by a writer that was killed."""
        size = self._file.seek(0, os.SEEK_END)
        keep = size
        while keep:
            begin = max(0, keep - _BLOCK)
            self._file.seek(begin)
            cut = self._file.read(keep - begin).rfind(b"\n")
            keep = begin + cut + 1 if cut >= 0 else begin
            if cut >= 0:
                break
        if keep < size:
            self._file.truncate(keep)

    def append(self, records: Sequence[bytes], *, partition: str | None = None, at: int | None = None) -> None:
        if any(b"\n" in record for record in records):
            raise ConfigError(f"{self._address}: a record in a file of lines must not contain a newline")
        if at is not None:
            records = remaining(self._address, records, at, self.written())
        if not records:
            return
        if self._file.tell() > _FILE_BYTES:
            self._file.close()
            self._name = f"part-{int(self._name[5:13]) + 1:08d}.txt"
            self._file = open(os.path.join(self._address.name, self._name), "a+b")  # noqa: SIM115
        before = self._file.tell()
        known = self._counts.get(self._name, (0, 0))
        self._file.write(b"\n".join(records) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if known[0] == before:
            self._counts[self._name] = (self._file.tell(), known[1] + len(records))

    def written(self, partition: str | None = None) -> int:
        """Count the newlines of all files; counts of files whose size has not changed are reused."""
        total = 0
        for name in self._names():
            path = os.path.join(self._address.name, name)
            size = os.path.getsize(path)
            if self._counts.get(name, (-1, 0))[0] != size:
                with open(path, "rb") as file:
                    lines = sum(block.count(b"\n") for block in iter(lambda file=file: file.read(_BLOCK), b""))
                self._counts[name] = (size, lines)
            total += self._counts[name][1]
        return total

    def close(self) -> None:
        self._file.close()
