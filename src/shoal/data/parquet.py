"""Parquet files through pyarrow, a row group at a time; texts are hashed natively where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.data.columns import interleave
from shoal.data.samples import Samples
from shoal.data.schema import Schema, no_column
from shoal.data.source import BadRow, OnBad, Unit, file_size, open_error
from shoal.errors import ConfigError, missing_extra


@dataclass(frozen=True, kw_only=True)
class ParquetFormat:
    """Columns by name: numbers and booleans, texts, integers, dictionaries, and with ``lists`` lists of ids."""

    schema: Schema
    lists: bool = False
    """Sparse columns hold lists; plain ones then count as lists of one."""

    @property
    def ragged(self) -> bool:
        return self.lists

    def units(self, path: str) -> list[Unit]:
        if not file_size(path):
            return []
        with open_error(path), open(path, "rb") as raw:
            if raw.read(4) != b"PAR1":
                raise ConfigError(f'data: {path} is not a Parquet file; set [data] format to what it is, such as "csv"')
        try:
            file = _parquet().ParquetFile(path)
        except (OSError, ValueError):
            return [Unit(path=path, begin=-1)]  # its cursor tells why, where bad rows are counted
        with file:
            names = set(file.schema_arrow.names)
            missing = [name for name in self.columns() if name not in names]
            if missing:
                raise ConfigError(f"{path}: {no_column(missing[0], file.schema_arrow.names)}")
            return [
                Unit(path=path, begin=group, size=max(1, file.metadata.row_group(group).num_rows))
                for group in range(file.num_row_groups)
            ]

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> ParquetCursor:
        return ParquetCursor(self, unit, state, bad)

    def columns(self) -> list[str]:
        schema = self.schema
        return [schema.label, *schema.dense, *schema.sparse, *([schema.time] if schema.time else [])]


class ParquetCursor:
    """The rows of one row group."""

    def __init__(self, form: ParquetFormat, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> None:
        self._form, self._unit, self._bad = form, unit, bad
        self._row = int(state["row"]) if state else 0
        self._table: Any = None
        self._first = 0
        try:
            with _parquet().ParquetFile(unit.path) as file:
                groups = range(max(unit.begin, 0))
                self._first = sum(file.metadata.row_group(group).num_rows for group in groups)
                self._table = file.read_row_group(max(unit.begin, 0), columns=form.columns())
        except (OSError, ValueError) as error:
            why = f"the file is damaged ({str(error).strip().splitlines()[0]})"
            bad(BadRow(path=unit.path, why=why, line=self._first + 1, rest=True, noun="row"))

    def read(self, rows: int) -> Samples | None:
        if self._table is None or self._row >= self._table.num_rows:
            return None
        part = self._table.slice(self._row, rows).combine_chunks()
        first = self._row
        self._row += part.num_rows
        schema, form = self._form.schema, self._form
        label = _numbers(part, schema.label, self._unit.path, missing=float("nan"))
        dense = [_numbers(part, name, self._unit.path) for name in schema.dense]
        numbers = torch.stack(dense, 1) if dense else torch.empty(part.num_rows, 0, device="cpu")
        time = _numbers(part, schema.time, self._unit.path, missing=float("nan")) if schema.time else None
        if form.lists:
            ids, offsets = interleave([_list(part, name, schema, self._unit.path) for name in schema.sparse])
        else:
            ids, offsets = torch.empty(part.num_rows, len(schema.sparse), dtype=torch.int64, device="cpu"), None
            for index, name in enumerate(schema.sparse):
                _fids(_array(part, name), schema.slot(name), schema.raw, ids[:, index], f"{self._unit.path}: {name!r}")
        good = torch.isfinite(label) & torch.isfinite(numbers).all(1)
        if time is not None:
            good &= torch.isfinite(time)
            time = time.nan_to_num().long()
        samples = Samples(label=label.float(), dense=numbers.float(), ids=ids, offsets=offsets, time=time)
        if bool(good.all()):
            return samples
        what = "a number" if time is None else f"a number or the time {schema.time!r}"
        for row in (~good).nonzero().view(-1).tolist():
            why = f"the label {schema.label!r} or {what} is missing, NaN or infinite"
            self._bad(BadRow(path=self._unit.path, why=why, line=self._first + first + row + 1, noun="row"))
        return samples.take(good.nonzero().view(-1))

    def state(self) -> dict[str, Any]:
        return {"row": self._row}

    def close(self) -> None:
        self._table = None


def _array(part: Any, name: str) -> Any:
    column = part.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numbers(part: Any, name: str, path: str, missing: float = 0.0) -> Tensor:
    """float64; nulls are ``missing``."""
    import pyarrow as pa

    array = _array(part, name)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
        raise ConfigError(f"{path}: column {name!r} is a number, got {array.type}")
    array = array.cast(pa.float64(), safe=False)
    array = array.fill_null(missing) if array.null_count else array
    return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False), dtype=np.float64))


def _list(part: Any, name: str, schema: Schema, path: str) -> tuple[Tensor, Tensor]:
    """Values and offsets of one feature; a null is an empty list."""
    import pyarrow as pa

    array = _array(part, name)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        import pyarrow.compute

        lengths_of: Any = pyarrow.compute.call_function

        lengths = torch.from_numpy(
            np.array(
                lengths_of("list_value_length", [array]).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64
            )
        )
        values = array.flatten()
    else:
        valid = array.is_valid()
        lengths = torch.from_numpy(np.array(valid.to_numpy(zero_copy_only=False), dtype=np.int64))
        values = array.filter(valid)
    ids = torch.empty(len(values), dtype=torch.int64, device="cpu")
    _fids(values, schema.slot(name), schema.raw, ids, f"{path}: {name!r}")
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(lengths, 0, out=offsets[1:])
    return ids, offsets


def _fids(array: Any, slot: int, raw: bool, out: Tensor, where: str) -> None:
    """The ids of an array into a column of ids; a null is the empty text."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        words = torch.empty(len(array.dictionary) + 1, dtype=torch.int64, device="cpu")
        _fids(array.dictionary, slot, raw, words[:-1], where)
        words[-1] = _core.text_fid(b"", slot)
        index = array.indices.cast(pa.int64()).fill_null(len(array.dictionary))
        out.copy_(words[torch.from_numpy(np.array(index.to_numpy(zero_copy_only=False)))])
        return
    if pa.types.is_integer(array.type):
        valid = array.is_valid() if array.null_count else None
        numbers = array.cast(pa.int64(), safe=False)
        numbers = numbers.fill_null(0) if valid is not None else numbers
        values = torch.from_numpy(np.array(numbers.to_numpy(zero_copy_only=False)))
        if raw:
            out.copy_(values)
        else:
            _core.hash_numbers(values.data_ptr(), len(values), slot, out.data_ptr(), out.stride(0) if len(out) else 1)
        if valid is not None:
            out[~torch.from_numpy(np.array(valid.to_numpy(zero_copy_only=False)))] = _core.text_fid(b"", slot)
        return
    if raw:
        raise ConfigError(f"{where} holds {array.type}, but with raw = true ids are integers")
    if not (pa.types.is_string(array.type) or pa.types.is_binary(array.type)):
        large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
        if not large and pa.types.is_nested(array.type):
            raise ConfigError(f"{where} holds {array.type}; set lists = true for features of many ids")
        array = array if large else array.cast(pa.string())
    array = array.fill_null("" if "string" in str(array.type) else b"") if array.null_count else array
    wide = str(array.type).startswith("large_")
    _, offsets, data = array.buffers()
    if not len(array):
        return
    begin = offsets.address + array.offset * (8 if wide else 4)
    address, size = (data.address, data.size) if data is not None else (0, 0)
    hash_texts = _core.hash_texts_64 if wide else _core.hash_texts_32
    hash_texts(address, size, begin, len(array), slot, out.data_ptr(), out.stride(0))


def _parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "train") from None
    return parquet
