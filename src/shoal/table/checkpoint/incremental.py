"""Incremental checkpoints: a full one, then deltas with the changes since; together they restore all rows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from shoal import _core
from shoal.durable import FileDigest, StrPath, file_bases, new_folder, read_folder, temporary_path
from shoal.errors import ConfigError, DataError, UnsupportedError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.chain import (
    Checkpoint,
    Link,
    describe,
    list_checkpoints,
    newest_chain,
    next_name,
    read_chain,
    table_in,
)
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.checkpoint.naming import CheckpointNotFoundError
from shoal.table.checkpoint.scales import has_scales
from shoal.table.checkpoint.single import begin_load, naming_table, read_shards, save_shards
from shoal.table.clock import DAY_S
from shoal.table.config.messages import SlotExpireTimeConfig
from shoal.table.config.native import default_expiry_s, slot_expiry_s
from shoal.table.multi import MultiHashTable
from shoal.table.multi_type import MultiTypeHashTable
from shoal.table.table import HashTable

_IDS_PER_RECORD = 65536
_REMEMBERED = 8  # the most checkpoints that a table can write a delta against
_MAX_EXPIRY_S = ((1 << 32) - 1) * DAY_S

Tables: TypeAlias = HashTable | MultiHashTable | MultiTypeHashTable | Iterable[HashTable]


# Table -> checkpoint id -> the epoch that started with it. Rows written later have that epoch or a newer one.
_epochs: weakref.WeakKeyDictionary[HashTable, dict[str, int]] = weakref.WeakKeyDictionary()


def save_incremental(
    tables: Tables,
    directory: StrPath,
    since: Checkpoint | str | None = "latest",
    *,
    step: int = 0,
    progress: _core.Progress | None = None,
) -> Checkpoint:
    """Saves the changes since another checkpoint in the same directory: rows written and ids removed.

    >>> import shoal, tempfile, torch
    >>> from shoal.table import restore_incremental, save_incremental
    >>> table = shoal.HashTable(dim=2, name="item").assign(torch.arange(1000), torch.ones(1000, 2))
    >>> folder = tempfile.mkdtemp()
    >>> save_incremental(table, folder).kind
    'full'
    >>> delta = save_incremental(table.assign(torch.tensor([7]), torch.zeros(1, 2)), folder)
    >>> delta.kind, delta.rows
    ('delta', 1)
    >>> other = shoal.HashTable(dim=2, name="item")
    >>> restore_incremental(other, folder).name == delta.name and other.size()
    1000

    Training can continue meanwhile; each row is saved as it was at some moment during the save. From the first call
    on, a table tracks its changes, which costs 4 bytes per row and 16 bytes per removed id.

    Args:
        tables: one training table, several, or a multi table; table names must be distinct.
        directory: the directory of these tables' checkpoints; created if missing.
        since: a checkpoint, or its name; ``"latest"`` is the newest one that these tables were saved to or restored
            from (without one, a full checkpoint is written); ``None`` writes a full one.
        step: recorded in the manifest.
        progress: counts rows as they are written; its ``cancel()`` ends the save.

    Raises:
        ConfigError: the changes since that checkpoint are not known: another process wrote it, or the tables were
            cleared or restored since. Save a full checkpoint with ``since=None``.
    """
    members = _members(tables)
    directory = os.fspath(directory)
    os.makedirs(directory, exist_ok=True)
    parent = _parent(members, directory, since)
    head = Manifest(kind="delta" if parent else "full", step=int(step))
    began = {table: table.changes.begin_epoch() for table in members}
    while True:
        name = next_name(directory)
        try:
            with new_folder(os.path.join(directory, name)) as draft:
                bases = file_bases(table.name for table in members)
                files: dict[str, FileDigest] = {}
                described = []
                for table in members:
                    base = os.path.join(draft.path, bases[table.name])
                    described.append(_save_member(table, base, parent, files, progress))
                content: dict[str, Any] = {"tables": described}
                if parent:
                    content["parent"] = {"name": parent.name, "id": parent.id}
                manifest = replace(head, content=content)
                draft.seal(manifest.fields(), files)
            break
        except FileExistsError:  # another process took the number
            continue
    for table, epoch in began.items():
        _remember(table, head.id, epoch)
    return describe(Link(manifest, read_folder(os.path.join(directory, name))))


def restore_incremental(
    tables: Tables,
    directory: StrPath,
    name: str | None = None,
    *,
    strict: bool = True,
    shard: Sequence[int] | None = None,
    progress: _core.Progress | None = None,
) -> Checkpoint:
    """Restores tables to the state of a checkpoint, from its full checkpoint and every delta up to it.

    All files are read and checked before the first table changes.

    Args:
        tables: the tables to restore; each must be in the checkpoint under its name.
        directory: the directory given to `save_incremental`.
        name: which checkpoint; None is the newest complete one. Damaged newer checkpoints are skipped, each with a
            warning that names it and the damage.
        strict: see `restore_table`.
        shard: see `restore_table`.
        progress: counts records as they are read; its ``cancel()`` ends the load.

    Raises:
        CheckpointNotFoundError: the directory does not have that checkpoint, or has none.
        DataError: a file of the chain is missing, damaged or from a table with a different row layout; without
            ``name``, no checkpoint in the directory can be restored. All tables are unchanged.
    """
    members = _members(tables, training=False)
    directory = os.fspath(directory)

    def read(chain: list[Link]) -> tuple[Link, list[Any]]:
        prepared = []
        for table in members:
            with naming_table(table.name):
                prepared.append((table, *_load_member(table, chain, strict, shard, progress)))
        return chain[-1], prepared

    head, prepared = newest_chain(directory, read) if name is None else read(read_chain(directory, name))
    for table, staging, load, described in prepared:
        load.commit()
        if table.on_gpu:
            table.adopt(staging._native)
        table._host.raise_max_update_time(described["max_update_time"])
        if has_scales(table.table_config):
            table._host.set_scales(described["scales"])
        if shard is None and not table.serving:
            _epochs.pop(table, None)
            _remember(table, head.manifest.id, table.changes.begin_epoch())
    return describe(head)


# --- one table's part -------------------------------------------------------------------------------------------------


def _save_member(
    table: HashTable,
    base: str,
    parent: Checkpoint | None,
    files: dict[str, FileDigest],
    progress: _core.Progress | None,
) -> dict[str, Any]:
    """Writes the files ``<base>…`` of a table, adds their digests to ``files``, returns its part of the manifest."""
    since = _epochs[table][parent.id] if parent else 0
    now = table.max_update_time
    scales = table._host.scales()
    # Removed ids first: an id that is written again before the rows are copied is then in both, and its row wins.
    removed = table.changes.removed_since(since) if parent else []
    if removed:
        files[os.path.basename(base) + ".removed"] = _write_ids(base + ".removed", removed)
    count = naming.shard_count(table.saver_parallel, table.size() if parent is None else 0)
    with naming_table(table.name):
        # A delta includes stale rows: they must replace the parent's rows before they are dropped.
        source = table.source(since, stale=parent is not None)
        rows, digests = save_shards([source], base, count, progress=progress)
    files |= digests
    return {
        "name": table.name,
        "file": os.path.basename(base),
        "shards": count,
        "rows": sum(map(sum, rows)),
        "removed": len(removed),
        "dim": table.dim_size,
        "max_update_time": now,
        "scales": scales,
        "expiry": expiry_to_json(table.table_config.slot_expire_time_config),
        **table.budget_report(),
    }


def _load_member(
    table: HashTable,
    chain: Sequence[Link],
    strict: bool,
    shard: Sequence[int] | None,
    progress: _core.Progress | None,
) -> tuple[Any, _core.Load, dict[str, Any]]:
    staging = table.staging()
    load = begin_load(staging, strict, shard)
    described: dict[str, Any] = {}
    for link in chain:
        described = table_in(link.manifest, table.name, link.saved.manifest)
        base = os.path.join(link.folder, described["file"])
        if described["removed"]:
            link.saved.verify([described["file"] + ".removed"])
            ids = torch.from_numpy(read_removed(base + ".removed", described["removed"]))
            load.erase(ids.data_ptr(), ids.numel())
        taken = read_shards(load, [naming.open_shards(base, link.saved)], progress)
        if shard is None and not table.serving and taken != described["rows"]:
            raise DataError(f"{base}: {taken} rows were read, the manifest says {described['rows']}")
    load.evict(_expiry_from_json(described["expiry"]), described["max_update_time"])
    segments = len(table.table_config.entry_config.segments)
    if has_scales(table.table_config) and len(described["scales"]) != segments:
        raise DataError(f"the checkpoint has scales of {len(described['scales'])} segments, the table has {segments}")
    return staging, load, described


def _write_ids(path: str, ids: Sequence[int]) -> FileDigest:
    data = np.array(ids, "<i8")
    records = [data[i : i + _IDS_PER_RECORD].tobytes() for i in range(0, len(data), _IDS_PER_RECORD)]
    return FileDigest(*_core.write_records(temporary_path(path), path, records))


def read_removed(path: str, count: int) -> NDArray[np.int64]:
    """The ids that a delta removes."""
    data = b"".join(_core.read_records(path))
    if len(data) != 8 * count:
        raise DataError(f"{path} has {len(data)} bytes of removed ids, but its manifest says {count} ids")
    return np.frombuffer(data, "<i8").astype(np.int64)


# --- the checkpoints that a table can write a delta against -----------------------------------------------------------


def _members(tables: Tables, training: bool = True) -> list[HashTable]:
    if isinstance(tables, MultiHashTable | MultiTypeHashTable):
        tables = tables.tables.values()
    members = [tables] if isinstance(tables, HashTable) else list(tables)
    names = [table.name for table in members]
    if not members:
        raise ConfigError("an incremental checkpoint must have at least one table, got none")
    if len(set(names)) != len(names):
        raise ConfigError(f"tables of one checkpoint must have different names, got {sorted(names)}")
    for table in members:
        if training and table.serving:
            raise UnsupportedError(f"table {table.name!r}: save is not supported by serving entries")
    return members


def _parent(members: Sequence[HashTable], directory: str, since: Checkpoint | str | None) -> Checkpoint | None:
    if since is None:
        return None
    known = {checkpoint.name: checkpoint for checkpoint in list_checkpoints(directory)}
    if since == "latest":
        tracked = [c for c in known.values() if all(_tracks(table, c.id) for table in members)]
        return tracked[-1] if tracked else None
    name = since.name if isinstance(since, Checkpoint) else since
    if name not in known:
        raise CheckpointNotFoundError(
            f"there is no complete checkpoint {name!r} in {directory!r} to save a delta against"
        )
    for table in members:
        if not _tracks(table, known[name].id):
            raise ConfigError(
                f"table {table.name!r}: its changes since {name!r} are not known (the table was not saved to it, was "
                "cleared or restored since, or a CUDA graph from before the first checkpoint writes to it); save a "
                "full checkpoint with since=None"
            )
    return known[name]


def _tracks(table: HashTable, checkpoint_id: str) -> bool:
    epoch = _epochs.get(table, {}).get(checkpoint_id)
    return epoch is not None and epoch >= table.changes.oldest_epoch()


def _remember(table: HashTable, checkpoint_id: str, epoch: int) -> None:
    of_table = _epochs.setdefault(table, {})
    of_table[checkpoint_id] = epoch
    while len(of_table) > _REMEMBERED:
        of_table.pop(next(iter(of_table)))
    table.changes.forget_before(min(of_table.values()))


def expiry_to_json(config: SlotExpireTimeConfig) -> dict[str, Any]:
    """Expiry in days, rounded up; also in seconds if it is not a multiple of a day (version 0.1 ignores those)."""
    seconds, slots = default_expiry_s(config), slot_expiry_s(config)
    days = {"default_days": -(-seconds // DAY_S), "slots": [[slot, -(-s // DAY_S)] for slot, s in slots.items()]}
    if all(s % DAY_S == 0 for s in (seconds, *slots.values())):
        return days
    return {**days, "default_s": seconds, "slots_s": [[slot, s] for slot, s in slots.items()]}


def expiry_seconds(expiry: Any) -> tuple[int, dict[int, int]]:
    """The default expiry in seconds, and that of each slot with its own, from the result of `expiry_to_json`.

    Raises:
        TypeError, KeyError, ValueError: it is not such a result.
    """
    if "default_s" in expiry:
        default, slots, unit = expiry["default_s"], expiry["slots_s"], 1
    else:
        default, slots, unit = expiry["default_days"], expiry["slots"], DAY_S
    return _seconds(default, unit), {index(slot): _seconds(number, unit) for slot, number in slots}


def _seconds(number: Any, unit: int) -> int:
    seconds = index(number) * unit
    if not 0 <= seconds <= _MAX_EXPIRY_S:
        raise ValueError(f"an expiry must be 0..{_MAX_EXPIRY_S} seconds, got {seconds}")
    return seconds


def _expiry_from_json(expiry: Any) -> _core.Expiry:
    try:
        default, slots = expiry_seconds(expiry)
        return _core.Expiry(default, list(slots.items()))
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"the manifest's expiry cannot be read: {error}") from error
