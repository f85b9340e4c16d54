"""Converts TF-Serving's JSON to tensors and back: rows or columns, strings as text or base64."""

import base64
import binascii
from typing import Any

import numpy as np
import torch

from shoal.errors import DataError
from shoal.serving.server.servable import Tensors
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import MAX_TENSOR_BYTES, dtype_code, torch_dtype


def columns_of(instances: Any, *, fill: bool = False) -> Any:
    """Convert rows to ``{alias: values of all rows}``; rows of a single unnamed input stay a list.

    ``fill``: missing values become None; otherwise all rows must have the same keys.
    """
    if not isinstance(instances, list) or not instances:
        raise invalid_argument("instances must be a list of at least one row")
    if not all(isinstance(row, dict) and not _is_b64(row) for row in instances):
        return instances
    if fill:
        found = dict.fromkeys(name for row in instances for name in row)
        return {name: [row.get(name) for row in instances] for name in found}
    names = instances[0].keys()
    if any(row.keys() != names for row in instances):
        raise invalid_argument("every instance must have the same keys")
    return {name: [row[name] for row in instances] for name in names}


def _is_b64(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"b64"}


def tensors_of(columns: dict[str, Any], specs: dict[str, Any], max_bytes: int = MAX_TENSOR_BYTES) -> Tensors:
    """Convert columns to tensors of the signature's dtypes; raises a DataError that names the input if that fails.

    ``max_bytes`` limits the total size of all inputs after padding.
    """
    tensors: Tensors = {}
    if columns.keys() != specs.keys():  # the check of inputs names the wrong ones
        return {alias: torch.empty(0, device="cpu") for alias in columns}
    for alias, value in columns.items():
        spec = specs[alias]
        try:
            if spec.dtype == "string":
                tensors[alias] = np.array(_strings(value), dtype=object)
                continue
            dtype = torch_dtype(dtype_code(spec.dtype))
            assert dtype is not None
            if len(spec.shape or ()) == 2:
                value = _padded(value, spec.padding, max_bytes // dtype.itemsize)
            if not dtype.is_floating_point and _has_fractions(value):
                raise ValueError("a number has a fraction; the values must be integers")
            tensors[alias] = torch.tensor(value, dtype=dtype, device="cpu")
            max_bytes -= tensors[alias].nbytes
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise DataError(f"input {alias!r} must be a tensor of {spec.dtype}: {error}") from None
    return tensors


def raw_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Check the raw values of columns and decode base64; raises a DataError that names the input if that fails."""
    made = {}
    for alias, values in columns.items():
        if not isinstance(values, list):
            raise DataError(f"input {alias!r} must be a list with one value per row, got {values!r}")
        try:
            made[alias] = [_raw(value) for value in values]
        except (ValueError, TypeError) as error:
            raise DataError(f"input {alias!r}: {error}") from None
    return made


def _raw(value: Any, inner: bool = False) -> Any:
    if value is None or isinstance(value, str) or type(value) in (int, float):
        return value
    if isinstance(value, list) and not inner:
        return [_raw(each, True) for each in value]
    if _is_b64(value):
        return _strings(value)
    raise TypeError(f"a value must be a text, a number, null or a list of them, got {value!r}")


def _has_fractions(value: Any) -> bool:
    """Whether a number is not written as an integer; torch would truncate it."""
    array = np.asarray(value)
    return bool(array.size) and array.dtype.kind == "f"


def _padded(rows: Any, padding: int | None, most: int) -> Any:
    """Pad short rows with the padding id to one length."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return rows
    lengths = {len(row) for row in rows}
    if len(lengths) <= 1:
        return rows
    if padding is None:
        raise ValueError(
            f"rows must have equal lengths, got {min(lengths)} to {max(lengths)} values; pad them, or export ids with "
            "Feature(padding=ID) to let the server pad them"
        )
    if (count := len(rows) * max(lengths)) > most:
        raise ValueError(
            f"rows must hold at most {max(0, most)} values after padding, got {count} ({len(rows)} * {max(lengths)})"
        )
    return [[*row, *[padding] * (max(lengths) - len(row))] for row in rows]


def _strings(value: Any) -> Any:
    if isinstance(value, list):
        return [_strings(each) for each in value]
    if _is_b64(value):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"b64 text is malformed: {error}") from None
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"values must be strings, got {type(value).__name__}")


def plain(value: Any) -> Any:
    """Convert a tensor to JSON values; bytes become ``{"b64": text}``."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, np.ndarray):
        return [plain(each) for each in value] if value.ndim else plain(value.item())
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
