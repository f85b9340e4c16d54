"""Results of TorchRec's types for batches of TorchRec's types, which are recognised without importing TorchRec."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

_TYPES = "torchrec.sparse.jagged_tensor"


def is_torchrec(ids: Any) -> bool:
    """Whether ids have one of TorchRec's types."""
    if isinstance(ids, dict | tuple | Tensor):  # torch.compile cannot trace the check of their classes
        return False
    return any(each.__module__ == _TYPES for each in type(ids).__mro__)


def keyed_tensor(names: list[str], widths: list[int], values: Tensor) -> Any:
    """Make a ``KeyedTensor`` of ``[B, sum of widths]``."""
    return sys.modules[_TYPES].KeyedTensor(keys=names, length_per_key=widths, values=values)


def jagged_tensor(rows: Tensor, offsets: Tensor, ids: Tensor | None) -> Any:
    """Make a ``JaggedTensor`` of rows, with ``ids``, if given, as its weights."""
    return sys.modules[_TYPES].JaggedTensor(values=rows, lengths=offsets.diff(), weights=ids)
