"""What every live source can do: read records from exact positions, say how far behind it is, and append records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Position = Any
"""JSON values. ``Reader.open({partition: position})`` reads on behind the record that the position belongs to."""


class Damaged(bytes):
    """A place of a source that cannot be read, in a `Chunk` of its own; as bytes it says why."""

    why: str

    def __new__(cls, why: str) -> Damaged:
        made = super().__new__(cls, why.encode())
        made.why = why
        return made


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring records of one partition, in its order."""

    partition: str
    records: Sequence[bytes]
    positions: Sequence[Position]
    """One per record: where reading continues after it."""

    def __len__(self) -> int:
        return len(self.records)

    @property
    def damaged(self) -> str:
        """Why it cannot be read, "" where it can."""
        first = self.records[0] if len(self.positions) == 1 and isinstance(self.records, list) else None
        return first.why if isinstance(first, Damaged) else ""

    def part(self, begin: int, end: int) -> Chunk:
        """Records ``begin`` to ``end``."""
        return Chunk(self.partition, self.records[begin:end], self.positions[begin:end])


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a reader is behind the end of its partitions; None where the source cannot tell."""

    records: int | None = None
    seconds: float | None = None
    """The age of the last record that was read, 0 for a reader at the end."""


class Reader(Protocol):
    """Reads the partitions of one address that belong to this process. Used by one thread at a time.

    Records are handed out in the order of their partition, each once. A source that is away is waited for: `poll`
    returns nothing meanwhile, and raises `shoal.errors.PeerError` once it was away for longer than the address's
    ``away_s`` (600 by default).
    """

    def open(self, positions: Mapping[str, Position] | None = None) -> None:
        """Reading begins at these positions; partitions that are not among them begin at the address's ``from``.

        May be called again to go elsewhere, also backwards.

        Raises:
            DataError: a position does not exist any more, so that records would be lost.
        """
        ...

    def poll(self, max_records: int, timeout_s: float) -> list[Chunk]:
        """At most ``max_records`` further records, as soon as there are some; nothing after ``timeout_s``."""
        ...

    def positions(self) -> dict[str, Position]:
        """Where the next `poll` begins, by partition: behind everything that was handed out."""
        ...

    def acknowledge(self, positions: Mapping[str, Position]) -> None:
        """Tells the source that everything before these positions is safe with us. Without a group it does nothing.

        An acknowledgement that fails is repeated with the next one; reading does not depend on it.
        """
        ...

    def lag(self) -> Lag: ...

    @property
    def ended(self) -> bool:
        """Whether there will never be another record: standard input was closed."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """Appends records to one address. Used by one thread at a time."""

    def append(self, records: Sequence[bytes], *, partition: str | None = None, at: int | None = None) -> None:
        """Returns when all records are stored as safely as the source stores anything.

        Args:
            partition: of those that readers name; None lets the source choose, where it has several.
            at: how many records the partition had before these. A writer that is alone there gives it; then records
                that are stored already are left out, the call waits for a source that is away, and it may be repeated
                after a crash. Without it a failure raises, and some of the first records may be stored.

        Raises:
            PeerError: the source does not answer.
            DataError: the partition has fewer than ``at`` records, or more than with these: somebody else writes there.
        """
        ...

    def written(self, partition: str | None = None) -> int:
        """How many records were ever appended there, by anybody, also if they were deleted since."""
        ...

    def close(self) -> None: ...
