"""Verification of a checkpoint without its tables: reports all problems, not only the first."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.errors import DataError
from shoal.table.checkpoint.incremental import read_removed
from shoal.table.checkpoint.scales import load_scales
from shoal.table.offline.distinct import Distinct
from shoal.table.offline.scan import Shard, scan_shard
from shoal.table.offline.source import Layer, Source, open_source
from shoal.table.offline.stat import optimizers_of


@dataclass
class Verdict:
    """The result of `verify`: the files and rows read, and their problems."""

    path: str
    kind: str = ""
    files: int = 0
    bytes: int = 0
    rows: int = 0
    tables: dict[str, int] = field(default_factory=dict)
    """Table -> number of rows in the files, including those of deltas."""
    problems: list[str] = field(default_factory=list)
    """Damage to the files."""
    warnings: list[str] = field(default_factory=list)
    """Readable but suspicious contents: rows with NaN, states of several optimizers in one table."""

    @property
    def good(self) -> bool:
        return not self.problems

    def report(self) -> dict[str, Any]:
        return {"good": self.good} | vars(self)


def verify(path: str, *, ids_in_memory: int = 1 << 25, seen: Callable[[int], None] | None = None) -> Verdict:
    """Reads every byte and checks manifests, sizes, both checksums of every record, every message, counts and duplicate
    ids.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at ``path``. Every other problem is part of the result.
    """
    verdict = Verdict(path)
    try:
        source = open_source(path, verdict.problems.append)
    except FileNotFoundError:
        raise
    except (DataError, OSError) as error:
        verdict.problems.append(str(error))
        return verdict
    verdict.path, verdict.kind = source.path, source.kind
    for layer in source.layers:
        _Reading(verdict, layer, ids_in_memory, seen).run()
    for base in source.filters:
        _filter(verdict, base)
    if source.kind in ("table", "multi"):
        try:
            load_scales(source.path)
        except DataError as error:
            verdict.problems.append(str(error))
    _other_files(verdict, source)
    return verdict


def _other_files(verdict: Verdict, source: Source) -> None:
    """Checks the files without rows in the manifests: dense tensors, scales, filters, removed ids."""
    read = {os.path.realpath(path) for path in source.files}
    for saved in source.saves:
        for name in saved.files:
            path = saved.path(name)
            if os.path.realpath(path) in read:
                continue
            read.add(os.path.realpath(path))
            try:
                saved.verify([name])
                verdict.files, verdict.bytes = verdict.files + 1, verdict.bytes + saved.files[name].bytes
            except DataError as error:
                verdict.problems.append(str(error))


class _Reading:
    """The verification of one checkpoint's files."""

    def __init__(self, verdict: Verdict, layer: Layer, ids_in_memory: int, seen: Callable[[int], None] | None) -> None:
        self.verdict, self.layer, self.seen = verdict, layer, seen
        self.rows: dict[str, int] = dict.fromkeys(layer.rows, 0)
        self.dims: dict[str, int] = {}
        self.shapes: dict[str, dict[int, str]] = {}
        self.bad: dict[str, list[int]] = {}
        self.ids: dict[str, Distinct] = {}
        self.ids_in_memory = ids_in_memory

    def run(self) -> None:
        verdict, layer = self.verdict, self.layer
        broken = False
        for shard in layer.shards:
            broken |= not self._shard(shard)
        for table, (path, count) in layer.removed.items():
            try:
                ids = read_removed(path, count)
                verdict.files, verdict.bytes = verdict.files + 1, verdict.bytes + os.path.getsize(path)
                distinct = Distinct()
                distinct.add(ids)
                if again := distinct.repeated()[0]:
                    verdict.problems.append(f"{path}: duplicates among the removed ids of table {table!r}: {again}")
            except (DataError, OSError) as error:
                verdict.problems.append(str(error))
        for table, distinct in self.ids.items():
            again, examples = distinct.repeated()
            if again:
                named = ", ".join(map(str, examples))
                verdict.problems.append(
                    f"{layer.name}: table {table!r}: records with a duplicate id: {again} (such as {named})"
                )
        for table, rows in self.rows.items():
            verdict.tables[table] = verdict.tables.get(table, 0) + rows
            if not broken and rows != layer.rows.get(table, rows):
                expected = layer.rows[table]
                verdict.problems.append(
                    f"{layer.name}: table {table!r} has {rows} rows, but its manifest says {expected}"
                )
        for table, (n, example) in self.bad.items():
            verdict.warnings.append(
                f"{layer.name}: table {table!r}: rows that hold NaN or infinity: {n} (such as id {example})"
            )
        for table, shapes in self.shapes.items():
            if len(shapes) > 1:
                kinds = "; ".join(sorted(shapes.values()))
                verdict.warnings.append(f"{layer.name}: table {table!r} mixes rows with states of {kinds}")

    def _shard(self, shard: Shard) -> bool:
        verdict = self.verdict
        for table, _ in shard.sections:
            self.rows.setdefault(table, 0)
        try:
            verdict.bytes += os.path.getsize(shard.path)
            verdict.files += 1
            for table, batch in scan_shard(shard):
                if self.dims.setdefault(table, batch.dim) != batch.dim:
                    raise DataError(
                        f"{shard.path}: rows of table {table!r} have {batch.dim} weights, but those of other files "
                        f"have {self.dims[table]}"
                    )
                self.rows[table] += len(batch)
                verdict.rows += len(batch)
                self.ids.setdefault(table, Distinct(self.ids_in_memory)).add(batch.ids)
                kinds = self.shapes.setdefault(table, {})
                for shape in set(batch.shapes.tolist()) - set(kinds):
                    of_first = batch.state(int((batch.shapes == shape).argmax()))
                    named = [f"{each['kind']}({each['dim'] or ''})" for each in optimizers_of(of_first)]
                    kinds[shape] = ", ".join(named) or "no optimizer"
                bad = ~np.isfinite(batch.norms)
                if bad.any():
                    known = self.bad.setdefault(table, [0, int(batch.ids[bad][0])])
                    known[0] += int(bad.sum())
                if self.seen is not None:
                    self.seen(len(batch))
        except (DataError, OSError) as error:
            verdict.problems.append(str(error))
            return False
        return True


def _filter(verdict: Verdict, base: str) -> None:
    from shoal import _core
    from shoal.table.checkpoint import naming

    try:
        for path in naming.find_shards(base):
            _core.read_records(path)
            verdict.files, verdict.bytes = verdict.files + 1, verdict.bytes + os.path.getsize(path)
    except (DataError, OSError) as error:
        verdict.problems.append(str(error))
