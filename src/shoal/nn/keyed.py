"""Results as TorchRec's types, for batches that came as such: known by their class's module, never imported."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

_TYPES = "torchrec.sparse.jagged_tensor"


def is_torchrec(ids: Any) -> bool:
    """Whether ids came as one of TorchRec's types."""
    if isinstance(ids, dict | tuple | Tensor):  # the compiler does not see through their classes
        return False
    return any(each.__module__ == _TYPES for each in type(ids).__mro__)


def keyed_tensor(names: list[str], widths: list[int], values: Tensor) -> Any:
    """A ``KeyedTensor`` of ``[B, sum of widths]``."""
    return sys.modules[_TYPES].KeyedTensor(keys=names, length_per_key=widths, values=values)


def jagged_tensor(rows: Tensor, offsets: Tensor, ids: Tensor | None) -> Any:
    """A ``JaggedTensor`` of rows; ``ids``, if they are wanted, are its weights."""
    return sys.modules[_TYPES].JaggedTensor(values=rows, lengths=offsets.diff(), weights=ids)
