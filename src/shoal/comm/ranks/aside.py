"""A second channel between the ranks, for calls from a background thread.

Ranks must make their calls in the same order. Two threads can guarantee that only if each has its own channel: within
`aside` that is `Ranks.aside`, opened by `Ranks.open_aside`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    depth = 0


_here = _Here()


@contextmanager
def aside() -> Iterator[None]:
    """Send this thread's calls on ranks, including those of tables, through the second channel if it is open."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def is_aside() -> bool:
    """Whether the calling thread is within `aside`."""
    return _here.depth > 0
