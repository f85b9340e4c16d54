"""`stream_frames`: a `Stream` over data frames and datasets instead of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.data.frames.sources import Source, source_of
from shoal.data.parquet import ParquetFormat, table_samples
from shoal.data.samples import Samples
from shoal.data.schema import Schema
from shoal.data.source import BadRow, OnBad, Unit
from shoal.data.stream import Stream
from shoal.errors import ConfigError

PART_ROWS = 1 << 16


def stream_frames(
    frames: Any, schema: Schema, *, batch_size: int, lists: bool = False, part_rows: int = PART_ROWS, **options: Any
) -> Stream:
    """Make a `Stream` over one or several frames: Polars, pandas, Arrow tables, Hugging Face datasets.

    >>> import pyarrow
    >>> from shoal.data import Schema, stream_frames
    >>> frame = pyarrow.table({"click": [0, 1, 0], "user": ["ann", "bob", "ann"]})
    >>> [len(batch) for batch in stream_frames(frame, Schema(label="click", sparse=("user",)), batch_size=2)]
    [2, 1]

    Columns are read like those of Parquet files: numbers, booleans, texts, categories, and lists of ids. Polars frames
    are converted to Arrow tables by this call (a LazyFrame is collected), with only the columns of the schema; other
    frames are converted as they are read. An `IterableDataset` is read shard by shard; resuming in the middle of a
    shard skips over the rows that were read.

    Args:
        frames: a frame, or a list of them.
        lists: sparse columns hold lists of ids; a plain value counts as a list of one.
        part_rows: rows that one rank or worker reads at a time. Parts are shuffled, and rows within windows.
        options: options of `Stream`: ``shuffle_rows``, ``seed``, ``epochs``, ``rank``, ``world``, ``on_bad``.
    """
    if part_rows < 1:
        raise ConfigError(f"data: part_rows must be at least 1, got {part_rows}")
    given = frames if isinstance(frames, list | tuple) else [frames]
    if not given:
        raise ConfigError(f"data: there must be at least one frame, got {frames!r}")
    columns = schema.raw_columns()
    sources = {one.name: one for one in (source_of(frame, number, columns) for number, frame in enumerate(given))}
    form = FrameFormat(schema=schema, lists=lists, sources=sources, part_rows=part_rows)
    return Stream(list(sources), form, schema, batch_size=batch_size, **options)


@dataclass(frozen=True, kw_only=True)
class FrameFormat(ParquetFormat):
    """A format whose files are frames, by name."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    part_rows: int = PART_ROWS

    def units(self, path: str) -> list[Unit]:
        source = self.sources[path]
        if source.rows is None:
            return [Unit(path=path, begin=shard) for shard in range(source.shards)]
        step = self.part_rows
        ends = ((begin, min(begin + step, source.rows)) for begin in range(0, source.rows, step))
        return [Unit(path=path, begin=begin, end=end, size=end - begin) for begin, end in ends]

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> Any:
        return FrameCursor(self, unit, state, bad)


class FrameCursor:
    """The rows of one part of a frame, or of one shard of a dataset."""

    def __init__(self, form: FrameFormat, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> None:
        self._form, self._unit, self._bad = form, unit, bad
        self._source = form.sources[unit.path]
        self._row = int(state["row"]) if state else 0
        self._tables: Iterator[Any] | None = None
        self._held: Any = None
        if self._source.rows is None:
            self._tables = self._source.part(unit.begin, self._row)

    def read(self, rows: int) -> Samples | None:
        part = self._next(rows)
        if part is None:
            return None
        first = self._row + (self._unit.begin if self._tables is None else 0)
        self._row += part.num_rows
        samples, bad = table_samples(self._form, part, self._unit.path)
        for row, why in bad:
            self._bad(BadRow(path=self._unit.path, why=why, line=first + row + 1, noun="row"))
        return samples

    def _next(self, rows: int) -> Any:
        """Return at most ``rows`` rows as an Arrow table; None at the end."""
        if self._tables is None:
            begin, end = self._unit.begin + self._row, self._unit.end
            assert end is not None
            return self._source.part(begin, min(begin + rows, end)) if begin < end else None
        while self._held is None or not self._held.num_rows:
            self._held = next(self._tables, None)
            if self._held is None:
                return None
        part, self._held = self._held.slice(0, rows), self._held.slice(rows)
        return part

    def state(self) -> dict[str, Any]:
        return {"row": self._row}

    def close(self) -> None:
        self._tables, self._held = iter(()) if self._tables is not None else None, None
