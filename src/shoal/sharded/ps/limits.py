"""Bounds of what one server takes on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what one server takes on."""

    max_ids: int = 1 << 24
    """Ids in one request."""
    max_message_bytes: int = 2 << 30
    """Bytes in one frame, of which a request has three; a connection that sends more is cut."""
    max_queued_bytes: int = 4 << 30
    """Requests that wait; beyond it no more are read, and senders feel it. Raise it if memory allows. Requests that
    have not come whole hold as much again at most, over all connections; the largest is cut first."""
    inline_ids: int = 2048
    """Lookups up to this size are answered by the socket thread itself: a hand-over would cost more."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "inline_ids" else 1
            if value < least:
                raise ConfigError(f"limits of a server: {field.name} must be at least {least}, got {value}")

    @property
    def max_request_bytes(self) -> int:
        """Bytes in the three frames of one request."""
        return 3 * self.max_message_bytes


def check_duration(value: Any, what: str) -> None:
    """Refuses what is not a span of time above zero."""
    if not isinstance(value, timedelta):
        raise ConfigError(f"{what} must be a datetime.timedelta, such as timedelta(seconds=3), got {value!r}")
    if value <= timedelta(0):
        raise ConfigError(f"{what} must be above 0, got {value}")
