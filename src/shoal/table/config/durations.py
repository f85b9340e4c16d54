"""Parsers for durations and sizes written as text: "30d", "2h", "8GiB"."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def seconds_of(duration: timedelta | str, what: str) -> int:
    """Whole seconds in a ``timedelta`` or in text: ``"90s"``, ``"10m"``, ``"2h"``, ``"30d"``, ``"2w"``, ``"1y"``.

    Raises:
        ConfigError: ``duration`` is neither, is negative or has fractions of a second.
    """
    if isinstance(duration, str):
        number, unit = duration[:-1].strip(), duration[-1:]
        if unit not in _SECONDS or not number.isdecimal():
            raise ConfigError(
                f"{what} must be a whole number of seconds, minutes, hours, days, weeks or years, as in '2h' or '30d', "
                f"got {duration!r}"
            )
        return int(number) * _SECONDS[unit]
    if not isinstance(duration, timedelta):
        raise ConfigError(f"{what} must be a timedelta or text such as '30d', got {duration!r}")
    if duration < timedelta() or duration % timedelta(seconds=1):
        raise ConfigError(f"{what} must be a whole number of seconds and not negative, got {duration}")
    return duration // timedelta(seconds=1)


def bytes_of(size: Any, what: str) -> int:
    """Bytes from a number, or from text such as ``"8GiB"`` or ``"500MB"``.

    Raises:
        ConfigError: ``size`` is neither, or is not above 0.
    """
    count: float = 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _BYTES:
            raise ConfigError(f"{what} must be a number of bytes or text such as '8GiB' or '500MB', got {size!r}")
        count = float(match[1]) * _BYTES[match[2].lower()]
    elif isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        raise ConfigError(f"{what} must be a number of bytes or text such as '8GiB', got {size!r}")
    if not 0 < count < 1 << 62:
        raise ConfigError(f"{what} must be above 0 and below {1 << 62} bytes, got {size!r}")
    return int(count)
