"""Addresses of live sources: ``redis://host:6379/clicks``, ``kafka://host/clicks?group=ctr``, ``dir:clicks``, ``-``."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import unquote, urlsplit

from shoal.errors import ConfigError, DataError, PeerError, did_you_mean
from shoal.metrics import emit_counter

SCHEMES = ("redis", "rediss", "kafka", "dir", "stdin", "join")
_PORTS = {"redis": 6379, "rediss": 6379, "kafka": 9092}
_COMMON = ("from", "away_s", "lost")
_REDIS = ("group", "consumer", "field", "maxlen", *_COMMON)
_OPTIONS = {
    "redis": _REDIS,
    "rediss": _REDIS,
    "kafka": ("group", "partitions", *_COMMON),
    "dir": ("pattern", "from"),
    "stdin": (),
    "join": (),
}
log = logging.getLogger(__name__)
_stopped: ContextVar[Callable[[], bool]] = ContextVar("stopped", default=lambda: False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A parsed address of a live source."""

    scheme: str
    hosts: tuple[tuple[str, int], ...] = ()
    name: str = ""
    """The stream, the topic or the folder."""
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The address without user, password and options, as used in messages and metrics."""
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        if self.scheme == "stdin":
            return "stdin:"
        if self.scheme in ("dir", "join"):
            return f"{self.scheme}:{self.name}"
        db = f"{self.db}/" if self.db else ""
        return f"{self.scheme}://{hosts}/{db}{self.name}"

    def number(self, name: str, default: float) -> float:
        """An option as a number >= 0."""
        text = self.options.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = -1.0
        if not value >= 0:
            raise ConfigError(f"{self}: {name} must be a number >= 0, got {text!r}")
        return value


def is_live(text: str) -> bool:
    """Whether a text is the address of a live source, even an invalid one, and not a path."""
    return text == "-" or "://" in text or text.partition(":")[0] in SCHEMES


def parse_address(text: str) -> Address:
    """Parse an address.

    >>> one = parse_address("redis://localhost/2/clicks?from=2026-11-01")
    >>> str(one), one.db, one.options["from"]
    ('redis://localhost:6379/2/clicks', 2, '2026-11-01')

    Raises:
        ConfigError: the text is not an address, or has options that its kind of source does not take.
    """
    if text in ("-", "stdin:", "stdin"):
        return Address(scheme="stdin")
    scheme, _, rest = text.partition(":")
    if scheme not in SCHEMES:
        raise ConfigError(
            f"a live source must begin with {', '.join(f'{one}:' for one in SCHEMES)}, got {_plain(text)!r}"
        )
    if scheme in ("dir", "join"):
        path, _, query = rest.partition("?")
        if not path:
            what = "a growing directory must be dir:PATH" if scheme == "dir" else "a join must be join:PATH.toml"
            raise ConfigError(f"the address of {what}, got {text!r}")
        return _checked(Address(scheme=scheme, name=path.removeprefix("//"), options=_options(query, text)))
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"{_plain(text)!r} is not the address of a live source: {error}") from None
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    path = [unquote(one) for one in parts.path.split("/") if one]
    db = 0
    if scheme != "kafka" and len(path) == 2 and path[0].isdecimal():
        db = int(path.pop(0))
    kind = "topic" if scheme == "kafka" else "stream"
    if not hosts or len(path) != 1:
        raise ConfigError(f"the address of a {kind} must be {scheme}://HOST:PORT/{kind.upper()}, got {_plain(text)!r}")
    return _checked(
        Address(
            scheme=scheme,
            hosts=tuple(_host(one, scheme, text) for one in hosts.split(",")),
            name=path[0],
            db=db,
            user=unquote(user) or None,
            password=unquote(password) or None,
            options=_options(parts.query, text),
        )
    )


def from_time_ms(text: str) -> int | None:
    """Milliseconds since 1970 of a date or a time (UTC unless it says otherwise); None if ``text`` is neither.

    >>> from_time_ms("2026-11-01")
    1793491200000
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def bad_from(address: Address, allowed: str) -> ConfigError:
    got = address.options.get("from")
    return ConfigError(f"{address}: from must be beginning, end, a date, a time or {allowed}, got {got!r}")


class StoppedError(PeerError):
    """A wait for an unreachable source ended because the process was asked to stop."""


@contextmanager
def stop_waiting_when(stopped: Callable[[], bool]) -> Iterator[None]:
    """In this block and thread, a wait for an unreachable source ends with `StoppedError` once ``stopped`` is true."""
    token = _stopped.set(stopped)
    try:
        yield
    finally:
        _stopped.reset(token)


class Away:
    """Tracks outages of a source: logs each one once, and raises when one lasts too long."""

    def __init__(self, address: Address) -> None:
        self.limit_s = address.number("away_s", 600.0)
        self._address = address
        self._since: float | None = None
        self.times = 0
        """The number of outages."""

    def failed(self, error: BaseException) -> None:
        """Record a failure.

        Raises:
            PeerError: the first failure was more than ``limit_s`` ago.
            StoppedError: the process was asked to stop; see `stop_waiting_when`.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self.times += 1
            emit_counter("stream_outages_total", 1, f"source={self._address}")
            log.warning("%s does not answer (%s); waiting for it, at most %g s", self._address, error, self.limit_s)
        if _stopped.get()():
            raise StoppedError(f"stopped waiting for {self._address}") from error
        if now - self._since >= self.limit_s:
            raise PeerError(f"{self._address} did not answer for {self.limit_s:g} s ({error})") from error

    def back(self) -> None:
        if self._since is not None:
            log.warning("%s answers again after %.1f s", self._address, time.monotonic() - self._since)
            self._since = None


def records_lost(address: Address, why: str) -> None:
    """Handle records that were deleted before they were read: raise, or with ``lost=skip`` warn."""
    if address.options.get("lost", "error") != "skip":
        raise DataError(f"{address}: {why}; to continue without them, add lost=skip to the address")
    emit_counter("stream_gaps_total", 1, f"source={address}")
    log.warning("%s: %s; continuing without them (lost=skip)", address, why)


def remaining(address: Address, records: Sequence[bytes], at: int, written: int) -> Sequence[bytes]:
    """Return the part of ``records``, numbered from ``at``, after the first ``written`` records of the source."""
    if not at <= written <= at + len(records):
        raise DataError(
            f"{address} has {written} records, but its writer wrote {at} and now adds {len(records)}; a stream with "
            "numbered records must have one writer, and must not be deleted"
        )
    return records[written - at :]


def _options(query: str, address: str) -> dict[str, str]:
    """Parse ``name=value&name=value``; ``+`` stays a plus, as in a time's offset."""
    found: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if not name or not value or unquote(name) in found:
            raise ConfigError(f"{_plain(address)!r}: options must be NAME=VALUE, each once, got {part!r}")
        found[unquote(name)] = unquote(value)
    return found


def _checked(address: Address) -> Address:
    known = _OPTIONS[address.scheme]
    for name in address.options:
        if name not in known and not (address.scheme == "kafka" and "." in name):
            hint = did_you_mean(name, known)
            raise ConfigError(f"{address} has no option {name!r}{hint}; it has {', '.join(known)}")
    for name in ("away_s", "maxlen"):
        address.number(name, 0.0)
    _check_from(address)
    if address.options.get("lost", "error") not in ("error", "skip"):
        raise ConfigError(f"{address}: lost must be error or skip, got {address.options['lost']!r}")
    return address


def _check_from(address: Address) -> None:
    """Check ``from`` for brokers before connecting; a folder checks it against its file names."""
    text = address.options.get("from", "end")
    if address.scheme == "dir" or text in ("beginning", "end") or from_time_ms(text) is not None:
        return
    if address.scheme == "kafka" and not text.isdecimal():
        raise bad_from(address, "an offset")
    if address.scheme in ("redis", "rediss") and not re.fullmatch(r"\d+(-\d+)?", text):
        raise bad_from(address, "the id of the entry to begin after, such as 1790000000000-0")


def _host(text: str, scheme: str, address: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(_PORTS[scheme])
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{_plain(address)!r}: {text!r} must be HOST or HOST:PORT")
    return host.strip("[]"), int(port)


def _plain(text: str) -> str:
    """Return an address without its login."""
    scheme, colon, rest = text.partition("://")
    return f"{scheme}{colon}{rest.rpartition('@')[2]}"
