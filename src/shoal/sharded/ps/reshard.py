"""Converts checkpoints of servers: to another number of shards, into a local table, or into ranks."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DataError
from shoal.sharded.ps.protocol import PARTITION
from shoal.sharded.ps.server.checkpoint import Checkpoint, Checkpoints, series
from shoal.sharded.ps.server.directory_lock import not_served
from shoal.sharded.ps.server.log import replay
from shoal.sharded.ps.server.shard import Shard
from shoal.sharded.ps.server.snapshot import ShardSnapshot
from shoal.sharded.ps.server.streams import Streams
from shoal.sharded.ps.server.table_spec import build_table
from shoal.table.checkpoint import restore_table
from shoal.table.table import HashTable


def newest_checkpoints(source: str | os.PathLike[str]) -> list[Checkpoint]:
    """The newest checkpoint of every shard in the ``--dir`` of servers, by shard.

    Raises:
        DataError: a checkpoint is damaged or missing.
    """
    found = []
    for folder in sorted(Path(source).glob("shard-*")):
        numbers = series(folder).numbers()
        if numbers:
            try:
                found.append(Checkpoint(series(folder).look(numbers[-1]).path))
            except DataError as error:
                raise DataError(
                    f"{error}; start the server once, so that it loads the previous checkpoint and the log, and end it "
                    "with SIGTERM"
                ) from error
    if not found:
        raise DataError(
            f"{os.fspath(source)}: has no checkpoint of a parameter server; stop the servers with SIGTERM first, which "
            "writes one"
        )
    count = found[0]["of"]
    shards = sorted(checkpoint["shard"] for checkpoint in found)
    if any(checkpoint["of"] != count for checkpoint in found) or shards != list(range(count)):
        raise DataError(f"{os.fspath(source)}: must have checkpoints of all {count} shards, got shards {shards}")
    return found


def kept_checkpoints(folders: Sequence[str | os.PathLike[str]], name: str) -> list[Checkpoint]:
    """The checkpoint that every shard has kept as ``name``, by shard; ``folders`` are the servers' ``--dir``.

    The servers can keep running: kept checkpoints do not change.

    Raises:
        ConfigError: a shard has none.
        DataError: one is damaged.
    """
    found: dict[int, Checkpoint] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob(f"shard-*/kept-{glob.escape(name)}")):
            checkpoint = Checkpoint(path)
            found[checkpoint["shard"]] = checkpoint
    where = ", ".join(str(folder) for folder in folders)
    if not found:
        raise ConfigError(f"{where}: no parameter server has kept rows as {name!r}")
    count = next(iter(found.values()))["of"]
    if missing := sorted(set(range(count)) - found.keys()):
        raise ConfigError(f"{where}: has no rows kept as {name!r} for shards {missing} of {count}; list all folders")
    return [found[shard] for shard in range(count)]


@contextlib.contextmanager
def _not_served(source: str | os.PathLike[str]) -> Iterator[None]:
    """Keep servers from using a ``--dir`` in this block, which would change its newest checkpoint and its log."""
    with contextlib.ExitStack() as stack:
        for folder in sorted(Path(source).glob("shard-*")):
            stack.enter_context(not_served(folder))
        yield


def _check_logs(found: Sequence[Checkpoint]) -> None:
    for checkpoint in found:
        for number, *_ in replay(checkpoint.path.parent, checkpoint["number"], cut=False):
            raise DataError(
                f"shard {checkpoint['shard']}: its log has records up to {number} after the checkpoint; start the "
                "server once and end it with SIGTERM, so that its last checkpoint holds everything"
            )


def table_spec(source: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """The spec of a table in the servers' ``--dir``."""
    tables = newest_checkpoints(source)[0].tables
    if name not in tables:
        raise ConfigError(f"{os.fspath(source)}: has no table {name!r}; it has {sorted(tables)}")
    return tables[name]["spec"]


def load_shard(
    table: HashTable, source: str | os.PathLike[str], name: str, shard: Sequence[int] | None = None
) -> HashTable:
    """Fill a local table, or a rank's, with rows that servers saved.

    ``shard=(index, count)`` loads only ids with ``id mod count == index``, ``(index, count, True)`` those of rank
    ``index`` if rank 0 stays empty; None loads all. In the other direction, save a local table with its ``save`` and
    load it on servers or ranks with ``restore(..., shard=...)``.
    """
    with _not_served(source):
        return _load_shard(table, source, name, shard)


def _load_shard(table: HashTable, source: str | os.PathLike[str], name: str, shard: Sequence[int] | None) -> HashTable:
    found = newest_checkpoints(source)
    _check_logs(found)
    parts = [checkpoint for checkpoint in found if name in checkpoint.tables]
    if not parts:
        raise ConfigError(f"{os.fspath(source)}: has no table {name!r}")
    for checkpoint in parts:
        checkpoint.verify(name)
    restore_table(table, [str(part.path / part.tables[name]["file"]) for part in parts], shard=shard)
    newest = max(part.tables[name]["max_update_time"] for part in parts)
    table._native.raise_max_update_time(newest)
    return table


def reshard_servers(source: str | os.PathLike[str], target: str | os.PathLike[str], of: int) -> dict[str, int]:
    """Write checkpoints for ``of`` shards into an empty ``target``; returns the number of rows of each table.

    Drain and stop the servers of ``source`` first. Let workers finish their writes, because they start new streams
    afterwards. The last learnt record of each partition is kept, and must be the same on all shards. Admission filters
    count from zero again.

    Raises:
        DataError: the shards have learnt partitions up to different records, because a trainer was killed.
    """
    if of < 1:
        raise ConfigError(f"the number of shards must be at least 1, got {of}")
    target = Path(target)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} must be empty; choose a new folder")
    with _not_served(source):
        return _reshard(source, target, of)


def _learnt(found: Sequence[Checkpoint]) -> dict[str, int]:
    """The streams of partitions, with the last record of each."""
    of_shard = [
        {stream: last for stream, last in one["streams"].items() if stream.startswith(PARTITION.hex())} for one in found
    ]
    if any(one != of_shard[0] for one in of_shard):
        raise DataError(
            "the shards have learnt streams up to different records, because a trainer was killed: start the servers "
            "as they were, let the trainers continue and stop them with SIGTERM, then change the number of shards"
        )
    return of_shard[0] if of_shard else {}


def _reshard(source: str | os.PathLike[str], target: Path, of: int) -> dict[str, int]:
    found = newest_checkpoints(source)
    _check_logs(found)
    names = sorted({name for checkpoint in found for name in checkpoint.tables})
    rows = dict.fromkeys(names, 0)
    learnt = _learnt(found)
    for index in range(of):
        shard, streams = Shard(index, of), Streams()
        streams.load(learnt, {})
        for name in names:
            spec = next(checkpoint.tables[name]["spec"] for checkpoint in found if name in checkpoint.tables)
            shard.add(spec, _load_shard(build_table(spec), source, name, (index, of)))
            rows[name] += shard.tables[name].size()
        shard.version = max(checkpoint["version"] for checkpoint in found)
        Checkpoints(target / f"shard-{index:05d}").save(ShardSnapshot(shard, streams, 0))
    return rows
