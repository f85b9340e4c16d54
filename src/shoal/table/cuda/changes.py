"""A GPU table's record of changes for incremental checkpoints, with the same methods as a native table."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class Changes:
    """The epochs of a table. The epoch of each row's last write is in device memory; removed ids are kept here.

    Tables of one storage share the epoch counter, but each has its own history.
    """

    def __init__(self, table: Any) -> None:
        self._table = weakref.proxy(table)  # no cycle, so that memory is freed with the last reference
        self._oldest = 0
        self._removed: list[tuple[int, Tensor]] = []

    @property
    def tracked(self) -> bool:
        return self._oldest > 0

    def begin_epoch(self) -> int:
        """Starts a new epoch and returns it. Rows written from now on have it; removed ids are remembered."""
        with self._table._storage as storage:
            epoch = storage.begin_epoch()
            self._oldest = self._oldest or epoch
            return epoch

    def oldest_epoch(self) -> int:
        """The first epoch since which changes are known; 0 while nothing is tracked."""
        storage = self._table._storage
        return storage.epoch + 1 if storage.untracked_graph else self._oldest

    def removed_since(self, since: int) -> list[int]:
        """Ids removed in ``since`` or later and not in the table now, sorted."""
        self._table.settle()
        ids = [ids for epoch, ids in self._removed if epoch >= since]
        if not ids:
            return []
        gone = torch.unique(torch.cat(ids))
        return gone[~self._table.contains(gone.to(self._table.device)).cpu()].tolist()

    def forget_before(self, epoch: int) -> None:
        """Forgets removals before ``epoch``; deltas against older epochs are rejected from now on."""
        self._table.settle()
        self._removed = [entry for entry in self._removed if entry[0] >= epoch]
        self._oldest = max(self._oldest, epoch)

    def remove(self, ids: Tensor) -> None:
        """Records that these ids were removed. Waits for the device."""
        if self.tracked and ids.numel():
            self.removed(self._table._storage.epoch, ids.cpu())

    def removed(self, epoch: int, ids: Tensor) -> None:
        """Records that these ids, in host memory, were removed in an epoch."""
        if ids.numel():
            self._removed.append((epoch, ids))

    def start_over(self) -> None:
        """Records that all rows were replaced, so that earlier changes are unknown."""
        self._table.settle()
        if self.tracked:
            self._removed.clear()
            self._oldest = 0
            self.begin_epoch()
