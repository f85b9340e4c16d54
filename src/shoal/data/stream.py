"""`Stream`: batches from files, shuffled in windows, divided over ranks, and resumable at any batch.

A stream reads a window of rows, permutes it by the seed, the epoch and the window's number, and hands it out in
batches. Its position is therefore a few numbers: the cursor at the window's beginning, and how many batches of the
window were taken. Resuming reads that window again. The positions of all ranks of a run can be dealt to another number
of ranks (`shoal.data.lanes`), and so can those of the workers of a `DataLoader` (`shoal.data.workers`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shoal.data.lanes import LATER, PLACE, Lane, deal, lane_of
from shoal.data.samples import Finish, Samples
from shoal.data.schema import Schema
from shoal.data.source import BadRow, Cursor, Format, OnBad, Unit
from shoal.data.workers import WORKER, WORKERS, Together, of_all_ranks, part_of
from shoal.errors import ConfigError, DataError

_UNEVEN = 1.5  # largest share of a rank, relative to the mean; above it ranks take turns reading batches from all files
_WINDOW = 1 << 15  # rows read at once: at least this many, and at least one batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples, and the ``state`` from which a stream continues after them."""

    samples: Samples
    state: dict[str, Any]
    records: tuple[str, int] | None = None
    """The partition of all its records, and the number of the last one; None if unknown."""

    def __len__(self) -> int:
        return len(self.samples)

    def pin_memory(self) -> Batch:
        """The batch with its samples in pinned memory; called by a `DataLoader`."""
        return replace(self, samples=self.samples.pin_memory())


class _Place:
    """An iteration's cursor, kept open from one window to the next: finding a position in a gzip file again means
    decompressing everything before it."""

    def __init__(self) -> None:
        self.cursor: Cursor | None = None

    def leave(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
            self.cursor = None


class Stream(IterableDataset[Batch]):
    """Iterates over batches from ``files``. Every rank makes one, with the same arguments except ``rank``.

    The workers of ``DataLoader(stream, batch_size=None, num_workers=…)`` divide the files of their rank. The batches
    of a worker carry that worker's state; those of `through` carry one from which all workers can resume. Each worker
    makes its own passes over its share, counts bad rows in the states of its batches, and calls its own copy of
    ``on_bad``.

    Args:
        files: paths and glob patterns, read in sorted order unless shuffled.
        batch_size: samples per batch on each rank. The last batch of an epoch can be smaller, and so can the last
            batch of a file if there are too few files to divide and ranks take turns in the same ones.
        shuffle_rows: the number of rows held in memory and shuffled; 0 keeps the order of the files.
        epochs: passes over the files.
        on_bad: called with each bad row, which is then skipped; by default they are only counted (``bad_rows``).
    """

    def __init__(
        self,
        files: Sequence[str],
        form: Format,
        schema: Schema,
        *,
        batch_size: int,
        shuffle_rows: int = 0,
        seed: int = 0,
        epochs: int = 1,
        rank: int = 0,
        world: int = 1,
        on_bad: OnBad | None = None,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("shuffle_rows", shuffle_rows, 0),
            ("epochs", epochs, 1),
        ):
            if value < least:
                raise ConfigError(f"data: {name} must be at least {least}, got {value}")
        if not 0 <= rank < world:
            raise ConfigError(f"data: rank must be 0..{world - 1}, got {rank}")
        self.form, self.schema = form, schema
        self.batch_size, self.shuffle_rows, self.seed, self.epochs = batch_size, shuffle_rows, seed, epochs
        self.rank, self.world = rank, world
        self.files = list(files) if hasattr(form, "sources") else expand(files)
        self._on_bad = on_bad
        self._finish = Finish(schema)
        units = {path: form.units(path) for path in self.files}
        self.empty = [path for path, parts in units.items() if not parts]
        """Files of size zero."""
        self._units = [unit for parts in units.values() for unit in parts]
        batches = max(1, (shuffle_rows or _WINDOW) // batch_size) if shuffle_rows or batch_size < _WINDOW else 1
        self._window = batches * batch_size
        self._progress: dict[str, Any] = {
            "epoch": 0, "unit": 0, "cursor": None, "stripe": 0, "window": 0, "rows": 0, "bad": 0, "batch": 0, **LATER,
        }  # fmt: skip
        # The batches of a shuffled window are copies, so the next window can reuse its memory.
        self._room: dict[str, np.ndarray] | None = {} if shuffle_rows else None
        self._measured = (0, 0.0)  # rows, and the share of all data that was read to get them
        self.first = dict(self._progress)
        """The state of a stream before the first read."""
        self.state = dict(self.first)
        """Where iteration begins. Set it to the state of a `Batch` to continue after that batch."""

    @property
    def bad_rows(self) -> int:
        """Rows skipped so far."""
        return self._progress["bad"]

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `state` on; each iteration begins there again."""
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        share = self if count == 1 and WORKERS not in self.state else part_of(self, number, count)
        progress = self._progress = share._progress = dict(share.state)
        place = _Place()
        try:
            for batch in share._batches(progress, place):
                if count > 1:
                    batch.state[WORKER] = [share.rank - self.rank * count, count]
                yield batch
        finally:
            place.leave()

    def through(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a `DataLoader` over this stream, each with a state from which all workers continue.

        ::

            loader = DataLoader(stream, batch_size=None, num_workers=4)
            for batch in stream.through(loader):
                ...
                save(batch.state)

        To resume, call ``stream.restart(batch.state)`` before the loader is made. The order is the same unless the
        number of workers changes.
        """
        together: Together | None = None
        for batch in loader:
            if WORKER not in batch.state:  # there are no workers, or one
                yield batch
                continue
            if together is None:
                _, count = batch.state[WORKER]
                parts = sorted((part_of(self, number, count) for number in range(count)), key=lambda one: one.rank)
                together = Together([part.state for part in parts])
            yield replace(batch, state=together.after(batch.state))

    def _batches(self, progress: dict[str, Any], place: _Place) -> Iterator[Batch]:
        skip = progress["batch"]
        while progress["epoch"] < self.epochs:
            lane = self._lane(progress)
            start = {**progress, "batch": 0, "end": None}
            samples = self._fill(progress, lane, place)
            if samples is None:
                place.leave()
                self._next_lane(progress)
                skip = progress["batch"]
                continue
            self._measured = (progress["rows"] + len(samples), self._share(progress, lane))
            order = self._order(start, lane, len(samples))
            end = {name: progress[name] for name in ("unit", "cursor", "stripe")}
            for number, begin in enumerate(range(0, len(samples), self.batch_size)):
                stop = min(begin + self.batch_size, len(samples))
                if number < skip:
                    continue
                part = samples.part(begin, stop) if order is None else samples.take(order[begin:stop])
                last = stop == len(samples)
                if last:
                    progress["rows"] += len(samples)
                    progress["window"] += 1
                    state = {**progress, "batch": 0, "end": None}
                else:
                    state = {**start, "batch": number + 1, "end": end}
                yield Batch(samples=part, state=state)
            skip = 0

    def total_rows(self) -> float | None:
        """Estimated rows that this rank reads in all epochs, from the sizes read so far; None at the beginning."""
        rows, share = self._measured
        return rows / share if share else None

    def _share(self, progress: Mapping[str, Any], lane: Lane) -> float:
        """The share of all epochs that was read, by the sizes of units; 0 if other ranks began this epoch."""
        if progress["lane"] is not None:
            return 0.0
        units = self._epoch_units(progress["epoch"])
        mine = [units[one] for one in lane.chosen(len(units))]
        sizes = [unit.size for unit in mine]
        here = progress["unit"]
        read = float(sum(sizes[:here])) + _read_of(mine[here : here + 1], progress["cursor"])
        return (progress["epoch"] + (read / sum(sizes) if sum(sizes) else 1.0)) / self.epochs

    def restart(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration after the batch that has this state."""
        if WORKER in state:
            number, count = state[WORKER]
            raise DataError(
                f"the state is only that of worker {number} of {count}; use the states of the batches of "
                "stream.through(loader)"
            )
        if WORKERS in state:
            self.state = dict(state)
            return
        state = {**LATER, **state}
        missing = sorted(self.first.keys() - state.keys())
        if missing:
            raise DataError(f"the state of a stream must have all of its fields; missing: {', '.join(missing)}")
        lane = self._lane(state)
        if not 0 <= lane.unit <= max(1, len(lane.chosen(len(self._units)))):
            raise DataError(f"the state of a stream is at unit {lane.unit}, but there are fewer units")
        self.state = {name: state[name] for name in self.first}

    def dealt(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state from which this rank continues, given the ``states`` of all ranks of a run, by rank.

        If that run had the same number of ranks, this is the rank's own state. Otherwise the rest of the epoch is dealt
        to the current ranks, so that each of its samples is read once. Ranks do not communicate: all must pass the same
        states, from the same step. States of workers are dealt out once the workers have started.
        """
        if any(WORKERS in state for state in states):
            return of_all_ranks(states, self.first)
        each = [{**LATER, **state} for state in states]
        world = len(each)
        if world == self.world:
            return each[self.rank]
        last = max(state["epoch"] for state in each)
        lanes: list[Lane] = []
        for rank, state in enumerate(each):
            lanes.append(self._lane(state, rank, world))
            lanes += [lane_of(one["lane"], one) for one in state["lanes"]]
            lanes += [self._whole(epoch, rank, world) for epoch in range(lanes[-1].epoch + 1, last + 1)]

        def read(lane: Lane) -> float:
            units = self._epoch_units(lane.epoch)
            return _read_of([units[one] for one in lane.chosen(len(units))[lane.unit : lane.unit + 1]], lane.cursor)

        sizes = {epoch: [unit.size for unit in self._epoch_units(epoch)] for epoch in {lane.epoch for lane in lanes}}
        whole = self._whole(last, self.rank, self.world)
        empty = replace(whole, unit=len(whole.chosen(len(self._units))), window=1)  # others read this rank's share
        first, *rest = deal(lanes, self.world, sizes.__getitem__, read)[self.rank] or [empty]
        totals = {name: sum(state[name] for state in each) if self.rank == 0 else 0 for name in ("rows", "bad")}
        return {**each[0], **totals, **self._json(first), "lanes": [self._json(lane, named=True) for lane in rest]}

    def _whole(self, epoch: int, rank: int, world: int) -> Lane:
        """Make the lane of a rank's complete share of an epoch."""
        return Lane(epoch=epoch, world=world, rank=rank, striped=_uneven(self._units, world))

    def _lane(self, state: Mapping[str, Any], rank: int | None = None, world: int | None = None) -> Lane:
        rule = state["lane"]
        if rule is None:
            rule = self._whole(0, self.rank if rank is None else rank, world or self.world).rule()
        return lane_of(rule, state)

    def _json(self, lane: Lane, *, named: bool = False) -> dict[str, Any]:
        """Convert a lane to JSON values for a state."""
        own = lane.rule() == self._whole(0, self.rank, self.world).rule()
        return {name: getattr(lane, name) for name in PLACE} | {"lane": None if own and not named else lane.rule()}

    def _next_lane(self, progress: dict[str, Any]) -> None:
        """Move to the next lane that other ranks began, or to the next epoch."""
        if progress["lanes"]:
            progress.update(progress["lanes"][0], lanes=progress["lanes"][1:])
            return
        found = progress["rows"] or progress["window"] or progress["lane"] is not None
        progress.update(
            epoch=progress["epoch"] + 1, unit=0, cursor=None, stripe=0, window=0, batch=0, end=None, lane=None
        )
        if progress["epoch"] < self.epochs and not found:
            progress["epoch"] = self.epochs  # this rank's files are empty, so all further epochs are, too

    def _fill(self, progress: dict[str, Any], lane: Lane, place: _Place) -> Samples | None:
        """Read the next window; None at the end of the lane."""
        units = self._epoch_units(progress["epoch"])
        mine = lane.chosen(len(units))
        parts: list[Samples] = []
        wanted = self._window
        while wanted > 0 and progress["unit"] < len(mine):
            if lane.until is not None and progress["stripe"] >= lane.until:
                break
            if place.cursor is None:
                unit = units[mine[progress["unit"]]]
                place.cursor = self.form.open(unit, progress["cursor"], self._count(progress, lane))
            takes = not lane.striped or progress["stripe"] % lane.world == lane.rank
            read = _exactly(place.cursor, self.batch_size if lane.striped else wanted)
            if not read:
                place.leave()
                progress.update(unit=progress["unit"] + 1, cursor=None)
                continue
            progress["stripe"] += 1
            progress["cursor"] = place.cursor.state()
            if takes:
                parts += read
                wanted -= sum(map(len, read))
        return self._finish(Samples.join(parts, self._room)) if parts else None

    def _epoch_units(self, epoch: int) -> list[Unit]:
        """All units, in the order of an epoch."""
        units = self._units
        if self.shuffle_rows:
            order = torch.randperm(len(units), generator=_generator(self.seed, epoch, 0, 0), device="cpu")
            units = [units[i] for i in order.tolist()]
        return units

    def _order(self, start: Mapping[str, Any], lane: Lane, rows: int) -> torch.Tensor | None:
        if not self.shuffle_rows:
            return None
        generator = _generator(self.seed, start["epoch"], start["window"] + 1, lane.rank)
        return torch.randperm(rows, generator=generator, device="cpu")

    def _count(self, progress: dict[str, Any], lane: Lane) -> OnBad:
        def report(row: BadRow) -> None:
            mine = not lane.striped or lane.rank == 0
            progress["bad"] += mine
            if self._on_bad is not None and mine:
                self._on_bad(row)

        return report


def expand(files: Sequence[str]) -> list[str]:
    """Expand paths and patterns to existing files, sorted and without duplicates."""
    found: list[str] = []
    for pattern in files:
        paths = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        if os.path.isdir(pattern):
            paths = sorted(entry.path for entry in os.scandir(pattern) if entry.is_file() and entry.name[0] not in "._")
        if not paths or not all(map(os.path.isfile, paths)):
            raise ConfigError(f"data: there is no file {pattern!r}")
        found += paths
    if not found:
        raise ConfigError(f"data: there must be at least one file, got {list(files)}")
    return list(dict.fromkeys(found))


def _uneven(units: Sequence[Unit], world: int) -> bool:
    """Whether dividing by units would leave some rank with much more than others."""
    shares = [sum(unit.size for unit in units[rank::world]) for rank in range(world)]
    return max(shares) > _UNEVEN * sum(shares) / world


def _read_of(units: Sequence[Unit], cursor: Mapping[str, Any] | None) -> float:
    """Return how much of the first of these units ``cursor`` has read."""
    if not units or cursor is None:
        return 0.0
    at = cursor["offset"] - units[0].begin if "offset" in cursor else cursor.get("row", 0)
    return min(max(at, 0), units[0].size)


def _exactly(cursor: Cursor, rows: int) -> list[Samples]:
    """Read ``rows`` samples, in parts, or as many as are left."""
    parts: list[Samples] = []
    while rows > 0:
        part = cursor.read(rows)
        if part is None:
            break
        if len(part):
            parts.append(part)
            rows -= len(part)
    return parts


def _generator(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 0x9E3779B97F4A7C15 + number + 1) & ((1 << 63) - 1)
        seed ^= seed >> 29
    return torch.Generator().manual_seed(seed)
