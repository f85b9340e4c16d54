"""Redis streams, read by id or through a consumer group."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.live.address import Address, Away, bad_from, from_time_ms, records_lost, remaining
from shoal.data.live.protocol import Chunk, Lag
from shoal.errors import ConfigError, DataError, PeerError, missing_extra

_BEGINNING = "0-0"
_MAX_SEQUENCE = (1 << 64) - 1
_BLOCK_S = 1.0  # the longest blocking call, so that a dead connection is noticed
_PAUSE_S = 0.1
_PAGE = 1000


def _redis() -> Any:
    try:
        import redis
    except ImportError:
        raise missing_extra("redis", "redis") from None
    return redis


def connect(address: Address) -> Any:
    """Make a client that raises at the first failure; this module retries and counts failures itself."""
    redis = _redis()
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    ((host, port),) = address.hosts if len(address.hosts) == 1 else _one_host(address)
    client = redis.Redis(
        host=host, port=port, db=address.db, username=address.user, password=address.password,
        ssl=address.scheme == "rediss", protocol=2, socket_timeout=30, socket_connect_timeout=10,
        retry=Retry(NoBackoff(), 0),
    )  # fmt: skip
    for command in ("XREAD", "XREADGROUP", "XINFO STREAM", "XINFO GROUPS", "XINFO CONSUMERS"):
        client.response_callbacks.pop(command, None)  # they would make a dict per entry
    return client


def _one_host(address: Address) -> Any:
    raise ConfigError(f"the address of a Redis stream must have one host, got {len(address.hosts)}: {address}")


class _Calls:
    """Calls Redis and converts its errors to Shoal's."""

    def __init__(self, address: Address) -> None:
        self.address, self.client, self.away = address, connect(address), Away(address)
        errors = _redis().exceptions
        self.lost = (errors.ConnectionError, errors.TimeoutError)
        self._login = (errors.AuthenticationError, errors.AuthorizationError)
        self.refused = errors.ResponseError

    def once(self, *command: Any) -> Any:
        """Call once and return the answer; raises one of ``lost`` if there is none."""
        try:
            answer = self.client.execute_command(*command)
        except self._login as error:
            raise ConfigError(f"{self.address}: Redis refuses the login ({error})") from None
        except self.refused as error:
            if str(error).startswith("WRONGTYPE"):
                raise ConfigError(f"{self.address}: the key {self.address.name!r} is not a stream") from None
            raise
        self.away.back()
        return answer

    def until(self, *command: Any) -> Any:
        """Repeat the call until there is an answer."""
        while True:
            try:
                return self.once(*command)
            except self.lost as error:
                self.away.failed(error)
                time.sleep(_PAUSE_S)

    def info(self, *, wait: bool = True) -> dict[str, Any]:
        """``XINFO STREAM``; empty if the stream does not exist yet."""
        try:
            answer = (self.until if wait else self.once)("XINFO STREAM", self.address.name)
        except self.refused as error:
            if "no such key" in str(error):
                return {}
            raise
        return _pairs(answer)

    def close(self) -> None:
        self.client.close()


class _Consumer:
    """The position of one reader: of the complete stream, or of a group's consumer."""

    def __init__(self, name: str, partition: str) -> None:
        self.name, self.partition = name, partition
        self.last = _BEGINNING
        self.pending = False
        """Whether entries that were delivered earlier must be read first."""
        self.unacknowledged: deque[str] = deque()


class RedisReader:
    """Reads the entries of a stream after an id. A position is the id of the last entry.

    In a group, the entries delivered to each consumer are a partition, ``stream@consumer``. Unfinished entries of
    ranks that no longer exist are read by the remaining ranks.
    """

    def __init__(self, address: Address, *, rank: int = 0, world: int = 1) -> None:
        self._calls, self._address = _Calls(address), address
        self._key = address.name
        self._group = address.options.get("group")
        self._rank, self._world = rank, world
        named = address.options.get("consumer")
        self._base = "rank" if named is None else named
        name = f"{self._base}-{rank}" if named is None or world > 1 else named
        self._own = _Consumer(name, self._key if self._group is None else f"{self._key}@{name}")
        self._former: list[_Consumer] = []
        self._field = address.options["field"].encode() if "field" in address.options else None
        if world > 1 and self._group is None:
            raise ConfigError(f"{address}: {world} ranks can share a Redis stream only in a group; add ?group=NAME")
        self._number: int | None = None  # the number of entries up to the last one read, once known
        self._ready: deque[tuple[bytes, list[bytes]]] = deque()
        self._ready_of = self._own
        self.ended = False

    def open(self, positions: Mapping[str, Any] | None = None) -> None:
        given = self._given(positions or {}, self._own)
        info = self._calls.info()
        self._own.last = given if given is not None else self._first(info)
        _id(self._own.last, self._address)
        self._number = self._known_number(info)
        self._ready.clear()
        if given is not None:
            self._check_kept(info)
        if self._group is not None:
            self._make_group(self._own.last)
            self._former = self._without_rank()
            for one in self._former:
                self._join_group(one, self._given(positions or {}, one))
            self._join_group(self._own, given)

    def _given(self, positions: Mapping[str, Any], one: _Consumer) -> str | None:
        given = positions.get(one.partition)
        if given is not None and not isinstance(given, str):
            raise DataError(f"{self._address}: a position must be an id such as '1-0', got {given!r}")
        return given

    def _without_rank(self) -> list[_Consumer]:
        """Return consumers of former ranks with unfinished entries that this rank takes over."""
        found = []
        for one in map(_pairs, self._calls.until("XINFO CONSUMERS", self._key, self._group)):
            name, pending = one["name"].decode(), one["pending"]
            base, _, number = name.rpartition("-")
            of_rank = base == self._base and number.isdecimal() and pending
            if of_rank and int(number) >= self._world and int(number) % self._world == self._rank:
                found.append(_Consumer(name, f"{self._key}@{name}"))
        return found

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._ready_of = next((one for one in self._former if one.pending), self._own)
            left = deadline - time.monotonic()
            try:
                self._read(self._ready_of, max_records, max(0.0, left))
            except self._calls.lost as error:
                self._ready_of.pending = self._group is not None  # read a lost answer's entries again
                self._calls.away.failed(error)
                time.sleep(max(0.0, min(_PAUSE_S, left)))
            if not self._ready and time.monotonic() >= deadline:
                return []
        if len(self._ready) <= max_records:
            entries = list(self._ready)
            self._ready.clear()
        else:
            entries = [self._ready.popleft() for _ in range(max_records)]
        ids, one = [each[0].decode() for each in entries], self._ready_of
        if self._group is not None:
            one.unacknowledged.extend(ids)
        one.last = ids[-1]
        if self._number is not None and one is self._own:
            self._number += len(ids)
        return [Chunk(one.partition, self._records([each[1] for each in entries]), ids)]

    def positions(self) -> dict[str, Any]:
        return {one.partition: one.last for one in (*self._former, self._own)}

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        if self._group is not None:
            for one in (*self._former, self._own):
                if one.partition in positions:
                    self._acknowledge(one, _id(positions[one.partition], self._address))

    def _acknowledge(self, one: _Consumer, upto: tuple[int, int]) -> None:
        while one.unacknowledged:
            page = []
            for entry in one.unacknowledged:
                if len(page) == _PAGE or _id(entry, self._address) > upto:
                    break
                page.append(entry)
            if not page:
                return
            try:
                self._calls.once("XACK", self._key, self._group, *page)
            except self._calls.lost:
                return
            for _ in page:
                one.unacknowledged.popleft()

    def lag(self) -> Lag:
        try:
            info = self._calls.info(wait=False)
        except self._calls.lost:
            return Lag(reachable=False)
        if not info:
            return Lag(0, 0.0)
        newest = _id(info["last-generated-id"].decode(), self._address)
        here = _id(self._own.last, self._address)
        if here >= newest:
            return Lag(0, 0.0)
        if self._number is None:
            self._number = self._known_number(info)
        records = None if self._number is None else max(0, info["entries-added"] - self._number)
        return Lag(records, max(0.0, time.time() - here[0] / 1000) if here[0] else None)

    def close(self) -> None:
        self._calls.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, one: _Consumer, count: int, block_s: float) -> None:
        block = ["BLOCK", max(1, int(min(block_s, _BLOCK_S) * 1000))] if block_s > 0 else []
        if self._group is None:
            answer = self._calls.once("XREAD", "COUNT", count, *block, "STREAMS", self._key, one.last)
        else:
            after = one.last if one.pending else ">"
            block = [] if one.pending else block
            head = ("XREADGROUP", "GROUP", self._group, one.name)
            try:
                answer = self._calls.once(*head, "COUNT", count, *block, "STREAMS", self._key, after)
            except self._calls.refused as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                self._make_group(one.last)  # the stream was deleted and created again
                return
        entries = answer[0][1] if answer else []
        if one.pending and not entries:
            one.pending = False
        deleted = [each[0] for each in entries if each[1] is None]
        if deleted:  # delivered to this consumer earlier, and deleted since
            self._calls.once("XACK", self._key, self._group, *deleted)
        self._ready.extend(each for each in entries if each[1] is not None)

    def _records(self, fields: list[list[bytes]]) -> list[bytes]:
        if self._field is None and all(len(one) == 2 for one in fields):
            return [one[1] for one in fields]
        return [self._record(one) for one in fields]

    def _record(self, fields: list[bytes]) -> bytes:
        if self._field is None and len(fields) == 2:
            return fields[1]
        named = dict(zip(fields[::2], fields[1::2], strict=False))
        if self._field in named:
            return named[self._field]
        text = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in named.items()}
        return json.dumps(text).encode()

    # --- beginning ----------------------------------------------------------------------------------------------------

    def _first(self, info: Mapping[str, Any]) -> str:
        text = self._address.options.get("from", "beginning")
        if text == "beginning":
            return _BEGINNING
        if text == "end":
            return info["last-generated-id"].decode() if info else _BEGINNING
        if (at_ms := from_time_ms(text)) is not None:
            return f"{at_ms - 1}-{_MAX_SEQUENCE}" if at_ms > 0 else _BEGINNING
        try:
            _id(text, self._address)
        except DataError:
            raise bad_from(self._address, "the id of the entry to begin after") from None
        return text

    def _known_number(self, info: Mapping[str, Any]) -> int | None:
        """The number of our last entry among all entries ever added, if known."""
        if not info:
            return 0
        if _id(self._own.last, self._address) >= _id(info["last-generated-id"].decode(), self._address):
            return info["entries-added"]
        if self._own.last == _BEGINNING:
            return info["entries-added"] - info["length"]
        return None

    def _check_kept(self, info: Mapping[str, Any]) -> None:
        here = _id(self._own.last, self._address)
        newest = _id(info["last-generated-id"].decode(), self._address) if info else (0, 0)
        if here > newest:
            records_lost(
                self._address,
                f"reading stopped after entry {self._own.last}, but the stream's newest entry is "
                f"{newest[0]}-{newest[1]}: the stream was deleted or replaced",
            )
            self._own.last = _BEGINNING
        elif (
            here < newest
            and here > (0, 0)
            and not self._calls.until("XRANGE", self._key, self._own.last, self._own.last)
        ):
            # Trimming removes the oldest entries, so while this one exists, none after it is missing.
            records_lost(
                self._address,
                f"entry {self._own.last}, after which reading stopped, was trimmed, and perhaps later ones that were "
                "not read",
            )

    def _join_group(self, one: _Consumer, given: str | None) -> None:
        """Resume a consumer: acknowledge its entries up to the position; later ones are delivered again."""
        after, done = _BEGINNING, _id(given, self._address) if given is not None else (0, 0)
        head = ("XREADGROUP", "GROUP", self._group, one.name, "COUNT", _PAGE)
        while entries := self._calls.until(*head, "STREAMS", self._key, after)[0][1]:
            ids = [each[0].decode() for each in entries]
            learnt = [each for each in ids if _id(each, self._address) <= done]
            if learnt:
                self._calls.until("XACK", self._key, self._group, *learnt)
            after = ids[-1]
            if len(learnt) < len(ids):
                break
        one.unacknowledged.clear()
        one.pending = True
        one.last = given if given is not None else _BEGINNING  # read pending entries from the first one

    def _make_group(self, first: str) -> None:
        try:
            self._calls.until("XGROUP CREATE", self._key, self._group, first, "MKSTREAM")
        except self._calls.refused as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


class RedisWriter:
    """Adds entries with one field, by default ``data``; the address's ``maxlen`` trims to about that many entries."""

    def __init__(self, address: Address) -> None:
        self._calls, self._address = _Calls(address), address
        self._field = address.options.get("field", "data").encode()
        maxlen = int(address.number("maxlen", 0))
        self._trim = ["MAXLEN", "~", maxlen] if maxlen else []

    def append(self, records: Sequence[bytes], *, partition: str | None = None, at: int | None = None) -> None:
        self._check(partition)
        try:
            if at is None:
                self._add(records)
                return
            while rest := remaining(self._address, records, at, self.written()):
                try:
                    self._add(rest)
                except self._calls.lost as error:
                    self._calls.away.failed(error)
                    time.sleep(_PAUSE_S)
        except self._calls.lost as error:
            raise PeerError(f"{self._address} does not answer ({error}); some records may not be stored") from error

    def _add(self, records: Sequence[bytes]) -> None:
        for begin in range(0, len(records), _PAGE):
            pipe = self._calls.client.pipeline(transaction=False)
            for record in records[begin : begin + _PAGE]:
                pipe.execute_command("XADD", self._address.name, *self._trim, "*", self._field, record)
            pipe.execute()
            self._calls.away.back()

    def written(self, partition: str | None = None) -> int:
        self._check(partition)
        return self._calls.info().get("entries-added", 0)

    def _check(self, partition: str | None) -> None:
        if partition not in (None, self._address.name):
            raise ConfigError(f"{self._address}: the only partition is {self._address.name!r}, got {partition!r}")

    def close(self) -> None:
        self._calls.close()


def _pairs(answer: Any) -> dict[str, Any]:
    return {name.decode(): value for name, value in zip(answer[::2], answer[1::2], strict=True)}


def _id(text: str, address: Address) -> tuple[int, int]:
    milliseconds, _, sequence = text.partition("-")
    if not milliseconds.isdecimal() or not (sequence or "0").isdecimal():
        raise DataError(f"{address}: an entry's id must be like '1526919030474-0', got {text!r}")
    return int(milliseconds), int(sequence or 0)
