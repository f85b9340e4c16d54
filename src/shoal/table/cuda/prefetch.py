"""Prefetching of rows for a `CachedHashTable`, in its own thread and on its own stream."""

from __future__ import annotations

import contextlib
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from shoal.errors import DeadlineError

if TYPE_CHECKING:
    from shoal.table.cuda.cache import CachedHashTable

_JOBS = 16  # the most jobs whose rows no call has used yet

Piece: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Times, weights and states of some rows."""


class Prefetcher:
    """The running prefetches of a cache, used under the cache's lock except in `submit`, `close` and the thread."""

    def __init__(self, cache: CachedHashTable, timeout: timedelta) -> None:
        self._of = weakref.ref(cache)
        self._timeout = timeout
        self._jobs: dict[tuple[int, int], Future[None]] = {}
        self._in_flight = 0
        self._tainted: list[Tensor] = []
        self._generation = 0
        self._worker: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None

    @property
    def _cache(self) -> CachedHashTable:
        cache = self._of()
        if cache is None:
            raise ReferenceError("the cache no longer exists")
        return cache

    def submit(self, ids: Tensor) -> None:
        """Starts to fetch the rows of ids."""
        cache = self._cache
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, f"prefetch-{cache.name}")
            self._stream = torch.cuda.Stream(cache.device) if cache.device.type == "cuda" else None
        main = None
        if self._stream is not None:
            main = torch.cuda.current_stream(cache.device)
            ids.record_stream(self._stream)
        with cache.lock:
            while len(self._jobs) >= _JOBS:
                self._jobs.pop(next(iter(self._jobs)))
            self._jobs[_key(ids)] = self._worker.submit(self._ahead, ids, main)

    def join(self) -> None:
        """Makes the current stream wait for the work on the thread's stream."""
        if self._ready is not None:
            torch.cuda.current_stream(self._cache.device).wait_event(self._ready)
            self._ready = None

    def wait_for(self, ids: Tensor) -> None:
        """Waits, without the lock, for the job of the same tensor and raises its error, if any.

        The caller must hold the cache's lock exactly once, and not that of its storage; other calls run meanwhile.
        """
        job = self._jobs.pop(_key(ids), None)
        if job is None:
            return
        lock: Any = self._cache.lock
        lock.release()  # the thread needs it
        try:
            job.result(self._timeout.total_seconds())
        except FutureTimeoutError:
            raise DeadlineError(
                f"table {self._cache.name!r}: waited {self._timeout.total_seconds():g} s for a prefetch of "
                f"{ids.numel()} ids; raise timeout"
            ) from None
        finally:
            lock.acquire()
        self.join()

    def taint(self, ids: Tensor) -> None:
        """Invalidates rows of these ids fetched so far, because they have changed in the CPU table."""
        if self._in_flight:
            self._tainted.append(ids)

    def taint_all(self) -> None:
        """Invalidates all rows fetched so far."""
        self._generation += 1

    def close(self) -> None:
        """Ends the thread."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        self._jobs.clear()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _ahead(self, ids: Tensor, main: torch.cuda.Stream | None) -> None:
        cache = self._cache
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            with cache.lock, cache.storage:
                self._follow(main)
                asked = cache.note(ids).cpu()
                if asked.numel() == 0:
                    self._record()
                    return
                self._in_flight += 1
                generation = self._generation
            try:
                known, pieces = cache.fetch(asked)
            except BaseException:
                with cache.lock:
                    self._landed()
                raise
            with cache.lock, cache.storage:
                self._follow(main)
                tainted = torch.cat(self._tainted) if self._tainted else None
                self._landed()
                if generation == self._generation:
                    self._arrive(asked[known], pieces, tainted)
                self._record()

    def _arrive(self, ids: Tensor, pieces: list[Piece], tainted: Tensor | None) -> None:
        """Loads fetched rows, except those that were loaded, written back or removed in the meantime."""
        if ids.numel() == 0:
            return
        cache = self._cache
        good = (cache.find_rows(ids.to(cache.device)) < 0).cpu()
        if tainted is not None:
            good &= ~torch.isin(ids, tainted)
        cache.make_room(int(good.sum()))
        cache.load(ids, pieces, None if bool(good.all()) else good.to(cache.device))

    def _landed(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._tainted.clear()

    def _follow(self, main: torch.cuda.Stream | None) -> None:
        if self._stream is not None and main is not None:
            self._stream.wait_stream(main)

    def _record(self) -> None:
        if self._stream is not None:
            self._ready = torch.cuda.Event()
            self._ready.record(self._stream)


def _key(ids: Tensor) -> tuple[int, int]:
    return ids.data_ptr(), ids.numel()
