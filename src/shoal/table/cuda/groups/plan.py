"""`Plan`: the kernels' data on the features of a batch, in device memory, created once."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.cuda.launch import power_of_2
from shoal.table.protocol import EVERY, FIRSTN, MAX, MEAN, SQRTN, SUM, SUMS, Features, Found

_KEPT = 64  # the most cached results of `begins`
_FEW = 64


def jump_of(count: int) -> int:
    """The largest power of two below ``count``: the first step of a binary search in ``count`` numbers."""
    return 1 << (count - 1).bit_length() - 1 if count > 1 else 0


class Family:
    """The features of a plan that one kernel pools: those that add rows, those with max or those with firstn."""

    def __init__(self, plan: Plan, features: Features, which: frozenset[int]) -> None:
        own = [f for f, kind in enumerate(features.combiners) if kind in which]
        self.count = len(own)
        self.covers_all = len(own) == len(features.combiners)
        """Whether these are all features of the plan."""
        self.numbers = plan.sent(tuple(own) or (0,), torch.int32)
        kinds = {features.combiners[f] for f in own}
        self.kind = kinds.pop() if len(kinds) == 1 else -1
        """Their common combiner; -1 if they differ."""


class Plan:
    """Features over the tables of a group."""

    def __init__(self, features: Features, tables: int, dim: int, device: torch.device) -> None:
        self._check(features, tables, dim)
        self.tables_of, self._device = features.tables, device
        self.features, self.width = len(features.tables), features.width
        self.jump = jump_of(self.features)
        self.few = power_of_2(self.features) if self.features <= _FEW else 0
        """The number of features, rounded up, if a kernel can compare ids with all borders; 0 if there are too many."""
        self.alone = len(set(features.tables)) == 1
        """Whether all features read one table, ``only``."""
        self.only = features.tables[0] if features.tables else 0
        kinds = set(features.combiners)
        self.kind = SUM if not kinds else kinds.pop() if len(kinds) == 1 else -1
        """The common combiner of all features; -1 if they differ."""
        self.first = FIRSTN in features.combiners
        self.unit = 4 if all(x % 4 == 0 for x in (*features.columns, *([dim] if self.first else ()))) else 1
        """The alignment of columns, in floats."""
        lengths = tuple([features.length(f) for f in range(self.features)])
        self.tables, self.combiners, columns, self.lengths = (
            self.sent(values, torch.int32)
            for values in (features.tables, features.combiners or (0,), features.columns or (0,), lengths)
        )
        self.sums, self.largest, self.firsts = (
            Family(self, features, which) for which in (SUMS, frozenset({MAX}), frozenset({FIRSTN}))
        )
        self.aimed = bool(self.largest.count or self.firsts.count)
        """Whether gradients differ from row to row of a bag."""
        self.divides = bool({MEAN, SQRTN} & set(features.combiners))
        self.columns = {1: columns, 4: columns // 4}
        self._none = (0,) * (self.features - 1)
        self.needs: dict[tuple[int, ...], int] = {}
        """Results of a group, by the sizes of batches."""
        self._begins: dict[tuple[int, ...], Tensor] = {}
        self._held: list[Tensor] = []

    @staticmethod
    def _check(features: Features, tables: int, dim: int) -> None:
        if not features.tables or any(not 0 <= table < tables for table in features.tables):
            raise ConfigError(f"features.tables must be 0..{tables - 1}, got {features.tables}")
        unknown = set(features.combiners) - EVERY
        if unknown:
            raise ConfigError(f"features.combiners must be of {sorted(EVERY)}, got {sorted(unknown)}")
        for feature, column in enumerate(features.columns):
            length = features.length(feature)
            if length < 1 or (length > 1 and features.combiners[feature] != FIRSTN):
                raise ConfigError(f"features.lengths must be at least 1, and 1 without firstn, got {features.lengths}")
            if not 0 <= column <= features.width - length * dim:
                raise ConfigError(
                    f"features.columns must be 0..{features.width - length * dim}, so that {length * dim} columns fit, "
                    f"got {column}"
                )

    def sent(self, values: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Copies numbers to the device."""
        pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)

    def begins(self, counts: Tensor, n: int, captured: bool) -> Tensor:
        """int64 on the device: the first id of each feature."""
        if counts.shape[0] != self.features:
            return counts[: -1 : self.each(counts)].contiguous()
        if counts.device == self._device and self._device.type == "cuda":
            return counts.cumsum(0) - counts
        sizes = tuple(counts.tolist())
        made = self._begins.get(sizes)
        if made is None:
            if len(sizes) != self.features or sum(sizes) != n:
                raise ConfigError(f"counts must be {self.features} numbers that add up to {n}, got {list(sizes)}")
            firsts = tuple(itertools.accumulate((0, *sizes[:-1])))
            if captured:  # not cached: it is empty until the graph runs, and each replay copies it again
                pinned = torch.tensor(firsts, dtype=torch.int64, device="cpu", pin_memory=True)
                self._held.append(pinned)
                return pinned.to(self._device, non_blocking=True)
            if len(self._begins) >= _KEPT:
                self._begins.clear()
            made = self._begins[sizes] = self.sent(firsts, torch.int64)
        if captured:
            self._held.append(made)
        return made

    def each(self, counts: Tensor) -> int:
        """The number of bags per feature, if ``counts`` are offsets; 0 if they are counts."""
        return 0 if counts.shape[0] == self.features else (counts.shape[0] - 1) // self.features

    def known(self, counts: Tensor) -> bool:
        """Whether the host knows how many ids each feature has."""
        return counts.shape[0] == self.features and counts.device.type == "cpu"

    def sizes(self, found: Found, features: Features, wait: bool = False) -> tuple[int, ...]:
        """The most ids that each feature can have in a batch; with ``wait``, the exact number from the device."""
        n = found.ids.shape[0]
        if self.alone:
            return (n, *self._none)
        return tuple(found.sizes(features)) if wait or self.known(found.counts) else (n,) * self.features
