"""Positions as numbers: records of a partition that have a name which is the same whoever reads them.

Where several trainers share parameter servers, an update of rows is named by the partition that its records are of and
the number of the last one, so that servers apply it once (`shoal.sharded.PsClient.name_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from shoal.data.live.address import Address
from shoal.errors import DataError

_SEQUENCE_BITS = 20


class Servers(Protocol):
    """What is asked of those who keep rows, and remember which records they have learnt: a `PsClient`."""

    def learnt(self, partitions: Sequence[str]) -> Mapping[str, Sequence[int]]:
        """Up to which record each shard has learnt partitions, 0 where it has not."""
        ...

    def begin_records(self, partition: str, number: int) -> None:
        """Says that a partition is learnt from behind this record on, where nothing is known of it."""
        ...


@dataclass(frozen=True, slots=True)
class Numbering:
    """How partitions and positions of an address are named."""

    address: Address
    number: Callable[[Any], int]
    """A position -> a number that rises with it, 0 before the first record."""
    position: Callable[[int], Any]

    def name(self, partition: str) -> str:
        return f"{self.address}#{partition}"


def numbering_of(address: Address) -> Numbering | None:
    """How the positions of an address are numbered; None where they cannot be."""
    if address.scheme == "kafka":
        return Numbering(address, int, int)
    if address.scheme in ("redis", "rediss"):
        return Numbering(address, _redis_number, _redis_id)
    return None


def _redis_number(entry: Any) -> int:
    """Milliseconds and, in the lowest bits, the sequence number within them."""
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
    """Where reading of a partition begins, and the numbers at which batches must end since a shard has learnt up to
    there."""

    number: int
    cuts: tuple[int, ...] = ()


def start_of(kept: int | None, learnt: Sequence[int], made: Iterable[int]) -> Start | None:
    """Where a trainer begins to read a partition; None where it continues from its checkpoint, with its journal.

    Args:
        kept: its checkpoint's position; None where that has none.
        learnt: up to where each shard has learnt the partition, by anybody; 0 where it knows nothing of it.
        made: where the batches end that it has made since the checkpoint, and will make again as they were.

    >>> start_of(100, [140, 120], [120, 140])  # it was killed: the same batches again, which shards leave out
    >>> start_of(100, [500, 480], [120, 140])  # another trainer had the partition meanwhile
    Start(number=480, cuts=(500,))
    >>> start_of(None, [0, 0], [])  # nobody has learnt it
    """
    ends = sorted({one for one in learnt if one})
    if not ends or (kept is not None and all(one <= kept or one in made for one in ends)):
        return None
    return Start(ends[0], tuple(ends[1:]))


Journal = Sequence[tuple[int, Sequence[tuple[str, str, int, Any]]]]
"""The batches since the checkpoint: number, and (source, partition, records, position behind the last) of each."""


def where_to_begin(
    here: Mapping[str, Mapping[str, Any]],
    kept: Mapping[str, Mapping[str, Any]],
    numberings: Mapping[str, Numbering],
    journal: Journal,
    servers: Servers,
) -> tuple[dict[tuple[str, str], Start | None], bool]:
    """(source, partition) -> where to begin, None for where it is; and whether the journal holds.

    It holds where all that servers have learnt since the checkpoint are batches in it. Otherwise another trainer has
    learnt records meanwhile, and all partitions begin where they were learnt to.

    Args:
        here: source -> partition -> position, of what is read here.
        kept: the same, as the checkpoint has it.
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
    holds = ours and not any(starts.values())
    if not holds:
        for each, name in names.items():
            at = numberings[each[0]].number(here[each[0]][each[1]])
            found = start_of(None, learnt[name], ())
            starts[each] = found if found is not None and (found.cuts or found.number > at) else None
    return starts, holds
