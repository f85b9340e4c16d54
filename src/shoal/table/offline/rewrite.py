"""Rewriting of checkpoints with another number of shards, as another kind, or from the original system's files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.assets import model_checkpoint_path
from shoal.table.checkpoint.scales import load_scales
from shoal.table.offline.scan import Batch, Shard, scan_shard
from shoal.table.offline.source import Layer, Source, basenames_in, of_basename, open_source
from shoal.table.offline.stat import optimizers_of
from shoal.table.offline.write import MultiWriter, TableWriter, basename_writer, folder_writer

Seen = Callable[[int], None]


def reshard(
    source: Source, wanted: Collection[str], out: str, shards: int,
    kind: Literal["same", "folder", "basename"] = "same", *, seen: Seen | None = None,
) -> dict[str, int]:  # fmt: skip
    """Writes the wanted tables to ``shards`` files each, row ``id`` to file ``id mod shards``; returns rows by table.

    ``kind`` is a ``folder`` that `restore_incremental` reads, files with a ``basename``, or the ``same`` as the source.
    Records are copied byte for byte; from a chain, those that a restore of its newest checkpoint would give.
    """
    if shards < 1:
        raise ConfigError(f"the number of shards must be at least 1, got {shards}")
    if kind == "same":
        kind = "basename" if source.kind in ("table", "multi") else "folder"
    if kind == "folder":
        return _to_folder(source, wanted, out, lambda _: shards, seen)
    if source.kind == "multi":
        return _to_multi(source, wanted, out, shards, seen)
    if len(wanted) != 1:
        names = ", ".join(map(repr, sorted(wanted)[:10]))
        raise ConfigError(f"a basename must have one table, but {source.path} has {names}; choose one with --table")
    (name,) = wanted
    scales = load_scales(source.path) if source.kind == "table" else {}
    with basename_writer(out, name, shards, scales) as writer:
        for _, batch in source.scan(wanted):
            writer.copy(batch)
            if seen is not None:
                seen(len(batch))
    return {name: writer.rows_written}


def _to_folder(
    source: Source, wanted: Collection[str], out: str, shards: Callable[[str], int], seen: Seen | None
) -> dict[str, int]:
    scales = dict(source.scales)
    if source.kind in ("table", "multi"):
        scales |= load_scales(source.path)
    written: dict[str, TableWriter] = {}
    with folder_writer(out, shards, step=source.step or 0) as writer_of:
        for name in sorted(wanted):
            writer = written[name] = writer_of(name)
            if name in source.stale:
                stale = source.stale[name]
                writer.expiry = dict(stale.expiry)
                writer.max_update_time = stale.now
        for name, batch in source.scan(wanted):
            if not written[name].rows_written:
                segments = optimizers_of(batch.state(0))
                written[name].scales = scales.get(name) or [1.0] * max(1, len(segments))
            written[name].copy(batch)
            if seen is not None:
                seen(len(batch))
    return {name: writer.rows_written for name, writer in written.items()}


def _to_multi(source: Source, wanted: Collection[str], out: str, shards: int, seen: Seen | None) -> dict[str, int]:
    writer = MultiWriter(out, shards)
    shards_in = source.layers[0].shards
    ordered = all([t for t, _ in s.sections] == sorted(t for t, _ in s.sections) for s in shards_in)
    following = _Following(shards_in, wanted)
    for table in sorted(wanted):
        writer.begin(table)
        for batch in following.table(table) if ordered else _table_of(shards_in, table):
            writer.copy(batch)
            if seen is not None:
                seen(len(batch))
    return writer.finish(load_scales(source.path))


class _Following:
    """Reads several files in parallel, table after table, each file once."""

    def __init__(self, shards: Collection[Shard], wanted: Collection[str]) -> None:
        self._open = [scan_shard(shard, wanted) for shard in shards]
        self._next: list[tuple[str, Batch] | None] = [next(each, None) for each in self._open]

    def table(self, name: str) -> Iterator[Batch]:
        for i, each in enumerate(self._open):
            while (at := self._next[i]) is not None and at[0] == name:
                yield at[1]
                self._next[i] = next(each, None)


def _table_of(shards: Collection[Shard], table: str) -> Iterator[Batch]:
    for shard in shards:
        yield from (batch for _, batch in scan_shard(shard, {table}))


# --- the original system's checkpoints --------------------------------------------------------------------------------

_SINGLE = re.compile(r"MonolithHashTable_(.+)", re.DOTALL)
_STEP = re.compile(r"-(\d+)\.assets")


def find_monolith(path: str) -> Source:
    """The tables of a model directory, an ``.assets`` folder or a basename of the original system.

    In a model directory, the newest checkpoint is used: the one in its file ``checkpoint``, or the only one.
    The files of one table on several parameter servers, ``MonolithHashTable_<name>_<server>``, become one table
    ``<name>``; the tables in ``MonolithMultiHashTable_<server>`` keep their names.
    """
    if not os.path.isdir(path):
        source = open_source(path)
        if source.kind == "multi":
            return source
        return renamed(source, {source.tables[0]: _plain(source.tables[0])})
    folder = _assets(path)
    bases, filters = basenames_in(os.listdir(folder))
    if not bases:
        raise DataError(f"{folder} has no tables: no file name has the form <name>-?????-of-?????")
    shards: list[Shard] = []
    tables: set[str] = set()
    groups = _groups(base for base in bases if not naming.shard_files(os.path.join(folder, base + ".meta")))
    for base in bases:
        found, names, _ = of_basename(os.path.join(folder, base), groups.get(base, ""))
        shards += found
        tables |= set(names)
    step = _STEP.search(folder)
    return Source(
        path=folder, kind="folder", tables=tuple(sorted(tables)), layers=(Layer(name=folder, shards=tuple(shards)),),
        step=int(step[1]) if step else None, filters=tuple(os.path.join(folder, base) for base in filters),
    )  # fmt: skip


def from_monolith(
    source: Source, out: str, *, rename: Mapping[str, str] | None = None, shards: int | None = None,
    seen: Seen | None = None,
) -> dict[str, int]:  # fmt: skip
    """Writes the tables of `find_monolith` to a new folder for `restore_incremental`; returns rows by table."""
    rename = dict(rename or {})
    if unknown := sorted(set(rename) - set(source.tables)):
        raise ConfigError(f"{source.path} has no table {unknown[0]!r} to rename; it has {list(source.tables)}")
    source = renamed(source, rename)
    if len(set(source.tables)) != len(source.tables):
        raise ConfigError(f"names of tables must be unique after --rename, got {sorted(source.tables)}")
    sizes: dict[str, int] = dict.fromkeys(source.tables, 0)
    for shard in source.layers[0].shards:
        for name, count in shard.sections:
            sizes[name] += count if count is not None else os.path.getsize(shard.path) // 256
    automatic = {name: naming.shard_count(-1, size) for name, size in sizes.items()}
    return _to_folder(source, source.tables, out, lambda name: shards or automatic[name], seen)


def _assets(path: str) -> str:
    if os.path.abspath(path).endswith(".assets"):
        return path
    latest = model_checkpoint_path(path)
    if latest is not None:
        folder = latest + ".assets"
        if not os.path.isdir(folder):
            raise DataError(f"{path}/checkpoint refers to {latest!r}, but there is no folder {folder!r}")
        return folder
    found = sorted(entry for entry in os.listdir(path) if entry.endswith(".assets"))
    if len(found) > 1:
        raise ConfigError(
            f"{path} has {len(found)} checkpoints and no file 'checkpoint'; choose one, such as {found[-1]}"
        )
    return os.path.join(path, found[0]) if found else path


def _plain(base: str) -> str:
    match = _SINGLE.fullmatch(base)
    return match[1] if match else base


def _groups(bases: Iterator[str]) -> dict[str, str]:
    """Basename -> table; the parts of one table from servers 0..n-1 get the same name."""
    plain = {base: _plain(base) for base in bases}
    parts: dict[str, dict[int, str]] = {}
    for base, name in plain.items():
        if match := re.fullmatch(r"(.+)_(\d+)", name, re.DOTALL):
            parts.setdefault(match[1], {})[int(match[2])] = base
    for name, of_server in parts.items():
        hashed = re.fullmatch(r"[0-9a-f]{32}", name) is not None
        complete = sorted(of_server) == list(range(len(of_server)))
        if hashed and not complete:
            missing = sorted(set(range(max(of_server) + 1)) - set(of_server))
            raise DataError(f"table {name!r} has files of servers {sorted(of_server)}, but none of {missing}")
        if complete and name not in plain.values() and (hashed or len(of_server) > 1):
            plain |= dict.fromkeys(of_server.values(), name)
    return plain


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    def of(name: str) -> str:
        return names.get(name, name)

    layers = tuple(
        replace(
            layer,
            shards=tuple(replace(s, sections=tuple((of(t), n) for t, n in s.sections)) for s in layer.shards),
        )
        for layer in source.layers
    )
    return replace(source, tables=tuple(sorted(map(of, source.tables))), layers=layers)
