"""Kafka topics: manually assigned partitions, read from exact offsets."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any

from shoal.data.live.address import Address, Away, bad_from, from_time_ms, log, records_lost, remaining
from shoal.data.live.protocol import Chunk, Lag
from shoal.errors import ConfigError, DataError, PeerError, missing_extra

_ASK_S = 5.0
_PAUSE_S = 0.2
_PROBE_S = 1.0


def _kafka() -> Any:
    try:
        import confluent_kafka
    except ImportError:
        raise missing_extra("confluent-kafka", "kafka") from None
    return confluent_kafka


def settings(address: Address) -> dict[str, Any]:
    """Return the client's settings: hosts, login, and every option of the address whose name contains a dot."""
    given: dict[str, Any] = {
        "bootstrap.servers": ",".join(f"{host}:{port}" for host, port in address.hosts),
        "client.id": "shoal",
        "log.connection.close": False,
        "reconnect.backoff.max.ms": 1000,
        "logger": log,
    }
    if address.user is not None:
        given |= {"sasl.username": address.user, "sasl.password": address.password or ""}
        given |= {"security.protocol": "SASL_SSL", "sasl.mechanisms": "PLAIN"}
    return given | {name: value for name, value in address.options.items() if "." in name}


class KafkaReader:
    """Reads the partitions of a topic that belong to this rank. A position is the offset of the next record."""

    def __init__(self, address: Address, *, rank: int = 0, world: int = 1) -> None:
        kafka = _kafka()
        self._kafka, self._address, self._away = kafka, address, Away(address)
        self._group = address.options.get("group")
        self._share = rank, world
        self._down: Any = None  # the error while all brokers are unreachable
        self._probed_s = 0.0
        own = {
            "group.id": self._group or f"shoal-{address.name}",  # the client requires one; unused without a group
            "enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "error",
            "error_cb": self._on_error,
        }  # fmt: skip
        self._settings = settings(address) | own
        try:
            self._consumer = kafka.Consumer(self._settings)
        except kafka.KafkaException as error:
            raise ConfigError(f"{address}: {error.args[0].str()}") from None
        self._next: dict[int, int] = {}
        self._read_ms: int | None = None  # when the last record was produced
        self.ended = False

    def open(self, positions: Mapping[str, Any] | None = None) -> None:
        given = {}
        for name, offset in (positions or {}).items():
            if not str(name).isdecimal() or not isinstance(offset, int):
                raise DataError(f"{self._address}: a position must be an offset by partition, got {name!r}: {offset!r}")
            given[int(name)] = offset
        everywhere = self._topic_partitions()
        there = self._chosen(everywhere)
        unknown = sorted(given.keys() - set(everywhere))
        if unknown:
            records_lost(self._address, f"reading stopped in partition {unknown[0]}, which the topic does not have")
        mine = there[self._share[0] :: self._share[1]]
        starts = self._starts([one for one in mine if one not in given])
        for partition in mine:
            if partition in given:
                starts[partition] = self._kept(partition, given[partition])
        self._next = starts
        self._assign()

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        # `consume` would wait for all of these records, so wait only for the first.
        first = self._consumer.poll(timeout_s)
        if first is None:
            self._check_down()
            return []
        messages = [first]
        if max_records > 1:
            messages += self._consumer.consume(max_records - 1, 0.0)
        if any([one.error() for one in messages]):  # noqa: C419  a list is quicker
            messages = self._without_errors(messages)
            if not messages:
                return []
        if self._down is not None:
            self._down = None
            self._away.back()
        self._read_ms = messages[-1].timestamp()[1]
        if len(self._next) == 1:
            return [self._chunk(next(iter(self._next)), messages)]
        runs = groupby(messages, key=self._kafka.Message.partition)
        return [self._chunk(partition, list(run)) for partition, run in runs]

    def positions(self) -> dict[str, Any]:
        return {str(partition): offset for partition, offset in sorted(self._next.items())}

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        if self._group is None or self._down is not None or not positions:
            return
        offsets = [self._at(int(partition), offset) for partition, offset in positions.items()]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except self._kafka.KafkaException as error:
            log.warning("%s: offsets could not be committed (%s); retrying later", self._address, error)

    def lag(self) -> Lag:
        if self._down is not None:
            return Lag(reachable=False)
        records = 0
        for partition, offset in self._next.items():
            try:
                _, high = self._consumer.get_watermark_offsets(self._at(partition), timeout=_ASK_S, cached=True)
                if high < 0:
                    _, high = self._consumer.get_watermark_offsets(self._at(partition), timeout=_ASK_S)
            except self._kafka.KafkaException:
                return Lag(reachable=False)
            records += max(0, high - offset)
        if not records:
            return Lag(0, 0.0)
        return Lag(records, None if self._read_ms is None else max(0.0, time.time() - self._read_ms / 1000))

    def close(self) -> None:
        self._consumer.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _chunk(self, partition: int, messages: list[Any]) -> Chunk:
        positions = [one.offset() + 1 for one in messages]
        self._next[partition] = positions[-1]
        records = [one.value() for one in messages]
        if None in records:  # deleted keys of a compacted topic
            records = [b"" if one is None else one for one in records]
        return Chunk(str(partition), records, positions)

    def _without_errors(self, messages: list[Any]) -> list[Any]:
        """Return the records of a poll that also returned errors; raise if an error is permanent."""
        codes = self._kafka.KafkaError
        reset, good = False, []
        for one in messages:
            error = one.error()
            if error is None:
                good.append(one)
            elif error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
                partition = one.partition()
                records_lost(
                    self._address,
                    f"the offset {self._next[partition]} of partition {partition} no longer exists",
                )
                self._next[partition] = self._marks(partition)[0]
                reset = True
            elif error.fatal() or not (error.retriable() or error.code() == codes._PARTITION_EOF):
                raise PeerError(f"{self._address}: {error.str()}")
        if reset:
            self._assign()
            return []  # the records that came with it will be read again
        return good

    def _on_error(self, error: Any) -> None:
        """Called by `poll`."""
        if error.code() == self._kafka.KafkaError._ALL_BROKERS_DOWN:
            self._down = error
        elif error.code() == self._kafka.KafkaError._AUTHENTICATION:
            raise ConfigError(f"{self._address}: Kafka refuses the login ({error.str()})")

    def _check_down(self) -> None:
        if self._down is None:
            return
        now = time.monotonic()
        if now - self._probed_s > _PROBE_S and self._next:
            self._probed_s = now
            try:
                self._consumer.get_watermark_offsets(self._at(next(iter(self._next))), timeout=_PROBE_S)
            except self._kafka.KafkaException as error:
                self._away.failed(error)
                return
            self._down = None
            self._away.back()

    # --- beginning ----------------------------------------------------------------------------------------------------

    def _at(self, partition: int, offset: int | None = None) -> Any:
        if offset is None:
            return self._kafka.TopicPartition(self._address.name, partition)
        return self._kafka.TopicPartition(self._address.name, partition, offset)

    def _assign(self) -> None:
        self._consumer.assign([self._at(partition, offset) for partition, offset in self._next.items()])

    def _ask(self, question: Any) -> Any:
        """Repeat a call until it succeeds; return its answer."""
        while True:
            try:
                answer = question()
            except self._kafka.KafkaException as error:
                self._away.failed(error)
                time.sleep(_PAUSE_S)
                continue
            self._away.back()
            return answer

    def _topic_partitions(self) -> list[int]:
        name = self._address.name

        def ask() -> list[int]:
            topic = self._consumer.list_topics(name, timeout=_ASK_S).topics[name]
            if topic.error is not None:
                raise self._kafka.KafkaException(topic.error)
            return sorted(topic.partitions)

        return self._ask(ask)

    def _chosen(self, there: list[int]) -> list[int]:
        """Return the partitions that the address names, by default all."""
        if (chosen := self._address.options.get("partitions")) is not None:
            try:
                wanted = sorted({int(one) for one in chosen.split(",")})
            except ValueError:
                wanted = []
            if not wanted or not set(wanted) <= set(there):
                names = ", ".join(map(str, there))
                raise ConfigError(f"{self._address}: partitions must be some of {names}, got {chosen!r}")
            there = wanted
        if len(there) < self._share[1]:
            raise ConfigError(
                f"{self._address}: each rank needs its own partition, got {len(there)} partitions for "
                f"{self._share[1]} ranks"
            )
        return there

    def _marks(self, partition: int) -> tuple[int, int]:
        return self._ask(lambda: self._consumer.get_watermark_offsets(self._at(partition), timeout=_ASK_S))

    def _kept(self, partition: int, offset: int) -> int:
        """Return the offset itself if it still exists, else the oldest one that does."""
        low, high = self._marks(partition)
        if low <= offset <= high:
            return offset
        what = "were deleted before they were read" if offset < low else "do not exist: it is another topic"
        first, last = (offset, low) if offset < low else (high, offset)
        records_lost(self._address, f"the records {first} to {last - 1} of partition {partition} {what}")
        return low

    def _starts(self, partitions: list[int]) -> dict[int, int]:
        """Return where partitions without a position begin: at the group's committed offset, else at ``from``."""
        starts: dict[int, int] = {}
        if self._group is not None and partitions:
            asked = [self._at(one) for one in partitions]
            committed = self._ask(lambda: self._consumer.committed(asked, timeout=_ASK_S))
            starts = {one.partition: self._kept(one.partition, one.offset) for one in committed if one.offset >= 0}
        text = self._address.options.get("from", "beginning")
        for partition in (one for one in partitions if one not in starts):
            low, high = self._marks(partition)
            if text in ("beginning", "end"):
                starts[partition] = low if text == "beginning" else high
            elif text.isdecimal():
                starts[partition] = self._kept(partition, int(text))
            elif (at_ms := from_time_ms(text)) is not None:
                starts[partition] = self._offset_of_time(partition, at_ms, low, high)
            else:
                raise bad_from(self._address, "an offset")
        return starts

    def _offset_of_time(self, partition: int, at_ms: int, low: int, high: int) -> int:
        """Return the offset of the first record produced at a time or later; ``high`` if there is none."""
        asked = [self._at(partition, at_ms)]
        (found,) = self._ask(lambda: self._consumer.offsets_for_times(asked, timeout=_ASK_S))
        if found.offset >= 0:
            return found.offset
        # No record is that new, or the broker has no index of times: check the newest record, then search.
        with closing(self._kafka.Consumer(self._settings | {"enable.partition.eof": True})) as consumer:
            if low == high or (self._produced_ms(consumer, partition, high - 1) or 0) < at_ms:
                return high
            while low < high:
                middle = (low + high) // 2
                if (self._produced_ms(consumer, partition, middle) or at_ms) < at_ms:
                    low = middle + 1
                else:
                    high = middle
        return low

    def _produced_ms(self, consumer: Any, partition: int, offset: int) -> int | None:
        """Return when the record at an offset, or the first one after it, was produced; None at the end.

        The last offsets may have no records: the end of a transaction, or compacted records.
        """
        codes = self._kafka.KafkaError
        consumer.assign([self._at(partition, offset)])

        def ask() -> int | None:
            message = consumer.poll(_ASK_S)
            error = codes(codes._TIMED_OUT) if message is None else message.error()
            if error is not None and error.code() != codes._PARTITION_EOF:
                raise self._kafka.KafkaException(error)
            return message.timestamp()[1] if error is None else None

        return self._ask(ask)


class KafkaWriter:
    """Produces records to all in-sync replicas, in order; a writer never duplicates its own records."""

    def __init__(self, address: Address) -> None:
        self._kafka, self._address, self._away = _kafka(), address, Away(address)
        own = {
            "enable.idempotence": True,
            "linger.ms": 5,
            "delivery.timeout.ms": 60_000,
            "error_cb": lambda error: None,
        }
        try:
            self._producer = self._kafka.Producer(own | settings(address))
        except self._kafka.KafkaException as error:
            raise ConfigError(f"{address}: {error.args[0].str()}") from None
        self._asking: Any = None

    def append(self, records: Sequence[bytes], *, partition: str | None = None, at: int | None = None) -> None:
        if at is None:
            self._produce(records, partition)
            return
        if partition is None:
            raise ConfigError(f"{self._address}: append with a number of records needs a partition")
        while rest := remaining(self._address, records, at, self.written(partition)):
            try:
                self._produce(rest, partition)
            except PeerError as error:
                self._away.failed(error)

    def _produce(self, records: Sequence[bytes], partition: str | None) -> None:
        failed: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error)

        where = {} if partition is None else {"partition": int(partition)}
        for record in records:
            while True:
                try:
                    self._producer.produce(self._address.name, record, on_delivery=delivered, **where)
                    break
                except BufferError:
                    self._producer.poll(0.1)
            self._producer.poll(0)
        self._producer.flush()  # at most delivery.timeout.ms
        if failed:
            raise PeerError(f"{self._address}: {len(failed)} of {len(records)} records were not stored ({failed[0]})")
        self._away.back()

    def written(self, partition: str | None = None) -> int:
        if self._asking is None:
            own = {"group.id": "shoal-writer", "enable.auto.commit": False, "error_cb": lambda error: None}
            self._asking = self._kafka.Consumer(settings(self._address) | own)
        while True:
            try:
                topic = self._producer.list_topics(self._address.name, timeout=_ASK_S).topics[self._address.name]
                if topic.error is not None:
                    raise self._kafka.KafkaException(topic.error)
                partitions = list(topic.partitions) if partition is None else [int(partition)]
                marks = [
                    self._asking.get_watermark_offsets(
                        self._kafka.TopicPartition(self._address.name, one), timeout=_ASK_S
                    )
                    for one in partitions
                ]
            except self._kafka.KafkaException as error:
                self._away.failed(error)
                time.sleep(_PAUSE_S)
                continue
            self._away.back()
            return sum(high for _, high in marks)

    def close(self) -> None:
        self._producer.flush(_ASK_S)
        if self._asking is not None:
            self._asking.close()
