"""`PsClient`: a worker's connections to all servers; reads run in parallel, writes in order and up to a limit ahead."""

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
    """A worker's client for all parameter servers; ``addresses[i]`` is shard ``i``. Thread-safe.

    The address of a replicated shard lists all its servers, as in ``host1:7100|host2:7100``. Requests under way move
    to the server that leads, and each is applied once.

    `close` it or use it in a ``with`` statement; otherwise it is closed when it is garbage-collected.

    Args:
        deadline: how long a call waits, including a dead server's restart; the error names the shard.
        max_staleness: how many of this worker's updates may be unanswered when it continues; 0 waits for each.
            Raise it when workers spend their time waiting for updates.
        keys: this worker's identity and the servers' public key, if they use CURVE.
        half_open_after: a connection that has been silent for this long is reopened.
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

        if not addresses or isinstance(addresses, str):
            raise ConfigError(f"addresses must be a list with the address of every server, got {addresses!r}")
        if max_staleness < 0:
            raise ConfigError(f"max_staleness must be >= 0, got {max_staleness}")
        check_duration(deadline, "deadline")
        check_duration(half_open_after, "half_open_after")
        self.addresses = ["|".join(one if "://" in one else f"tcp://{one}" for one in a.split("|")) for a in addresses]
        self.places = [0] * len(addresses)
        """By shard: the index of the server that was last found to lead it."""
        self.deadline = deadline
        self.max_staleness = max_staleness
        self.keys = keys
        self.half_open_after = half_open_after
        self.staleness = Histogram(STEPS)
        """This worker's unanswered updates at each lookup."""
        self.context = self.zmq.Context()
        self.sockets: set[Any] = set()
        """All open sockets. A client that was not closed must close them before its context, which waits forever for
        open sockets; garbage collection has no order."""
        self._dropped = weakref.finalize(self, _end, self.context, self.sockets)
        # Not at the end of the process: daemon threads may still use it then.
        self._dropped.atexit = False  # type: ignore[missing-attribute]
        self._free: list[list[Line]] = []
        self._pool_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._under_way: deque[list[Call]] = deque()
        self._closed = False
        self.versions = [0] * len(self.addresses)
        """Each shard's version when it was last read."""
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
        """Number this worker's next writes in the stream ``name``, starting after ``numbers[shard]``.

        A restarted worker that repeats the same writes in the same order passes its earlier name and the
        `write_numbers` of the moment from which it resumes; servers then apply only the writes they have not applied.
        """
        if len(numbers) != self.num_ps:
            raise ConfigError(
                f"continue_writes must get one number for each of {self.num_ps} servers, got {len(numbers)}"
            )
        self.flush()
        with self._write_lock:
            for line, number in zip(self._writers, numbers, strict=True):
                line.stream, line.seq = hashlib.blake2b(name.encode(), digest_size=16).digest(), number

    def learnt(self, partitions: Sequence[str], deadline: timedelta | None = None) -> dict[str, list[int]]:
        """The last record learnt of each partition, by shard; 0 if none. See `records`."""
        return self._records.learnt(partitions, deadline)

    def records(self, partition: str, upto: int) -> contextlib.AbstractContextManager[None]:
        """Send the updates in this block as one write, for the records of a partition up to number ``upto``.

        A server applies it once, in the order of the records, whoever sends it and however often. A trainer that was
        killed, or one that takes over the partition, repeats the updates from the start of any earlier block; `learnt`
        returns where to start. If two trainers learn a partition at the same time, one gets an error.

        Example::

            with client.records("kafka://broker/clicks#3", upto=1200):
                loss.backward()  # updates rows
        """
        return self._records.block(partition, upto)

    def begin_records(self, partition: str, number: int) -> None:
        """Set the record after which a partition is learnt, unless some of it has been learnt already."""
        self._records.begin(partition, number)

    def _seconds(self, deadline: timedelta | None) -> float:
        if deadline is None:
            return self.deadline.total_seconds()
        check_duration(deadline, "deadline")
        return deadline.total_seconds()

    def _check_sizes(self, requests: dict[int, Request]) -> None:
        """Raise before sending a request for which a server would cut the connection."""
        for shard, request in requests.items():
            size = max(nbytes_of(request.ids), nbytes_of(request.values))
            if size > self._max_frame_bytes:
                raise ConfigError(
                    f"parameter server {shard} ({self.addresses[shard]}) accepts at most {self._max_frame_bytes} bytes "
                    f"of ids or values in a request, got {size}; split it into smaller requests"
                )

    def read(self, requests: dict[int, Request], deadline: timedelta | None = None) -> dict[int, Reply]:
        """Send requests to shards in parallel, one round trip each; returns the replies by shard."""
        self.verify(deadline)
        self._check_operations(requests, deadline)
        self._check_sizes(requests)
        return self._read(requests, deadline)

    def _check_operations(self, requests: dict[int, Request], deadline: timedelta | None) -> None:
        """Raise if a server is too old for a request, after asking it again in case it has been upgraded."""
        if all(request.op.name in self._operations[shard] for shard, request in requests.items()):
            return
        self._take_infos(self.info(deadline))
        for shard, request in requests.items():
            if request.op.name not in self._operations[shard]:
                raise UnsupportedError(
                    f"parameter server {shard} ({self.addresses[shard]}) does not support {request.op.name.lower()}: "
                    "it is older than this worker; upgrade the servers first"
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
        """Send this worker's next write to shards in parallel.

        With ``wait`` it returns their replies. Without, it returns an empty dict once at most ``max_staleness`` writes
        are unanswered; if such a write fails, a later call or `flush` raises its error (a later call with ``wait``
        raises it before it sends anything).
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
        """Wait until at most ``allowed`` writes are unanswered; raises the first error of each."""
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
        """Wait until every write of this worker has been answered."""
        with self._write_lock:
            self._settle(0)

    @property
    def unanswered(self) -> int:
        """Writes of this worker that are under way."""
        return len(self._under_way)

    def info(self, deadline: timedelta | None = None) -> list[dict[str, Any]]:
        """Each server's shard, version, limits, operations and tables."""
        replies = self._read({shard: Request(Op.INFO) for shard in range(self.num_ps)}, deadline)
        return [json.loads(bytes(replies[shard].payload[0])) for shard in range(self.num_ps)]

    def verify(self, deadline: timedelta | None = None) -> None:
        """Check once that address ``i`` is shard ``i`` and that every shard has an address."""
        if self._verified:
            return
        self._take_infos(self.info(deadline))
        self._verified = True

    def _take_infos(self, infos: Sequence[dict[str, Any]]) -> None:
        for shard, info in enumerate(infos):
            if (info["shard"], info["of"]) != (shard, self.num_ps):
                raise ConfigError(
                    f"{self.addresses[shard]} is shard {info['shard']} of {info['of']}, but address {shard} "
                    f"of {self.num_ps}; list all servers in the order of their shards"
                )
        self._max_frame_bytes = min(info["max_message_bytes"] for info in infos)
        without = [op.name for op in ALWAYS]
        self._operations = [frozenset(info.get("operations", without)) for info in infos]

    def publish(self, wish: Mapping[str, Any], deadline: timedelta | None = None) -> list[dict[str, Any]]:
        """Make every server send its rows to replicas, with the settings in ``wish``; an empty one returns progress.

        Raises:
            UnsupportedError: a server does not support it.
        """
        request = json.dumps(dict(wish)).encode()
        replies = self.read({shard: Request(Op.PUBLISH, values=request) for shard in range(self.num_ps)}, deadline)
        return [json.loads(bytes(replies[shard].payload[0])) for shard in range(self.num_ps)]

    def scan(self, table: str, page_bytes: int = 4 << 20, deadline: timedelta | None = None) -> Iterator[Any]:
        """Iterate over all rows of a table, one server after another, in pages of ids ``[n]`` and weights ``[n, D]``.

        A row that exists throughout the scan is returned once, as it was when its page was read.

        Raises:
            UnsupportedError: a server is too old to support it.
        """
        self.verify(deadline)
        for shard in range(self.num_ps):
            info = self.info(deadline)[shard]
            if table not in info["tables"]:
                raise ConfigError(f"{self.addresses[shard]} has no table {table!r}; it has {sorted(info['tables'])}")
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
        """The stamp of each server's rows, by the name under which it publishes them."""
        infos = self.info(deadline)
        return {f"ps_{info['shard']}": Stamp(info["run"], info["version"]) for info in infos if "run" in info}

    def checkpoint(
        self, deadline: timedelta | None = None, *, keep_as: str = "", others: Sequence[str] = ()
    ) -> list[str]:
        """Make every server write a checkpoint now; returns their paths on the servers.

        With ``keep_as="RUN-WHAT"`` the checkpoint is kept for `restore`, until one of the same run is kept that does
        not list it in ``others``.
        """
        names = json.dumps([keep_as, list(others)]).encode() if keep_as else b""
        replies = self.read({shard: Request(Op.CHECKPOINT, values=names) for shard in range(self.num_ps)}, deadline)
        return [replies[shard].text() for shard in range(self.num_ps)]

    def restore(self, table: str, kept: str, deadline: timedelta | None = None) -> None:
        """Restore a table on every server from the checkpoint kept under the name ``kept``."""
        requests = {
            shard: Request(Op.RESTORE, counts=[0], names=(table,), values=kept.encode()) for shard in range(self.num_ps)
        }
        self.write(requests, deadline)

    def close(self) -> None:
        """Drop calls under way and close the connections; other threads' calls raise `PeerError`."""
        with self._pool_lock:
            if self._closed:
                return
            self._closed = True
            idle, self._free = self._free, []
        for lines in idle:
            _close(lines)
        with self._write_lock:  # a thread that writes checks `closed` in every tick
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
    """Close the sockets of a client that was garbage-collected, so no thread uses them any more."""
    for socket in list(sockets):
        socket.close(0)
    context.term()
