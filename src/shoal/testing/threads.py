"""Ranks as threads of this process on the in-process transport: the quickest way to try an algorithm."""

import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.comm.ranks.in_process import InProcessTransport
from shoal.errors import DeadlineError


def run_threads(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    transports: list[Any] | None = None,
    return_errors: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(transport, *args, **kwargs)`` in one thread per rank; return the results by rank.

    Raises the exception of the first rank that failed; with ``return_errors`` exceptions are in the list instead.

    Example:
        >>> run_threads(2, lambda t: (t.send(1 - t.rank, b"hi"), t.recv(1 - t.rank))[1])
        [b'hi', b'hi']
    """
    if transports is None:
        transports = list(InProcessTransport.create_group(world_size, default_timeout_s=timeout_s))
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(transports[rank], *args, **kwargs)
        except BaseException as error:
            results[rank] = error
            errors.append((rank, error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors and not return_errors:
        raise errors[0][1]
    if stuck:
        raise DeadlineError(f"run_threads: rank(s) {stuck} were still running after {timeout_s:g} s")
    return results
