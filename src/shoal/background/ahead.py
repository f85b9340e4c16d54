"""`ReadAhead`: an iterator whose next elements a thread prepares while the caller works on the current one."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from shoal.background.queue import BoundedQueue, EndOfInput

T = TypeVar("T")
JOIN_S = 60.0
WAITED_S, WAITED_SHARE = 0.25, 0.1
"""A source is slow if reading it has waited longer than this many seconds and this share of the elapsed time."""


class ReadAhead(Iterator[T], Generic[T]):
    """Iterates over ``source`` while a thread keeps up to ``depth`` elements ready. Close it, or use it in ``with``.

    An error of the source is raised after the elements before it, with its own traceback. With a ``depth`` of 0 there
    is no thread, and elements are made on request.

    Args:
        source: only the thread advances it, and closes the iterator that it made from it.
        depth: number of ready elements, in addition to the one that the thread is making.
        name: name of the thread.
        inside: makes a context in which the thread works.
    """

    def __init__(
        self,
        source: Iterable[T],
        depth: int = 8,
        *,
        name: str = "shoal-read",
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._source: Iterator[T] = iter(source)
        self._owned = self._source is not source  # an iterator given by the caller is not ours to close
        self._queue = BoundedQueue(max(1, depth), name)
        self._thread: threading.Thread | None = None
        if depth:
            work = (self._source, self._owned, self._queue, inside)  # without `self`, whose finalizer ends the thread
            self._thread = threading.Thread(target=_fill, args=work, name=name, daemon=True)
            weakref.finalize(self, self._queue.close, drop=True)
            self._thread.start()

    def __next__(self) -> T:
        if self._thread is None:
            return next(self._source)
        try:
            return self._queue.get()
        except EndOfInput:
            raise StopIteration from None

    @property
    def ready(self) -> int:
        """Number of ready elements; usually 0 if the source is the bottleneck."""
        return self._queue.size()

    def close(self, wait_s: float = JOIN_S) -> None:
        """End the thread after the element that it is making; ready elements are dropped.

        Returns after ``wait_s`` seconds even if the thread is still making that element; it ends later.
        """
        self._queue.close(drop=True)
        if self._thread is None:
            with contextlib.suppress(ValueError):  # another reader's thread is still running the generator
                _close(self._source, self._owned)
        elif self._thread is not threading.current_thread():
            self._thread.join(wait_s)

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class ReadAheadIfSlow(Iterator[T], Generic[T]):
    """Iterates over ``source`` in the caller's thread until the source proves slow, then as `ReadAhead` does.

    For machines with few cores, where a thread helps if it waits for a disk or a network, but not if it parses. Time
    in which this process uses no CPU counts as waiting.
    """

    def __init__(self, source: Iterable[T], depth: int = 8, *, name: str = "shoal-read") -> None:
        self._source: Iterator[T] = iter(source)
        self._owned = self._source is not source
        self._depth, self._name = depth, name
        self._ahead: ReadAhead[T] | None = None
        self._begun = time.perf_counter()
        self._waited_s = 0.0

    def __next__(self) -> T:
        if self._ahead is not None:
            return next(self._ahead)
        begin, used = time.perf_counter(), time.process_time()
        item = next(self._source)
        end = time.perf_counter()
        self._waited_s += max(0.0, end - begin - (time.process_time() - used))
        if self._waited_s > max(WAITED_S, WAITED_SHARE * (end - self._begun)):
            self._ahead = ReadAhead(self._source, self._depth, name=self._name)
        return item

    @property
    def is_ahead(self) -> bool:
        """Whether a thread reads ahead."""
        return self._ahead is not None

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._ahead is not None:
            self._ahead.close()
        with contextlib.suppress(ValueError):  # the thread is still running the generator
            _close(self._source, self._owned)


def _fill(source: Any, owned: bool, queue: BoundedQueue, inside: Callable[[], AbstractContextManager[Any]]) -> None:
    error: BaseException | None = None
    try:
        with inside():
            try:
                for item in source:
                    queue.put(item)
            finally:
                _close(source, owned)
    except EndOfInput:  # the consumer closed the queue
        pass
    except BaseException as raised:
        error = raised
    queue.close(error)


def _close(source: Any, owned: bool) -> None:
    close = getattr(source, "close", None)
    if owned and callable(close):
        close()
