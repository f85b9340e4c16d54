"""Exchanges over a byte transport's four methods, with an order of sends and receives that cannot deadlock.

In every ring step even ranks send first and odd ranks receive first. One rank that receives first breaks the cycle,
even if ``send`` blocks until the message is received.
"""

import itertools
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm.ranks.serialization import deserialize_tensors, serialize_tensors
from shoal.comm.ranks.transport import Transport
from shoal.errors import AggregationError, TransportError
from shoal.train.aggregation.buckets import make_buckets
from shoal.train.aggregation.exchange import Exchange, add_in_order, as_numpy
from shoal.train.sharding import shard_sizes

COUNT = struct.Struct("<q")


class ByteExchange(Exchange):
    """Exchanges over any ``Transport``."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.rank, transport.world_size)
        self.transport = transport
        self.next = (self.rank + 1) % self.world_size
        self.previous = (self.rank - 1) % self.world_size

    def _send(self, dest: int, data: bytes | np.ndarray) -> None:
        message: Any = data
        if isinstance(data, np.ndarray):  # as bytes, because a user's transport may ask for the length of its message
            message = data.data.cast("B") if data.nbytes else b""
        self.transport.send(dest, message)
        self.bytes_sent += len(message)
        self.messages += 1

    def _recv(self, src: int, nbytes: int | None = None) -> bytes:
        data = self.transport.recv(src)
        if nbytes is not None and len(data) != nbytes:
            raise TransportError(
                f"rank {self.rank}: the message from rank {src} must have {nbytes} bytes, got {len(data)}; check that "
                "all ranks run the same program and that nothing else uses this transport",
                kind="protocol",
                peer=src,
            )
        self.bytes_received += len(data)
        return data

    def _step(self, outgoing: bytes | np.ndarray, in_bytes: int) -> bytes:
        """One ring step: send ``outgoing`` to the next rank, return the previous rank's message."""
        with self.waiting():
            if self.rank % 2 == 0:
                self._send(self.next, outgoing)
                return self._recv(self.previous, in_bytes)
            data = self._recv(self.previous, in_bytes)
            self._send(self.next, outgoing)
            return data

    def extremes(self, value: int) -> tuple[int, int]:
        low = high = value
        with self._uncounted():
            for _ in range(self.world_size - 1):
                other = struct.unpack("<qq", self._step(struct.pack("<qq", low, high), 16))
                low, high = min(low, other[0]), max(high, other[1])
        return low, high

    def share(self, value: bytes) -> list[bytes]:
        values = [value] * self.world_size
        with self._uncounted():
            for s in range(self.world_size - 1):
                sent = values[(self.rank - s) % self.world_size]
                values[(self.rank - s - 1) % self.world_size] = self._step(sent, len(value))
        return values

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Do not count the messages sent inside: the counters describe only the reduction."""
        saved = (self.bytes_sent, self.bytes_received, self.messages)
        try:
            yield
        finally:
            self.bytes_sent, self.bytes_received, self.messages = saved

    def all_gather(self, data: Tensor) -> list[Tensor]:
        mine = as_numpy(data)
        parts: list[bytes | np.ndarray] = [mine] * self.world_size
        for s in range(self.world_size - 1):
            sent = parts[(self.rank - s) % self.world_size]
            parts[(self.rank - s - 1) % self.world_size] = self._step(sent, mine.nbytes)
        return [torch.from_numpy(np.frombuffer(p, np.uint8).copy()).to(data.device) for p in parts]  # type: ignore[arg-type]

    def ring(self, flat: Tensor) -> Tensor:
        """The sum over ranks, in place on the CPU: a reduce phase, then a gather phase, ``2 * (W - 1)`` messages."""
        values = as_numpy(flat)
        sizes = shard_sizes(len(values), self.world_size)
        ends = np.cumsum([0, *sizes])
        chunks = [values[a:b] for a, b in itertools.pairwise(ends)]
        rank, world = self.rank, self.world_size
        for s in range(world - 1):
            out, into = chunks[(rank - s) % world], chunks[(rank - s - 1) % world]
            data = self._step(out, into.nbytes)
            with np.errstate(all="ignore"):  # infinity and NaN are legal values
                np.add(into, np.frombuffer(data, values.dtype), out=into)
        for s in range(world - 1):
            out, into = chunks[(rank + 1 - s) % world], chunks[(rank - s) % world]
            into[:] = np.frombuffer(self._step(out, into.nbytes), values.dtype)
        return torch.from_numpy(values).to(flat.device)

    def sum_in_order(self, flat: Tensor, owner: int, divisor: float | None) -> Tensor:
        values = as_numpy(flat)
        with self.waiting():
            if self.rank != owner:
                self._send(owner, values)
                return self._tensor(self._recv(owner, values.nbytes), flat)
            parts = []
            for src in range(self.world_size):
                parts.append(flat if src == owner else self._tensor(self._recv(src, values.nbytes), flat))
            total = add_in_order(parts, divisor)
            result = as_numpy(total)
            for dest in range(self.world_size):
                if dest != owner:
                    self._send(dest, result)
        return total

    @staticmethod
    def _tensor(data: bytes, like: Tensor) -> Tensor:
        array = np.frombuffer(data, as_numpy(like[:0]).dtype).copy()
        return torch.from_numpy(array).to(like.device)

    def broadcast_tensors(self, tensors: Sequence[Tensor] | None, bucket_bytes: int) -> list[Tensor]:
        with self.waiting():
            if self.rank == 0:
                return self._broadcast(tensors, bucket_bytes)
            (count,) = COUNT.unpack(self._recv(0, COUNT.size))
            if count < 0:
                raise AggregationError(f"rank {self.rank}: rank 0 has no parameters that can be broadcast")
            return [tensor for _ in range(count) for tensor in deserialize_tensors(self._recv(0))]

    def _broadcast(self, tensors: Sequence[Tensor] | None, bucket_bytes: int) -> list[Tensor]:
        messages: list[bytes] = []
        if tensors is not None:
            plan = make_buckets(tensors, bucket_bytes, by_dtype=False)
            messages = [serialize_tensors([tensors[i] for i in bucket]) for bucket in plan]
        head = COUNT.pack(-1 if tensors is None else len(messages))
        for dest in range(1, self.world_size):
            for message in (head, *messages):
                self._send(dest, message)
        if tensors is None:
            raise AggregationError("rank 0 has no parameters to broadcast")
        return [t.detach().clone() for t in tensors]
