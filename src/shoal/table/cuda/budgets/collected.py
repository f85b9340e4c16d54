"""`Collected`: the rows that leave a GPU table, collected on request."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UnsupportedError
from shoal.table.budget.evicted import EvictedRows

NOT_COLLECTED = (
    "table {name!r}: collect_evicted does not work with CUDA graphs, whose evictions only eviction_stats() counts; "
    "train without a graph to collect rows"
)


class Collected:
    """Rows that leave a GPU table while this is open. Some stay on the device until taken; writes never wait."""

    def __init__(self, table: Any, limit: int) -> None:
        self._table, self._limit, self._lost, self._size = table, limit, 0, 0
        self._on_device: deque[tuple[Tensor, ...]] = deque()  # per call: count, ids, times and words
        self._bound = 0  # the most rows that these can have
        self._on_host: list[tuple[Tensor, ...]] = []

    def __enter__(self) -> Collected:
        if self._table.replayed:
            raise UnsupportedError(NOT_COLLECTED.format(name=self._table.name))
        self._table._budget.collected = self
        return self

    def __exit__(self, *_: object) -> None:
        self._table._budget.collected = None

    def __len__(self) -> int:
        with self._table._storage:  # no write may add rows meanwhile
            self._fetch()
            return self._size

    def add(self, count: Tensor, ids: Tensor, times: Tensor, words: Tensor) -> None:
        """Adds the rows that left in one call: the first ``count`` of these."""
        self._on_device.append((count, ids, times, words))
        self._bound += ids.numel()
        while self._bound > self._limit and len(self._on_device) > 1:
            self._send()

    def _send(self) -> None:
        part = self._on_device.popleft()
        self._bound -= part[1].numel()
        self._table._arrivals.send(part, self._arrived)

    def _arrived(self, count: Tensor, *parts: Tensor) -> None:
        evicted = int(count)
        fit = min(evicted, self._limit - self._size)
        self._lost += evicted - fit
        self._size += fit
        self._on_host.append(tuple(part[:fit].clone() for part in parts))

    def _fetch(self) -> None:
        while self._on_device:
            self._send()
        self._table._arrivals.settle()

    def take(self) -> EvictedRows:
        """The rows that have left since the last call, in host memory. Waits for the device."""
        dim, words = self._table.dim_size, self._table._layout.words
        none = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, words, device="cpu"),
        )
        with self._table._storage:  # no write may add rows meanwhile
            self._fetch()
            ids, times, rows = (torch.cat(part) for part in zip(none, *self._on_host, strict=True))
            lost, self._lost, self._size, self._on_host = self._lost, 0, 0, []
        if self._table.serving:
            return EvictedRows(ids, self._table.decode_words(rows), rows[:, :0], times, lost)
        return EvictedRows(ids, rows[:, :dim].contiguous(), rows[:, dim:].contiguous(), times, lost)
