"""The event loop that the process's model servers share: one thread where requests arrive and short ones are run."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class ServingLoop:
    """An event loop on a thread of its own, as long as the process lives."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="shoal-serve", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result], timeout: float) -> Result:
        """Runs a coroutine there and waits for it here; raises TimeoutError when it takes longer."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise


_lock = threading.Lock()
_loop: ServingLoop | None = None


def serving_loop() -> ServingLoop:
    """The process's loop, made at the first call."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = ServingLoop()
        return _loop


def _forget() -> None:
    """A forked child has no thread for the loop that it inherits."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
