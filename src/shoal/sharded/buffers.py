"""Large buffers that are used again: fresh memory costs a page fault every 4 KiB, more than the copy into it."""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

SMALL_BYTES = 1 << 20  # below this the allocator is as good
HUGE_PAGE = 2 << 20


class BufferPool:
    """Hands out flat float32 tensors; one that nobody holds any more is handed out again. Threads may share it.

    A tensor is in use as long as anything refers to its memory: views, arrays made from it, a socket that still sends
    it. At most ``max_bytes`` are kept.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self._kept: list[tuple[Tensor, int]] = []
        self._lock = threading.Lock()

    def take(self, numel: int) -> Tensor:
        """``[numel]``, with whatever is in it."""
        size = 4 * numel
        if size < SMALL_BYTES or size > self.max_bytes or not hasattr(torch._C, "_storage_Use_Count"):
            return torch.empty(numel)
        with self._lock:
            for at, (whole, idle) in enumerate(self._kept):
                if whole.nbytes >= size >= whole.nbytes // 4 and _uses(whole) == idle:
                    self._kept.append(self._kept.pop(at))
                    return whole[:numel]
            whole = _allocate(size)
            self._kept.append((whole, _uses(whole)))
            while sum(t.nbytes for t, _ in self._kept) > self.max_bytes:
                self._kept.pop(0)
            return whole[:numel]


def _allocate(size: int) -> Tensor:
    memory = mmap.mmap(-1, (size + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)


def _uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


pool = BufferPool()
"""The process's own."""
