"""Inputs of predictions as columns: converted to the signature's form, joined, and split by rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.errors import DataError
from shoal.proto.serving.tensor_pb2 import SignatureDef
from shoal.serving.predict import BY_ROW
from shoal.serving.tensors import NAME_OF_DTYPE, native_dtype, torch_dtype

Column = Any
"""A tensor, or an object array of bytes or str."""


@dataclass(frozen=True, slots=True)
class Form:
    """The signature's description of one input."""

    dtype: torch.dtype | None
    """None for strings."""
    rank: int | None
    """None if any rank is accepted."""


@dataclass(frozen=True)
class Forms:
    """The signature's description of its inputs and outputs."""

    inputs: Mapping[str, Form]
    by_row: bool = False
    """Whether requests may be joined and split: each output row depends only on its own input row."""


def forms_of(signature: SignatureDef) -> Forms:
    """The forms of a signature's inputs, from a server's metadata."""
    forms = {}
    for alias, info in signature.inputs.items():
        try:
            dtype = torch_dtype(info.dtype)
        except DataError:
            continue  # an unsupported dtype: the input is sent unchanged
        shape = info.tensor_shape
        forms[alias] = Form(dtype, None if shape.unknown_rank else len(shape.dim))
    outputs = signature.outputs.values()
    return Forms(forms, bool(outputs) and all(info.name.endswith(f"|{BY_ROW}") for info in outputs))


def columns_of(inputs: Mapping[str, Any], forms: Mapping[str, Form]) -> dict[str, Column]:
    """Convert a user's inputs to columns; a scalar is one row.

    Integers are converted to the signature's dtype if all of them fit. Text stays text, whatever the signature's dtype:
    servers that have the model's features turn it into ids. Rows of strings with different lengths are padded with "".
    None is a missing value: "" for strings, NaN for numbers, an empty list for lists.

    Raises:
        DataError: a value has no tensor form.
    """
    if not isinstance(inputs, Mapping):
        raise DataError(f"inputs must be a dict of input name -> values, got {type(inputs).__name__}")
    return {alias: _column(alias, value, forms.get(alias)) for alias, value in inputs.items()}


def _column(alias: str, value: Any, form: Form | None) -> Column:
    try:
        column = _as_column(value, form is None or form.dtype is None)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DataError(f"input {alias!r}: {error}") from None
    if form is None:
        return column
    if isinstance(column, torch.Tensor) and form.dtype is not None and _is_harmless(column, form.dtype):
        column = column.to(form.dtype)
    if form.rank == 2 and column.ndim == 1:
        column = column[:, None] if isinstance(column, torch.Tensor) else column.reshape(-1, 1)
    elif form.rank == 1 and column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    return column


def _is_harmless(column: torch.Tensor, want: torch.dtype) -> bool:
    """Whether values may be converted to ``want``: fractions are never truncated, integers never wrapped around.

    Empty lists have no dtype.
    """
    have = column.dtype
    if not column.numel() or want.is_floating_point:
        return True
    if have.is_floating_point or have == torch.bool:
        return False
    if want in (have, torch.bool):
        return True
    values, limits = column.numpy(), torch.iinfo(want)
    return bool((values >= limits.min).all() and (values <= limits.max).all())


def _as_column(value: Any, text: bool = False) -> Column:
    """Convert one input to a column; ``text``: treat an input with only missing values as strings."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().reshape(1) if not value.ndim else value.detach().cpu()
    if isinstance(value, str | bytes | bool | int | float):
        value = [value]
    if isinstance(value, list | tuple):
        leaf = _first_leaf(value)
        if any(isinstance(each, list | tuple) for each in value):
            value = [[] if each is None else each for each in value]
        if isinstance(leaf, str | bytes) or (leaf is None and text and len(value)):
            return _texts(value)
        if isinstance(leaf, torch.Tensor):
            return torch.stack([torch.as_tensor(each, device="cpu") for each in value]).detach().cpu()
        if any(isinstance(each, list | tuple) for each in value):
            if not all(isinstance(each, list | tuple) for each in value):
                raise TypeError("either every row must be a list or none")
            if len({len(each) for each in value}) > 1:
                raise ValueError(
                    f"rows must have equal lengths, got {min(map(len, value))} to {max(map(len, value))} values; pad "
                    "them, or pass texts"
                )
        array = np.asarray(_numbers(value))
        if array.dtype == np.float64:
            array = array.astype(np.float32)
    else:
        array = np.asarray(value)
    if array.dtype.kind in "OSU":
        if bad := [each for each in array.reshape(-1) if not isinstance(each, str | bytes)]:
            if other := [each for each in bad if not isinstance(each, int | float | np.number)]:
                raise TypeError(f"values must be numbers or texts, got {type(other[0]).__name__}")
            if large := [each for each in bad if isinstance(each, int) and not -(1 << 63) <= each < 1 << 64]:
                raise ValueError(f"integers must have at most 64 bits, got {large[0]}")
            raise TypeError(f"an array of numbers must have a number dtype, got {array.dtype}")
        return array.astype(object).reshape(array.shape or (1,))
    tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=native_dtype(array)))
    if tensor.dtype not in NAME_OF_DTYPE:
        raise TypeError(f"values of {tensor.dtype} cannot be sent; convert them, for example to float32")
    return tensor.reshape(tuple(array.shape) or (1,))


def _first_leaf(value: Any) -> Any:
    """The first value in nested lists, skipping empty ones; None if all are empty."""
    if not isinstance(value, list | tuple):
        return value
    return next((leaf for each in value if (leaf := _first_leaf(each)) is not None), None)


def _numbers(rows: Sequence[Any]) -> Sequence[Any]:
    """Convert missing numbers to NaN; the column's integers must then be exact in float32."""
    if not any(row is None for row in rows):
        return rows
    if large := [row for row in rows if isinstance(row, int) and abs(row) > 1 << 24]:
        raise ValueError(
            f"with missing values, integers must be from -2**24 to 2**24, got {large[0]}; pass them as texts"
        )
    return [math.nan if row is None else row for row in rows]


def _texts(rows: Sequence[Any]) -> np.ndarray:
    """One string per row, or a list of strings per row."""
    if not any(isinstance(row, list | tuple) for row in rows):
        array = np.empty(len(rows), object)
        array[:] = [_text(each) for each in rows]
        return array
    if not all(isinstance(row, list | tuple) for row in rows):
        raise TypeError("either every row must be a list or none")
    array = np.empty((len(rows), max(map(len, rows), default=0)), object)
    array[:] = ""
    for index, row in enumerate(rows):
        array[index, : len(row)] = [_text(each) for each in row]
    return array


def _text(value: Any) -> str | bytes:
    if value is None:
        return ""
    if not isinstance(value, str | bytes):
        raise TypeError(f"a column of texts must hold texts only, got {value!r:.40} of type {type(value).__name__}")
    return value


def rows_of(columns: Mapping[str, Column]) -> int | None:
    """The number of rows, if it is >= 1 and the same in all columns; otherwise None: they cannot be joined or split."""
    counts = {column.shape[0] if column.ndim else None for column in columns.values()}
    return counts.pop() or None if len(counts) == 1 else None


def kind_of(columns: Mapping[str, Column]) -> tuple:
    """A key that is equal for columns that can be joined."""
    return tuple(
        (alias, "text" if isinstance(column, np.ndarray) else column.dtype, tuple(column.shape[1:]))
        for alias, column in sorted(columns.items())
    )


def row_bytes(columns: Mapping[str, Column], rows: int) -> float:
    """The approximate size of a row in a message."""
    total = 0
    for column in columns.values():
        if isinstance(column, np.ndarray):
            total += sum(map(len, column.reshape(-1))) + 4 * column.size
        else:
            total += column.nbytes
    return total / rows


def joined(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate columns of one kind."""
    if len(parts) == 1:
        return dict(parts[0])
    return {alias: _concatenated([part[alias] for part in parts]) for alias in parts[0]}


def _concatenated(values: Sequence[Column]) -> Column:
    return np.concatenate(values) if isinstance(values[0], np.ndarray) else torch.cat(list(values))


def cut(columns: Mapping[str, Column], rows: Sequence[int]) -> list[dict[str, Column]] | None:
    """Split the columns into parts of ``rows`` rows; None if a column does not have ``sum(rows)`` rows."""
    if any(not column.ndim or len(column) != sum(rows) for column in columns.values()):
        return None
    parts, at = [], 0
    for count in rows:
        parts.append({alias: column[at : at + count] for alias, column in columns.items()})
        at += count
    return parts
