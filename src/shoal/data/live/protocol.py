"""The interface of live sources: read records from exact positions, report the lag, and append records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Position = Any
"""A JSON value. ``Reader.open({partition: position})`` continues after the record that has this position."""


REST = 1 << 62
"""The end offset of a file whose rest cannot be read."""


class Damaged(bytes):
    """An unreadable part of a source, alone in its `Chunk`; its bytes are the reason."""

    why: str

    def __new__(cls, why: str) -> Damaged:
        made = super().__new__(cls, why.encode())
        made.why = why
        return made

    @classmethod
    def rest(cls, why: str) -> Damaged:
        """The part of a file that follows its last readable record."""
        return cls(f"the file is damaged ({why}); its rest is skipped")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one partition."""

    partition: str
    records: Sequence[bytes]
    positions: Sequence[Position]
    """One per record: where reading continues after that record."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def damaged(self) -> str:
        """Why the chunk cannot be read; "" if it can."""
        first = self.records[0] if len(self.positions) == 1 and isinstance(self.records, list) else None
        return first.why if isinstance(first, Damaged) else ""

    def part(self, begin: int, end: int) -> Chunk:
        """Records ``begin`` to ``end``."""
        return Chunk(self.partition, self.records[begin:end], self.positions[begin:end])


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a reader is behind the end of its partitions; None if unknown."""

    records: int | None = None
    seconds: float | None = None
    """The age of the last record read; 0 for a reader at the end."""
    reachable: bool = True
    """Whether the source answers."""


class Reader(Protocol):
    """Reads the partitions of one address that belong to this process. Used by one thread at a time.

    Records are returned in the order of their partition, each once. While a source is unreachable, `poll` returns
    nothing; it raises `shoal.errors.PeerError` once the source has been unreachable for longer than the address's
    ``away_s`` (600 by default).
    """

    def open(self, positions: Mapping[str, Position] | None = None) -> None:
        """Begin reading at these positions; other partitions begin at the address's ``from``.

        Can be called again to move to other positions, also backwards.

        Raises:
            DataError: a position no longer exists, so records would be lost.
        """
        ...

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        """Return at most ``max_records`` records, as soon as there are any; an empty list after ``timeout_s``."""
        ...

    def positions(self) -> dict[str, Position]:
        """Return the position of the next `poll` by partition: after everything that was returned."""
        ...

    def acknowledge(self, positions: Mapping[str, Position]) -> None:
        """Tell the source that everything before these positions is stored safely. Does nothing without a group.

        A failed acknowledgement is repeated with the next one; reading does not depend on it.
        """
        ...

    def lag(self) -> Lag: ...

    @property
    def ended(self) -> bool:
        """Whether there will never be another record, as when standard input was closed."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """Appends records to one address. Used by one thread at a time."""

    def append(self, records: Sequence[bytes], *, partition: str | None = None, at: int | None = None) -> None:
        """Append records; return when they are stored as durably as the source can.

        Args:
            partition: a partition as readers name it; None lets the source choose among several.
            at: the number of records in the partition before these, for the partition's only writer. Then records
                that are stored already are skipped, the call waits for an unreachable source, and it can be repeated
                after a crash. Without it a failure raises, and some of the first records may have been stored.

        Raises:
            PeerError: the source does not answer.
            DataError: the partition has fewer than ``at`` records, or too many: something else writes to it.
        """
        ...

    def written(self, partition: str | None = None) -> int:
        """Return the number of records ever appended, by any writer, including deleted ones."""
        ...

    def close(self) -> None: ...
