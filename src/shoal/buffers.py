"""Uninitialised result tensors; large ones come from memory that is kept warm between calls.

A fresh tensor of a megabyte costs more in page faults than a lookup costs to fill it. Large results of tables and
ops therefore reuse the blocks of results that were freed. `set_buffer_cache_bytes` limits what is kept idle (512 MiB at
first, or ``SHOAL_BUFFER_CACHE_MB``); 0 turns the cache off.
"""

import torch
from torch import Tensor

from shoal import _core

_LARGE_BYTES = 1 << 18

set_buffer_cache_bytes = _core.set_buffer_cache_bytes
buffer_cache_bytes = _core.buffer_cache_bytes
idle_buffer_bytes = _core.idle_buffer_bytes


def empty_rows(rows: int, columns: int) -> Tensor:
    """float32 ``[rows, columns]`` on the CPU, uninitialised."""
    if rows * columns * 4 < _LARGE_BYTES:
        return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    out = _core.empty_rows(rows, columns)
    if torch.are_deterministic_algorithms_enabled() and getattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ):
        out.fill_(torch.nan)  # as torch.empty does then
    return out


def empty_flat(numel: int) -> Tensor:
    """float32 ``[numel]`` on the CPU, uninitialised."""
    return empty_rows(numel, 1).view(-1)


def empty_of(numel: int, dtype: torch.dtype) -> Tensor:
    """``[numel]`` of any dtype on the CPU, uninitialised."""
    words = -(-numel * dtype.itemsize // 4)
    return empty_flat(words).view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
