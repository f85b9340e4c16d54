"""`LiveStream`: batches from files first and then from unbounded sources, resumable at any record.

A batch closes when it is full, or ``max_wait_s`` after its first record. While nothing is ready, an empty batch comes
every fifth of a second, so that the training loop can do its timed work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.data.lanes import LATER
from shoal.data.live.address import StoppedError, log, stop_waiting_when
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
        max_wait_s: how long a partial batch waits for more records; infinite for full batches only.
        idle_s: the iteration ends after waiting this long for a record, if all sources answer; None: never.
        dead_letters: a file for messages that cannot be read.
        journal: a file that records which records made which batch, so that a resumed run makes the same batches.
        on_bad: called with each message that cannot be read.
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
                f'[data] message_format = "parquet" needs growing directories (dir:), got {", ".join(names)}; messages '
                "must be json, csv, tsv, criteo or tfrecord"
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
        """Where iteration begins: the state of a `Batch` continues after it. ``live`` has the positions by source."""
        self._last_bad = 0
        self._lag = Lag()
        self._lag_asked_s = float("-inf")
        self._servers: Servers | None = None
        self._queues: ByPartition | None = None
        self.note: Callable[[str], None] = log.info
        """Called with a message if reading does not begin at the checkpoint."""
        self.stopped: Callable[[], bool] = lambda: False
        """Whether to stop waiting for sources that do not answer when they are opened; the iteration then ends."""
        self._safe: Mapping[str, Any] | None = None  # positions to acknowledge
        self._lock = threading.Lock()

    def learn_by_partition(self, servers: Servers) -> bool:
        """Make each batch from records of one partition, named in `Batch.records`, and begin each partition where
        the learning of ``servers`` ended. Returns False if a source's positions cannot be numbered."""
        if all(numbering_of(one.address) is not None for one in self._sources):
            self._servers = servers
        return self._servers is not None

    @property
    def epochs(self) -> int:
        """Passes over the history, plus one for the sources."""
        return 1 + (self.history.epochs if self.history is not None else 0)

    @property
    def bad_rows(self) -> int:
        """Rows and messages skipped so far."""
        return self._last_bad

    def total_rows(self) -> float | None:
        return None

    def lag(self) -> Lag:
        """The lag of all sources together, at most a second old."""
        return self._lag

    def restart(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration after the batch that has this state."""
        state = {**LATER, **state}
        missing = sorted(self.state.keys() - state.keys())
        if missing:
            raise DataError(f"the state of a stream must have all of its fields; missing: {', '.join(missing)}")
        self.state = {name: state[name] for name in self.state}
        if self.history is not None and not state["begun"]:
            self.history.restart(state)

    def dealt(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state from which this rank continues, given the ``states`` of all ranks of a run, by rank; see
        `Stream.dealt`. If the number of ranks has changed, the journal is dropped, because batches will differ."""
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
        for name in ("writes", "writer"):  # they belong to another rank
            state.pop(name, None)
        return {**state, "live": live or None, "begun": begun, "letters": 0}

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """Record that a durable checkpoint has everything up to ``state``; the reading thread acknowledges it."""
        with self._lock:
            self._safe = state

    def forget(self) -> None:
        """Remove the journal of a run that is not resumed."""
        self._journal.remove()

    def close(self) -> None:
        """Send the last acknowledgements and close the sources. No iteration may be running."""
        self._acknowledge()
        self._sources.close()
        self._letters.close()
        self._journal.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """The batches from `state` on; each iteration begins there again."""
        state = dict(self.state)
        self._last_bad = state["bad"]
        try:
            self._waiting(self._open, state)
            if self.history is not None and not state["begun"]:
                yield from self._of_history(state)
                self._waiting(self._reopen)
        except StoppedError as error:
            log.warning("%s", error)
            yield Batch(samples=self._empty(), state=dict(state))
            return
        state |= {"begun": True, "epoch": self.epochs - 1}
        yield from self._of_sources(state)

    def _waiting(self, step: Callable[..., None], *args: Any) -> None:
        with stop_waiting_when(self.stopped):
            step(*args)

    def _reopen(self) -> None:
        """Open the sources after the history; they were not read meanwhile, so check that no record was deleted."""
        for one in self._sources:
            assert one.reader is not None
            one.reader.open(one.positions)

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
        """Begin each partition where the servers' learning ended, unless the batches of the journal are repeated."""
        here = {one.name: one.positions for one in self._sources}
        numberings = {one.name: self._numbering(one) for one in self._sources}
        starts, journal_valid = where_to_begin(here, given, numberings, self._journal.load(window), servers)
        if not journal_valid:
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
        assert found is not None  # checked by `learn_by_partition`
        return found

    def _of_history(self, state: dict[str, Any]) -> Iterator[Batch]:
        assert self.history is not None
        for batch in self.history:
            state |= batch.state
            self._last_bad = state["bad"]
            yield Batch(samples=batch.samples, state=dict(state))
        state["bad"] = self._last_bad = self.history.bad_rows  # includes bad rows after the last batch

    def _of_sources(self, state: dict[str, Any]) -> Iterator[Batch]:
        for number, runs in self._journal.load(state["window"]):
            yield from self._replayed(number, runs, state)
        if self._queues is not None:
            yield from self._of_partitions(self._queues, state)
            return
        parts: list[Samples] = []
        rows, closes_s = 0, 0.0
        runs: list[Run] = []
        quiet_s, yielded_s = 0.0, time.monotonic()
        before = dict(state)  # the state without the records of the open batch
        while True:
            begin = time.monotonic()
            wait_s = TICK_S if not rows else min(TICK_S, max(0.0, closes_s - begin))
            chunks = self._sources.poll(self.batch_size - rows, wait_s)
            now = time.monotonic()
            quiet_s = 0.0 if chunks else quiet_s + min(now - begin, wait_s)  # a stall here is not silence there
            if chunks:
                if not rows:
                    closes_s = now + self.max_wait_s
                runs += [(one.name, chunk.partition, len(chunk), chunk.positions[-1]) for one, chunk in chunks]
                samples = self._samples(chunks, state)
                if len(samples):
                    parts.append(samples)
                    rows += len(samples)
            ended = not chunks and self._ended(quiet_s)
            self._periodic_work(now)
            if rows and (rows == self.batch_size or now >= closes_s or ended):
                batch = self._closed(Samples.join(parts), state)
                self._journal.add(state["window"], runs)
                before = dict(state)
                parts, rows, runs, yielded_s = [], 0, [], now
                yield batch
            elif now - yielded_s >= TICK_S:
                yielded_s = now
                yield Batch(samples=self._empty(), state=before)
            if ended:
                return

    def _of_partitions(self, queues: ByPartition, state: dict[str, Any]) -> Iterator[Batch]:
        """Batches of one partition each."""
        quiet_s, yielded_s = 0.0, time.monotonic()
        before = dict(state)
        while True:
            begin = time.monotonic()
            wait_s = min(TICK_S, queues.wait_s(begin))
            chunks = self._sources.poll(queues.room, wait_s) if queues.room else []
            now = time.monotonic()
            quiet_s = 0.0 if chunks else quiet_s + min(now - begin, wait_s)
            for one, chunk in chunks:
                queues.add(one, chunk, now)
            ended = not chunks and self._ended(quiet_s)
            self._periodic_work(now)
            found = queues.take(now, ended)
            if found is not None:
                taken = [(found[0], chunk) for chunk in found[1]]
                samples = self._samples(taken, state)
                if len(samples):
                    runs = [(one.name, chunk.partition, len(chunk), chunk.positions[-1]) for one, chunk in taken]
                    batch = self._closed(samples, state, runs)
                    self._journal.add(state["window"], runs)
                    before, yielded_s = dict(state), now
                    yield batch
            elif now - yielded_s >= TICK_S:
                yielded_s = now
                yield Batch(samples=self._empty(), state=before)
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
        """A batch as recorded in the journal, and empty batches while waiting for its records."""
        before = dict(state)
        chunks: list[tuple[Source, Chunk]] = []
        for name, partition, count, last in runs:
            one = self._sources.named(name)
            if one is None or one.reader is None:
                raise DataError(f"the batches since the checkpoint were read from {name}; add it to [data] train")
            while count:
                chunk = take(one.held, partition, count)
                if chunk is not None:
                    chunks.append((one, chunk))
                    count -= len(chunk)
                    continue
                polled = one.reader.poll(max(count, self.batch_size), TICK_S)
                one.held.extend(polled)
                if not polled:
                    self._periodic_work(time.monotonic())
                    yield Batch(samples=self._empty(), state=before)
            if chunks[-1][1].positions[-1] != last:
                raise DataError(
                    f"{name}: batch {number} ended at {last} in partition {partition} when it was first read, but now "
                    f"at {chunks[-1][1].positions[-1]}; the stream was changed. Remove {self._journal.path} to continue"
                )
        samples = self._samples(chunks, state)
        yield self._closed(samples, state, runs)

    def _samples(self, chunks: list[tuple[Source, Chunk]], state: dict[str, Any]) -> Samples:
        """Decode the records of one poll and move positions past them."""
        readable: list[tuple[Source, Chunk]] = []
        for one, chunk in chunks:
            one.positions[chunk.partition] = chunk.positions[-1]
            emit_counter("stream_records_total", len(chunk), f"source={one.name}")
            if chunk.damaged:
                self._report([(one, chunk)], 0, chunk.damaged, state)
            else:
                readable.append((one, chunk))
        records: Any = readable[0][1].records if readable else []
        for _, chunk in readable[1:]:
            records = records + chunk.records
        samples, bad = self._decode(records)
        for number, why in bad:
            self._report(readable, number, why, state)
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

    def _empty(self) -> Samples:
        return self._decode([])[0]

    def _ended(self, quiet_s: float) -> bool:
        if self.idle_s is not None and quiet_s >= self.idle_s:
            lag = self._measure()
            return lag.reachable and not lag.records  # a source that has records but returns none is slow
        return self._sources.ended

    # --- periodic work ------------------------------------------------------------------------------------------------

    def _periodic_work(self, now: float) -> None:
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
