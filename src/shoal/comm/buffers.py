"""Memory for messages: bytes that are written once, in place, and pooled tensors for buckets."""

import ctypes
from typing import Any

import numpy as np
import torch

from shoal import _core


def writable_bytes(n: int) -> tuple[bytes, np.ndarray]:
    """A new ``bytes`` of length ``n`` and a view to fill it through, before anybody else sees it."""
    if n == 0:
        return b"", np.empty(0, np.uint8)
    data = _core.new_bytes(n)
    raw: Any = (ctypes.c_uint8 * n).from_address(_core.bytes_address(data))
    return data, np.frombuffer(raw, np.uint8)


def crc32(raw: np.ndarray) -> int:
    """zlib's CRC-32 of a contiguous array."""
    return _core.crc32(raw.ctypes.data, raw.nbytes)


def fresh(n: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised flat tensor on the CPU; numpy asks for huge pages, which makes a large one cheap to touch."""
    if n == 0:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.empty(n * dtype.itemsize, np.uint8)).view(dtype)


class BufferPool:
    """Flat CPU tensors that are used again once nobody else holds their storage.

    Page faults of fresh memory cost more than a copy into it; a training loop that drops last step's results gets the
    same buffers again, one that keeps them gets new ones.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, int]]] = {}

    def get(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        buffers = self._free.setdefault((n, dtype), [])
        for tensor, alone in buffers:
            if _holders(tensor) == alone:
                return tensor.view(-1)
        tensor = fresh(n, dtype)
        alone = _holders(tensor)
        if alone and n:
            buffers.append((tensor, alone))
        return tensor.view(-1)

    def trim(self, used: set[tuple[int, torch.dtype]]) -> None:
        """Lets go of sizes that the last use did not need."""
        for key in self._free.keys() - used:
            del self._free[key]


def _holders(tensor: torch.Tensor) -> int:
    """Tensors on this storage; 0 where torch cannot tell."""
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    return count(tensor.untyped_storage()._cdata) if count is not None else 0
