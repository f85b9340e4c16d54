"""`Prefetch`: the batches of a stream, read ahead by a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from shoal.data.stream import Batch
from shoal.errors import PeerError

_TICK_S = 0.2
_END = object()


class Prefetch:
    """Iterates over ``stream`` while a thread keeps up to ``depth`` batches ready. Close it, or use it in ``with``.

    Parsing is native and lets go of the interpreter, so it overlaps with training. With a ``depth`` of 0 there is no
    thread, and batches are read when they are asked for.
    """

    def __init__(self, stream: Iterable[Batch], depth: int = 8) -> None:
        self._stream = stream
        self._thread: threading.Thread | None = None
        self._queue: queue.Queue[Any] = queue.Queue(max(1, depth))
        self._stop = threading.Event()
        if not depth:
            return
        self._thread = threading.Thread(target=self._run, args=(iter(stream),), name="shoal-read", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._stream) if self._thread is None else self._ready_ones(self._thread)

    def _ready_ones(self, thread: threading.Thread) -> Iterator[Batch]:
        while True:
            try:
                item = self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                if not thread.is_alive() and self._queue.empty():
                    raise PeerError("the reading thread ended without an error") from None
                continue
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    @property
    def ready(self) -> int:
        """Batches that wait; 0 most of the time means that reading is what takes the time."""
        return self._queue.qsize()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, batches: Iterator[Batch]) -> None:
        try:
            for batch in batches:
                if not self._put(batch):
                    return
            self._put(_END)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_TICK_S)
                return True
            except queue.Full:
                continue
        return False
