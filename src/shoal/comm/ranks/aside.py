"""Calls of a thread of its own: they go through a second channel between the ranks, and mix with no others.

Ranks make their calls in the same order. Two threads cannot promise that, unless what each of them exchanges has a
channel of its own: within `aside` it is `Ranks.aside`, which `Ranks.open_aside` has made.
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
    """Within it, calls of this thread that tables make of ranks go through the second channel, where it is open."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def is_aside() -> bool:
    """Whether the calling thread is within `aside`."""
    return _here.depth > 0
