"""Frames and datasets of all supported libraries, read as Arrow tables in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shoal.data.source import check_columns
from shoal.errors import ConfigError, missing_extra

KINDS = (
    "a Polars DataFrame or LazyFrame, a pandas DataFrame, an Arrow Table, or a Hugging Face Dataset or IterableDataset"
)


class Source(NamedTuple):
    """A frame; only the needed columns are read."""

    name: str
    rows: int | None
    """None if unknown before everything was read, as in an `IterableDataset`."""
    shards: int
    """The number of parts that can be read independently, if the number of rows is unknown."""
    part: Callable[[int, int], Any]
    """``part(begin, end)``: an Arrow table of these rows. If the number of rows is unknown: an iterator over tables of
    shard number ``begin`` without its first ``end`` rows."""


def source_of(frame: Any, number: int, columns: Sequence[str]) -> Source:
    """Wrap a frame or dataset as a source; ``number`` is its position among several."""
    package, kind = type(frame).__module__.partition(".")[0], type(frame).__name__
    make = _MAKERS.get((package, kind))
    if make is None:
        splits = f"; choose one of its splits, such as [{next(iter(frame))!r}]" if _is_splits(frame) else ""
        raise ConfigError(f"data: a frame must be {KINDS}, got {package}.{kind}{splits}")
    return make(frame, f"frame {number} ({package}.{kind})", list(columns))


def _is_splits(frame: Any) -> bool:
    return isinstance(frame, Mapping) and type(frame).__name__.endswith("DatasetDict") and len(frame) > 0


def _polars(frame: Any, name: str, columns: list[str]) -> Source:
    import polars

    if isinstance(frame, polars.LazyFrame):
        check_columns(name, columns, frame.collect_schema().names())
        frame = frame.select(columns).collect()
    check_columns(name, columns, frame.columns)
    # Converted right away because Polars cannot be called in forked workers; most types are not copied.
    return _arrow(frame.select(columns).to_arrow(compat_level=polars.CompatLevel.oldest()), name, columns)


def _pandas(frame: Any, name: str, columns: list[str]) -> Source:
    arrow = _pyarrow()
    check_columns(name, columns, [str(column) for column in frame.columns])
    frame = frame[columns]

    def part(begin: int, end: int) -> Any:
        return arrow.Table.from_pandas(frame.iloc[begin:end], preserve_index=False)

    return Source(name, len(frame), 0, part)


def _arrow(table: Any, name: str, columns: list[str]) -> Source:
    check_columns(name, columns, table.column_names)
    table = table.select(columns)
    return Source(name, table.num_rows, 0, lambda begin, end: table.slice(begin, end - begin))


def _dataset(dataset: Any, name: str, columns: list[str]) -> Source:
    check_columns(name, columns, dataset.column_names)
    dataset = dataset.select_columns(columns).with_format("arrow")
    return Source(name, len(dataset), 0, lambda begin, end: dataset[begin:end])


def _iterable_dataset(dataset: Any, name: str, columns: list[str]) -> Source:
    if dataset.column_names is not None:  # otherwise the columns are checked when rows arrive
        check_columns(name, columns, dataset.column_names)
    dataset, shards = dataset.with_format("arrow"), dataset.num_shards

    def tables(shard: int, skip: int) -> Iterator[Any]:
        mine = dataset.shard(num_shards=shards, index=shard)
        for table in (mine.skip(skip) if skip else mine).iter(batch_size=_ITERATED_ROWS):
            check_columns(name, columns, table.column_names)
            yield table.select(columns)

    return Source(name, None, shards, tables)


_ITERATED_ROWS = 1024
_MAKERS: dict[tuple[str, str], Callable[[Any, str, list[str]], Source]] = {
    ("polars", "DataFrame"): _polars,
    ("polars", "LazyFrame"): _polars,
    ("pandas", "DataFrame"): _pandas,
    ("pyarrow", "Table"): _arrow,
    ("datasets", "Dataset"): _dataset,
    ("datasets", "IterableDataset"): _iterable_dataset,
}


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing_extra("pyarrow", "train") from None
    return pyarrow
