"""The differences between two checkpoints: ids added and removed, rows changed, and how far their weights moved."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.errors import DataError
from shoal.table.offline.distinct import parts_of
from shoal.table.offline.scan import Batch, Ints
from shoal.table.offline.source import Source

_SHOWN = 5


@dataclass
class TableDiff:
    """One table in both checkpoints; distances are Euclidean, between the weights of ids that are in both."""

    name: str
    rows_a: int = 0
    rows_b: int = 0
    added: int = 0
    """Ids only in B."""
    removed: int = 0
    """Ids only in A."""
    changed: int = 0
    """Ids whose weights differ in any bit."""
    state_only: int = 0
    """Ids whose weights are equal but whose optimizer state or time differs."""
    same: int = 0
    max_distance: float = 0.0
    sum_distance: float = 0.0
    farthest: list[tuple[float, int]] = field(default_factory=list)
    """(distance, id) of the ids that moved most."""
    added_ids: list[int] = field(default_factory=list)
    removed_ids: list[int] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.state_only)

    def report(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key != "sum_distance"}
        far = [{"id": i, "distance": d} for d, i in sorted(self.farthest, reverse=True)]
        mean = self.sum_distance / self.changed if self.changed else 0.0
        return plain | {"farthest": far, "mean_distance": mean}


@dataclass
class _Part:
    """The rows of A in one pass, sorted by id."""

    ids: Ints
    times: Ints
    states: Ints
    weights: np.ndarray
    met: np.ndarray

    @classmethod
    def of(cls, batches: list[Batch], where: str) -> _Part:
        dims = {batch.dim for batch in batches}
        if len(dims) > 1:
            raise DataError(f"{where}: rows have {' and '.join(map(str, sorted(dims)))} weights")
        ids = np.concatenate([b.ids for b in batches]) if batches else np.empty(0, np.int64)
        order = np.argsort(ids, kind="stable")
        columns = [
            np.concatenate([getattr(b, name) for b in batches])[order] if batches else np.empty(0, np.int64)
            for name in ("times", "states", "weights")
        ]
        ids = ids[order]
        if (again := np.flatnonzero(ids[1:] == ids[:-1])).size:
            raise DataError(f"{where}: id {ids[again[0]]} occurs more than once; see `shoal table verify`")
        return cls(ids, *columns, met=np.zeros(len(ids), bool))


def diff(a: Source, b: Source, wanted: Collection[str], *, memory_bytes: int = 1 << 30) -> list[TableDiff]:
    """Compares the wanted tables. A's rows are held in memory, in several passes if they exceed ``memory_bytes``.

    A table that is in only one of the checkpoints counts as empty in the other.
    """
    results = {name: TableDiff(name) for name in wanted}
    passes = max(1, -(-a.bytes // max(1, memory_bytes)))
    ours, theirs = set(wanted) & set(a.tables), set(wanted) & set(b.tables)
    for number in range(passes):
        held: dict[str, list[Batch]] = {name: [] for name in wanted}
        for name, batch in a.scan(ours):
            held[name].append(_part(batch, passes, number))
        parts = {name: _Part.of(batches, a.path) for name, batches in held.items()}
        held.clear()
        for name, batch in b.scan(theirs):
            _compare(results[name], parts[name], _part(batch, passes, number), b.path)
        for name, part in parts.items():
            result, gone = results[name], part.ids[~part.met]
            result.rows_a += len(part.ids)
            result.removed += len(gone)
            result.removed_ids += gone[: _SHOWN - len(result.removed_ids)].tolist()
    return list(results.values())


def _part(batch: Batch, passes: int, number: int) -> Batch:
    return batch if passes == 1 else batch.take(parts_of(batch.ids, passes) == number)


def _compare(result: TableDiff, part: _Part, batch: Batch, where: str) -> None:
    result.rows_b += len(batch)
    if not len(batch):
        return
    at = np.searchsorted(part.ids, batch.ids)
    known = at < len(part.ids)
    known[known] = part.ids[at[known]] == batch.ids[known]
    new = batch.ids[~known]
    result.added += len(new)
    result.added_ids += new[: _SHOWN - len(result.added_ids)].tolist()
    at = at[known]
    if not len(at):
        return
    if part.met[at].any():
        raise DataError(f"{where}: id {part.ids[at[part.met[at]][0]]} occurs more than once; see `shoal table verify`")
    part.met[at] = True
    before, after = part.weights[at], batch.weights[known]
    if before.shape[1] != after.shape[1]:
        raise DataError(f"rows of table {result.name!r} have {before.shape[1]} weights in A and {after.shape[1]} in B")
    moved = (before.view(np.uint32) != after.view(np.uint32)).any(axis=1)
    other = (part.times[at] != batch.times[known]) | (part.states[at] != batch.states[known])
    result.changed += int(moved.sum())
    result.state_only += int((other & ~moved).sum())
    result.same += int((~other & ~moved).sum())
    if not moved.any():
        return
    delta = after[moved].astype(np.float64) - before[moved]
    distances = np.sqrt(np.einsum("ij,ij->i", delta, delta))
    ids = batch.ids[known][moved]
    result.max_distance = max(result.max_distance, float(distances.max()))
    result.sum_distance += float(distances.sum())
    most = np.argsort(-distances)[:_SHOWN]
    candidates = [(float(distances[i]), int(ids[i])) for i in most]
    result.farthest = heapq.nlargest(_SHOWN, result.farthest + candidates)
