"""Times of writes: those that a caller gave, and those that were read from the clock because none was given."""

from __future__ import annotations

import time

DAY_S = 86400
HOUR_S = 3600


class Now(int):
    """Seconds that were read from a clock.

    A write stamps its rows with the ``req_time`` that it was given, also with one that is older than a row's own stamp.
    With a ``Now`` it never moves a stamp back: a row that has a later one keeps it.
    """

    __slots__ = ()


def now() -> Now:
    """The current time."""
    return Now(time.time())
