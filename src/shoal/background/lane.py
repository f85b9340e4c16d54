"""`Lane`: a thread that does what it is given, one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from shoal.errors import CancelledError, UnsupportedError

T = TypeVar("T")
JOIN_S = 60.0


class Lane:
    """Work in the order in which it was given.

    When something fails, nothing that was given after it is done: whoever waits for that gets the same error, and so
    does the next who calls `submit` or `settle`, with the traceback of the failure.

    Args:
        name: of the thread.
        inside: makes a context in which the thread works.
    """

    def __init__(self, name: str, *, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._inside = inside
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._last: Future[Any] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller is the lane's own thread."""
        return threading.current_thread() is self._thread

    @property
    def error(self) -> BaseException | None:
        """What went wrong, if something did."""
        return self._error

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has ``work`` done after everything that was given before. Raises what went wrong meanwhile."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UnsupportedError(f"the lane {self._thread.name!r} is closed")
        future: Future[T] = Future()
        self._last = future
        self._work.put((work, future))
        return future

    def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done after everything that was given before; in the lane itself, at once."""
        return work() if self.here else self.submit(work).result()

    def settle(self) -> None:
        """Waits until everything that was given is done; raises what went wrong."""
        last = self._last
        if last is not None and not self.here:
            last.result()
        if self._error is not None:
            raise self._error

    def close(self, *, finish: bool = True, wait_s: float = JOIN_S) -> None:
        """Ends the thread: after everything that was given, or with ``finish=False`` after what is under way.

        Returns after ``wait_s`` seconds also if the thread still works; it ends later.
        """
        if not self._closed:
            self._closed = True
            if not finish:
                self._error = self._error or CancelledError("the lane was closed before it came to this")
            self._work.put(None)
        if not self.here:
            self._thread.join(wait_s)

    def _run(self) -> None:
        with self._inside():
            while (given := self._work.get()) is not None:
                work, future = given
                if self._error is not None:
                    future.set_exception(self._error)
                    continue
                try:
                    result = work()
                except BaseException as error:
                    self._error = error
                    future.set_exception(error)
                else:
                    future.set_result(result)
                del given, work, future
