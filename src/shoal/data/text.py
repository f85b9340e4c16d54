"""Criteo TSV and CSV, plain or gzip: byte ranges of files through the native parser."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import _core
from shoal.data.samples import Samples, from_block
from shoal.data.schema import Schema
from shoal.data.source import (
    DAMAGED,
    LineCursor,
    OnBad,
    Unit,
    check_columns,
    file_size,
    is_gzip,
    open_bytes,
    open_error,
    refuse_other_kinds,
)
from shoal.errors import ConfigError

LABEL, DENSE, SPARSE, TIME = range(4)  # as in csrc/data/text.h
_BLOCK = 1 << 21
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Lines of cells between delimiters.

    Args:
        columns: the names of the columns in order; None reads them from each file's first line.
        quote: encloses cells that contain delimiters or newlines; if empty, ranks can divide a single file.
        separator: separates the values of a sparse cell; empty if a cell is one value.
        max_line_bytes: a longer line is a bad row.
        part_bytes: the size of the pieces that are divided over ranks.
        threads: parse on all threads of the native pool; for reading that does not happen during training.
    """

    schema: Schema
    columns: Sequence[str] | None = None
    delimiter: str = ","
    quote: str = ""
    separator: str = ""
    max_line_bytes: int = 1 << 20
    part_bytes: int = 1 << 26
    threads: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("delimiter", (1,)), ("quote", (0, 1)), ("separator", (0, 1))):
            value = getattr(self, name)
            if len(value.encode()) not in allowed:
                raise ConfigError(
                    f"data: {name} must be one ASCII character{' or empty' * (0 in allowed)}, got {value!r}"
                )
        if self.max_line_bytes < 1:
            raise ConfigError(f"data: max_line_bytes must be at least 1, got {self.max_line_bytes}")
        if self.part_bytes < 1:
            raise ConfigError(f"data: part_bytes must be at least 1, got {self.part_bytes}")
        if self.columns is not None:
            self.parser(self.columns, "data")

    @property
    def ragged(self) -> bool:
        return self._set().listed

    def units(self, path: str) -> list[Unit]:
        size = file_size(path)
        if not size:
            return []
        refuse_other_kinds(path, "lines of text")
        if self.columns is None:
            with contextlib.suppress(*DAMAGED):  # the cursor reports it, where bad rows are counted
                self.parser(self.header(path)[0], path)  # report a missing column before the run begins
        if is_gzip(path) or self.quote or size <= self.part_bytes:
            return [Unit(path=path, size=size)]
        return [
            Unit(
                path=path, begin=begin, end=min(begin + self.part_bytes, size), size=min(self.part_bytes, size - begin)
            )
            for begin in range(0, size, self.part_bytes)
        ]

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> TextCursor | _WithoutHeader:
        try:
            columns = self.header(unit.path)[0] if self.columns is None else self.columns
        except DAMAGED as error:
            return _WithoutHeader(unit, bad, error)
        return TextCursor(self, self.parser(columns, unit.path), unit, state, bad)

    def header(self, path: str) -> tuple[list[str], int]:
        """Return the names in a file's first line, and its length in bytes; raises `DAMAGED` if it cannot be read."""
        with open_error(path), open_bytes(path) as file:
            line = file.readline(self.max_line_bytes)
        if b"\0" in line:
            raise ConfigError(f"{path}: its first line is not text; check [data] format")
        text = line.decode("utf-8-sig", "replace").rstrip("\r\n")
        try:
            names = next(csv.reader([text], delimiter=self.delimiter, quotechar=self.quote or None), []) if text else []
        except csv.Error as error:
            raise ConfigError(f"{path}: its first line is not a header ({error})") from None
        return names, len(line)

    def parser(self, columns: Sequence[str], where: str) -> _core.TextParser:
        """Make the native parser for lines with these columns."""
        schema = self.schema
        uses: dict[str, list[tuple[int, int]]] = {name: [] for name in schema.raw_columns()}
        check_columns(where, uses, columns)
        uses[schema.label].append((LABEL, 0))
        if schema.time:
            uses[schema.time].append((TIME, 0))
        for role, names in ((DENSE, schema.dense), (SPARSE, schema.sparse)):
            for index, name in enumerate(names):
                if column := schema.column(name):
                    uses[column].append((role, index))
        return _core.TextParser(
            [uses.get(name, []) for name in columns],
            self._set(),
            ord(self.delimiter),
            ord(self.quote or "\0"),
            self.max_line_bytes,
        )

    def _set(self) -> _core.FeatureSet:
        return self.schema.native(separator=self.separator)


class _WithoutHeader(LineCursor):
    """A file so damaged that not even its first line can be read."""

    def __init__(self, unit: Unit, bad: OnBad, error: BaseException) -> None:
        super().__init__(unit, bad)
        self._report_damage(error)

    def read(self, rows: int) -> Samples | None:
        return None


class TextCursor(LineCursor):
    """The lines that begin in a unit."""

    def __init__(
        self, form: TextFormat, parser: _core.TextParser, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad
    ) -> None:
        super().__init__(unit, bad)
        self._form, self._parser = form, parser
        schema = form.schema
        self._shape = (len(schema.dense), len(schema.sparse))
        self._timed = schema.time is not None
        self._buffer, self._at, self._final, self._damaged = b"", 0, False, False
        if state is not None:
            self._seek(int(state["offset"]))
            self._lines = int(state["lines"])
        elif unit.begin:
            self._seek(unit.begin - 1)  # a line that crosses the border belongs to the previous unit
            self._skip_line()
        elif form.columns is None:
            self._seek(form.header(unit.path)[1])
            self._lines = 1
        else:
            self._buffer = self._more()
            if self._buffer.startswith(_BOM):
                self._offset = self._at = len(_BOM)

    def read(self, rows: int) -> Samples | None:
        while True:
            end = self._unit.end
            limit = (1 << 62) if end is None else end - self._offset
            if limit <= 0:
                return None
            block = self._parser.parse(self._buffer, self._at, self._final, rows, limit, self._form.threads)
            first = self._lines
            for line, offset, why in block.bad:
                self._report(first + line, self._offset + offset, why)
            self._at += block.consumed
            self._offset += block.consumed
            self._lines += block.lines
            if block.rows:
                return from_block(block, *self._shape, ragged=self._form.ragged, timed=self._timed)
            if not block.lines:
                if self._final:
                    return None
                self._refill()

    def _more(self) -> bytes:
        try:
            return b"" if self._damaged else self._file.read(_BLOCK)
        except DAMAGED as error:
            self._damaged = True
            self._report_damage(error)
            return b""

    def _refill(self) -> None:
        """Append more text to the unread rest; skip a line that is too long."""
        rest = self._buffer[self._at :]
        more = self._more()
        self._final = not more
        if self._damaged:
            rest = b""  # drop the truncated line
        self._buffer, self._at = rest + more, 0
        if len(rest) > self._form.max_line_bytes and b"\n" not in self._buffer:
            limit = self._form.max_line_bytes
            self._report(self._lines, self._offset, f"the line has more than {limit} bytes")
            self._skip_line()
            self._lines += 1

    def _skip_line(self) -> None:
        """Skip to the byte after the next newline."""
        while True:
            cut = self._buffer.find(b"\n", self._at)
            if cut >= 0:
                self._offset += cut + 1 - self._at
                self._at = cut + 1
                return
            self._offset += len(self._buffer) - self._at
            self._buffer, self._at = self._more(), 0
            if not self._buffer:
                self._final = True
                return

    def _seek(self, offset: int) -> None:
        """Seek to a byte. Gzip is decompressed up to there, which costs as much as reading it."""
        self._offset = offset
        try:
            self._file.seek(offset)
        except DAMAGED as error:
            self._damaged = self._final = True
            self._report_damage(error)
