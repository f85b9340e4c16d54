"""Iteration over a table's rows in parts, as serialized entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal import _core
from shoal.errors import ConfigError
from shoal.table.arguments import as_part

if TYPE_CHECKING:
    from shoal.table.table import HashTable

# An offset is (index of the stripe in the part) << 40 | (position in that stripe).
_PLACE_BITS = 40
_PLACE = (1 << _PLACE_BITS) - 1


def save_as_tensor(
    table: HashTable, shard_idx: int, num_shards: int, limit: int, offset: int
) -> tuple[int, list[bytes]]:
    """At most ``limit`` serialized ``EntryDump`` messages of part ``shard_idx`` of ``num_shards``, from ``offset``.

    Args:
        table: a training table.
        shard_idx: the part, 0 to ``num_shards - 1``; parts are disjoint and together hold every row.
        num_shards: the number of parts; parts beyond the first 64 are empty.
        limit: the most entries to return, at least 1.
        offset: 0 in the first call, then the offset that the previous call returned.

    Returns:
        The offset to continue from, and the entries. Fewer than ``limit`` means that the part is finished. If nothing
        is written in between, every row is returned once.
    """
    shard_idx, num_shards, limit, offset = as_part(table.name, shard_idx, num_shards, limit, offset)
    stripes = range(shard_idx, _core.Table.num_stripes, num_shards)
    at, place = offset >> _PLACE_BITS, offset & _PLACE
    entries: list[bytes] = []
    while at < len(stripes) and len(entries) < limit:
        found, place = _core.walk_entries(table._native, stripes[at], place, limit - len(entries))
        entries += found
        if place < 0:
            at, place = at + 1, 0
    return at << _PLACE_BITS | place, entries


def iterate_table_and_apply(
    table: HashTable, fn: Callable[[list[bytes]], Any], limit: int = 1000, nshards: int = 4
) -> None:
    """Calls ``fn`` with lists of at most ``limit`` serialized entries, which together hold every row of ``table``.

    >>> import shoal, torch
    >>> from shoal.table import EntryDump, iterate_table_and_apply
    >>> table = shoal.HashTable(dim=1).assign(torch.arange(3), torch.ones(3, 1))
    >>> ids = []
    >>> iterate_table_and_apply(table, lambda entries: ids.extend(EntryDump.FromString(e).id for e in entries))
    >>> sorted(ids)
    [0, 1, 2]
    """
    if nshards < 1:
        raise ConfigError(f"table {table.name!r}: nshards must be at least 1, got {nshards}")
    for shard in range(nshards):
        offset = 0
        while True:
            offset, entries = table.save_as_tensor(shard, nshards, limit, offset)
            if entries:
                fn(entries)
            if len(entries) < limit:
                break
