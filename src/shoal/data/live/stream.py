"""`LiveStream`: batches from files first and then from sources that never end, resumable to the record.

A batch closes when it is full, or ``max_wait_s`` after its first record. While nothing is ready an empty batch comes
every fifth of a second, so that whoever trains can do what is due by the clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.data.lanes import LATER
from shoal.data.live.address import log
from shoal.data.live.by_partition import ByPartition
from shoal.data.live.journal import Journal, Run
from shoal.data.live.messages import DeadLetters, decoder, framing_of
from shoal.data.live.numbering import Numbering, Servers, numbering_of, where_to_begin
from shoal.data.live.opening import open_reader
from shoal.data.live.protocol import Chunk, Lag
from shoal.data.live.sources import BadMessage, Source, Sources, take
from shoal.data.samples import Finish, Samples
from shoal.data.schema import Schema
from shoal.data.source import OnBad
from shoal.data.stream import Batch, Stream
from shoal.errors import ConfigError, DataError
from shoal.metrics import emit_counter

TICK_S = 0.2
_LAG_S = 1.0
_HEAD = {"epoch": 0, "unit": 0, "cursor": None, "stripe": 0, "window": 0, "rows": 0, "bad": 0, "batch": 0}


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
        self._sources = Sources(sources)
        names = self._sources.names
        if self._framing == "parquet" and any(one.address.scheme != "dir" for one in self._sources):
            raise ConfigError(
                f'[data] message_format = "parquet" is of growing directories (dir:), got {", ".join(names)}; messages '
                "are json, csv, tsv, criteo or tfrecord"
            )
        self._letters, self._journal = DeadLetters(dead_letters), Journal(journal)
        self._on_bad = on_bad
        self._finish = Finish(schema)
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
        self._servers: Servers | None = None
        self._queues: ByPartition | None = None
        self.note: Callable[[str], None] = log.info
        """Is told where reading begins elsewhere than at the checkpoint."""
        self._safe: Mapping[str, Any] | None = None  # positions that are to be acknowledged
        self._lock = threading.Lock()

    def learn_by_partition(self, servers: Servers) -> bool:
        """From now on each batch has records of one partition, whose name and number it tells (`Batch.records`), and
        partitions begin where ``servers`` have learnt them to. Returns False if a source has no numbers."""
        if all(numbering_of(one.address) is not None for one in self._sources):
            self._servers = servers
        return self._servers is not None

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
        self._sources.close()
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
        given: Mapping[str, Any] = state["live"] if state["live"] is not None else self._sources.recorded(self.files)
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
        if self._servers is not None:
            self._go_to_learnt(self._servers, given, state["window"])
        state["live"] = self._sources.positions()

    def _go_to_learnt(self, servers: Servers, given: Mapping[str, Any], window: int) -> None:
        """Begins each partition where servers have learnt it to, unless batches since the checkpoint are made again."""
        here = {one.name: one.positions for one in self._sources}
        numberings = {one.name: self._numbering(one) for one in self._sources}
        starts, journal_holds = where_to_begin(here, given, numberings, self._journal.load(window), servers)
        if not journal_holds:
            self._journal.remove()
        self._queues = ByPartition(self.batch_size, self.max_wait_s)
        for one in self._sources:
            assert one.reader is not None
            numbering, elsewhere = numberings[one.name], {}
            for partition, position in one.positions.items():
                start, name = starts[one.name, partition], numbering.name(partition)
                self._queues.follow(one, partition, numbering.number, () if start is None else start.cuts)
                if start is None:
                    servers.begin_records(name, numbering.number(position))
                else:
                    elsewhere[partition] = numbering.position(start.number)
                    self.note(f"{name} was learnt up to {elsewhere[partition]}; reading begins there")
            if elsewhere:
                one.reader.open({**one.positions, **elsewhere})
                one.positions = one.reader.positions()

    @staticmethod
    def _numbering(one: Source) -> Numbering:
        found = numbering_of(one.address)
        assert found is not None  # `learn_by_partition` has looked
        return found

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
        if self._queues is not None:
            yield from self._of_partitions(self._queues, state)
            return
        parts: list[Samples] = []
        rows, closes_s = 0, 0.0
        runs: list[Run] = []
        came_s = told_s = time.monotonic()
        before = dict(state)  # what a batch that is not closed yet has not changed
        while True:
            wait_s = TICK_S if not rows else min(TICK_S, max(0.0, closes_s - time.monotonic()))
            chunks = self._sources.poll(self.batch_size - rows, wait_s)
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

    def _of_partitions(self, queues: ByPartition, state: dict[str, Any]) -> Iterator[Batch]:
        """Batches of one partition each."""
        came_s = told_s = time.monotonic()
        before = dict(state)
        while True:
            wait_s = min(TICK_S, queues.wait_s(time.monotonic()))
            chunks = self._sources.poll(queues.room, wait_s) if queues.room else []
            now = time.monotonic()
            came_s = now if chunks else came_s
            for one, chunk in chunks:
                queues.add(one, chunk, now)
            ended = not chunks and self._ended(now - came_s)
            self._duties(now)
            found = queues.take(now, ended)
            if found is not None:
                taken = [(found[0], chunk) for chunk in found[1]]
                samples = self._samples(taken, state)
                if len(samples):
                    runs = [(one.name, chunk.partition, len(chunk), chunk.positions[-1]) for one, chunk in taken]
                    batch = self._closed(samples, state, runs)
                    self._journal.add(state["window"], runs)
                    before, told_s = dict(state), now
                    yield batch
            elif now - told_s >= TICK_S:
                told_s = now
                yield Batch(samples=self._nothing(), state=before)
            if ended and not len(queues):
                return

    def _closed(self, samples: Samples, state: dict[str, Any], runs: Sequence[Run] = ()) -> Batch:
        state["rows"] += len(samples)
        state["window"] += 1
        state["live"] = self._sources.positions()
        records = None
        if self._servers is not None and len({(source, partition) for source, partition, _, _ in runs}) == 1:
            name, partition, _, last = runs[-1]
            numbering = self._numbering(next(one for one in self._sources if one.name == name))
            records = numbering.name(partition), numbering.number(last)
        return Batch(samples=self._finish(samples), state=dict(state), records=records)

    def _replayed(self, number: int, runs: list[Run], state: dict[str, Any]) -> Iterator[Batch]:
        """A batch as the journal has it, and empty ones while its records are waited for."""
        before = dict(state)
        chunks: list[tuple[Source, Chunk]] = []
        for name, partition, count, last in runs:
            one = self._sources.named(name)
            if one is None or one.reader is None:
                raise DataError(f"the batches since the checkpoint were read from {name}, which [data] train must name")
            while count:
                chunk = take(one.held, partition, count)
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
        yield self._closed(samples, state, runs)

    def _samples(self, chunks: list[tuple[Source, Chunk]], state: dict[str, Any]) -> Samples:
        """What the records of one poll hold; positions move behind them."""
        whole: list[tuple[Source, Chunk]] = []
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

    def _report(self, chunks: list[tuple[Source, Chunk]], number: int, why: str, state: dict[str, Any]) -> None:
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

    def _nothing(self) -> Samples:
        return self._decode([])[0]

    def _ended(self, idle_s: float) -> bool:
        if self.idle_s is not None and idle_s >= self.idle_s:
            return not self._measure().records  # a source that has records and does not give them is slow, or away
        return self._sources.ended

    # --- beside reading -----------------------------------------------------------------------------------------------

    def _duties(self, now: float) -> None:
        self._acknowledge()
        if now - self._lag_asked_s >= _LAG_S:
            self._lag_asked_s = now
            self._measure()

    def _measure(self) -> Lag:
        self._lag = self._sources.lag()
        return self._lag

    def _acknowledge(self) -> None:
        with self._lock:
            safe, self._safe = self._safe, None
        if safe is not None:
            self._journal.safe(safe["window"])
            self._sources.acknowledge(safe["live"] or {})
