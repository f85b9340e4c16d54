"""Ids and numbers from raw values in columns, as in requests, Python programs and Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.samples import from_block
from shoal.data.schema import Schema
from shoal.errors import ConfigError, did_you_mean

TEXT32, TEXT64, INTEGER, NUMBER, READY = range(5)  # as in csrc/data/raw_columns.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The values of one column: texts as offsets into ``text``, int64 or float64, one after the other."""

    kind: int
    values: np.ndarray
    count: int
    text: Any = b""
    """The object that owns the texts: bytes, or an array of bytes."""
    lengths: np.ndarray | None = None
    """The number of values per sample, int64; None: one each."""
    valid: np.ndarray | None = None
    """uint8: 0 where a value is missing; None: no value is missing."""

    def native(self) -> tuple[int, int, int, int, int, int, int]:
        text = np.frombuffer(self.text, np.uint8)
        lengths = 0 if self.lengths is None else self.lengths.ctypes.data
        valid = 0 if self.valid is None else self.valid.ctypes.data
        return self.kind, self.values.ctypes.data, self.count, text.ctypes.data, text.nbytes, lengths, valid


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a net: numbers ``[n, D]``, and ids in the form of `Samples`."""

    dense: Tensor
    ids: Tensor
    offsets: Tensor | None


def make_inputs(schema: Schema, raw: Mapping[str, Any], *, lists: bool = False) -> Inputs:
    """Make a model's inputs from raw columns: lists or arrays with one value, or one list of values, per sample.

    >>> from shoal.data import Feature
    >>> schema = Schema(label="click", sparse=("user", "tags"), definitions={"tags": Feature(list=True)})
    >>> made = make_inputs(schema, {"user": ["u17", "u18"], "tags": [["a", "b"], []]})
    >>> made.offsets.tolist()
    [0, 1, 3, 4, 4]

    A missing value is None; a column whose values are all missing can be left out. Raises `ConfigError` for a column
    that is not in the schema, for columns of different lengths, and for values that a definition does not accept.
    """
    return InputMaker(schema, lists=lists)(raw)


class InputMaker:
    """Does the same as `make_inputs`, for any number of calls with one schema.

    Args:
        lists, separator: as for `Schema.native`.
        ready: columns are named by feature and hold ids already; numbers stay raw.
    """

    def __init__(self, schema: Schema, *, lists: bool = False, separator: str = "", ready: bool = False) -> None:
        self.schema, self.ready = schema, ready
        self.rules = schema.native(lists=lists, separator=separator)
        self.listed = frozenset(
            name
            for name in schema.sparse
            if schema.feature(name).listed or (name not in schema.definitions and (lists or bool(separator)))
        )
        """Features that can have any number of values, without crosses."""
        self.columns = {name: self.column(name) for name in schema.sparse}
        """The input column of each feature; empty for a cross."""
        dense = {name: schema.column(name) for name in schema.dense}
        self.names = tuple(dict.fromkeys(one for one in [*self.columns.values(), *dense.values()] if one))
        """The input columns, each once."""

    def column(self, feature: str) -> str:
        column = self.schema.column(feature)
        return feature if self.ready and column else column

    def __call__(self, raw: Mapping[str, Any]) -> Inputs:
        schema, rules = self.schema, self.rules
        columns = self._columns(raw)
        n = len(next(iter(columns.values()))) if columns else 0
        features = [
            None if not (name := self.columns[f]) else self._column_of(columns.get(name), n, name)
            for f in schema.sparse
        ]
        block = rules.apply(n, [None if column is None else column.native() for column in features])
        if block.bad:
            row, _, why = block.bad[0]
            number, _, rest = why.removeprefix("feature ").partition(" ")
            name = schema.sparse[int(number)] if number.isdigit() else "a cross"
            raise ConfigError(f"sample {row}: feature {name!r} {rest}")
        made = from_block(block, 0, len(schema.sparse), ragged=rules.listed, timed=False)
        dense = torch.empty(n, len(schema.dense), dtype=torch.float32, device="cpu")
        for place, name in enumerate(schema.dense):
            dense[:, place] = _numbers(columns.get(schema.column(name)), n, name, schema.number(name).default)
        rules.apply_numbers(dense.data_ptr(), n)
        return Inputs(dense=dense, ids=made.ids, offsets=made.offsets)

    def _columns(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        unread = (self.schema.label, self.schema.time)
        columns = {}
        for name, values in raw.items():
            if name in unread and name not in self.names:
                continue
            if name not in self.names:
                raise ConfigError(
                    f"there is no feature {name!r}{did_you_mean(name, self.names)}; there are {sorted(self.names)}"
                )
            if isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
                raise ConfigError(f"feature {name!r}: its values must be a list with one per sample, got {values!r}")
            columns[name] = values
        sizes = {name: len(values) for name, values in columns.items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"all features must have one value or list per sample, got different lengths: {sizes}")
        return columns

    def _column_of(self, values: Any, n: int, name: str) -> Column:
        made = column_of(values, n, name)
        if not self.ready or values is None:
            return made
        if made.kind != INTEGER:
            raise ConfigError(f"feature {name!r}: ids must be 64-bit integers")
        return replace(made, kind=READY)


def column_of(values: Any, n: int, name: str) -> Column:
    """Build a column from Python or numpy values; None: all values are missing."""
    if values is None:
        return Column(kind=INTEGER, values=np.zeros(n, np.int64), count=n, valid=np.zeros(n, np.uint8))
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufb":
        return _array(values, n)
    lengths = None
    if any(isinstance(value, list | tuple | np.ndarray | Tensor) for value in values):
        listed = [_listed(value) for value in values]
        lengths = np.array([len(one) for one in listed], np.int64)
        values = [value for one in listed for value in one]
    return _mixed(list(values), lengths, name)


def _array(values: np.ndarray, n: int) -> Column:
    kind, dtype = (NUMBER, np.float64) if values.dtype.kind == "f" else (INTEGER, np.int64)
    lengths = None if values.ndim == 1 else np.full(n, values[0].size if n else 0, np.int64)
    with np.errstate(invalid="ignore"):  # a NaN of any bits is a missing value
        flat = np.ascontiguousarray(values.reshape(-1), dtype)
    valid = None
    if kind == NUMBER and bool((missing := np.isnan(flat)).any()):
        valid = (~missing).astype(np.uint8)
    return Column(kind=kind, values=flat, count=len(flat), lengths=lengths, valid=valid)


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return []
    if isinstance(value, np.ndarray | Tensor):
        return value.tolist()
    return value if isinstance(value, list | tuple) else [value]


def _mixed(values: list[Any], lengths: np.ndarray | None, name: str) -> Column:
    """Build a column from texts, integers or numbers, some of which can be None."""
    present = [value for value in values if value is not None]
    valid = None if len(present) == len(values) else np.array([value is not None for value in values], np.uint8)
    if any(isinstance(value, str | bytes) for value in present):
        texts = [_text(value, name) for value in values]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return Column(kind=TEXT64, values=offsets, count=len(texts), text=b"".join(texts), lengths=lengths, valid=valid)
    real = any(isinstance(value, float | np.floating) for value in present)
    try:
        array = np.array([0 if value is None else value for value in values], np.float64 if real else np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"feature {name!r}: values must be texts, integers or numbers ({error})") from None
    return Column(kind=NUMBER if real else INTEGER, values=array, count=len(array), lengths=lengths, valid=valid)


def _text(value: Any, name: str) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value).encode()
    raise ConfigError(f"feature {name!r}: values must be texts, integers or numbers, got {value!r}")


def _numbers(values: Any, n: int, name: str, default: float) -> Tensor:
    if values is None:
        return torch.full((n,), default, device="cpu")
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu().double().numpy()  # numpy has no bfloat16
        elif not isinstance(values, np.ndarray):
            values = [np.nan if value is None else value for value in values]
        with np.errstate(invalid="ignore"):  # a NaN of any bits is a missing value
            numbers = torch.from_numpy(np.array(values, np.float64).reshape(n)).float()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"number {name!r} must have one number per sample ({error})") from None
    if bool(torch.isinf(numbers).any()):
        raise ConfigError(f"number {name!r} must be finite in float32, got infinity")
    return torch.where(torch.isnan(numbers), default, numbers)
