"""Rows that were evicted from a full table, and statistics about them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core


@dataclass(frozen=True)
class EvictionStats:
    """Counts since the table was made; a restored table continues the counts of its checkpoint."""

    evicted: int = 0
    """Rows that left because the table was full (``table_evicted_rows_total``)."""
    refused: int = 0
    """New ids that got no row: all rows in reach were better, too young or pinned (``table_refused_ids_total``)."""
    created: int = 0
    """Rows that writes created."""
    hits: int = 0
    """Writes to existing rows."""
    age_mean_s: float = 0.0
    """Mean time between the last write of an evicted row and its eviction."""
    age_min_s: int = 0
    age_max_s: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of writes that found their row. If gradients are summed, an id counts once per call."""
        written = self.hits + self.created + self.refused
        return self.hits / written if written else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": round(self.hit_rate, 6)}

    @classmethod
    def of_counters(cls, counters: tuple[int, ...]) -> EvictionStats:
        """From created, hits, evicted, refused, the sum of ages, the lowest and the highest age (-1: none)."""
        created, hits, evicted, refused, ages, youngest, oldest = counters
        mean = ages / evicted if evicted else 0.0
        return cls(evicted, refused, created, hits, mean, max(0, youngest), max(0, oldest))


@dataclass(frozen=True)
class EvictedRows:
    """Evicted rows, in the order of their eviction."""

    ids: Tensor
    """int64 ``[n]``"""
    values: Tensor
    """float32 ``[n, dim]``: their weights"""
    states: Tensor
    """float32 ``[n, words]``: their optimizer state, segment after segment; a step counter takes two words"""
    times: Tensor
    """int64 ``[n]``: seconds of their last write"""
    lost: int = 0
    """The number of evicted rows beyond the limit, which were not kept."""


@dataclass(frozen=True)
class MissRatioCurve:
    """Estimated miss ratios of tables of other sizes, from a sample of the ids that were written."""

    rows: list[int]
    """Sizes, in rows, of tables with `Lru`, in ascending order."""
    misses: list[float]
    """For each size, the share of writes that would not have found their row."""
    sampled: int
    """Writes in the sample; a few thousand are needed."""

    def at(self, rows: int) -> float:
        """The miss ratio of a table with that many rows; 1 without data."""
        if not self.rows:
            return 1.0
        place = int(np.searchsorted(self.rows, rows, side="right")) - 1
        return self.misses[place] if place >= 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "misses": [round(miss, 5) for miss in self.misses], "sampled": self.sampled}


class Collected:
    """Collects the rows evicted from a CPU table while the context is open."""

    def __init__(self, table: Any, limit: int) -> None:
        self._table, self._native = table, _core.EvictedRows(limit)

    def __enter__(self) -> Collected:
        _core.set_evicted_sink(self._table._native, self._native)
        return self

    def __exit__(self, *_: object) -> None:
        _core.set_evicted_sink(self._table._native, None)

    def __len__(self) -> int:
        return len(self._native)

    def take(self) -> EvictedRows:
        """The rows evicted since the last call."""
        ids, times, rows, lost = self._native.take()
        layout = self._table._native.layout
        count = len(ids) // 8
        words = torch.from_numpy(np.frombuffer(rows, np.uint8).copy()).view(count, layout.stride)
        if layout.serving:
            values, states = self._table.decode_rows(words), torch.empty(count, 0, device="cpu")
        else:
            both = words[:, : layout.row_bytes].contiguous().view(torch.float32)
            values, states = both[:, : layout.dim].contiguous(), both[:, layout.dim :].contiguous()
        return EvictedRows(
            torch.from_numpy(np.frombuffer(ids, np.int64).copy()),
            values,
            states,
            torch.from_numpy(np.frombuffer(times, np.uint32).astype(np.int64)),
            lost,
        )
