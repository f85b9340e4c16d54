"""`unique_key_with_value_and_offset`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.errors import ConfigError
from shoal.ops import checks
from shoal.ops._op import Op, new_size
from shoal.ops.unique import reference
from shoal.ops.unique.shared import SharedTensor
from shoal.ragged import Ragged


class UniqueKeys(NamedTuple):
    """The result of `unique_key_with_value_and_offset`."""

    unique_key: Ragged
    """Distinct keys of each row, in order of first occurrence."""
    value_offset: Ragged
    """Doubly ragged: per row and distinct key, the rising float offsets of its occurrences."""
    value_buffer: SharedTensor | None
    """The buffer to which the offsets refer, or None if not requested."""


def unique_key_with_value_and_offset(key: Any, dims: Any, generate_buffer: bool = True) -> UniqueKeys:
    """Find each row's distinct keys, and the offsets of all keys' values in one flat buffer.

    Args:
        key: ragged int64 with R rows.
        dims: R ints; the value of a key in row ``i`` has ``dims[i]`` floats.
        generate_buffer: also make the buffer, zero-filled.

    >>> unique, offsets, buffer = unique_key_with_value_and_offset([[8, 5, 8], [5, 5]], [1, 2])
    >>> unique.to_list(), offsets.to_list(), buffer.size
    ([[8, 5], [5]], [[[0, 2], [1]], [[3, 5]]], 7)
    """
    op = "unique_key_with_value_and_offset"
    key = checks.ragged(key, op, "key")
    ids, id_splits, offset_splits, offsets, buffer = _unique(
        key.values, key.row_splits, checks.int_list(dims, op, "dims"), bool(generate_buffer)
    )
    return UniqueKeys(
        Ragged.trusted(ids, id_splits),
        Ragged.trusted(Ragged.trusted(offsets, offset_splits), id_splits),
        SharedTensor(buffer, offsets) if generate_buffer else None,
    )


def _check(values: Tensor, row_splits: Tensor, dims: list[int], generate_buffer: bool) -> None:
    op = "unique_key_with_value_and_offset"
    if not dims:
        raise ConfigError(f"{op}: key must have at least one row, got none")
    checks.check_same(op, "the number of dims", len(dims), "the number of rows", row_splits.shape[0] - 1)


def _cpu(
    values: Tensor, row_splits: Tensor, dims: list[int], generate_buffer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    values, row_splits = values.contiguous(), row_splits.contiguous()
    rows, n = len(dims), values.numel()
    _core.check_row_splits(row_splits.data_ptr(), rows, n)
    work = _core.UniqueKeys(values.data_ptr(), row_splits.data_ptr(), rows, list(dims))
    ids, id_splits = values.new_empty(work.size), values.new_empty(rows + 1)
    offset_splits, offsets = values.new_empty(work.size + 1), values.new_empty(n)
    work.finish(ids.data_ptr(), id_splits.data_ptr(), offset_splits.data_ptr(), offsets.data_ptr())
    buffer = empty_flat(work.floats if generate_buffer else 0).zero_()
    return ids, id_splits, offset_splits, offsets, buffer


def _fake(
    values: Tensor, row_splits: Tensor, dims: list[int], generate_buffer: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = new_size()
    return (
        values.new_empty(count),
        torch.empty_like(row_splits),
        values.new_empty(count + 1),
        torch.empty_like(values),
        values.new_empty(new_size() if generate_buffer else 0, dtype=torch.float32),
    )


_unique = Op(
    "unique_key_with_value_and_offset(Tensor values, Tensor row_splits, int[] dims, bool generate_buffer)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check,
    cpu=_cpu,
    reference=reference.unique_key_with_value_and_offset,
    cuda="unique:unique_key_with_value_and_offset",
    fake=_fake,
)
