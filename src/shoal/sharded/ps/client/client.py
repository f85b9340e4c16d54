"""The worker's side: lines to all servers, reads in parallel, writes in order and as far ahead as is allowed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import timedelta
from typing import Any

import torch

from shoal.errors import ConfigError, PeerError, UnsupportedError
from shoal.sharded.ps.client.line import CLOSED, UNORDERED, Call, Line
from shoal.sharded.ps.client.records import RecordWrites
from shoal.sharded.ps.limits import check_duration
from shoal.sharded.ps.metrics import STEPS, Histogram
from shoal.sharded.ps.protocol import ALWAYS, Op, Reply, Request, as_tensor, nbytes_of
from shoal.sharded.ps.security import ClientKeys, zmq_module
from shoal.stamps import Stamp


class PsClient:
    """Talks to all parameter servers, ``addresses[i]`` being shard ``i``. Threads may share it.

    A shard on several servers has them all in its address, as ``host1:7100|host2:7100``: what is under way moves to
    the one that leads, and is applied once.

    `close` it, or use it in a ``with`` statement; one that is dropped is closed when it is collected.

    Args:
        deadline: how long a call waits, a dead server's restart included; the error names the shard.
        max_staleness: how many of this worker's updates may be unanswered when it continues; 0 waits for each.
            Raise it when workers spend their time waiting for updates.
        keys: this worker's identity and the servers' public key, where they use CURVE.
        half_open_after: a connection that has been silent for so long is opened anew.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        deadline: timedelta = timedelta(minutes=30),
        max_staleness: int = 0,
        keys: ClientKeys | None = None,
        half_open_after: timedelta = timedelta(seconds=10),
    ) -> None:
        self.zmq = zmq_module()
        import zmq.utils.monitor  # noqa: F401

        if not addresses:
            raise ConfigError("a parameter-server client must have at least one address")
        if max_staleness < 0:
            raise ConfigError(f"max_staleness must be >= 0, got {max_staleness}")
        check_duration(deadline, "deadline")
        check_duration(half_open_after, "half_open_after")
        self.addresses = ["|".join(one if "://" in one else f"tcp://{one}" for one in a.split("|")) for a in addresses]
        self.places = [0] * len(addresses)
        """Which of a shard's servers was last found to lead it."""
        self.deadline = deadline
        self.max_staleness = max_staleness
        self.keys = keys
        self.half_open_after = half_open_after
        self.staleness = Histogram(STEPS)
        """At each lookup: this worker's updates that were not answered yet."""
        self.context = self.zmq.Context()
        self.sockets: set[Any] = set()
        """All open sockets, for the end of a client that nobody closed: garbage collection has no order, and a context
        waits for ever for a socket that is open."""
        self._dropped = weakref.finalize(self, _end, self.context, self.sockets)
        # Not at the end of the process: daemon threads may still use it then.
        self._dropped.atexit = False  # type: ignore[missing-attribute]
        self._free: list[list[Line]] = []
        self._pool_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._under_way: deque[list[Call]] = deque()
        self._closed = False
        self.versions = [0] * len(self.addresses)
        """The version that each shard had when it was last read."""
        self._records = RecordWrites(self)
        self._verified = False
        self._max_frame_bytes = 0
        self._operations: list[Set[str]] = []
        try:
            self._writers = self._open(uuid.uuid4().bytes)
        except BaseException:
            self._dropped()
            raise

    @property
    def num_ps(self) -> int:
        return len(self.addresses)

    @property
    def closed(self) -> bool:
        return self._closed

    def _open(self, stream: bytes = UNORDERED) -> list[Line]:
        lines: list[Line] = []
        try:
            for shard in range(self.num_ps):
                lines.append(Line(self, shard, stream))
        except BaseException:
            _close(lines)
            raise
        return lines

    @contextlib.contextmanager
    def _reader(self) -> Iterator[list[Line]]:
        with self._pool_lock:
            if self._closed:
                raise PeerError(CLOSED)
            lines = self._free.pop() if self._free else self._open()
        try:
            yield lines
        finally:
            with self._pool_lock:
                closed = self._closed
                if not closed:
                    self._free.append(lines)
            if closed:
                _close(lines)

    def write_numbers(self) -> list[int]:
        """The number of this worker's last write to each shard."""
        with self._write_lock:
            return [line.seq for line in self._writers]

    def continue_writes(self, name: str, numbers: Sequence[int]) -> None:
        """From now on writes are those of the stream ``name``, behind these numbers by shard.

        A worker that is started again and makes the same writes in the same order gives the name that it had, and the
        numbers of the moment that it goes on from: servers apply only those that they have not applied before.
        """
        if len(numbers) != self.num_ps:
            raise ConfigError(
                f"continue_writes must have a number for each of {self.num_ps} servers, got {len(numbers)}"
            )
        self.flush()
        with self._write_lock:
            for line, number in zip(self._writers, numbers, strict=True):
                line.stream, line.seq = hashlib.blake2b(name.encode(), digest_size=16).digest(), number

    def learnt(self, partitions: Sequence[str], deadline: timedelta | None = None) -> dict[str, list[int]]:
        """Up to which record each partition was learnt, by shard; 0 where nothing is known of it. See `records`."""
        return self._records.learnt(partitions, deadline)

    def records(self, partition: str, upto: int) -> contextlib.AbstractContextManager[None]:
        """The updates in this block are of the records of a partition up to one with this number, and are one write.

        A server applies it once, whoever sends it and however often, in the order of the records. A trainer that was
        killed, or one that takes over the partition, makes the updates again from any record at which one began, and
        `learnt` tells from where. Two trainers that learn a partition at the same time are told so by an error.

        Example::

            with client.records("kafka://broker/clicks#3", upto=1200):
                loss.backward()  # updates rows
        """
        return self._records.block(partition, upto)

    def begin_records(self, partition: str, number: int) -> None:
        """Says that a partition is learnt from behind this record on, where nothing is known of it."""
        self._records.begin(partition, number)

    def _seconds(self, deadline: timedelta | None) -> float:
        if deadline is None:
            return self.deadline.total_seconds()
        check_duration(deadline, "deadline")
        return deadline.total_seconds()

    def _check_sizes(self, requests: dict[int, Request]) -> None:
        """Refuses what a server would cut the connection for."""
        for shard, request in requests.items():
            size = max(nbytes_of(request.ids), nbytes_of(request.values))
            if size > self._max_frame_bytes:
                raise ConfigError(
                    f"parameter server {shard} ({self.addresses[shard]}) takes at most {self._max_frame_bytes} bytes "
                    f"of ids or values in a request, got {size}; ask in smaller parts"
                )

    def read(self, requests: dict[int, Request], deadline: timedelta | None = None) -> dict[int, Reply]:
        """Asks shards in parallel, one round trip each; replies by shard."""
        self.verify(deadline)
        self._check_operations(requests, deadline)
        self._check_sizes(requests)
        return self._read(requests, deadline)

    def _check_operations(self, requests: dict[int, Request], deadline: timedelta | None) -> None:
        """Refuses what a server of an older version does not know; one that was replaced meanwhile is asked again."""
        if all(request.op.name in self._operations[shard] for shard, request in requests.items()):
            return
        self._take_infos(self.info(deadline))
        for shard, request in requests.items():
            if request.op.name not in self._operations[shard]:
                raise UnsupportedError(
                    f"parameter server {shard} ({self.addresses[shard]}) does not know {request.op.name.lower()}: it "
                    "is of an older version than this worker; upgrade the servers first"
                )

    def _read(self, requests: dict[int, Request], deadline: timedelta | None = None) -> dict[int, Reply]:
        seconds = self._seconds(deadline)
        self.staleness.add(len(self._under_way))
        with self._reader() as lines:
            calls = {shard: lines[shard].send(request, seconds) for shard, request in requests.items()}
            try:
                replies = {shard: call.result() for shard, call in calls.items()}
            finally:
                for shard, call in calls.items():
                    lines[shard].calls.pop(call.request.request, None)
        for shard, reply in replies.items():
            self.versions[shard] = reply.version
        return replies

    def write(
        self, requests: dict[int, Request], deadline: timedelta | None = None, *, wait: bool = True
    ) -> dict[int, Reply]:
        """Sends this worker's next write to shards in parallel.

        With ``wait`` it returns their replies. Without, it returns an empty dict once at most ``max_staleness`` writes
        are unanswered; an error of such a write is raised by a later call (before that sends anything, if it waits) or
        by `flush`.
        """
        self.verify(deadline)
        self._check_sizes(requests)
        seconds = self._seconds(deadline)
        with self._write_lock:
            if self._closed:
                raise PeerError(CLOSED)
            if self._records.gathered is not None and not wait:
                self._records.gathered.append(requests)
                return {}
            if wait:
                self._settle(0)
            calls = {shard: self._writers[shard].send(request, seconds) for shard, request in requests.items()}
            self._under_way.append(list(calls.values()))
            self._settle(0 if wait else self.max_staleness)
            return {shard: call.reply for shard, call in calls.items() if call.reply is not None} if wait else {}

    def _settle(self, allowed: int) -> None:
        """Waits until at most ``allowed`` writes are unanswered; raises the first error of each."""
        while len(self._under_way) > allowed:
            error: Exception | None = None
            for call in self._under_way.popleft():
                try:
                    call.result()
                except Exception as raised:
                    error = error or raised
            if error is not None:
                raise error

    def flush(self) -> None:
        """Waits until every write of this worker has been answered."""
        with self._write_lock:
            self._settle(0)

    @property
    def unanswered(self) -> int:
        """Writes of this worker that are under way."""
        return len(self._under_way)

    def info(self, deadline: timedelta | None = None) -> list[dict[str, Any]]:
        """What each server tells about itself."""
        replies = self._read({shard: Request(Op.INFO) for shard in range(self.num_ps)}, deadline)
        return [json.loads(bytes(replies[shard].payload[0])) for shard in range(self.num_ps)]

    def verify(self, deadline: timedelta | None = None) -> None:
        """Checks once that address ``i`` is shard ``i`` of as many as there are addresses."""
        if self._verified:
            return
        self._take_infos(self.info(deadline))
        self._verified = True

    def _take_infos(self, infos: Sequence[dict[str, Any]]) -> None:
        for shard, info in enumerate(infos):
            if (info["shard"], info["of"]) != (shard, self.num_ps):
                raise ConfigError(
                    f"{self.addresses[shard]} is shard {info['shard']} of {info['of']}, but is number {shard} "
                    f"of {self.num_ps} addresses; list all servers in the order of their shards"
                )
        self._max_frame_bytes = min(info["max_message_bytes"] for info in infos)
        without = [op.name for op in ALWAYS]
        self._operations = [frozenset(info.get("operations", without)) for info in infos]

    def publish(self, wish: Mapping[str, Any], deadline: timedelta | None = None) -> list[dict[str, Any]]:
        """Has every server send its rows to replicas as ``wish`` says, or tell how far it is with an empty one.

        Raises:
            UnsupportedError: a server cannot.
        """
        request = json.dumps(dict(wish)).encode()
        replies = self.read({shard: Request(Op.PUBLISH, values=request) for shard in range(self.num_ps)}, deadline)
        return [json.loads(bytes(replies[shard].payload[0])) for shard in range(self.num_ps)]

    def scan(self, table: str, page_bytes: int = 4 << 20, deadline: timedelta | None = None) -> Iterator[Any]:
        """All rows of a table, server after server, in pages of ids ``[n]`` and weights ``[n, D]``.

        A row that is there from beginning to end comes once, as it was at the moment of its page.

        Raises:
            UnsupportedError: a server is of an older version and cannot.
        """
        self.verify(deadline)
        for shard in range(self.num_ps):
            info = self.info(deadline)[shard]
            if table not in info["tables"]:
                raise ConfigError(
                    f"{self.addresses[shard]} holds no table {table!r}; it holds {sorted(info['tables'])}"
                )
            dim = info["tables"][table]
            limit = max(1, min(page_bytes // (4 * dim), info["max_ids"]))
            place: Any = [0, None]
            while place is not None:
                request = Request(Op.SCAN, counts=[limit], names=(table,), values=json.dumps(place).encode())
                following, ids, rows = self.read({shard: request}, deadline)[shard].payload
                place = json.loads(bytes(following))
                found = as_tensor(ids, torch.int64)
                if len(found):
                    yield found, as_tensor(rows, torch.float32).view(len(found), dim)

    def stamps(self, deadline: timedelta | None = None) -> dict[str, Stamp]:
        """The stamp of the rows of each server, by the name that it publishes them under."""
        infos = self.info(deadline)
        return {f"ps_{info['shard']}": Stamp(info["run"], info["version"]) for info in infos if "run" in info}

    def checkpoint(
        self, deadline: timedelta | None = None, *, keep_as: str = "", others: Sequence[str] = ()
    ) -> list[str]:
        """Has every server write a checkpoint now; their paths, on the servers.

        With ``keep_as="RUN-WHAT"`` it stays there for `restore`, whatever comes later, until one of the same run is
        kept that does not name it among its ``others``.
        """
        names = json.dumps([keep_as, list(others)]).encode() if keep_as else b""
        replies = self.read({shard: Request(Op.CHECKPOINT, values=names) for shard in range(self.num_ps)}, deadline)
        return [replies[shard].text() for shard in range(self.num_ps)]

    def restore(self, table: str, kept: str, deadline: timedelta | None = None) -> None:
        """Brings a table back on every server to what it was in the checkpoint kept under that name."""
        requests = {
            shard: Request(Op.RESTORE, counts=[0], names=(table,), values=kept.encode()) for shard in range(self.num_ps)
        }
        self.write(requests, deadline)

    def close(self) -> None:
        """Drops what is under way and closes the connections; other threads' calls end with `PeerError`."""
        with self._pool_lock:
            if self._closed:
                return
            self._closed = True
            idle, self._free = self._free, []
        for lines in idle:
            _close(lines)
        with self._write_lock:  # a thread that writes looks at `closed` in every tick
            _close(self._writers)
        self._dropped.detach()
        self.context.term()  # ends the waits of threads that read; each closes its own lines

    def __enter__(self) -> PsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close(lines: Sequence[Line]) -> None:
    for line in lines:
        line.close()


def _end(context: Any, sockets: Set[Any]) -> None:
    """Closes what a client had open. No thread uses it any more, or the client would still be there."""
    for socket in list(sockets):
        socket.close(0)
    context.term()
