"""Predict calls that run together: their tensors joined out of the messages, their answers written natively."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal import _core
from shoal.serving.predict import PredictCall
from shoal.serving.tensors import MAX_TENSOR_BYTES, extent, shared_tensor

_KINDS = {
    torch.float32: (1, np.dtype("<f4")),
    torch.float64: (2, np.dtype("<f8")),
    torch.int32: (3, np.dtype("<i4")),
    torch.int64: (9, np.dtype("<i8")),
    torch.bool: (10, np.dtype("?")),
}
_NUMPY = dict(_KINDS.values())


def join_calls(calls: Sequence[PredictCall]) -> tuple[dict[str, Any], list[int]] | None:
    """({alias: all calls' tensors, one after another}, rows of each call).

    None when they do not ask alike: other inputs, dtypes or shapes, different numbers of rows within one call, or
    a tensor that is broken. Those are to be read one by one, which says what is wrong.
    """
    aliases = calls[0].inputs.keys()
    if not aliases or any(call.inputs.keys() != aliases for call in calls):
        return None
    joined: dict[str, Any] = {}
    rows: list[int] | None = None
    for alias in aliases:
        parts = [(call.data, *call.inputs[alias]) for call in calls]
        dtype = _dtype_of(*parts[0])
        if dtype not in _NUMPY:
            return None
        try:
            found = _core.join_tensors(parts, dtype)
        except ValueError:
            return None
        if found is None or (rows is not None and found[1] != rows):
            return None
        values, rows, tail = found
        if extent(tail) > MAX_TENSOR_BYTES // _NUMPY[dtype].itemsize:  # empty, and too large for strides
            return None
        joined[alias] = shared_tensor(np.frombuffer(values, _NUMPY[dtype]).reshape(sum(rows), *tail))
    return (joined, rows) if rows is not None else None


def _dtype_of(data: bytes, begin: int, size: int) -> int:
    """The dtype that a tensor begins with, as writers put it first; -1 where it does not."""
    return data[begin + 1] if size >= 2 and data[begin] == 0x08 and data[begin + 1] < 0x80 else -1


def split_answers(spec: bytes, outputs: Mapping[str, Any], rows: list[int]) -> list[bytes] | None:
    """A serialised PredictResponse for each number of rows; None where an output is not of a plain dtype or shape."""
    total = sum(rows)
    given, kept = [], []
    for alias, value in outputs.items():
        kind = _KINDS.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if kind is None or not value.ndim or len(value) != total or value.device.type != "cpu":
            return None
        value = value.contiguous()
        kept.append(value)
        given.append((alias, kind[0], list(value.shape[1:]), value.data_ptr()))
    return _core.split_responses(spec, given, rows)
