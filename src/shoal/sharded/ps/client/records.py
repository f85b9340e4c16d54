"""Updates that carry the numbers of their input records, so that servers apply each once, whichever worker sends it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from shoal.errors import ConfigError
from shoal.sharded.ps.protocol import FLOAT16, NOW, PARTITION, RECORDS, Op, Request, as_tensor

if TYPE_CHECKING:
    from shoal.sharded.ps.client.client import PsClient


class RecordWrites:
    """The state of a client's input partitions."""

    def __init__(self, client: PsClient) -> None:
        self._client = client
        self.gathered: list[dict[int, Request]] | None = None
        """The updates within a `block`, which are sent at its end; None outside a block."""
        self._learnt: dict[bytes, list[int]] = {}

    def learnt(self, partitions: Sequence[str], deadline: timedelta | None = None) -> dict[str, list[int]]:
        """See `PsClient.learnt`."""
        streams, shards = [_stream(name) for name in partitions], range(self._client.num_ps)
        asked = json.dumps([stream.hex() for stream in streams]).encode()
        replies = self._client.read({shard: Request(Op.LEARNT, values=asked) for shard in shards}, deadline)
        numbers = [json.loads(bytes(replies[shard].payload[0])) for shard in shards]
        found = {name: [of_shard[i] for of_shard in numbers] for i, name in enumerate(partitions)}
        self._learnt |= {stream: list(found[name]) for stream, name in zip(streams, partitions, strict=True)}
        return found

    @contextlib.contextmanager
    def block(self, partition: str, upto: int) -> Iterator[None]:
        """See `PsClient.records`."""
        if self.gathered is not None:
            raise ConfigError("records: blocks must not be nested")
        self.gathered = []
        try:
            yield
            requests = _joined(self.gathered)
        finally:
            self.gathered = None
        stream = _stream(partition)
        if stream not in self._learnt:
            self.learnt([partition])
        learnt = self._learnt[stream]
        for shard, request in requests.items():
            request.flags |= RECORDS
            request.stream, request.seq, request.acked = stream, upto, learnt[shard]
            learnt[shard] = max(learnt[shard], upto)
        self._client.write(requests, wait=False)

    def begin(self, partition: str, number: int) -> None:
        """See `PsClient.begin_records`."""
        if number and not any(self.learnt([partition])[partition]):
            with self.block(partition, number):
                self._client.write({shard: Request(Op.APPLY) for shard in range(self._client.num_ps)}, wait=False)
            self._client.flush()


def _stream(partition: str) -> bytes:
    """The stream id of a partition's writes; the prefix `PARTITION` distinguishes it from those of workers."""
    return PARTITION + hashlib.blake2b(partition.encode(), digest_size=12).digest()


def _joined(writes: Sequence[dict[int, Request]]) -> dict[int, Request]:
    """Join the updates of several groups of tables into one request per shard."""
    if len(writes) == 1:
        return writes[0]
    shards = sorted({shard for each in writes for shard in each})
    return {shard: _one([each[shard] for each in writes if shard in each]) for shard in shards}


def _one(parts: Sequence[Request]) -> Request:
    first = parts[0]
    times = {one.req_time for one in parts} if not first.flags & NOW else ()  # with NOW the server sets the time
    if any((one.op, one.flags) != (first.op, first.flags) for one in parts) or len(times) > 1:
        raise ConfigError("records: all updates within a block must have the same operation, flags and req_time")
    dtype = torch.float16 if first.flags & FLOAT16 else torch.float32
    return replace(
        first,
        counts=[count for one in parts for count in one.counts],
        rates=[rate for one in parts for rate in one.rates],
        names=tuple(name for one in parts for name in one.names),
        ids=torch.cat([one.ids_tensor() for one in parts]),
        values=torch.cat([as_tensor(one.values, dtype).view(-1) for one in parts]),
        global_step=max(one.global_step for one in parts),
    )
