"""Redis streams: entries by id, or shared by a consumer group."""

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
_BLOCK_S = 1.0  # the longest wait inside of Redis, so that a connection that died is noticed
_PAUSE_S = 0.1
_PAGE = 1000


def _redis() -> Any:
    try:
        import redis
    except ImportError:
        raise missing_extra("redis", "redis") from None
    return redis


def connect(address: Address) -> Any:
    """A client that raises at the first failure: waiting is done here, where it can be counted."""
    redis = _redis()
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    ((host, port),) = address.hosts if len(address.hosts) == 1 else _one_host(address)
    client = redis.Redis(
        host=host, port=port, db=address.db, username=address.user, password=address.password,
        ssl=address.scheme == "rediss", protocol=2, socket_timeout=30, socket_connect_timeout=10,
        retry=Retry(NoBackoff(), 0),
    )  # fmt: skip
    for command in ("XREAD", "XREADGROUP", "XINFO STREAM", "XINFO GROUPS"):
        client.response_callbacks.pop(command, None)  # they make a dict per entry; the plain lists do
    return client


def _one_host(address: Address) -> Any:
    raise ConfigError(f"the address of a Redis stream must have one host, got {len(address.hosts)}: {address}")


class _Calls:
    """Calls Redis, with what went wrong as our errors."""

    def __init__(self, address: Address) -> None:
        self.address, self.client, self.away = address, connect(address), Away(address)
        errors = _redis().exceptions
        self.lost = (errors.ConnectionError, errors.TimeoutError)
        self._login = (errors.AuthenticationError, errors.AuthorizationError)
        self.refused = errors.ResponseError

    def once(self, *command: Any) -> Any:
        """The answer; raises what ``lost`` names if there is none."""
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
        """The answer, however often that has to be asked."""
        while True:
            try:
                return self.once(*command)
            except self.lost as error:
                self.away.failed(error)
                time.sleep(_PAUSE_S)

    def info(self, *, wait: bool = True) -> dict[str, Any]:
        """``XINFO STREAM``; empty where there is no such stream yet."""
        try:
            answer = (self.until if wait else self.once)("XINFO STREAM", self.address.name)
        except self.refused as error:
            if "no such key" in str(error):
                return {}
            raise
        return _pairs(answer)

    def close(self) -> None:
        self.client.close()


class RedisReader:
    """The entries of a stream behind an id. A position is the id of the last entry."""

    def __init__(self, address: Address, *, rank: int = 0, world: int = 1) -> None:
        self._calls, self._address = _Calls(address), address
        self._key = address.name
        self._group = address.options.get("group")
        self._consumer = address.options.get("consumer", f"rank-{rank}")
        self._field = address.options["field"].encode() if "field" in address.options else None
        if world > 1 and self._group is None:
            raise ConfigError(f"{address}: a Redis stream is shared by {world} ranks only in a group; add ?group=NAME")
        self._last = _BEGINNING
        self._number: int | None = None  # entries up to the last one, once it is known
        self._ready: deque[tuple[bytes, list[bytes]]] = deque()
        self._pending = False  # whether entries that were delivered before are to be read first
        self._unacknowledged: deque[str] = deque()
        self.ended = False

    def open(self, positions: Mapping[str, Any] | None = None) -> None:
        given = (positions or {}).get(self._key)
        info = self._calls.info()
        if given is not None and not isinstance(given, str):
            raise DataError(f"{self._address}: a position must be an id such as '1-0', got {given!r}")
        self._last = given if given is not None else self._first(info)
        _id(self._last, self._address)
        self._number = self._known_number(info)
        self._ready.clear()
        if given is not None:
            self._check_kept(info)
        if self._group is not None:
            self._join_group(given)

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            left = deadline - time.monotonic()
            try:
                self._read(max_records, max(0.0, left))
            except self._calls.lost as error:
                self._pending = self._group is not None  # an answer that was lost is asked for again
                self._calls.away.failed(error)
                time.sleep(max(0.0, min(_PAUSE_S, left)))
            if not self._ready and time.monotonic() >= deadline:
                return []
        if len(self._ready) <= max_records:
            entries = list(self._ready)
            self._ready.clear()
        else:
            entries = [self._ready.popleft() for _ in range(max_records)]
        ids = [one[0].decode() for one in entries]
        if self._group is not None:
            self._unacknowledged.extend(ids)
        self._last = ids[-1]
        if self._number is not None:
            self._number += len(ids)
        return [Chunk(self._key, self._records([one[1] for one in entries]), ids)]

    def positions(self) -> dict[str, Any]:
        return {self._key: self._last}

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        upto = positions.get(self._key)
        if self._group is None or upto is None:
            return
        upto = _id(upto, self._address)
        while self._unacknowledged:
            page = []
            for one in self._unacknowledged:
                if len(page) == _PAGE or _id(one, self._address) > upto:
                    break
                page.append(one)
            if not page:
                return
            try:
                self._calls.once("XACK", self._key, self._group, *page)
            except self._calls.lost:
                return
            for _ in page:
                self._unacknowledged.popleft()

    def lag(self) -> Lag:
        try:
            info = self._calls.info(wait=False)
        except self._calls.lost:
            return Lag()
        if not info:
            return Lag(0, 0.0)
        newest = _id(info["last-generated-id"].decode(), self._address)
        here = _id(self._last, self._address)
        if here >= newest:
            return Lag(0, 0.0)
        if self._number is None:
            self._number = self._known_number(info)
        records = None if self._number is None else max(0, info["entries-added"] - self._number)
        return Lag(records, max(0.0, time.time() - here[0] / 1000) if here[0] else None)

    def close(self) -> None:
        self._calls.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, count: int, block_s: float) -> None:
        block = ["BLOCK", max(1, int(min(block_s, _BLOCK_S) * 1000))] if block_s > 0 else []
        if self._group is None:
            answer = self._calls.once("XREAD", "COUNT", count, *block, "STREAMS", self._key, self._last)
        else:
            after = self._last if self._pending else ">"
            block = [] if self._pending else block
            head = ("XREADGROUP", "GROUP", self._group, self._consumer)
            try:
                answer = self._calls.once(*head, "COUNT", count, *block, "STREAMS", self._key, after)
            except self._calls.refused as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                self._make_group(self._last)  # the stream was deleted and made again
                return
        entries = answer[0][1] if answer else []
        if self._pending and not entries:
            self._pending = False
        deleted = [one[0] for one in entries if one[1] is None]
        if deleted:  # given to this consumer before, and gone since
            self._calls.once("XACK", self._key, self._group, *deleted)
        self._ready.extend(one for one in entries if one[1] is not None)

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
            raise bad_from(self._address, "the id of an entry behind which to begin") from None
        return text

    def _known_number(self, info: Mapping[str, Any]) -> int | None:
        """The number of the entry of ``_last`` among all that were ever added, where that can be told."""
        if not info:
            return 0
        if _id(self._last, self._address) >= _id(info["last-generated-id"].decode(), self._address):
            return info["entries-added"]
        if self._last == _BEGINNING:
            return info["entries-added"] - info["length"]
        return None

    def _check_kept(self, info: Mapping[str, Any]) -> None:
        here = _id(self._last, self._address)
        newest = _id(info["last-generated-id"].decode(), self._address) if info else (0, 0)
        if here > newest:
            records_lost(
                self._address,
                f"reading stopped behind the entry {self._last}, but the newest of the stream is "
                f"{newest[0]}-{newest[1]}: it was deleted, or it is another one",
            )
            self._last = _BEGINNING
        elif here < newest and here > (0, 0) and not self._calls.until("XRANGE", self._key, self._last, self._last):
            # Trimming removes the oldest entries, so while this one is there, none behind it is missing.
            records_lost(
                self._address,
                f"the entry {self._last}, behind which reading stopped, was trimmed, and perhaps others behind it that "
                "were not read",
            )

    def _join_group(self, given: str | None) -> None:
        self._make_group(self._last)
        # What this consumer was given before: entries up to the position are learnt, those behind it come again.
        after, done = _BEGINNING, _id(given, self._address) if given is not None else (0, 0)
        head = ("XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", _PAGE)
        while entries := self._calls.until(*head, "STREAMS", self._key, after)[0][1]:
            ids = [one[0].decode() for one in entries]
            learnt = [one for one in ids if _id(one, self._address) <= done]
            if learnt:
                self._calls.until("XACK", self._key, self._group, *learnt)
            after = ids[-1]
            if len(learnt) < len(ids):
                break
        self._unacknowledged.clear()
        self._pending = True
        if given is None:
            self._last = _BEGINNING  # pending entries are read from the first one on

    def _make_group(self, first: str) -> None:
        try:
            self._calls.until("XGROUP CREATE", self._key, self._group, first, "MKSTREAM")
        except self._calls.refused as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


class RedisWriter:
    """Adds entries with one field, ``data`` unless the address names another; ``maxlen`` trims to about that many."""

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
