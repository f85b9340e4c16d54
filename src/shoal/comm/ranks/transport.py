"""The `Transport` interface for byte messages, and the bookkeeping that the library's transports share."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import ConfigError, TransportError

Buffer = Any  # anything memoryview() accepts: bytes, bytearray, memoryview, array

DEFAULT_TIMEOUT_S = 300.0
MAX_MESSAGE_BYTES = 4 << 30


class Transport(ABC):
    """Complete messages between ranks, in order per pair.

    A subclass sets ``rank`` and ``world_size`` and implements the four methods; the library's algorithms need nothing
    else. ``collectives`` is True if a process group (its ``group``) or MPI can do the same work faster.
    """

    rank: int
    world_size: int
    collectives = False

    @abstractmethod
    def send(self, dest: int, data: Buffer) -> None:
        """Send one message; returns when ``data`` may be reused."""

    @abstractmethod
    def recv(self, src: int, timeout: float | None = None) -> bytes:
        """The next message from ``src``; ``TransportError(kind="timeout")`` after ``timeout`` seconds."""

    @abstractmethod
    def barrier(self, timeout: float | None = None) -> None:
        """Returns when every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Close this rank's transport; messages already sent are still delivered."""


class Deadline:
    """A point in time on the monotonic clock, and the time left until it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + max(0.0, seconds)

    def left(self) -> float:
        return min(max(0.0, self.at - time.monotonic()), threading.TIMEOUT_MAX)

    def over(self) -> bool:
        return time.monotonic() >= self.at


class BaseTransport(Transport):
    """Rank checks, statistics, messages to self and the one-receiver rule; subclasses move the bytes.

    ``stats`` maps a peer to its ``bytes_sent``, ``bytes_received``, ``messages_sent`` and ``messages_received``
    (payload bytes). Threads of one rank may share a transport, but only one at a time may receive from one source.
    """

    def __init__(self, rank: int, world_size: int, default_timeout_s: float, max_message_bytes: int) -> None:
        if not default_timeout_s > 0 or math.isinf(default_timeout_s):
            raise ConfigError(
                f"{type(self).__name__}: default_timeout_s must be positive and finite, got {default_timeout_s}"
            )
        if max_message_bytes < 0:
            raise ConfigError(f"{type(self).__name__}: max_message_bytes must be >= 0, got {max_message_bytes}")
        self.rank = rank
        self.world_size = world_size
        self.default_timeout_s = default_timeout_s
        self.max_message_bytes = max_message_bytes
        keys = ("bytes_sent", "bytes_received", "messages_sent", "messages_received")
        self.stats: dict[int, dict[str, int]] = {peer: dict.fromkeys(keys, 0) for peer in range(world_size)}
        self._closed = False
        self._lock = threading.Lock()
        self._receiving: set[int] = set()
        self._in_barrier = False
        self._to_self: deque[bytes] = deque()
        self._self_ready = threading.Condition(self._lock)

    def send(self, dest: int, data: Buffer) -> None:
        view = memoryview(data)
        self._check(dest, "send to")
        if view.nbytes > self.max_message_bytes:
            raise self._error(
                f"a message of {view.nbytes} bytes to rank {dest} exceeds max_message_bytes={self.max_message_bytes}; "
                "send it in parts or raise the limit on both ranks",
                "too_large",
                dest,
            )
        if dest == self.rank:
            with self._self_ready:
                self._to_self.append(bytes(view))
                self._self_ready.notify()
        else:
            self._send(dest, view)
        self._count(dest, "sent", view.nbytes)

    def recv(self, src: int, timeout: float | None = None) -> bytes:
        self._check(src, "receive from")
        with self._only_receiver(src):
            deadline = self._deadline(timeout)
            data = self._recv_self(deadline) if src == self.rank else self._recv(src, deadline)
        self._count(src, "received", len(data))
        return data

    def barrier(self, timeout: float | None = None) -> None:
        self._check(self.rank, "barrier on")
        with self._lock:
            if self._in_barrier:
                raise self._error(
                    "only one thread of a rank may be in the barrier at a time, got two", "protocol", self.rank
                )
            self._in_barrier = True
        try:
            self._barrier(self._deadline(timeout))
        finally:
            self._in_barrier = False

    def close(self) -> None:
        with self._self_ready:
            if self._closed:
                return
            self._closed = True
            self._self_ready.notify_all()
        self._close()

    def __enter__(self) -> "BaseTransport":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, dest: int, view: memoryview) -> None:
        raise NotImplementedError

    def _recv(self, src: int, deadline: Deadline) -> bytes:
        raise NotImplementedError

    def _barrier(self, deadline: Deadline) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.default_timeout_s if timeout is None else timeout)

    def _check(self, peer: int, what: str) -> None:
        if self._closed:
            raise self._closed_error()
        if isinstance(peer, bool) or not hasattr(peer, "__index__") or not 0 <= peer < self.world_size:
            raise self._error(f"cannot {what} rank {peer!r}; a rank must be 0..{self.world_size - 1}", "bad_rank", peer)

    def _error(self, text: str, kind: str, peer: int | None = None) -> TransportError:
        return TransportError(f"{type(self).__name__} of rank {self.rank}: {text}", kind=kind, peer=peer)

    def _closed_error(self) -> TransportError:
        return self._error("it was closed on this rank; make a new transport", "closed", self.rank)

    def _lost(self, peer: int, why: str) -> TransportError:
        return self._error(f"rank {peer} is gone ({why}); see its log", "peer_lost", peer)

    def _timed_out(self, peer: int, deadline: Deadline) -> TransportError:
        return self._error(
            f"waited {deadline.seconds:g} s for a message from rank {peer}; see its log, or raise the timeout",
            "timeout",
            peer,
        )

    def _check_size(self, length: int, src: int) -> None:
        if length > self.max_message_bytes:
            raise self._error(
                f"rank {src} announced a message of {length} bytes, more than max_message_bytes="
                f"{self.max_message_bytes}; raise the limit if that is expected",
                "too_large",
                src,
            )

    @contextmanager
    def _only_receiver(self, src: int) -> Iterator[None]:
        with self._lock:
            if src in self._receiving:
                raise self._error(f"only one thread may receive from rank {src} at a time, got two", "protocol", src)
            self._receiving.add(src)
        try:
            yield
        finally:
            with self._lock:
                self._receiving.discard(src)

    def _recv_self(self, deadline: Deadline) -> bytes:
        with self._self_ready:
            while not self._to_self:
                if self._closed:
                    raise self._closed_error()
                if not self._self_ready.wait(deadline.left()) and deadline.over():
                    raise self._timed_out(self.rank, deadline)
            return self._to_self.popleft()

    def _count(self, peer: int, direction: str, nbytes: int) -> None:
        with self._lock:
            entry = self.stats[peer]
            entry[f"bytes_{direction}"] += nbytes
            entry[f"messages_{direction}"] += 1
