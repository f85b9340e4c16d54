"""The sources of a `LiveStream`: the position of each, and the records that are not in a batch yet."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.data.live.address import Address, parse_address
from shoal.data.live.protocol import Chunk, Lag, Reader
from shoal.data.source import BadRow
from shoal.errors import ConfigError, DataError
from shoal.metrics import emit_store

POSITION_FILE = "_positions.json"
_TURN_S = 0.02  # how long to wait for one of several sources before trying the next


@dataclass(slots=True)
class Source:
    """An open address, its positions and its pending records."""

    address: Address
    reader: Reader | None = None
    positions: dict[str, Any] = field(default_factory=dict)
    """The position after the last record that is in a batch, by partition."""
    held: deque[Chunk] = field(default_factory=deque)
    """Records that were read and not returned yet."""

    @property
    def name(self) -> str:
        return str(self.address)


class Sources:
    """All sources of a stream, read in turn."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.all = [Source(parse_address(one)) for one in addresses]
        self.names = [one.name for one in self.all]
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"[data] train: each source must be named once, got {', '.join(self.names)}")

    def __iter__(self) -> Iterator[Source]:
        return iter(self.all)

    def named(self, name: str) -> Source | None:
        """The source with this name, if it is open."""
        return next((one for one in self.all if one.name == name and one.reader is not None), None)

    def poll(self, wanted: int, wait_s: float) -> list[tuple[Source, Chunk]]:
        """Return at most ``wanted`` records; a source with records does not wait for the others."""
        deadline = time.monotonic() + wait_s
        alone = len(self.all) == 1
        found: list[tuple[Source, Chunk]] = []
        while True:
            for one in self.all:
                assert one.reader is not None
                while wanted and (chunk := take(one.held, None, wanted)) is not None:
                    found.append((one, chunk))
                    wanted -= len(chunk)
                for chunk in one.reader.poll(wanted, 0.0 if not alone or found else wait_s) if wanted else ():
                    found.append((one, chunk))
                    wanted -= len(chunk)
                if not wanted:
                    break
            left = deadline - time.monotonic()
            if found or left <= 0 or alone:
                return found
            time.sleep(min(_TURN_S, left))

    def recorded(self, files: Sequence[str]) -> Mapping[str, Any]:
        """Read the positions at which a history ends from a file next to its last file; not for addresses with
        ``from``."""
        path = os.path.join(os.path.dirname(files[-1]), POSITION_FILE) if files else ""
        if not os.path.exists(path):
            return {}
        try:
            with open(path, "rb") as file:
                given = json.load(file)
            if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
                raise ValueError("it must be {address: {partition: position}}")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: the positions at which the history ends cannot be read ({error})") from None
        own = {one.name for one in self.all if "from" not in one.address.options}
        return {name: positions for name, positions in given.items() if name in own}

    def positions(self) -> dict[str, Any]:
        """The position after the last record that is in a batch, by source and partition."""
        return {one.name: dict(one.positions) for one in self.all}

    @property
    def ended(self) -> bool:
        """Whether there will never be another record."""
        return all(one.reader is not None and one.reader.ended for one in self.all)

    def lag(self) -> Lag:
        """Ask for the current lag of all sources together; each one's lag goes to the metrics."""
        each = []
        for one in self.all:
            assert one.reader is not None
            each.append(lag := one.reader.lag())
            if lag.records is not None:
                emit_store("stream_lag_records", lag.records, f"source={one.name}")
            if lag.seconds is not None:
                emit_store("stream_lag_seconds", lag.seconds, f"source={one.name}")
        records = [one.records for one in each if one.records is not None]
        seconds = [one.seconds for one in each if one.seconds is not None]
        return Lag(
            sum(records) if len(records) == len(each) else None,
            max(seconds, default=None),
            all(one.reachable for one in each),
        )

    def acknowledge(self, positions: Mapping[str, Any]) -> None:
        """Tell the sources what is stored safely."""
        for one in self.all:
            if one.reader is not None and one.name in positions:
                one.reader.acknowledge(positions[one.name])

    def close(self) -> None:
        """Close all sources."""
        for one in self.all:
            if one.reader is not None:
                one.reader.close()
                one.reader = None


def take(held: deque[Chunk], partition: str | None, count: int) -> Chunk | None:
    """Remove at most ``count`` consecutive records of a partition (None: the first one's) from ``held``."""
    for place, chunk in enumerate(held):
        if partition is None or chunk.partition == partition:
            if len(chunk) > count:
                held[place] = chunk.part(count, len(chunk))
                return chunk.part(0, count)
            del held[place]
            return chunk
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMessage(BadRow):
    """A message that could not be read; ``path`` is its source and position."""

    def where(self) -> str:
        return self.path
