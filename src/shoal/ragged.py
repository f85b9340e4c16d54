"""`Ragged`: rows of different length as ``(values, row_splits)``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal import _core
from shoal.errors import ConfigError


class Ragged:
    """A tensor with one ragged dimension; row ``i`` is ``values[row_splits[i]:row_splits[i + 1]]``.

    ``values`` is ``[n, ...]``, or another `Ragged` with ``n`` rows, which makes a doubly ragged tensor.
    ``row_splits`` is int64 ``[rows + 1]``, rising from 0 to ``n``; anything else raises here. Both are kept,
    not copied.

    While `torch.compile` or `torch.export` traces, the splits hold no numbers yet: the op that uses them checks them.

    >>> Ragged.from_lists([[5, 6], [], [7]]).row_splits
    tensor([0, 2, 2, 3])
    """

    __slots__ = ("_row_ids", "row_splits", "values")

    def __init__(self, values: Tensor | Ragged | Sequence[Any], row_splits: Tensor | Sequence[int]) -> None:
        if not isinstance(values, Tensor | Ragged):
            values = torch.as_tensor(values, dtype=None if len(values) else torch.int64, device=None)
        if not isinstance(row_splits, Tensor):  # as_tensor would move a tensor to torch's default device
            row_splits = torch.as_tensor(row_splits, device=_device(values))
        if row_splits.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"row_splits must be int64, got {row_splits.dtype}")
        row_splits = row_splits.long()
        if row_splits.dim() != 1 or row_splits.numel() < 1:
            raise ConfigError(f"row_splits must be 1-D with at least one element, got shape {list(row_splits.shape)}")
        if isinstance(values, Tensor) and values.dim() < 1:
            raise ConfigError("the values of a ragged tensor must have at least one dimension, got a scalar")
        if not torch.compiler.is_compiling() and type(row_splits) is Tensor:
            _check_row_splits(row_splits, values.nrows() if isinstance(values, Ragged) else values.shape[0])
        self.values = values
        self.row_splits = row_splits
        self._row_ids: Tensor | None = None

    @classmethod
    def from_row_splits(cls, values: Tensor | Ragged | Sequence[Any], row_splits: Tensor | Sequence[int]) -> Ragged:
        """The same as the constructor."""
        return cls(values, row_splits)

    @classmethod
    def trusted(cls, values: Tensor | Ragged, row_splits: Tensor) -> Ragged:
        """Build without checking the splits, which an op has just made; the op that uses them checks them."""
        self = cls.__new__(cls)
        self.values = values
        self.row_splits = row_splits
        self._row_ids = None
        return self

    @classmethod
    def from_row_lengths(cls, values: Tensor | Ragged | Sequence[Any], row_lengths: Tensor | Sequence[int]) -> Ragged:
        """Rows of the given lengths, whose sum is the number of values."""
        if not isinstance(row_lengths, Tensor):
            row_lengths = torch.as_tensor(
                row_lengths, dtype=None if len(row_lengths) else torch.int64, device=_device(values)
            )
        if row_lengths.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"row lengths must be int64, got {row_lengths.dtype}")
        lengths = row_lengths.long()
        if lengths.dim() != 1:
            raise ConfigError(f"row lengths must be 1-D, got shape {list(lengths.shape)}")
        if not torch.compiler.is_compiling() and lengths.numel() and int(lengths.min()) < 0:
            raise ConfigError(f"row lengths must be >= 0, got {int(lengths.min())}")
        return cls(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    @classmethod
    def from_lists(cls, rows: Sequence[Any]) -> Ragged:
        """Build from nested lists, ragged in one or two dimensions; without any values the dtype is int64."""
        lengths = [len(row) for row in rows]
        flat = [item for row in rows for item in row]
        if flat and isinstance(flat[0], list | tuple):
            return cls.from_row_lengths(cls.from_lists(flat), lengths)
        return cls.from_row_lengths(torch.tensor(flat, dtype=None if flat else torch.int64, device=None), lengths)

    @property
    def tensor(self) -> Tensor:
        """``values``, which must not be ragged itself."""
        if isinstance(self.values, Ragged):
            raise ConfigError("the tensor must have one ragged dimension, got two")
        return self.values

    def nrows(self) -> int:
        """The number of rows, including empty ones."""
        return self.row_splits.numel() - 1

    def row_lengths(self) -> Tensor:
        """int64 ``[rows]``."""
        return self.row_splits.diff()

    def to_list(self) -> list[Any]:
        """Nested Python lists."""
        values = self.values.to_list() if isinstance(self.values, Ragged) else self.values.tolist()
        splits = self.row_splits.tolist()
        return [values[a:b] for a, b in itertools.pairwise(splits)]

    def __len__(self) -> int:
        return self.nrows()

    def __repr__(self) -> str:
        return f"Ragged({self.to_list()})" if self.nrows() <= 16 else f"Ragged(rows={self.nrows()})"


def _device(values: Any) -> torch.device | None:
    """The device for splits given as numbers: that of the values; None is torch's default device."""
    while isinstance(values, Ragged):
        values = values.values
    return values.device if isinstance(values, Tensor) else None


def _check_row_splits(splits: Tensor, length: int) -> None:
    if splits.device.type != "cpu":
        splits = splits.cpu()
    splits = splits.contiguous()
    try:
        _core.check_row_splits(splits.data_ptr(), splits.numel() - 1, length)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _flatten(ragged: Ragged) -> tuple[list[Any], None]:
    return [ragged.values, ragged.row_splits], None


def _flatten_with_keys(ragged: Ragged) -> tuple[list[Any], None]:
    return [(pytree.GetAttrKey("values"), ragged.values), (pytree.GetAttrKey("row_splits"), ragged.row_splits)], None


# Compiled and exported programs take and return it like any container of tensors.
pytree.register_pytree_node(
    Ragged,
    _flatten,
    lambda children, _: Ragged.trusted(*children),
    serialized_type_name="shoal.Ragged",
    flatten_with_keys_fn=_flatten_with_keys,
)
