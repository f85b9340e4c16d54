"""The interface of file formats: units of work that are divided over ranks, and resumable cursors over a unit."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shoal.errors import ConfigError, did_you_mean, missing_extra

if TYPE_CHECKING:  # a process without tensors, such as `shoal join`, does not load torch
    from shoal.data.samples import Samples

_COUNT_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A part of a file that one rank reads: bytes ``begin`` to ``end`` of text, row group ``begin`` of Parquet."""

    path: str
    begin: int = 0
    end: int | None = None
    size: int = 1
    """Its size, in the same measure as the other units of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A line, row or record that could not be read; with ``rest`` everything after it in its file is lost, too."""

    path: str
    why: str
    line: int | None = None
    """Counted from 1; None if only ``offset`` is known."""
    offset: int = 0
    rest: bool = False
    noun: str = "line"

    def where(self) -> str:
        """The file and line. In the middle of a large file, this call counts the lines before it."""
        line = self.line
        if line is None and self.noun == "line":
            line = 1 + count_newlines(self.path, self.offset)
        return f"{self.path}, {self.noun} {line}" if line is not None else f"{self.path}, byte {self.offset}"

    def __str__(self) -> str:
        rest = "; the rest of the file is skipped" if self.rest else ""
        return f"{self.where()}: {self.why}{rest}"


OnBad = Callable[[BadRow], None]
"""Called with each bad row; can raise."""


class Cursor(Protocol):
    """Reads the samples of one unit in order."""

    def read(self, rows: int) -> Samples | None:
        """Read at most ``rows`` further samples, possibly none; None at the end of the unit."""
        ...

    def state(self) -> dict[str, Any]:
        """The position of the next `read`, as JSON values that `Format.open` takes."""
        ...

    def close(self) -> None: ...


class LineCursor:
    """A position in a file of lines: its ``state``, and the reporting of bad lines and damage."""

    def __init__(self, unit: Unit, bad: OnBad) -> None:
        self._unit, self._bad = unit, bad
        self._offset, self._lines = unit.begin, 0  # the next line's offset in the file; lines since the unit began
        with open_error(unit.path):
            self._file = open_bytes(unit.path)

    def state(self) -> dict[str, Any]:
        return {"offset": self._offset, "lines": self._lines}

    def close(self) -> None:
        self._file.close()

    def _report(self, line: int, offset: int, why: str, *, rest: bool = False) -> None:
        number = None if self._unit.begin else line + 1
        self._bad(BadRow(path=self._unit.path, why=why, line=number, offset=offset, rest=rest))

    def _report_damage(self, error: BaseException) -> None:
        self._report(self._lines, self._offset, f"the file is damaged ({error})", rest=True)


class Format(Protocol):
    """A kind of file. Implementations are frozen; all mutable state is in the cursors."""

    @property
    def ragged(self) -> bool:
        """Whether a feature can have any number of ids."""
        ...

    def units(self, path: str) -> list[Unit]:
        """The units of one file."""
        ...

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> Cursor:
        """Open a cursor at the beginning of a unit, or at the position ``state`` of an earlier cursor."""
        ...


DAMAGED = (EOFError, OSError, zlib.error)
"""The exceptions that reading a broken file raises."""


def open_bytes(path: str) -> Any:
    """Open a file, decompressing gzip (detected by its first bytes); ``read`` returns everything before damage."""
    return Unpacked(path) if is_gzip(path) else open(path, "rb")


class Unpacked(gzip.GzipFile):
    """A gzip file that raises for damage only after everything before it was read."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "rb")
        self._error: Exception | None = None

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return super().read(size)
        parts: list[bytes] = []
        while size > 0 and self._error is None:
            try:
                part = self.read1(size)
            except DAMAGED as error:
                self._error = error
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        if not parts and self._error is not None:
            raise self._error
        return b"".join(parts)


# The first bytes of other kinds of files, what they are, and the advice.
_KINDS = (
    (b"PAR1", "a Parquet file", 'set format = "parquet"'),
    (b"ARROW1\0", "an Arrow file", "convert it to Parquet"),
    (b"PK\x03\x04", "a zip archive", "unpack it; gzip is read as it is"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", "unpack it; gzip is read as it is"),
    (b"BZh91AY&SY", "packed with bzip2", "unpack it; gzip is read as it is"),
    (b"\xfd7zXZ\0", "packed with xz", "unpack it; gzip is read as it is"),
    (b"\xff\xfe", "UTF-16 text", "convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it to UTF-8"),
)


def refuse_other_kinds(path: str, wanted: str) -> None:
    """Raise `ConfigError` for a file whose first bytes show that it is not of the ``wanted`` kind."""
    with open_error(path), open_bytes(path) as file:
        try:
            begin = file.read(64)
        except DAMAGED:  # reported later, as a bad row
            return
    for magic, kind, way_out in _KINDS:
        # A text file's header can begin with the letters PAR1, but not followed by a Parquet file's binary numbers.
        if begin.startswith(magic) and (magic != b"PAR1" or any(byte < 9 for byte in begin)):
            raise ConfigError(f"data: {path} is {kind}, not {wanted}; {way_out}")


def is_gzip(path: str) -> bool:
    with open_error(path), open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


class open_error:
    """Adds the file's name to the error when it cannot be opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            raise ConfigError(f"data: cannot read {self.path!r} ({error.strerror or error})") from None


def count_newlines(path: str, before: int) -> int:
    """Count the newlines in the first ``before`` bytes."""
    total = 0
    with open_bytes(path) as file:
        while before > 0:
            block = file.read(min(before, _COUNT_BYTES))
            if not block:
                break
            total += block.count(b"\n")
            before -= len(block)
    return total


def check_columns(where: str, wanted: Iterable[str], there: Sequence[str]) -> None:
    """Raise `ConfigError` unless each ``wanted`` column is ``there`` exactly once."""
    for name in wanted:
        if name not in there:
            known = ", ".join(map(repr, there[:50])) + (", …" if len(there) > 50 else "")
            raise ConfigError(
                f"{where}: there is no column {name!r}{did_you_mean(name, there)}; the columns are {known}"
            )
        if there.count(name) > 1:
            raise ConfigError(f"{where}: column names must be unique, got {name!r} {there.count(name)} times")


def parquet_module() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "train") from None
    return parquet


def damaged_parquet() -> tuple[type[BaseException], ...]:
    """The exceptions that reading a broken Parquet file raises."""
    import pyarrow as pa

    return OSError, ValueError, pa.ArrowException


def file_size(path: str) -> int:
    with open_error(path):
        return os.path.getsize(path)
