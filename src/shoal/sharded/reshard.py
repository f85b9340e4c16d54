"""Checkpoints of one number of shards for another: between servers, into one local table, or into ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DataError
from shoal.sharded.ps.checkpoint import Checkpoints, read_manifest
from shoal.sharded.ps.directory_lock import not_served
from shoal.sharded.ps.log import replay
from shoal.sharded.ps.shard import Shard
from shoal.sharded.ps.snapshot import ShardSnapshot
from shoal.sharded.ps.streams import Streams
from shoal.sharded.ps.table_spec import build_table
from shoal.table.checkpoint import restore_table
from shoal.table.table import HashTable


def newest_checkpoints(source: str | os.PathLike[str]) -> list[tuple[Path, dict[str, Any]]]:
    """The newest whole checkpoint of every shard in the ``--dir`` of servers: folder and manifest, by shard."""
    found = []
    for folder in sorted(Path(source).glob("shard-*")):
        checkpoints = Checkpoints(folder)
        numbers = checkpoints.numbers()
        if numbers:
            path = checkpoints.path(numbers[-1])
            found.append((path, read_manifest(path)))
    if not found:
        raise DataError(f"{os.fspath(source)}: there is no checkpoint of a parameter server; drain the servers first")
    count = found[0][1]["of"]
    shards = [manifest["shard"] for _, manifest in found]
    if any(manifest["of"] != count for _, manifest in found) or sorted(shards) != list(range(count)):
        raise DataError(f"{os.fspath(source)}: has checkpoints of shards {sorted(shards)}, needed are all of {count}")
    return found


@contextlib.contextmanager
def _not_served(source: str | os.PathLike[str]) -> Iterator[None]:
    """No server serves from a ``--dir`` meanwhile: its newest checkpoint and its log would change under the reader."""
    with contextlib.ExitStack() as stack:
        for folder in sorted(Path(source).glob("shard-*")):
            stack.enter_context(not_served(folder))
        yield


def _check_logs(found: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    for path, manifest in found:
        for number, *_ in replay(path.parent, manifest["number"], cut=False):
            raise DataError(
                f"shard {manifest['shard']}: its log goes on to record {number} behind the checkpoint; start the "
                "server once and end it with SIGTERM, so that its last checkpoint holds everything"
            )


def table_spec(source: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """How a table in a servers' ``--dir`` was made."""
    tables = newest_checkpoints(source)[0][1]["tables"]
    if name not in tables:
        raise ConfigError(f"{os.fspath(source)}: has no table {name!r}; it has {sorted(tables)}")
    return tables[name]["spec"]


def load_shard(
    table: HashTable, source: str | os.PathLike[str], name: str, shard: Sequence[int] | None = None
) -> HashTable:
    """Fills a local table, or a rank's, with rows that servers saved.

    ``shard=(index, count)`` takes the ids with ``id mod count == index`` alone, ``(index, count, True)`` those of rank
    ``index`` where rank 0 stays empty; None takes all. A local table is saved for servers or ranks by its own ``save``
    and loaded there by ``restore(..., shard=...)``.
    """
    with _not_served(source):
        return _load_shard(table, source, name, shard)


def _load_shard(table: HashTable, source: str | os.PathLike[str], name: str, shard: Sequence[int] | None) -> HashTable:
    found = newest_checkpoints(source)
    _check_logs(found)
    bases, newest = [], 0
    for path, manifest in found:
        entry = manifest["tables"].get(name)
        if entry is not None:
            bases.append(str(path / entry["file"]))
            newest = max(newest, entry["max_update_time"])
    if not bases:
        raise ConfigError(f"{os.fspath(source)}: has no table {name!r}")
    restore_table(table, bases, shard=shard)
    table._native.raise_max_update_time(newest)
    return table


def reshard_servers(source: str | os.PathLike[str], target: str | os.PathLike[str], of: int) -> dict[str, int]:
    """Writes checkpoints of ``of`` shards into an empty ``target``; the rows of each table.

    The servers of ``source`` have been drained; one that still serves is an error. Workers start new streams of writes
    afterwards: let theirs finish before. Admission filters start to count anew.
    """
    if of < 1:
        raise ConfigError(f"the number of shards is at least 1, got {of}")
    target = Path(target)
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; give a new folder")
    with _not_served(source):
        return _reshard(source, target, of)


def _reshard(source: str | os.PathLike[str], target: Path, of: int) -> dict[str, int]:
    found = newest_checkpoints(source)
    _check_logs(found)
    names = sorted({name for _, manifest in found for name in manifest["tables"]})
    rows = dict.fromkeys(names, 0)
    for index in range(of):
        shard, streams = Shard(index, of), Streams()
        for name in names:
            spec = next(m["tables"][name]["spec"] for _, m in found if name in m["tables"])
            shard.add(spec, _load_shard(build_table(spec), source, name, (index, of)))
            rows[name] += shard.tables[name].size()
        shard.version = max(manifest["version"] for _, manifest in found)
        Checkpoints(target / f"shard-{index:05d}").save(ShardSnapshot(shard, streams, 0))
    return rows
