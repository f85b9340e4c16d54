"""Splits a push into parts that fit a message: first by a fixed rule, then by halving."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from shoal.proto.serving.parameter_sync_pb2 import PushRequest
from shoal.serving.wire import varint

Range = tuple[int, int]


@dataclass(slots=True)
class Delta:
    """Fresh rows of one table: ``fids`` int64 ``[k]``, ``values`` float32 ``[k, dim]``."""

    unique_id: str
    dim: int
    fids: np.ndarray
    values: np.ndarray


@dataclass(slots=True)
class DeltaBatch:
    """A PushRequest as arrays, with the size of the serialised message."""

    model_name: str
    signature_name: str
    timeout_in_ms: int
    multi: bool
    deltas: list[Delta] = field(default_factory=list)
    read_at: float = 0.0
    """Unix time by which the rows had been read; 0 if unknown."""

    def size(self) -> int:
        head = PushRequest(
            model_name=self.model_name, signature_name=self.signature_name, timeout_in_ms=self.timeout_in_ms
        ).ByteSize()
        return head + sum(_delta_size(delta) for delta in self.deltas)

    def counts(self) -> list[int]:
        return [len(delta.fids) for delta in self.deltas]

    def cut(self, ranges: Sequence[Range]) -> "DeltaBatch":
        deltas = [
            Delta(delta.unique_id, delta.dim, delta.fids[a:b], delta.values[a:b])
            for delta, (a, b) in zip(self.deltas, ranges, strict=True)
        ]
        return DeltaBatch(self.model_name, self.signature_name, self.timeout_in_ms, self.multi, deltas, self.read_at)

    def message(self) -> PushRequest:
        request = PushRequest(
            model_name=self.model_name, signature_name=self.signature_name, timeout_in_ms=self.timeout_in_ms
        )
        into = request.delta_multi_hash_tables if self.multi else request.delta_hash_tables
        for delta in self.deltas:
            into.add(
                unique_id=delta.unique_id,
                dim_size=delta.dim,
                fids=delta.fids.tolist(),
                embeddings=delta.values.reshape(-1).tolist(),
            )
        return request

    @classmethod
    def of(cls, request: PushRequest) -> "DeltaBatch":
        """Convert a message; raises ValueError if a table's embeddings do not match its fids."""
        multi = bool(request.delta_multi_hash_tables)
        deltas = []
        for each in request.delta_multi_hash_tables if multi else request.delta_hash_tables:
            fids = np.fromiter(each.fids, np.int64, len(each.fids))
            values = np.fromiter(each.embeddings, np.float32, len(each.embeddings))
            dim = _dim(each)
            if values.size != fids.size * dim:
                raise ValueError(
                    f"table {each.unique_id!r}: {fids.size} fids of dim {dim} need {fids.size * dim} values, "
                    f"got {values.size}"
                )
            deltas.append(Delta(each.unique_id, dim, fids, values.reshape(fids.size, dim)))
        return cls(request.model_name, request.signature_name, request.timeout_in_ms, multi, deltas)


def _dim(delta: PushRequest.DeltaEmbeddingHashTable) -> int:
    """The columns of a table's rows: ``dim_size``, or the number of values per fid if that is not set."""
    return delta.dim_size or (len(delta.embeddings) // len(delta.fids) if delta.fids else 0)


def _delta_size(delta: Delta) -> int:
    from shoal import _core

    fids = np.ascontiguousarray(delta.fids)
    head = PushRequest.DeltaEmbeddingHashTable(unique_id=delta.unique_id, dim_size=delta.dim).ByteSize()
    inner = head + fids.size + _core.varint_size(fids.ctypes.data, fids.size) + 5 * fids.size * delta.dim
    return 1 + len(varint(inner)) + inner


@dataclass(slots=True)
class _Message:
    """A PushRequest with the interface of :class:`DeltaBatch`."""

    request: PushRequest

    @property
    def _deltas(self) -> list:
        return [*self.request.delta_hash_tables, *self.request.delta_multi_hash_tables]

    def size(self) -> int:
        return self.request.ByteSize()

    def counts(self) -> list[int]:
        return [len(delta.fids) for delta in self._deltas]

    def cut(self, ranges: Sequence[Range]) -> "_Message":
        source = self.request
        part = PushRequest(
            model_name=source.model_name, signature_name=source.signature_name, timeout_in_ms=source.timeout_in_ms
        )
        ranges = iter(ranges)  # pyrefly: ignore
        for name in ("delta_hash_tables", "delta_multi_hash_tables"):
            for delta in getattr(source, name):
                begin, end = next(ranges)  # pyrefly: ignore
                dim = _dim(delta)
                cut = getattr(part, name).add(
                    unique_id=delta.unique_id,
                    fids=delta.fids[begin:end],
                    embeddings=delta.embeddings[begin * dim : end * dim],
                )
                if delta.HasField("dim_size"):
                    cut.dim_size = delta.dim_size
        return _Message(part)


class _Cuttable(Protocol):
    def size(self) -> int: ...
    def counts(self) -> list[int]: ...
    def cut(self, ranges: Sequence[Range]) -> "_Cuttable": ...


def _split(whole: _Cuttable, limit: int) -> list:
    size = whole.size()
    if size <= limit:
        return [whole]
    if limit < 1:
        raise ValueError(f"max_message_length must be at least 1, got {limit}")
    n = -(-size // limit)
    counts = whole.counts()
    steps = [count // n for count in counts]
    return [
        whole.cut([(i * q, (i + 1) * q if i < n - 1 else count) for count, q in zip(counts, steps, strict=True)])
        for i in range(n)
    ]


def _halve(part: _Cuttable, limit: int) -> list:
    """Halve ``part`` repeatedly until each piece fits or has one row."""
    counts = part.counts()
    rows = sum(counts)
    if rows <= 1 or part.size() <= limit:
        return [part]
    first, left = [], (rows + 1) // 2
    for count in counts:
        first.append(min(count, left))
        left -= first[-1]
    one = part.cut([(0, split) for split in first])
    two = part.cut([(split, count) for split, count in zip(first, counts, strict=True)])
    return _halve(one, limit) + _halve(two, limit)


class RequestSplitter:
    """Splits a request by its serialised size."""

    def split(self, request: PushRequest, max_message_length: int) -> list[PushRequest]:
        """``ceil(size / max)`` parts, each with every table; rows are dealt evenly and remainders go to the last part.

        A request that fits is returned unchanged. Parts may still exceed the limit; :func:`sendable_parts` cuts those.
        """
        if request.ByteSize() <= max_message_length:
            return [request]
        return [part.request for part in _split(_Message(request), max_message_length)]


def sendable_parts(request: PushRequest | DeltaBatch, limit: int) -> list:
    """The parts of a request to send: split until each part fits, without parts that hold no id.

    A request without tables is one part, which is answered but not sent.
    """
    whole: _Cuttable = _Message(request) if isinstance(request, PushRequest) else request
    if not whole.counts():
        return [request]
    parts = [small for part in _split(whole, limit) for small in _halve(part, limit)]
    return [part.request if isinstance(part, _Message) else part for part in parts if sum(part.counts())]
