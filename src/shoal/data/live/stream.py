"""`LiveStream`: batches from files first and then from sources that never end, resumable to the record.

A batch closes when it is full, or ``max_wait_s`` after its first record. While nothing is ready an empty batch comes
every fifth of a second, so that whoever trains can do what is due by the clock.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.data.features import Number
from shoal.data.lanes import LATER
from shoal.data.live.address import Address, parse_address
from shoal.data.live.journal import Journal, Run
from shoal.data.live.messages import DeadLetters, decoder, framing_of
from shoal.data.live.opening import open_reader
from shoal.data.live.protocol import Chunk, Lag, Reader
from shoal.data.samples import Samples
from shoal.data.schema import Schema
from shoal.data.source import BadRow, OnBad
from shoal.data.stream import Batch, Stream
from shoal.errors import ConfigError, DataError
from shoal.metrics import emit_counter, emit_store

TICK_S = 0.2
_TURN_S = 0.02  # how long one of several sources is waited for before the next one has its turn
_LAG_S = 1.0
_HEAD = {"epoch": 0, "unit": 0, "cursor": None, "stripe": 0, "window": 0, "rows": 0, "bad": 0, "batch": 0}
POSITION_FILE = "_positions.json"


@dataclass(slots=True)
class _Source:
    address: Address
    reader: Reader | None = None
    positions: dict[str, Any] = field(default_factory=dict)
    """Behind the last record that is in a batch."""
    held: deque[Chunk] = field(default_factory=deque)
    """What was read and not handed on yet."""

    @property
    def name(self) -> str:
        return str(self.address)


class LiveStream:
    """Iterates over the batches of ``history``, if there is one, and then of ``sources``.

    Args:
        sources: addresses (`shoal.data.live.parse_address`); several are read in turn.
        max_wait_s: how long a batch that is not full waits for more; infinite for batches that are always full.
        idle_s: the iteration ends when no record came for so long; None: never.
        dead_letters: a file for messages that cannot be read.
        journal: a file that remembers which records made which batch, so that a run that resumes makes the same ones.
        on_bad: is told of each of them.
    """

    def __init__(
        self,
        sources: Sequence[str],
        form: Any,
        schema: Schema,
        *,
        format_name: str,
        batch_size: int,
        history: Stream | None = None,
        max_wait_s: float = 1.0,
        idle_s: float | None = None,
        dead_letters: str | None = None,
        journal: str | None = None,
        rank: int = 0,
        world: int = 1,
        on_bad: OnBad | None = None,
    ) -> None:
        self.schema, self.history, self.batch_size = schema, history, batch_size
        self.max_wait_s, self.idle_s = max_wait_s, idle_s
        self._share = rank, world
        self._decode = decoder(form, format_name)
        self._framing, self._columns = framing_of(form)
        self._sources = [_Source(parse_address(one)) for one in sources]
        names = [one.name for one in self._sources]
        if len(set(names)) < len(names):
            raise ConfigError(f"[data] train: each source must be named once, got {', '.join(names)}")
        if self._framing == "parquet" and any(one.address.scheme != "dir" for one in self._sources):
            raise ConfigError(
                f'[data] message_format = "parquet" is of growing directories (dir:), got {", ".join(names)}; messages '
                "are json, csv, tsv, criteo or tfrecord"
            )
        self._letters, self._journal = DeadLetters(dead_letters), Journal(journal)
        self._on_bad = on_bad
        self._rules = schema.native()
        self._changes_numbers = any(schema.number(name) != Number() for name in schema.dense)
        self.files = history.files if history is not None else []
        self.empty = history.empty if history is not None else []
        self.sources = names
        self.state: dict[str, Any] = {
            **(history.state if history is not None else _HEAD), "live": None, "begun": history is None, "letters": 0,
        }  # fmt: skip
        """From where iteration begins; that of a `Batch` to continue after it. ``live`` has the positions by source."""
        self._last_bad = 0
        self._lag = Lag()
        self._lag_asked_s = float("-inf")
        self._safe: Mapping[str, Any] | None = None  # positions that are to be acknowledged
        self._lock = threading.Lock()

    @property
    def epochs(self) -> int:
        """Passes over the history, and one more for what never ends."""
        return 1 + (self.history.epochs if self.history is not None else 0)

    @property
    def bad_rows(self) -> int:
        """Rows and messages that were left out so far."""
        return self._last_bad

    def total_rows(self) -> float | None:
        return None

    def lag(self) -> Lag:
        """Of all sources together, at most a second old."""
        return self._lag

    def restart(self, state: Mapping[str, Any]) -> None:
        """Iteration begins behind the batch that ``state`` is of."""
        state = {**LATER, **state}
        missing = sorted(self.state.keys() - state.keys())
        if missing:
            raise DataError(f"the state of a stream lacks {', '.join(missing)}")
        self.state = {name: state[name] for name in self.state}
        if self.history is not None and not state["begun"]:
            self.history.restart(state)

    def dealt(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state from which this rank continues, where ``states`` are those of all ranks of a run, by rank; see
        `Stream.dealt`. What each of more or fewer ranks made its batches of is forgotten, since they make others."""
        rank, world = self._share
        if len(states) == world:
            return {**LATER, **states[rank]}
        self._journal.remove()
        live: dict[str, dict[str, Any]] = {}
        for one in states:
            for source, positions in (one["live"] or {}).items():
                live.setdefault(source, {}).update(positions)
        begun = any(one["begun"] for one in states)
        if self.history is not None and not begun:
            state = self.history.dealt(states)
        else:
            totals = {name: sum(one[name] for one in states) if rank == 0 else 0 for name in ("rows", "bad")}
            state = {**LATER, **states[0], **totals}
        for name in ("writes", "writer"):  # those of another rank
            state.pop(name, None)
        return {**state, "live": live or None, "begun": begun, "letters": 0}

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """What was read up to ``state`` is in a durable checkpoint: sources are told so, by the thread that reads."""
        with self._lock:
            self._safe = state

    def forget(self) -> None:
        """Removes the journal of a run that is not resumed."""
        self._journal.remove()

    def close(self) -> None:
        """Tells sources what is still to be acknowledged, and leaves them. Nobody may be iterating."""
        self._acknowledge()
        for one in self._sources:
            if one.reader is not None:
                one.reader.close()
                one.reader = None
        self._letters.close()
        self._journal.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `state` on; each iteration begins there again."""
        state = dict(self.state)
        self._last_bad = state["bad"]
        self._open(state)
        if self.history is not None and not state["begun"]:
            yield from self._of_history(state)
        state |= {"begun": True, "epoch": self.epochs - 1}
        yield from self._of_sources(state)

    def _open(self, state: dict[str, Any]) -> None:
        given: Mapping[str, Any] = state["live"] if state["live"] is not None else self._recorded()
        self._letters.open(state["letters"])
        for one in self._sources:
            start = given.get(one.name)
            if one.reader is None:
                one.reader = open_reader(
                    one.address, start, rank=self._share[0], world=self._share[1], framing=self._framing,
                    columns=self._columns,
                )  # fmt: skip
            else:
                one.reader.open(start)
            one.positions = one.reader.positions()
            one.held.clear()
        state["live"] = self._positions()

    def _recorded(self) -> Mapping[str, Any]:
        """Where the history ends in the sources, as a file next to its last one tells; addresses with ``from`` know."""
        path = os.path.join(os.path.dirname(self.files[-1]), POSITION_FILE) if self.files else ""
        if not os.path.exists(path):
            return {}
        try:
            with open(path, "rb") as file:
                given = json.load(file)
            if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
                raise ValueError("it must be {address: {partition: position}}")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: the positions at which the history ends cannot be read ({error})") from None
        own = {one.name for one in self._sources if "from" not in one.address.options}
        return {name: positions for name, positions in given.items() if name in own}

    def _of_history(self, state: dict[str, Any]) -> Iterator[Batch]:
        assert self.history is not None
        for batch in self.history:
            state |= batch.state
            self._last_bad = state["bad"]
            yield Batch(samples=batch.samples, state=dict(state))
        state["bad"] = self._last_bad = self.history.bad_rows  # the last ones are behind the last batch
        for one in self._sources:  # nothing was read meanwhile: is it all still there?
            assert one.reader is not None
            one.reader.open(one.positions)

    def _of_sources(self, state: dict[str, Any]) -> Iterator[Batch]:
        for number, runs in self._journal.load(state["window"]):
            yield from self._replayed(number, runs, state)
        parts: list[Samples] = []
        rows, closes_s = 0, 0.0
        runs: list[Run] = []
        came_s = told_s = time.monotonic()
        before = dict(state)  # what a batch that is not closed yet has not changed
        while True:
            wait_s = TICK_S if not rows else min(TICK_S, max(0.0, closes_s - time.monotonic()))
            chunks = self._poll(self.batch_size - rows, wait_s)
            now = time.monotonic()
            if chunks:
                came_s = now
                if not rows:
                    closes_s = now + self.max_wait_s
                runs += [(one.name, chunk.partition, len(chunk), chunk.positions[-1]) for one, chunk in chunks]
                samples = self._samples(chunks, state)
                if len(samples):
                    parts.append(samples)
                    rows += len(samples)
            ended = not chunks and self._ended(now - came_s)
            self._duties(now)
            if rows and (rows == self.batch_size or now >= closes_s or ended):
                batch = self._closed(Samples.join(parts), state)
                self._journal.add(state["window"], runs)
                before = dict(state)
                parts, rows, runs, told_s = [], 0, [], now
                yield batch
            elif now - told_s >= TICK_S:
                told_s = now
                yield Batch(samples=self._nothing(), state=before)
            if ended:
                return

    def _closed(self, samples: Samples, state: dict[str, Any]) -> Batch:
        state["rows"] += len(samples)
        state["window"] += 1
        state["live"] = self._positions()
        return Batch(samples=self._finished(samples), state=dict(state))

    def _replayed(self, number: int, runs: list[Run], state: dict[str, Any]) -> Iterator[Batch]:
        """A batch as the journal has it, and empty ones while its records are waited for."""
        before = dict(state)
        chunks: list[tuple[_Source, Chunk]] = []
        for name, partition, count, last in runs:
            one = next((each for each in self._sources if each.name == name), None)
            if one is None or one.reader is None:
                raise DataError(f"the batches since the checkpoint were read from {name}, which [data] train must name")
            while count:
                chunk = _take(one.held, partition, count)
                if chunk is not None:
                    chunks.append((one, chunk))
                    count -= len(chunk)
                    continue
                came = one.reader.poll(max(count, self.batch_size), TICK_S)
                one.held.extend(came)
                if not came:
                    self._duties(time.monotonic())
                    yield Batch(samples=self._nothing(), state=before)
            if chunks[-1][1].positions[-1] != last:
                raise DataError(
                    f"{name}: batch {number} ended at {last} in partition {partition} when it was first read, and now "
                    f"at {chunks[-1][1].positions[-1]}; the stream was changed. Remove {self._journal.path} to go on"
                )
        samples = self._samples(chunks, state)
        yield self._closed(samples, state)

    def _poll(self, wanted: int, wait_s: float) -> list[tuple[_Source, Chunk]]:
        """At most ``wanted`` further records; whoever has some does not wait for the others."""
        deadline = time.monotonic() + wait_s
        alone = len(self._sources) == 1
        found: list[tuple[_Source, Chunk]] = []
        while True:
            for one in self._sources:
                assert one.reader is not None
                while wanted and (chunk := _take(one.held, None, wanted)) is not None:
                    found.append((one, chunk))
                    wanted -= len(chunk)
                for chunk in one.reader.poll(wanted, 0.0 if not alone or found else wait_s) if wanted else ():
                    found.append((one, chunk))
                    wanted -= len(chunk)
                if not wanted:
                    break
            left = deadline - time.monotonic()
            if found or left <= 0 or alone:
                return found
            time.sleep(min(_TURN_S, left))

    def _samples(self, chunks: list[tuple[_Source, Chunk]], state: dict[str, Any]) -> Samples:
        """What the records of one poll hold; positions move behind them."""
        whole: list[tuple[_Source, Chunk]] = []
        for one, chunk in chunks:
            one.positions[chunk.partition] = chunk.positions[-1]
            emit_counter("stream_records_total", len(chunk), f"source={one.name}")
            if chunk.damaged:
                self._report([(one, chunk)], 0, chunk.damaged, state)
            else:
                whole.append((one, chunk))
        records: Any = whole[0][1].records if whole else []
        for _, chunk in whole[1:]:
            records = records + chunk.records
        samples, bad = self._decode(records)
        for number, why in bad:
            self._report(whole, number, why, state)
        self._last_bad = state["bad"]
        return samples

    def _report(self, chunks: list[tuple[_Source, Chunk]], number: int, why: str, state: dict[str, Any]) -> None:
        at = 0
        while number >= len(chunks[at][1]):
            number -= len(chunks[at][1])
            at += 1
        one, chunk = chunks[at]
        position = chunk.positions[number]
        state["bad"] += 1
        emit_counter("stream_bad_records_total", 1, f"source={one.name}")
        state["letters"] += self._letters.write(
            source=one.name, partition=chunk.partition, position=position, why=why, message=chunk.records[number]
        )
        if self._on_bad is not None:
            where = f"{one.name}, partition {chunk.partition}, before {position}"
            self._on_bad(BadMessage(path=where, why=why, noun="message"))

    def _finished(self, samples: Samples) -> Samples:
        label, dense = samples.label, samples.dense
        if self.schema.positive_above is not None:
            label = (label > self.schema.positive_above).float()
        if self._changes_numbers:
            dense = dense.clone()
            self._rules.apply_numbers(dense.data_ptr(), len(dense))
        return Samples(label=label, dense=dense, ids=samples.ids, offsets=samples.offsets, time=samples.time)

    def _nothing(self) -> Samples:
        return self._decode([])[0]

    def _positions(self) -> dict[str, Any]:
        return {one.name: dict(one.positions) for one in self._sources}

    def _ended(self, idle_s: float) -> bool:
        if self.idle_s is not None and idle_s >= self.idle_s:
            return not self._measure().records  # a source that has records and does not give them is slow, or away
        return all(one.reader is not None and one.reader.ended for one in self._sources)

    # --- beside reading -----------------------------------------------------------------------------------------------

    def _duties(self, now: float) -> None:
        self._acknowledge()
        if now - self._lag_asked_s >= _LAG_S:
            self._lag_asked_s = now
            self._measure()

    def _measure(self) -> Lag:
        each = []
        for one in self._sources:
            assert one.reader is not None
            each.append(lag := one.reader.lag())
            if lag.records is not None:
                emit_store("stream_lag_records", lag.records, f"source={one.name}")
            if lag.seconds is not None:
                emit_store("stream_lag_seconds", lag.seconds, f"source={one.name}")
        records = [one.records for one in each if one.records is not None]
        seconds = [one.seconds for one in each if one.seconds is not None]
        self._lag = Lag(sum(records) if len(records) == len(each) else None, max(seconds, default=None))
        return self._lag

    def _acknowledge(self) -> None:
        with self._lock:
            safe, self._safe = self._safe, None
        if safe is None:
            return
        self._journal.safe(safe["window"])
        for one in self._sources:
            if one.reader is not None and one.name in (safe["live"] or {}):
                one.reader.acknowledge(safe["live"][one.name])


def _take(held: deque[Chunk], partition: str | None, count: int) -> Chunk | None:
    """At most ``count`` neighbouring records of a partition, or of the first one, out of what is held."""
    for place, chunk in enumerate(held):
        if partition is None or chunk.partition == partition:
            if len(chunk) > count:
                held[place] = chunk.part(count, len(chunk))
                return chunk.part(0, count)
            del held[place]
            return chunk
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMessage(BadRow):
    """A message that could not be read; ``path`` says where it was."""

    def where(self) -> str:
        return self.path
