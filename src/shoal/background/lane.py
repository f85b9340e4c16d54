"""`Lane`: a thread that runs tasks one after the other."""

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
    """Runs tasks in the order of submission.

    When a task fails, later ones are not run: their futures get the same error, and so does the next call of `submit`
    or `settle`, with the traceback of the failure.

    Args:
        name: name of the thread.
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
        """The error of the failed task, if any."""
        return self._error

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` after all earlier tasks. Raises the error of an earlier task that failed."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UnsupportedError(f"the lane {self._thread.name!r} is closed")
        future: Future[T] = Future()
        self._last = future
        self._work.put((work, future))
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` after all earlier tasks and return its result; in the lane's own thread, run it at once."""
        return work() if self.here else self.submit(work).result()

    def settle(self) -> None:
        """Wait until all submitted tasks are done; raise the error of a failed one."""
        last = self._last
        if last is not None and not self.here:
            last.result()
        if self._error is not None:
            raise self._error

    def close(self, *, finish: bool = True, wait_s: float = JOIN_S) -> None:
        """End the thread after all submitted tasks, or with ``finish=False`` after the running one.

        Returns after ``wait_s`` seconds even if the thread still works; it ends later.
        """
        if not self._closed:
            self._closed = True
            if not finish:
                self._error = self._error or CancelledError("the lane was closed before it ran this task")
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
