"""Reading of rows from checkpoint files as columns, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal import _core
from shoal.durable import Saved
from shoal.errors import DataError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some rows of one table. `state` reads the file, so it only works until the next batch is requested."""

    path: str
    ids: Ints
    times: Ints
    """Times of the last updates, in seconds since 1970."""
    offsets: Ints
    """The offset of each record in the file (or in its uncompressed blocks)."""
    shapes: Ints
    """A number per row, equal for rows whose optimizer states have the same kinds and sizes."""
    states: Ints
    """A number per row, equal for rows whose states have the same bytes."""
    weights: Floats
    """``[n, dim]``."""
    indices: Ints
    """The positions of the rows in ``scan``."""
    scan: _core.EntryScan

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        return self.weights.shape[1]

    @cached_property
    def norms(self) -> NDArray[np.float64]:
        """The Euclidean norm of each row's weights."""
        return np.sqrt(np.einsum("ij,ij->i", self.weights, self.weights, dtype=np.float64))

    def state(self, row: int) -> bytes:
        """The serialized ``OptimizerDump`` of one row."""
        return self.scan.state(int(self.indices[row]))

    def take(self, which: NDArray) -> Batch:
        """The rows selected by a mask or by positions."""
        columns = ("ids", "times", "offsets", "shapes", "states", "weights", "indices")
        picked = {name: getattr(self, name)[which] for name in columns}
        return Batch(path=self.path, scan=self.scan, **picked)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file: the rows of one table, or of several one after another."""

    path: str
    sections: tuple[tuple[str, int | None], ...]
    """Table name and number of rows, in the order of the file; None: all remaining rows."""
    snappy: bool = False
    name: str = ""
    """The name in the manifest."""
    saved: Saved | None = None
    """The manifest that lists the file, if there is one; the file must match its digest."""


def scan_shard(shard: Shard, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Batch]]:
    """The rows of a file in order; with ``wanted``, only of these tables.

    Raises:
        DataError: the file is truncated, damaged or of another kind (the message names the record and its byte), its
            number of rows differs from that in its sections, or a table has rows of different widths.
    """
    scan = _core.EntryScan(shard.path, shard.snappy)
    sections = iter(shard.sections)
    table, left = next(sections, ("", 0))
    dim: int | None = None
    seen = 0
    while True:
        n, floats = scan.next()
        if n == 0:
            break
        numbers, weights = np.empty((6, n), np.int64), np.empty(floats, np.float32)
        scan.columns(numbers.ctypes.data, n, weights.ctypes.data, floats)
        ends = np.cumsum(numbers[3])
        begin = 0
        while begin < n:
            while left == 0:
                table, left = next(sections, ("", -1))
                dim = None
                if left == -1:
                    expected = sum(count or 0 for _, count in shard.sections)
                    raise DataError(f"{shard.path} has more than the {expected} records that its meta file says")
            end = n if left is None else min(n, begin + left)
            if wanted is None or table in wanted:
                dims = numbers[3, begin:end]
                dim = int(dims[0]) if dim is None else dim
                if (odd := np.flatnonzero(dims != dim)).size:
                    at = begin + int(odd[0])
                    raise DataError(
                        f"{shard.path}: record {seen + at} at byte {numbers[2, at]}: id {numbers[0, at]} has "
                        f"{numbers[3, at]} weights, but earlier ones have {dim}; the file mixes tables"
                    )
                flat = weights[ends[begin] - dims[0] : ends[end - 1]]
                yield (
                    table,
                    Batch(
                        path=shard.path,
                        scan=scan,
                        ids=numbers[0, begin:end],
                        times=numbers[1, begin:end],
                        offsets=numbers[2, begin:end],
                        shapes=numbers[4, begin:end],
                        states=numbers[5, begin:end],
                        weights=flat.reshape(end - begin, dim),
                        indices=np.arange(begin, end),
                    ),
                )
            left = None if left is None else left - (end - begin)
            begin = end
        seen += n
    if shard.saved is not None:
        shard.saved.check(shard.name, scan.digest())
    missing = (left or 0) + sum(count or 0 for _, count in sections)
    if missing:
        raise DataError(f"{shard.path} ends after {seen} records, but its meta file says {seen + missing}")
