"""Parquet files of a growing directory: each is read once it is complete, with a position for every row."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from shoal.data.live.protocol import Damaged
from shoal.data.source import check_columns, damaged_parquet, parquet_module
from shoal.errors import ConfigError

REST_ROW = 1 << 62
"""The end position of a file that cannot be read."""
_MAGIC = b"PAR1"


class Rows(Sequence[bytes]):
    """Rows of Arrow tables. Each item is a row as a JSON object in bytes; ``parts`` are the tables themselves.

    Args:
        parts: (file, table) pairs, in order.
    """

    def __init__(self, parts: Sequence[tuple[str, Any]]) -> None:
        self.parts = list(parts)

    def __len__(self) -> int:
        return sum(table.num_rows for _, table in self.parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            return Rows(list(self._cut(begin, end)))
        index += len(self) * (index < 0)
        if not 0 <= index < len(self):
            raise IndexError(index)
        ((_, table),) = self._cut(index, index + 1)
        return json.dumps(table.to_pylist()[0], default=str).encode()

    def _cut(self, begin: int, end: int) -> Any:
        for path, table in self.parts:
            if begin < table.num_rows and end > 0:
                yield path, table.slice(max(0, begin), min(end, table.num_rows) - max(0, begin))
            begin, end = begin - table.num_rows, end - table.num_rows

    def __add__(self, other: Rows) -> Rows:
        return Rows([*self.parts, *other.parts])


class ParquetPart:
    """A Parquet file, read a row group at a time; ``offset`` is the first row of the next `take`.

    A file is complete when it has a footer. The reader waits for the footer until a later file exists.
    """

    def __init__(self, path: str, offset: int, columns: Sequence[str]) -> None:
        self._path, self.offset, self._columns = path, offset, list(columns)
        self._file: Any = None
        self._group = 0
        self._ready: Any = None  # read but not taken: a table or Damaged
        self._damaged = offset >= REST_ROW or (offset > 0 and not os.path.exists(path))

    def __bool__(self) -> bool:
        return self._ready is not None

    def read(self) -> bool:
        """Read the next rows; return whether there were any."""
        if self._damaged or (self._file is None and not self._open()):
            return bool(self)
        skip, metadata = self.offset, self._file.metadata
        for group in range(self._group):
            skip -= metadata.row_group(group).num_rows
        while self._group < metadata.num_row_groups:
            rows = metadata.row_group(self._group).num_rows
            self._group += 1
            if skip < rows:
                try:
                    table = self._file.read_row_group(self._group - 1, columns=self._columns)
                except damaged_parquet() as error:
                    self._give_up(f"the file is damaged ({_first_line(error)}); its rest is skipped")
                    return True
                self._ready = table.slice(max(0, skip))
                return True
            skip -= rows
        return False

    def _open(self) -> bool:
        if not _looks_complete(self._path):
            return False
        try:
            self._file = parquet_module().ParquetFile(self._path)
        except damaged_parquet():
            return False  # still being written, or damaged: `finish` decides
        try:
            check_columns("the file cannot be used", self._columns, self._file.schema_arrow.names)
        except ConfigError as error:
            self._give_up(str(error))
            return False
        return True

    def finish(self) -> None:
        """Mark the file as final: a later file exists, and `read` has found nothing since."""
        if self._file is None and not self._damaged:
            self._give_up("the file is not a complete Parquet file")

    def _give_up(self, why: str) -> None:
        self._damaged, self._ready = True, Damaged(why)

    def take(self, count: int) -> tuple[Sequence[bytes], Sequence[int]]:
        """Take at most ``count`` rows, and the position after each."""
        ready = self._ready
        if isinstance(ready, Damaged):
            self._ready, self.offset = None, REST_ROW
            return [ready], [REST_ROW]
        taken = ready.slice(0, count)
        self._ready = ready.slice(count) if ready.num_rows > count else None
        first, self.offset = self.offset, self.offset + taken.num_rows
        return Rows([(self._path, taken)]), range(first + 1, self.offset + 1)

    def waits(self) -> bool:
        """Whether it has rows that were not taken yet."""
        return self._ready is not None or (not self._damaged and (self._file is None or self._unread()))

    def _unread(self) -> bool:
        return self.offset < self._file.metadata.num_rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _looks_complete(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            if file.seek(0, os.SEEK_END) < 12:
                return False
            file.seek(-4, os.SEEK_END)
            return file.read(4) == _MAGIC
    except OSError:
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
