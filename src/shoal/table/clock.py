"""Times of writes: given by the caller, or read from the clock if the caller gave none."""

from __future__ import annotations

import time

DAY_S = 86400
HOUR_S = 3600


class Now(int):
    """A time in seconds that was read from the clock.

    A write stamps its rows with the given ``req_time``, even if that is older than a row's current stamp. A ``Now``
    never moves a stamp back: a row with a later stamp keeps it.
    """

    __slots__ = ()


def now() -> Now:
    """The current time."""
    return Now(time.time())
