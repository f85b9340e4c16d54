"""Limits of one parameter server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one parameter server."""

    max_ids: int = 1 << 24
    """The most ids in one request."""
    max_message_bytes: int = 2 << 30
    """The most bytes in one frame; a request has three. A connection that sends more is cut."""
    max_queued_bytes: int = 4 << 30
    """The most bytes of waiting requests; beyond it the server stops reading, and senders wait. Raise it if memory
    allows. Incomplete requests of all connections may use as much again; beyond that, the connection with the largest
    one is cut."""
    inline_ids: int = 2048
    """Lookups of up to this many ids are answered by the socket thread; handing them over would take longer."""

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
    """Raise unless ``value`` is a duration above zero."""
    if not isinstance(value, timedelta):
        raise ConfigError(f"{what} must be a datetime.timedelta, such as timedelta(seconds=3), got {value!r}")
    if value <= timedelta(0):
        raise ConfigError(f"{what} must be above 0, got {value}")
