"""Statistics of a checkpoint's tables, and access to single rows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from shoal.errors import DataError
from shoal.fid import slot_v1, slot_v2
from shoal.table.config.messages import EntryDump, OptimizerDump
from shoal.table.offline.scan import Batch
from shoal.table.offline.source import Source

SHOWN_SLOTS = 10
_SAMPLED_TIMES = 1000  # per batch


def optimizers_of(state: bytes) -> list[dict[str, Any]]:
    """The optimizers of a row's segments, from their stored state: ``[{"kind": "adagrad", "dim": 8}]``."""
    try:
        dump = OptimizerDump.FromString(state)
    except DecodeError as error:
        raise DataError("the state of a row is not an OptimizerDump message") from error
    found = []
    for element in dump.dump:
        kind = element.WhichOneof("type")
        sizes = []
        if kind is not None:
            for descriptor, value in getattr(element, kind).ListFields():
                if descriptor.is_repeated:
                    sizes.append(len(value))
        found.append({"kind": kind, "dim": max(sizes, default=None)})
    return found


@dataclass
class TableStat:
    """Statistics of one table's rows as a restore would see them."""

    name: str
    rows: int = 0
    dim: int | None = None
    optimizers: list[list[dict[str, Any]]] = field(default_factory=list)
    """One list per layout of state that occurs; more than one means that optimizers were mixed."""
    first_update: int | None = None
    last_update: int | None = None
    min_id: int | None = None
    max_id: int | None = None
    norm_sum: float = 0.0
    norm_max: float = 0.0
    zero_rows: int = 0
    bad_rows: int = 0
    """The number of rows with NaN or infinity."""
    slots: Counter[int] = field(default_factory=Counter)
    _times: list[np.ndarray] = field(default_factory=list)
    _shapes: set[int] = field(default_factory=set)

    def add(self, batch: Batch, slot: Callable[[Any], Any]) -> None:
        n = len(batch)
        self.dim = batch.dim if self.dim is None else self.dim
        if self.dim != batch.dim:
            raise DataError(
                f"{batch.path}: rows of table {self.name!r} have {batch.dim} weights, but earlier ones have {self.dim}"
            )
        norms = batch.norms
        good = np.isfinite(norms)
        self.norm_sum += float(norms[good].sum())
        self.norm_max = max(self.norm_max, float(norms[good].max(initial=0.0)))
        self.bad_rows += int(n - good.sum())
        self.zero_rows += int((norms == 0).sum())
        self.rows += n
        self._times.append(batch.times[:: max(1, n // _SAMPLED_TIMES)].copy())
        first, last = int(batch.times.min()), int(batch.times.max())
        self.first_update = first if self.first_update is None else min(self.first_update, first)
        self.last_update = last if self.last_update is None else max(self.last_update, last)
        low, high = int(batch.ids.min()), int(batch.ids.max())
        self.min_id = low if self.min_id is None else min(self.min_id, low)
        self.max_id = high if self.max_id is None else max(self.max_id, high)
        slots, counts = np.unique(slot(batch.ids), return_counts=True)
        self.slots.update(dict(zip(slots.tolist(), counts.tolist(), strict=True)))
        for shape in set(np.unique(batch.shapes).tolist()) - self._shapes:
            self._shapes.add(shape)
            self.optimizers.append(optimizers_of(batch.state(int(np.argmax(batch.shapes == shape)))))

    def ages(self) -> dict[str, int]:
        """Quantiles of row ages, in seconds before the newest write, from a sample."""
        if not self._times or self.last_update is None:
            return {}
        ages = self.last_update - np.concatenate(self._times)
        return {f"p{q}": int(np.percentile(ages, q)) for q in (10, 50, 90)}

    def report(self) -> dict[str, Any]:
        hidden = ("_shapes", "_times", "slots", "norm_sum")
        plain = {key: value for key, value in vars(self).items() if key not in hidden}
        mean = self.norm_sum / max(1, self.rows - self.bad_rows)
        return plain | {
            "norm_mean": mean,
            "ages_s": self.ages(),
            "num_slots": len(self.slots),
            "slots": dict(self.slots.most_common(SHOWN_SLOTS)),
        }


def slot_function(version: Literal["v1", "v2"]) -> Callable[[Any], Any]:
    """The function that gives the slot of each id in an array."""
    import torch

    of = slot_v1 if version == "v1" else slot_v2
    return lambda ids: of(torch.from_numpy(np.ascontiguousarray(ids))).numpy()


def table_stats(
    source: Source,
    wanted: Collection[str],
    slots: Literal["v1", "v2"] = "v2",
    *,
    seen: Callable[[int], None] | None = None,
) -> list[TableStat]:
    """Statistics of the wanted tables."""
    stats = {name: TableStat(name) for name in wanted}
    slot = slot_function(slots)
    for name, batch in source.scan(wanted):
        stats[name].add(batch, slot)
        if seen is not None:
            seen(len(batch))
    return list(stats.values())


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, for display."""

    table: str
    id: int
    time: int
    norm: float
    weights: list[float]
    state: bytes = b""

    def report(self, *, weights: bool = True) -> dict[str, Any]:
        shown = {"table": self.table, "id": self.id, "time": self.time, "norm": self.norm}
        return shown | ({"weights": self.weights} if weights else {})


def rows_of(table: str, batch: Batch, which: Collection[int], *, state: bool = False) -> Iterator[Row]:
    for i in map(int, which):
        yield Row(
            table=table, id=int(batch.ids[i]), time=int(batch.times[i]), norm=float(batch.norms[i]),
            weights=batch.weights[i].tolist(), state=batch.state(i) if state else b"",
        )  # fmt: skip


def find(source: Source, wanted: Collection[str], id: int) -> list[Row]:
    """The row of an id in each of the wanted tables; each table is read only until the id is found."""
    found: list[Row] = []
    left = set(wanted)
    for name, batch in source.scan(wanted):
        at = np.flatnonzero(batch.ids == id)
        if name in left and len(at):
            found += rows_of(name, batch, at[:1].tolist(), state=True)
            left.discard(name)
            if not left:
                break
    return found


def state_of(row: Row) -> dict[str, Any]:
    """The optimizer state of a row as plain values, one entry per segment."""
    from google.protobuf.json_format import MessageToDict

    dump = EntryDump()
    dump.opt.ParseFromString(row.state)
    return MessageToDict(dump.opt, preserving_proto_field_name=True)


def listing(
    source: Source, wanted: Collection[str], *, slot: int | None = None, slots: Literal["v1", "v2"] = "v2",
    since: int | None = None, skip: int = 0, limit: int | None = 20,
) -> Iterator[Row]:  # fmt: skip
    """Rows in the order of the files."""
    slot_of = slot_function(slots)
    for name, batch in source.scan(wanted):
        keep = np.ones(len(batch), bool)
        if slot is not None:
            keep &= slot_of(batch.ids) == slot
        if since is not None:
            keep &= batch.times >= since
        places = np.flatnonzero(keep)
        passed = min(skip, len(places))
        skip -= passed
        places = places[passed:]
        if limit is not None:
            places = places[:limit]
            limit -= len(places)
        yield from rows_of(name, batch, places.tolist())
        if limit == 0:
            return


def top(source: Source, wanted: Collection[str], by: Literal["norm", "recent"], count: int) -> dict[str, list[Row]]:
    """The ``count`` rows of each wanted table with the largest norm or the newest update; largest first.

    Equal rows are sorted by id. By norm, rows with NaN or infinity come first because they indicate a problem.
    """
    best: dict[str, list[tuple[float, int, Row]]] = {name: [] for name in wanted}
    for name, batch in source.scan(wanted):
        keys = batch.times.astype(np.float64) if by == "recent" else np.nan_to_num(batch.norms, nan=np.inf)
        heap = best[name]
        if len(heap) == count:
            places = np.flatnonzero(keys >= heap[0][0])
        else:
            places = np.arange(len(batch))
        if len(places) > count:
            order = np.lexsort((batch.ids[places], -keys[places]))[:count]
            places = places[order]
        for row, i in zip(rows_of(name, batch, places.tolist()), places.tolist(), strict=True):
            item = (float(keys[i]), -row.id, row)
            if len(heap) < count:
                heapq.heappush(heap, item)
            elif item[:2] > heap[0][:2]:
                heapq.heapreplace(heap, item)
    return {name: [row for *_, row in sorted(heap, key=lambda t: t[:2], reverse=True)] for name, heap in best.items()}
