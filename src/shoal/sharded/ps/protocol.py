"""The messages between workers and parameter servers: one fixed header, then raw tensor frames.

A request is ``[header, ids, values]`` and a reply ``[header, payload...]``; numbers are little-endian.
docs/parameter_server.md describes the layout; the durable log stores requests in the same form.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError, DataError
from shoal.table.clock import Now

MAGIC = b"SHPS"
VERSION = 1

FLOAT16 = 1  # values and replies are float16 on the wire
DEDUP = 2  # apply_gradients sums equal ids first
NATIVE = 4  # a lookup may name unknown tables
NOW = 8  # the sender gave no time: the server sets its own before it logs the write, and no row's time decreases
RECORDS = 16  # the write is for input records: those after ``acked`` up to ``seq`` of the stream's partition

PARTITION = b"part"
"""The prefix of the ids of streams whose writes have the flag ``RECORDS``."""
MAX_CACHED = 1 << 16  # bytes; longer lists of table names are not cached

_REQUEST = struct.Struct("<4sHHIQ16sQQqqQIII")
_REPLY = struct.Struct("<4sHHQQ")


class Op(IntEnum):
    """The operation of a request. Those from ASSIGN on change the shard: they are ordered, logged and applied once."""

    INFO = 1
    LOOKUP = 2
    CONTAINS = 3
    ENTRIES = 4
    SIZES = 5
    CHECKPOINT = 7
    FIND_INITIAL = 8
    """LOOKUP that returns an unknown id's initial row, or zeros while an admission filter is active."""
    PUBLISH = 9
    """Make the server send its rows to replicas, or report its progress: JSON in and out."""
    SCAN = 10
    """A page of a table: at most as many rows as the count says. In: JSON ``[part, after]``; ``after`` is the last
    id of the page before, or null. Out: ``[part, after]`` of the next page, or null; ids; rows."""
    FOLLOW = 11
    """A follower requests records of the log and reports which it has: JSON in; JSON and the records out."""
    FETCH = 12
    """A part of a checkpoint's file, or the list of files, for a server without a checkpoint: JSON in."""
    HANDOVER = 13
    """Make the leader of a shard hand over to a follower that has all records. Out: the follower's address."""
    LEARNT = 14
    """The number of the last write of each given stream, 0 if it has none: hexadecimal ids as JSON in, numbers as JSON
    out."""
    OUTCOME = 15
    """Only in the log, after a write to tables with budgets: the ids whose rows it evicted, and the refused ids."""
    ASSIGN = 32
    ASSIGN_ADD = 33
    APPLY = 34
    REINITIALIZE = 35
    INSERT = 36
    CREATE = 37
    CLEAR = 38
    EVICT = 39
    ERASE = 40
    RESTORE = 41

    @property
    def writes(self) -> bool:
        return self >= Op.ASSIGN


WITH_IDS = frozenset(
    {
        Op.LOOKUP, Op.CONTAINS, Op.ENTRIES, Op.FIND_INITIAL, Op.ASSIGN, Op.ASSIGN_ADD, Op.APPLY, Op.REINITIALIZE,
        Op.INSERT, Op.ERASE, Op.OUTCOME,
    }
)  # fmt: skip
"""The operations whose ids frame holds as many ids as the header counts."""
ALWAYS = frozenset(Op) - {
    Op.FIND_INITIAL, Op.PUBLISH, Op.SCAN, Op.FOLLOW, Op.FETCH, Op.HANDOVER, Op.LEARNT, Op.OUTCOME,
}  # fmt: skip
"""The operations of a server that does not report its operations, which is of version 0.1."""


class Status(IntEnum):
    """The outcome of a request. UNAVAILABLE, GAP and, at another server of the shard, NOT_LEADER can be retried."""

    OK = 0
    BAD_REQUEST = 1
    UNKNOWN_TABLE = 2
    UNSUPPORTED = 3
    UNAVAILABLE = 4
    GAP = 5
    INTERNAL = 6
    EXPIRED = 7
    NOT_LEADER = 8
    """This server is a follower; the second frame of the reply is the leader's address, if it is known."""


@dataclass(slots=True)
class Request:
    """One request, decoded. ``counts[i]`` ids of ``ids`` belong to table ``names[i]``, in that order."""

    op: Op
    request: int = 0
    stream: bytes = bytes(16)
    """The id of the ordered stream of writes: of a worker, or of a partition of its input."""
    seq: int = 0
    """The number of a write in its stream, from 1."""
    acked: int = 0
    """Every write of the stream up to this one has been answered; with ``RECORDS``, the previous write."""
    flags: int = 0
    global_step: int = 0
    req_time: int = 0
    read_version: int = 0
    """The shard's version when the worker read the rows for this write; staleness is measured from it."""
    deadline_ms: int = 0
    """How long the worker will wait; 0 for no limit."""
    counts: Sequence[int] = ()
    rates: Sequence[float] = ()
    names: tuple[str, ...] = ()
    ids: Any = b""
    values: Any = b""
    arrived: float = field(default=0.0, compare=False)

    def header(self) -> bytes:
        names = _join(self.names)
        k, r = len(self.counts), len(self.rates)
        try:
            fixed = _REQUEST.pack(
                MAGIC, VERSION, self.op, self.flags, self.request, self.stream, self.seq, self.acked,
                self.global_step, self.req_time, self.read_version, self.deadline_ms, k, r,
            )  # fmt: skip
            return fixed + struct.pack(f"<{k}q{r}f", *self.counts, *self.rates) + names
        except (struct.error, OverflowError) as error:
            raise ConfigError(
                f"{self.op.name.lower()} of {', '.join(self.names)}: a number does not fit its field ({error})"
            ) from None

    def frames(self) -> list[Any]:
        """The frames to send, without empty ones at the end."""
        frames = [self.header(), buffer_of(self.ids), buffer_of(self.values)]
        while len(frames) > 1 and not nbytes_of(frames[-1]):
            frames.pop()
        return frames

    @property
    def time(self) -> int:
        """The time of a write, in the form that tables accept."""
        return Now(self.req_time) if self.flags & NOW else self.req_time

    def ids_tensor(self) -> Tensor:
        return as_tensor(self.ids, torch.int64)

    def values_tensor(self) -> Tensor:
        if self.flags & FLOAT16:
            return as_tensor(self.values, torch.float16).float()
        return as_tensor(self.values, torch.float32)


class PlainLookup(NamedTuple):
    """The most common request: rows of one table."""

    request: int
    op: Op
    n: int
    table: bytes


_PLAIN = {int(op): op for op in (Op.LOOKUP, Op.FIND_INITIAL)}


def plain_lookup(header: memoryview) -> PlainLookup | None:
    """Parse the header of a lookup in one table; None for any other request."""
    if header.nbytes < _REQUEST.size + 9:
        return None
    magic, version, op, flags, request, _, _, _, _, _, _, _, k, r = _REQUEST.unpack_from(header)
    if magic != MAGIC or version != VERSION or op not in _PLAIN or flags or k != 1 or r:
        return None
    n = int.from_bytes(header[_REQUEST.size : _REQUEST.size + 8], "little")
    return PlainLookup(request, _PLAIN[op], n, bytes(header[_REQUEST.size + 8 :]))


def reply_header(request: int, version: int) -> bytes:
    """The header of a reply with status OK."""
    return _REPLY.pack(MAGIC, VERSION, 0, request, version)


def parse_request(header: Any, ids: Any = b"", values: Any = b"") -> Request:
    """Parse a request from its frames; `DataError` if they are malformed."""
    header = memoryview(header)
    if header.nbytes < _REQUEST.size:
        raise DataError(f"a request's header must have at least {_REQUEST.size} bytes, got {header.nbytes}")
    magic, version, op, flags, request, stream, seq, acked, step, time, read, deadline, k, r = _REQUEST.unpack_from(
        header
    )
    if magic != MAGIC:
        raise DataError(f"a request must start with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise DataError(f"this server speaks protocol version {VERSION}, but the request has version {version}")
    tail = _REQUEST.size + 8 * k + 4 * r
    if header.nbytes < tail:
        raise DataError(f"a header of {k} tables and {r} rates must have at least {tail} bytes, got {header.nbytes}")
    names = _split(bytes(header[tail:]))
    if len(names) != k:
        raise DataError(f"the header counts {k} tables but names {len(names)}")
    numbers = struct.unpack_from(f"<{k}q{r}f", header, _REQUEST.size)
    counts = numbers[:k]
    if k and min(counts) < 0:
        raise DataError(f"a table's number of ids must be >= 0, got {min(counts)}")
    try:
        op = Op(op)
    except ValueError:
        raise DataError(f"unknown operation {op}") from None
    if op in WITH_IDS and 8 * sum(counts) != memoryview(ids).nbytes:
        raise DataError(f"the header counts {sum(counts)} ids, but the ids frame has {memoryview(ids).nbytes} bytes")
    return Request(
        op, request, stream, seq, acked, flags, step, time, read, deadline, counts, numbers[k:], names, ids, values
    )  # fmt: skip


@dataclass(slots=True)
class Reply:
    """One reply, decoded; ``payload`` holds the operation's results, or an error's text."""

    status: Status
    request: int
    version: int
    payload: Sequence[Any] = ()

    def frames(self) -> list[Any]:
        return [_REPLY.pack(MAGIC, VERSION, self.status, self.request, self.version), *map(buffer_of, self.payload)]

    def text(self) -> str:
        return bytes(self.payload[0]).decode("utf-8", "replace") if self.payload else self.status.name


def parse_reply(frames: Sequence[Any]) -> Reply:
    """Parse a reply from its frames; `DataError` if they are malformed."""
    if not frames or memoryview(frames[0]).nbytes != _REPLY.size:
        raise DataError("the reply's header is missing or has the wrong size; is this a parameter server's address?")
    magic, version, status, request, shard_version = _REPLY.unpack(frames[0])
    if magic != MAGIC or version != VERSION:
        raise DataError(f"this client speaks protocol version {VERSION}, but the reply has {magic!r} version {version}")
    try:
        return Reply(Status(status), request, shard_version, frames[1:])
    except ValueError:
        raise DataError(f"the reply has status {status}, which this client does not know") from None


def error_reply(request: int, status: Status, text: str, version: int = 0) -> Reply:
    return Reply(status, request, version, [text.encode()])


@functools.lru_cache(maxsize=1024)
def _join(names: tuple[str, ...]) -> bytes:
    return "\n".join(names).encode()


def _split(names: bytes) -> tuple[str, ...]:
    return _split_once(names) if len(names) <= MAX_CACHED else _split_once.__wrapped__(names)


@functools.lru_cache(maxsize=1024)
def _split_once(names: bytes) -> tuple[str, ...]:
    try:
        return tuple(names.decode().split("\n")) if names else ()
    except UnicodeDecodeError as error:
        raise DataError(f"table names must be UTF-8 ({error})") from None


def as_tensor(data: Any, dtype: torch.dtype) -> Tensor:
    """A flat tensor over a buffer, which is copied only if it is read-only or not aligned for its type."""
    if isinstance(data, Tensor):
        return data
    view = memoryview(data)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    if view.nbytes % dtype.itemsize:
        raise DataError(f"a frame of {dtype} must have a multiple of {dtype.itemsize} bytes, got {view.nbytes}")
    if view.readonly:
        view = memoryview(bytearray(view))
    tensor = torch.frombuffer(view, dtype=dtype)
    return tensor.clone() if tensor.data_ptr() % dtype.itemsize else tensor


def buffer_of(data: Any) -> Any:
    """``data`` as a buffer that a socket or file can send; a tensor is not copied."""
    return data.numpy() if isinstance(data, Tensor) else data


def nbytes_of(data: Any) -> int:
    return data.nbytes if isinstance(data, Tensor) else memoryview(data).nbytes
