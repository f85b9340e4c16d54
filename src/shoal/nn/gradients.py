"""Gradients of rows, gathered over one or more backward passes until somebody applies them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from shoal import _core

# Parts are summed by id once they hold this many rows and twice what the last sum left, so that a long accumulation
# takes the memory of its distinct ids.
_SUM_ROWS = 1 << 20


class Gradients:
    """``(ids, grads)`` parts of one table; an id may occur often. Safe to use from several threads."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._lock = threading.Lock()
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._rows = 0
        self._sum_at = _SUM_ROWS
        self._summed = True  # no id is there twice

    def add(self, ids: Tensor, grads: Tensor) -> None:
        """Keeps both tensors, which nobody may change afterwards."""
        if not ids.numel():
            return
        with self._lock:
            self._parts.append((ids, grads))
            self._rows += ids.numel()
            self._summed = False
            if self._rows > self._sum_at:
                self._sum()
                self._sum_at = max(_SUM_ROWS, 2 * self._rows)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Everything there is, which is gone from here; None if that is nothing. Equal ids are not summed yet."""
        with self._lock:
            parts, self._parts, self._rows = self._parts, [], 0
            self._sum_at, self._summed = _SUM_ROWS, True
        return _joined(parts) if parts else None

    def sums(self) -> tuple[Tensor, Tensor]:
        """Distinct ids and the sums of their gradients, still kept here: what is done to them in place, counts."""
        with self._lock:
            self._sum()
            if self._parts:
                return self._parts[0]
        return torch.empty(0, dtype=torch.int64, device="cpu"), torch.empty(0, self._dim, device="cpu")

    def after_fork(self) -> None:
        """In a child process, which does not have the thread that may hold the lock."""
        self._lock = threading.Lock()

    def clear(self) -> None:
        self.take()

    def __len__(self) -> int:
        """Rows waiting, equal ids counted each."""
        return self._rows

    def _sum(self) -> None:
        if not self._summed:
            self._parts = [sum_by_id(*_joined(self._parts))]
            self._rows = self._parts[0][0].numel()
            self._summed = True


def sum_by_id(ids: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids, by first occurrence, and the sums of their rows; always new tensors."""
    n, dim = grads.shape
    if ids.is_cuda:
        distinct, place = torch.unique(ids, return_inverse=True)
        return distinct, grads.new_zeros(distinct.shape[0], dim).index_add_(0, place, grads)
    out_ids = torch.empty(n, dtype=torch.int64, device="cpu")
    out = torch.empty(n, dim, dtype=torch.float32, device="cpu")
    distinct = _core.sum_by_id(ids.data_ptr(), n, grads.data_ptr(), dim, out_ids.data_ptr(), out.data_ptr())
    return out_ids[:distinct].clone(), out[:distinct].clone()


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([grads for _, grads in parts])
