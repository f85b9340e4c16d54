"""Event loops on their own threads: one shared by the process's model servers, one by its clients."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class ServingLoop:
    """An event loop on its own thread, for the lifetime of the process."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result], timeout: float) -> Result:
        """Run a coroutine on the loop and wait for its result; raises TimeoutError if it takes longer."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise


_lock = threading.Lock()
_loops: dict[str, ServingLoop] = {}


def serving_loop() -> ServingLoop:
    """The loop of the process's servers, which receives requests and runs short ones; created at the first call."""
    return _loop("shoal-serve")


def client_loop() -> ServingLoop:
    """The loop of the process's clients; created at the first call."""
    return _loop("shoal-client")


def _loop(name: str) -> ServingLoop:
    with _lock:
        if name not in _loops:
            _loops[name] = ServingLoop(name)
        return _loops[name]


def _forget() -> None:
    """Drop the loops in a forked child, which has no threads for them."""
    global _loops, _lock
    _loops, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget)
