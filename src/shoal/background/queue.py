"""`BoundedQueue`: a few elements between two threads, first in, first out, with an end and with errors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.errors import ConfigError, DeadlineError, ShoalError


class EndOfInput(ShoalError, StopIteration):
    """The producer has ended and everything it made has been taken."""


class BoundedQueue:
    """At most ``capacity`` elements. Threads may share it.

    `put` blocks while it is full, `get` while it is empty. After `close`, `get` returns the remaining elements, then
    raises `EndOfInput` or the producer's error.
    """

    def __init__(self, capacity: int = 1, name: str = "queue") -> None:
        if capacity < 1:
            raise ConfigError(f"queue {name!r}: capacity must be at least 1, got {capacity}")
        self.capacity, self.name = capacity, name
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, item: Any, timeout: float | None = None) -> None:
        """Add an element; raises `EndOfInput` if the queue is closed, also while waiting for room."""
        with self._changed:
            self._wait(lambda: self._closed or len(self._items) < self.capacity, timeout, "room")
            if self._closed:
                raise EndOfInput(f"queue {self.name!r} is closed")
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> Any:
        """Take the oldest element."""
        with self._changed:
            self._wait(lambda: self._closed or bool(self._items), timeout, "an element")
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise EndOfInput(f"queue {self.name!r}: the input has ended")

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        if not self._changed.wait_for(ready, timeout):
            raise DeadlineError(f"queue {self.name!r}: waited {timeout:g} s for {what}")

    def size(self) -> int:
        with self._changed:
            return len(self._items)

    def close(self, error: BaseException | None = None, *, drop: bool = False) -> None:
        """End the queue; the consumer gets ``error`` after the last element. ``drop`` discards queued elements."""
        with self._changed:
            self._closed = True
            self._error = self._error or error
            if drop:
                self._items.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed
