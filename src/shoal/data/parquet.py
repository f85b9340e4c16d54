"""Parquet files through pyarrow, a row group at a time; texts are hashed natively, without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.data.features import native_set
from shoal.data.raw import INTEGER, NUMBER, READY, TEXT32, TEXT64, Column
from shoal.data.samples import Samples, from_block
from shoal.data.schema import Schema, wrong_time
from shoal.data.source import BadRow, OnBad, Unit, check_columns, damaged_parquet, file_size, open_error, parquet_module
from shoal.errors import ConfigError
from shoal.table.arguments import MAX_TIME


@dataclass(frozen=True, kw_only=True)
class ParquetFormat:
    """Columns by name: numbers and booleans, texts, integers, dictionaries, and with ``lists`` lists of ids."""

    schema: Schema
    lists: bool = False
    """Sparse columns hold lists; plain ones then count as lists of one."""

    @property
    def ragged(self) -> bool:
        return self.rules().listed

    def rules(self) -> _core.FeatureSet:
        return self.schema.native(lists=self.lists)

    def units(self, path: str) -> list[Unit]:
        if not file_size(path):
            return []
        with open_error(path), open(path, "rb") as raw:
            if raw.read(4) != b"PAR1":
                raise ConfigError(f'data: {path} is not a Parquet file; set [data] format to its format, such as "csv"')
        try:
            file = parquet_module().ParquetFile(path)
        except damaged_parquet():
            return [Unit(path=path, begin=-1)]  # its cursor reports the error, where bad rows are counted
        with file:
            check_columns(path, self.columns(), file.schema_arrow.names)
            return [
                Unit(path=path, begin=group, size=max(1, file.metadata.row_group(group).num_rows))
                for group in range(file.num_row_groups)
            ]

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> ParquetCursor:
        return ParquetCursor(self, unit, state, bad)

    def columns(self) -> list[str]:
        return self.schema.raw_columns()


class ParquetCursor:
    """The rows of one row group."""

    def __init__(self, form: ParquetFormat, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> None:
        self._form, self._unit, self._bad = form, unit, bad
        self._row = int(state["row"]) if state else 0
        self._table: Any = None
        self._first = 0
        try:
            with parquet_module().ParquetFile(unit.path) as file:
                groups = range(max(unit.begin, 0))
                self._first = sum(file.metadata.row_group(group).num_rows for group in groups)
                self._table = file.read_row_group(max(unit.begin, 0), columns=form.columns())
        except damaged_parquet() as error:
            why = f"the file is damaged ({str(error).strip().splitlines()[0]})"
            bad(BadRow(path=unit.path, why=why, line=self._first + 1, rest=True, noun="row"))

    def read(self, rows: int) -> Samples | None:
        if self._table is None or self._row >= self._table.num_rows:
            return None
        part = self._table.slice(self._row, rows)
        first = self._first + self._row
        self._row += part.num_rows
        samples, bad = table_samples(self._form, part, self._unit.path)
        for row, why in bad:
            self._bad(BadRow(path=self._unit.path, why=why, line=first + row + 1, noun="row"))
        return samples

    def state(self) -> dict[str, Any]:
        return {"row": self._row}

    def close(self) -> None:
        self._table = None


def table_samples(form: ParquetFormat, table: Any, path: str) -> tuple[Samples, list[tuple[int, str]]]:
    """Convert an Arrow table from the file ``path``; return the samples, and (number, reason) of unreadable rows."""
    schema, part = form.schema, table.combine_chunks()
    label = _numbers(part, schema.label, path, missing=float("nan"))
    dense = [_numbers(part, schema.column(name), path, schema.number(name).default) for name in schema.dense]
    numbers = torch.stack(dense, 1) if dense else torch.empty(part.num_rows, 0, device="cpu")
    time = _numbers(part, schema.time, path, missing=float("nan")) if schema.time else None
    made, bad = _ids(form, part, path)
    label, numbers = label.float(), numbers.float()
    good = torch.isfinite(label) & torch.isfinite(numbers).all(1)
    if time is not None:
        for row in ((time >= 0) & (time <= MAX_TIME)).logical_not().nonzero().view(-1).tolist():
            bad.setdefault(row, wrong_time(schema.time or ""))
        time = time.nan_to_num().long()
    good[list(bad)] = False
    samples = Samples(label=label, dense=numbers, ids=made.ids, offsets=made.offsets, time=time)
    if bool(good.all()):
        return samples, []
    why = f"the label {schema.label!r} or a number is missing, NaN or infinite"
    rows = (~good).nonzero().view(-1).tolist()
    return samples.take(good.nonzero().view(-1)), [(row, bad.get(row) or why) for row in rows]


def _ids(form: ParquetFormat, part: Any, path: str) -> tuple[Samples, dict[int, str]]:
    """Return the ids of a part of a table, and the reasons of unreadable rows by number."""
    schema, rules, columns = form.schema, form.rules(), []
    for name in schema.sparse:
        column = schema.column(name)
        where = f"{path}: {column!r}"
        columns.append(_column(_array(part, column), schema, name, form.lists, where) if column else None)
    block = rules.apply(part.num_rows, [None if column is None else column.native() for column in columns])
    bad = {}
    for row, _, why in block.bad:
        number, _, rest = why.removeprefix("feature ").partition(" ")
        bad[row] = f"{schema.sparse[int(number)]!r} {rest}" if number.isdigit() else why
    return from_block(block, 0, len(schema.sparse), ragged=rules.listed, timed=False), bad


def _array(part: Any, name: str) -> Any:
    column = part.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numbers(part: Any, name: str, path: str, missing: float = 0.0) -> Tensor:
    """Return a column as float64; nulls become ``missing``."""
    import pyarrow as pa

    array = _array(part, name)
    is_number = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null)
    if not any(one(array.type) for one in is_number):
        raise ConfigError(f"{path}: column {name!r} must be a number, got {array.type}")
    array = array.cast(pa.float64(), safe=False)
    array = array.fill_null(missing) if array.null_count else array
    return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False), dtype=np.float64))


def _column(array: Any, schema: Schema, name: str, lists: bool, where: str) -> Column:
    """Convert one feature's values to the form that native code takes."""
    import pyarrow as pa

    lengths = None
    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(one(array.type) for one in is_list):
        if not (lists or schema.feature(name).listed):
            raise ConfigError(f"{where} holds {array.type}; set lists = true for features with several ids")
        import pyarrow.compute

        count: Any = pyarrow.compute.call_function
        lengths = _ints(count("list_value_length", [array]).fill_null(0))
        array = array.flatten()
    elif lists and name not in schema.definitions:  # a null is an empty list
        lengths = _ints(array.is_valid())
        array = array.drop_null()
    if pa.types.is_dictionary(array.type):
        return _words(array, schema, name, lengths, where)
    valid = np.array(array.is_valid().to_numpy(zero_copy_only=False), np.uint8) if array.null_count else None
    raw = schema.feature(name).kind == "id"
    if pa.types.is_integer(array.type):
        values = _ints(array)
        return Column(kind=INTEGER, values=values, count=len(values), lengths=lengths, valid=valid)
    if pa.types.is_floating(array.type) and schema.feature(name).kind in ("bucket", "log"):
        values = np.array(array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False), np.float64)
        return Column(kind=NUMBER, values=values, count=len(values), lengths=lengths, valid=valid)
    if raw:
        raise ConfigError(f"{where} holds {array.type}, but ids must be integers with raw = true")
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not (large or pa.types.is_string(array.type) or pa.types.is_binary(array.type)):
        if pa.types.is_nested(array.type):
            raise ConfigError(f"{where} must hold texts, numbers or lists of these, got {array.type}")
        array = array.cast(pa.string())
    _, offsets, data = array.buffers()
    values = np.frombuffer(offsets, np.int64 if large else np.int32) if offsets is not None else np.zeros(1, np.int32)
    return Column(
        kind=TEXT64 if large else TEXT32, values=values[array.offset :], count=len(array),
        text=b"" if data is None else data, lengths=lengths, valid=valid,
    )  # fmt: skip


def _words(array: Any, schema: Schema, name: str, lengths: np.ndarray | None, where: str) -> Column:
    """Convert a dictionary column; if each value has one id, the id is computed once per value."""
    feature = schema.feature(name)
    words = _column(array.dictionary, schema, name, False, where)
    if feature.listed or feature.default is not None or words.lengths is not None:
        return _column(array.dictionary_decode(), schema, name, lengths is not None, where)
    only = native_set({name: feature}, {}, {name: schema.slot(name)})
    block = only.apply(words.count, [words.native()])
    if block.bad:
        raise ConfigError(f"{where}: {block.bad[0][2]}")
    ids = from_block(block, 0, 1, ragged=False, timed=False).ids.view(-1).numpy()
    index = _ints(array.indices.fill_null(0)) if array.null_count else _ints(array.indices)
    values = ids[index] if len(ids) else np.zeros(len(index), np.int64)
    valid = np.array(array.is_valid().to_numpy(zero_copy_only=False), np.uint8) if array.null_count else None
    return Column(kind=READY, values=values, count=len(values), lengths=lengths, valid=valid)


def _ints(array: Any) -> np.ndarray:
    """Convert to int64; nulls become 0, and unsigned numbers wrap around."""
    import pyarrow as pa

    array = array.cast(pa.int64(), safe=False)
    array = array.fill_null(0) if array.null_count else array
    return np.array(array.to_numpy(zero_copy_only=False), np.int64)
