"""Uninitialised result tensors; large ones reuse memory of freed results.

The page faults of a new tensor of a megabyte cost more than a lookup needs to fill it, so large results of tables and
ops reuse the blocks of freed results. `set_buffer_cache_bytes` limits the idle memory (default 512 MiB, or
``SHOAL_BUFFER_CACHE_MB``); 0 turns the cache off.
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
        out.fill_(torch.nan)  # as torch.empty does in this mode
    return out


def empty_flat(numel: int) -> Tensor:
    """float32 ``[numel]`` on the CPU, uninitialised."""
    return empty_rows(numel, 1).view(-1)


def empty_of(numel: int, dtype: torch.dtype) -> Tensor:
    """``[numel]`` of any dtype on the CPU, uninitialised."""
    words = -(-numel * dtype.itemsize // 4)
    return empty_flat(words).view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
