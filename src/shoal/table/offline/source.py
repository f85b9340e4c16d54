"""Checkpoints of any kind, by path: files of one or more tables, chains of increments, saves of ranks or servers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.durable import MANIFEST, Saved, Series, StrPath, find_saved, read_folder, read_saved
from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.chain import Link, newest_chain, read_chain, table_in
from shoal.table.checkpoint.incremental import expiry_seconds, read_removed
from shoal.table.checkpoint.multi import read_metas
from shoal.table.checkpoint.naming import CheckpointNotFoundError
from shoal.table.offline.scan import Batch, Ints, Shard, scan_shard

log = logging.getLogger(__name__)

_SHARD_FILE = re.compile(r"(.+)-\d{5,}-of-\d{5,}", re.DOTALL)
_CHAIN_FOLDER = re.compile(r"ckpt-\d{8,}")
_FILTER = re.compile(r"hash_filter_\d+")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The files of one checkpoint, full or delta."""

    name: str
    shards: tuple[Shard, ...]
    removed: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Table -> file of the ids that a delta removes, and their number."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Table -> number of rows in the manifest; empty without a manifest."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint: its tables and their files."""

    path: str
    kind: str
    """``table``, ``multi``, ``chain``, ``ranks``, ``servers`` or ``folder``."""
    tables: tuple[str, ...]
    layers: tuple[Layer, ...]
    """Newest first; only a chain has more than one."""
    stale: Mapping[str, Stale] = field(default_factory=dict)
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Table -> its budget when it was saved: limits, counts and miss ratios of other sizes. Only tables with one."""
    step: int | None = None
    created: str | None = None
    scales: Mapping[str, Sequence[float]] = field(default_factory=dict)
    filters: tuple[str, ...] = ()
    """Basenames of admission filters next to the tables."""
    saves: tuple[Saved, ...] = ()
    """The manifests that list the files, if there are any."""

    @property
    def files(self) -> list[str]:
        """All files with rows or removed ids."""
        shards = [shard.path for layer in self.layers for shard in layer.shards]
        return shards + [path for layer in self.layers for path, _ in layer.removed.values()]

    @property
    def bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.files)

    def pick(self, tables: Collection[str]) -> tuple[str, ...]:
        """The tables with these names; all tables if none is given."""
        if unknown := sorted(set(tables) - set(self.tables)):
            have = ", ".join(map(repr, self.tables[:20])) or "none"
            raise ConfigError(f"{self.path} has no table {unknown[0]!r}; it has {have}")
        return tuple(name for name in self.tables if not tables or name in tables)

    def scan(self, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Batch]]:
        """Every row as a restore would see it, in batches of one table; each id once unless the files are damaged.

        For a chain, only the ids of its deltas take memory; the full checkpoint is streamed.
        """
        superseded: dict[str, Ints] = {}
        for layer in self.layers:
            delta = layer is not self.layers[-1]
            changed: dict[str, list[Ints]] = {}
            for shard in layer.shards:
                if wanted is not None and not any(table in wanted for table, _ in shard.sections):
                    continue
                for table, batch in scan_shard(shard, wanted):
                    if delta:
                        changed.setdefault(table, []).append(batch.ids.copy())
                    keep = np.ones(len(batch), bool)
                    if table in superseded:
                        keep &= ~contains(superseded[table], batch.ids)
                    if table in self.stale:
                        keep &= ~self.stale[table].mask(batch.ids, batch.times)
                    live = batch if keep.all() else batch.take(keep)
                    if len(live):
                        yield table, live
            if delta:
                for table, (path, count) in layer.removed.items():
                    changed.setdefault(table, []).append(read_removed(path, count))
                for table, parts in changed.items():
                    before = superseded.get(table, np.empty(0, np.int64))
                    superseded[table] = np.unique(np.concatenate([*parts, before]))


@dataclass(frozen=True, kw_only=True)
class Stale:
    """Which rows of a chain have expired at the time of its newest checkpoint."""

    now: int
    default_s: int
    slots: Mapping[int, int]
    """Slot -> seconds, for slots with their own setting."""
    expiry: Mapping[str, Any]
    """The setting as stored in the checkpoint."""

    @classmethod
    def of(cls, described: Mapping[str, Any], where: str) -> Stale:
        expiry = described.get("expiry")
        try:
            default, slots = expiry_seconds(expiry)
            return cls(now=described["max_update_time"], default_s=default, slots=slots, expiry=expiry)  # type: ignore[arg-type]
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"{where}: the expiry cannot be read: {error}") from error

    def mask(self, ids: Ints, times: Ints) -> np.ndarray:
        seconds = np.full(len(ids), self.default_s, np.int64)
        if self.slots:
            slots = ids >> 48 & 0x7FFF
            for slot, of_slot in self.slots.items():
                seconds[slots == slot] = of_slot
        return self.now - times >= seconds


def contains(ordered: Ints, ids: Ints) -> np.ndarray:
    """Which of ``ids`` are in the sorted array ``ordered``."""
    if not len(ordered):
        return np.zeros(len(ids), bool)
    at = np.minimum(np.searchsorted(ordered, ids), len(ordered) - 1)
    return ordered[at] == ids


# --- opening ----------------------------------------------------------------------------------------------------------


def open_source(path: StrPath, report: Callable[[str], None] = log.warning) -> Source:
    """The checkpoint at ``path``: a basename, one of its files, or a folder of any kind that the library writes.

    Args:
        path: in a directory with several checkpoints, the newest complete one is used.
        report: called for each damaged checkpoint that is skipped.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at ``path``.
        DataError: the checkpoint is incomplete or damaged.
    """
    where = os.fspath(path).rstrip("/") or "/"
    if not os.path.isdir(where):
        return _by_basename(where)
    entries = set(os.listdir(where))
    if _CHAIN_FOLDER.fullmatch(os.path.basename(os.path.abspath(where))) and MANIFEST in entries:
        return _chain(read_chain(*os.path.split(os.path.abspath(where))))
    if any(map(_CHAIN_FOLDER.fullmatch, entries)):
        return newest_chain(where, _chain, report)
    if any(entry.startswith("shard-") and os.path.isdir(os.path.join(where, entry)) for entry in entries):
        return _servers(where, entries, report)
    if MANIFEST in entries:
        saved = read_folder(where, unsealed=True)
        if "world_size" in saved.fields:
            return _ranks(where, saved)
        if "shard" in saved.fields and "tables" in saved.fields:
            return _of_servers(where, [saved])
    return _folder(where, entries)


def of_basename(
    base: str, prefix: str = "", saved: Saved | None = None
) -> tuple[tuple[Shard, ...], tuple[str, ...], bool]:
    """The shards ``<base>-?????-of-?????``, their tables, and whether they belong to a multi table."""
    saved = saved or find_saved(base)
    data = naming.open_shards(base, saved)
    about = [{"path": path, "name": n, "saved": saved} for path, n in zip(data.paths, data.names, strict=True)]
    try:
        metas = naming.open_shards(base + ".meta", saved)
    except CheckpointNotFoundError:
        name = prefix or os.path.basename(base)
        return tuple(Shard(sections=((name, None),), **each) for each in about), (name,), False
    if len(data.paths) != len(metas.paths):
        raise DataError(f"checkpoint {base!r} has {len(data.paths)} data files and {len(metas.paths)} meta files")
    shards = []
    for each, meta in zip(about, read_metas(metas), strict=True):
        sections = tuple((prefix + name, count) for name, count in meta)
        shards.append(Shard(sections=sections, snappy=True, **each))
    names = dict.fromkeys(name for shard in shards for name, _ in shard.sections)
    return tuple(shards), tuple(sorted(names)), True


def basenames_in(entries: Iterable[str]) -> tuple[list[str], list[str]]:
    """The basenames of tables and of admission filters among the names of files."""
    bases = sorted({match[1] for match in map(_SHARD_FILE.fullmatch, entries) if match})
    bases = [base for base in bases if not (base.endswith(".meta") and base.removesuffix(".meta") in bases)]
    filters = [base for base in bases if _FILTER.fullmatch(base)]
    return [base for base in bases if base not in filters], filters


def _by_basename(where: str) -> Source:
    match = _SHARD_FILE.fullmatch(where)
    if match and os.path.isfile(where):
        where = match[1].removesuffix(".meta")
    elif where.endswith(".manifest") and os.path.isfile(where):
        where = where.removesuffix(".manifest")
    elif os.path.isfile(where):
        raise DataError(f"{where} is not a file of a checkpoint: its name must be like <basename>-00000-of-00001")
    shards, tables, multi = of_basename(where)
    kind = "multi" if multi else "table"
    return Source(
        path=where, kind=kind, tables=tables, layers=(Layer(name=where, shards=shards),), saves=_saves(shards)
    )  # fmt: skip


def _saves(shards: Sequence[Shard]) -> tuple[Saved, ...]:
    """The distinct manifests of the shards."""
    return tuple({each.saved.manifest: each.saved for each in shards if each.saved is not None}.values())


def _chain(chain: list[Link]) -> Source:
    head = chain[-1].manifest
    tables = [str(described.get("name")) for described in head.content["tables"]]
    layers, stale, scales, budgets = [], {}, {}, {}
    for link in chain:
        shards, removed, rows = [], {}, {}
        where = link.saved.manifest
        for table in tables:
            described = table_in(link.manifest, table, where)
            base = os.path.join(link.folder, described["file"])
            shards += of_basename(base, table, link.saved)[0]
            rows[table] = described["rows"]
            if described["removed"]:
                removed[table] = (base + ".removed", described["removed"])
            stale[table], scales[table] = Stale.of(described, where), described["scales"]
            if isinstance(described.get("budget"), dict):
                budgets[table] = described["budget"]
        layers.insert(0, Layer(name=link.name, shards=tuple(shards), removed=removed, rows=rows))
    return Source(
        path=chain[-1].folder, kind="chain", tables=tuple(sorted(tables)), layers=tuple(layers), stale=stale,
        budgets=budgets,
        scales=scales, step=head.step, created=head.created, saves=tuple(link.saved for link in chain),
    )  # fmt: skip


def _ranks(where: str, saved: Saved) -> Source:
    world = saved.fields["world_size"]
    if not isinstance(world, int) or not 1 <= world <= 1 << 20:
        raise DataError(f"{saved.manifest}: world_size must be 1..{1 << 20}, got {world!r:.40}")
    name = os.path.basename(os.path.abspath(where))
    bases = [os.path.join(where, f"rank-{rank:05d}", "rows") for rank in range(world)]
    shards = [shard for base in bases for shard in of_basename(base, name)[0]]
    layer = Layer(name=where, shards=tuple(shards))
    return Source(path=where, kind="ranks", tables=(name,), layers=(layer,), saves=(saved, *_saves(shards)))


def _servers(where: str, entries: set[str], report: Callable[[str], None]) -> Source:
    newest = []
    for shard in sorted(entry for entry in entries if entry.startswith("shard-")):
        series = Series(os.path.join(where, shard), "checkpoint-", 1)
        newest.append(series.load_newest(lambda found: found.saved, report))
    complete = [saved for saved in newest if saved is not None]
    if not complete:
        raise CheckpointNotFoundError(f"there is no checkpoint in any folder {where}/shard-*")
    return _of_servers(where, complete)


def _of_servers(where: str, saves: Sequence[Saved]) -> Source:
    shards, tables = [], set()
    for saved in saves:
        found = saved.fields.get("tables")
        if not isinstance(found, dict):
            raise DataError(f"{saved.manifest}: tables must be an object, got {found!r:.40}")
        for name, entry in found.items():
            base = entry.get("file") if isinstance(entry, dict) else None
            if not isinstance(base, str) or os.path.basename(base) != base:
                raise DataError(f"{saved.manifest}: file must be a plain name, got {base!r:.80}")
            shards += of_basename(os.path.join(saved.folder, base), name, saved if saved.files else None)[0]
            tables.add(name)
    layer = Layer(name=where, shards=tuple(shards))
    return Source(path=where, kind="servers", tables=tuple(sorted(tables)), layers=(layer,), saves=tuple(saves))


def _folder(where: str, entries: set[str]) -> Source:
    saves = []
    for entry in sorted(entries):
        if entry.startswith("manifest.") and entry.endswith(".json"):
            saves.append(read_saved(os.path.join(where, entry), unsealed=True))
            if missing := saves[-1].missing():
                raise DataError(f"checkpoint {where!r} is damaged: {missing}")
    bases, filters = basenames_in(entries)
    found = {base: of_basename(os.path.join(where, base)) for base in bases}
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {where!r}: no file name has the form <name>-?????-of-?????"
        )
    names = [name for _, tables, _ in found.values() for name in tables]
    if len(set(names)) != len(names):  # several multi tables have tables with the same names
        found = {
            base: of_basename(os.path.join(where, base), f"{base}/" if multi else "")
            for base, (_, _, multi) in found.items()
        }
    shards = [shard for of_base, _, _ in found.values() for shard in of_base]
    tables = sorted(name for _, of_base, _ in found.values() for name in of_base)
    return Source(
        path=where, kind="folder", tables=tuple(tables), layers=(Layer(name=where, shards=tuple(shards)),),
        filters=tuple(os.path.join(where, base) for base in filters), saves=(*saves, *_saves(shards)),
    )  # fmt: skip
