"""What a path holds: files of one table or of many, a chain of increments, or the checkpoints of ranks or servers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal import _core
from shoal.durable import MANIFEST, Saved, Series, StrPath, find_saved, read_folder, read_saved
from shoal.errors import ConfigError, DataError
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.chain import Link, newest_chain, read_chain, table_in
from shoal.table.checkpoint.incremental import expiry_seconds
from shoal.table.checkpoint.multi import read_metas
from shoal.table.checkpoint.naming import CheckpointNotFoundError
from shoal.table.offline.scan import Batch, Ints, Shard, scan_shard

log = logging.getLogger(__name__)

_SHARD_FILE = re.compile(r"(.+)-\d{5,}-of-\d{5,}", re.DOTALL)
_CHAIN_FOLDER = re.compile(r"ckpt-\d{8,}")
FILTER = re.compile(r"hash_filter_\d+")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The files of one checkpoint: a full one, or what a delta adds to another."""

    name: str
    shards: tuple[Shard, ...]
    removed: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Table -> file of the ids that a delta takes back, and how many."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Table -> rows by the manifest; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that was found: its tables, and the files they are in."""

    path: str
    kind: str
    """``table``, ``multi``, ``chain``, ``ranks``, ``servers`` or ``folder``."""
    tables: tuple[str, ...]
    layers: tuple[Layer, ...]
    """Newest first; more than one in a chain alone."""
    stale: Mapping[str, Stale] = field(default_factory=dict)
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of tables that have one: limits, counts and what other sizes would miss, as of the save."""
    step: int | None = None
    created: str | None = None
    scales: Mapping[str, Sequence[float]] = field(default_factory=dict)
    filters: tuple[str, ...] = ()
    """Basenames of admission filters beside the tables."""
    saves: tuple[Saved, ...] = ()
    """The manifests that name the files, where there are any."""

    @property
    def files(self) -> list[str]:
        """All files with rows or removed ids."""
        shards = [shard.path for layer in self.layers for shard in layer.shards]
        return shards + [path for layer in self.layers for path, _ in layer.removed.values()]

    @property
    def bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.files)

    def pick(self, tables: Collection[str]) -> tuple[str, ...]:
        """The tables of these names, all of them when none is named."""
        if unknown := sorted(set(tables) - set(self.tables)):
            have = ", ".join(map(repr, self.tables[:20])) or "none"
            raise ConfigError(f"{self.path} has no table {unknown[0]!r}; it has {have}")
        return tuple(name for name in self.tables if not tables or name in tables)

    def scan(self, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Batch]]:
        """Every row as a restore would see it, table and batch at a time, each id once where the files are right.

        Of a chain, memory is taken by the ids of its deltas; the full checkpoint below them is only streamed.
        """
        gone: dict[str, Ints] = {}
        for layer in self.layers:
            below = layer is not self.layers[-1]
            came: dict[str, list[Ints]] = {}
            for shard in layer.shards:
                if wanted is not None and not any(table in wanted for table, _ in shard.sections):
                    continue
                for table, batch in scan_shard(shard, wanted):
                    if below:
                        came.setdefault(table, []).append(batch.ids.copy())
                    keep = np.ones(len(batch), bool)
                    if table in gone:
                        keep &= ~contains(gone[table], batch.ids)
                    if table in self.stale:
                        keep &= ~self.stale[table].mask(batch.ids, batch.times)
                    live = batch if keep.all() else batch.take(keep)
                    if len(live):
                        yield table, live
            if below:
                for table, (path, count) in layer.removed.items():
                    came.setdefault(table, []).append(read_removed(path, count))
                for table, parts in came.items():
                    gone[table] = np.unique(np.concatenate([*parts, gone.get(table, np.empty(0, np.int64))]))


@dataclass(frozen=True, kw_only=True)
class Stale:
    """Which rows of a chain have expired by its newest checkpoint."""

    now: int
    default_s: int
    slots: Mapping[int, int]
    """Seconds of slots with a setting of their own."""
    expiry: Mapping[str, Any]
    """As the checkpoint has it."""

    @classmethod
    def of(cls, described: Mapping[str, Any], where: str) -> Stale:
        expiry = described.get("expiry")
        try:
            default, slots = expiry_seconds(expiry)
            return cls(now=described["max_update_time"], default_s=default, slots=slots, expiry=expiry)  # type: ignore[arg-type]
        except (TypeError, KeyError, ValueError) as error:
            raise DataError(f"{where}: the expiry is not readable: {error}") from error

    def mask(self, ids: Ints, times: Ints) -> np.ndarray:
        seconds = np.full(len(ids), self.default_s, np.int64)
        if self.slots:
            slots = ids >> 48 & 0x7FFF
            for slot, of_slot in self.slots.items():
                seconds[slots == slot] = of_slot
        return self.now - times >= seconds


def contains(ordered: Ints, ids: Ints) -> np.ndarray:
    """Which of ``ids`` are in an ascending array."""
    if not len(ordered):
        return np.zeros(len(ids), bool)
    at = np.minimum(np.searchsorted(ordered, ids), len(ordered) - 1)
    return ordered[at] == ids


def read_removed(path: str, count: int) -> Ints:
    """The ids that a delta takes back."""
    data = b"".join(_core.read_records(path))
    if len(data) != 8 * count:
        raise DataError(f"{path}: {len(data)} bytes of removed ids, the manifest says {count} ids")
    return np.frombuffer(data, "<i8").astype(np.int64)


# --- finding out ------------------------------------------------------------------------------------------------------


def open_source(path: StrPath, report: Callable[[str], None] = log.warning) -> Source:
    """The checkpoint at ``path``: a basename, one of its files, or a folder of any kind that the library writes.

    Args:
        path: of a directory with several checkpoints the newest whole one is taken.
        report: is told of each damaged checkpoint that was passed over.

    Raises:
        CheckpointNotFoundError: there is nothing like that.
        DataError: what is there is not whole.
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
    """The shards of ``<base>-?????-of-?????``, their tables, and whether they are a multi table's."""
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


def _by_basename(where: str) -> Source:
    match = _SHARD_FILE.fullmatch(where)
    if match and os.path.isfile(where):
        where = match[1].removesuffix(".meta")
    elif where.endswith(".manifest") and os.path.isfile(where):
        where = where.removesuffix(".manifest")
    elif os.path.isfile(where):
        raise DataError(f"{where} is a file that is called like no shard: <basename>-00000-of-00001")
    shards, tables, multi = of_basename(where)
    kind = "multi" if multi else "table"
    return Source(
        path=where, kind=kind, tables=tables, layers=(Layer(name=where, shards=shards),), saves=_saves(shards)
    )  # fmt: skip


def _saves(shards: Sequence[Shard]) -> tuple[Saved, ...]:
    """The manifests of shards, each once."""
    return tuple({each.saved.manifest: each.saved for each in shards if each.saved is not None}.values())


def _chain(chain: list[Link]) -> Source:
    head = chain[-1].manifest
    found = head.content.get("tables")
    tables = [str(t.get("name")) for t in found if isinstance(t, dict)] if isinstance(found, list) else []
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
        raise DataError(f"{saved.manifest}: world_size must be a number of ranks, got {world!r:.40}")
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
    whole = [saved for saved in newest if saved is not None]
    if not whole:
        raise CheckpointNotFoundError(f"{where} has folders of servers, but no checkpoint in any of them")
    return _of_servers(where, whole)


def _of_servers(where: str, saves: Sequence[Saved]) -> Source:
    shards, tables = [], set()
    for saved in saves:
        found = saved.fields.get("tables")
        if not isinstance(found, dict):
            raise DataError(f"{saved.manifest} has no tables")
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
    bases = sorted({match[1] for match in map(_SHARD_FILE.fullmatch, entries) if match})
    bases = [base for base in bases if not (base.endswith(".meta") and base.removesuffix(".meta") in bases)]
    filters = [base for base in bases if FILTER.fullmatch(base)]
    found = {base: of_basename(os.path.join(where, base)) for base in bases if base not in filters}
    if not found:
        raise CheckpointNotFoundError(f"there is no checkpoint in {where!r}: no file is called <name>-?????-of-?????")
    names = [name for _, tables, _ in found.values() for name in tables]
    if len(set(names)) != len(names):  # several multi tables with tables of the same names
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
