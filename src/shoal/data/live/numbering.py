"""Positions as numbers, which name a partition's records in the same way for every reader.

When several trainers share parameter servers, an update of rows is named by its records' partition and the number of
the last record, so that servers apply it once (`shoal.sharded.PsClient.name_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shoal.data.live.address import Address
from shoal.errors import DataError

_SEQUENCE_BITS = 20


class Servers(Protocol):
    """The servers that keep rows and remember which records they have learnt; implemented by `PsClient`."""

    def learnt(self, partitions: Sequence[str]) -> Mapping[str, Sequence[int]]:
        """The last record that each shard has learnt, by partition; 0 for none."""
        ...

    def begin_records(self, partition: str, number: int) -> None:
        """Tell servers that have not learnt a partition that learning begins after record ``number``."""
        ...


@dataclass(frozen=True, slots=True)
class Numbering:
    """The names of an address's partitions, and the numbers of its positions."""

    address: Address
    number: Callable[[Any], int]
    """Position -> a number that rises with it, 0 before the first record."""
    position: Callable[[int], Any]

    def name(self, partition: str) -> str:
        return f"{self.address}#{partition}"


def numbering_of(address: Address) -> Numbering | None:
    """The numbering of an address's positions; None if they cannot be numbered."""
    if address.scheme == "kafka":
        return Numbering(address, int, int)
    if address.scheme in ("redis", "rediss"):
        return Numbering(address, _redis_number, _redis_id)
    return None


def _redis_number(entry: Any) -> int:
    """Combine milliseconds with the sequence number, which is in the lowest bits."""
    millis, _, sequence = str(entry).partition("-")
    if int(sequence or 0) >> _SEQUENCE_BITS or int(millis) >> (63 - _SEQUENCE_BITS):
        raise DataError(
            f"the id {entry} of a Redis stream that several trainers learn must be below 2^43 milliseconds, with a "
            f"sequence number below 2^{_SEQUENCE_BITS}"
        )
    return int(millis) << _SEQUENCE_BITS | int(sequence or 0)


def _redis_id(number: int) -> str:
    return f"{number >> _SEQUENCE_BITS}-{number & ((1 << _SEQUENCE_BITS) - 1)}"


class Start(NamedTuple):
    """Where reading of a partition begins, and the numbers at which batches must end because a shard has learnt
    exactly up to there."""

    number: int
    cuts: tuple[int, ...] = ()


def start_of(kept: int | None, learnt: Sequence[int], made: Iterable[int]) -> Start | None:
    """Return where a trainer begins to read a partition; None if it continues from its checkpoint with its journal.

    Args:
        kept: its checkpoint's position; None if the checkpoint has none.
        learnt: up to where each shard has learnt the partition, from any trainer; 0 for nothing.
        made: the ends of the batches since the checkpoint, which will be made again in the same way.

    >>> start_of(100, [140, 120], [120, 140])  # it was killed: make the same batches again, which shards skip
    >>> start_of(100, [500, 480], [120, 140])  # another trainer has learnt the partition meanwhile
    Start(number=480, cuts=(500,))
    >>> start_of(None, [0, 0], [])  # nobody has learnt it
    """
    ends = sorted({one for one in learnt if one})
    if not ends or (kept is not None and all(one <= kept or one in made for one in ends)):
        return None
    return Start(ends[0], tuple(ends[1:]))


Journal = Sequence[tuple[int, Sequence[tuple[str, str, int, Any]]]]
"""The batches since the checkpoint: number, and (source, partition, records, position after the last) of each."""


def where_to_begin(
    here: Mapping[str, Mapping[str, Any]],
    kept: Mapping[str, Mapping[str, Any]],
    numberings: Mapping[str, Numbering],
    journal: Journal,
    servers: Servers,
) -> tuple[dict[tuple[str, str], Start | None], bool]:
    """Return (source, partition) -> where to begin (None: at its current position), and whether the journal is valid.

    It is valid if everything that servers have learnt since the checkpoint is a batch in it. Otherwise another trainer
    has learnt records meanwhile, and all partitions begin where the servers' learning ended.

    Args:
        here: source -> partition -> current position of this reader.
        kept: the same, from the checkpoint.
    """
    runs = [run for _, of_batch in journal for run in of_batch]
    own = [(source, partition) for source, partitions in here.items() for partition in partitions]
    names = {each: numberings[each[0]].name(each[1]) for each in own}
    learnt = servers.learnt(list(names.values())) if names else {}
    ours = all((source, partition) in names for source, partition, _, _ in runs)
    starts: dict[tuple[str, str], Start | None] = {}
    for each, name in names.items():
        number = numberings[each[0]].number
        made = {number(last) for source, partition, _, last in runs if (source, partition) == each}
        position = (kept.get(each[0]) or {}).get(each[1])
        starts[each] = start_of(None if position is None or not ours else number(position), learnt[name], made)
    valid = ours and not any(starts.values())
    if not valid:
        for each, name in names.items():
            at = numberings[each[0]].number(here[each[0]][each[1]])
            found = start_of(None, learnt[name], ())
            starts[each] = found if found is not None and (found.cuts or found.number > at) else None
    return starts, valid
