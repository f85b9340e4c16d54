"""Warm start: take the rows and weights that fit from another run's checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal import fid
from shoal.comm.ranks.ranks import Ranks
from shoal.data.schema import Schema
from shoal.durable import Saved
from shoal.errors import ConfigError
from shoal.table.checkpoint.chain import checkpoints_of
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.offline.source import open_source
from shoal.train.loop.checkpoint import read_dense
from shoal.train.loop.config import Config
from shoal.train.loop.rows.rows import Rows

_LISTED = 8


def warm_start(path: str, config: Config, model: nn.Module, rows: Rows, ranks: Ranks, now_s: int) -> list[str]:
    """Take what fits from a checkpoint of `shoal train`; return lines that list what was taken, is new or left out.

    A tensor fits if name and shape are equal, a row if its feature, the feature's definition and its dim are equal.
    Optimizers start fresh. All ranks must call it together.

    Raises:
        ConfigError: ``path`` is not a checkpoint of `shoal train`.
        DataError: the checkpoint is damaged; nothing was taken.
    """
    saved, manifest = _open(path)
    identity = manifest.content.get("identity")
    if not isinstance(identity, dict):
        raise ConfigError(f"--init-from: {saved.folder} was not written by `shoal train`")
    saved.verify()
    report = [f"begins with rows and weights of {saved.folder}, step {manifest.step:,}"]
    report += _take_dense(read_dense(saved), model)
    return report + _Moving(config, identity, manifest, rows, ranks, now_s).run(str(saved.folder))


def _open(path: str) -> tuple[Saved, Manifest]:
    """The checkpoint at ``path``, or the newest complete one in a run's folder."""
    where = path.rstrip("/") or "/"
    try:
        if os.path.basename(os.path.abspath(where)).startswith("ckpt-"):
            series, number = os.path.split(os.path.abspath(where))
            found = checkpoints_of(series).look(int(number.removeprefix("ckpt-")))
        else:
            whole = checkpoints_of(where).whole()
            found = max(whole, key=lambda one: one.number, default=None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--init-from: {path} is not a checkpoint of `shoal train` ({error})") from None
    if found is None or found.saved is None:
        why = "it contains no complete checkpoint" if found is None else found.damage
        raise ConfigError(f"--init-from: {path} is not a checkpoint of `shoal train`: {why}")
    return found.saved, Manifest.of(found.saved)


def _take_dense(tensors: Mapping[str, torch.Tensor], model: nn.Module) -> list[str]:
    there = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    here = model.state_dict()
    fits = {name for name in here if name in there and there[name].shape == here[name].shape}
    model.load_state_dict({name: there[name] if name in fits else value for name, value in here.items()})
    new = [
        f"{name} {list(here[name].shape)}" + (f" (there {list(there[name].shape)})" if name in there else "")
        for name in here
        if name not in fits
    ]
    numbers = sum(here[name].numel() for name in fits)
    report = [f"  taken: {len(fits)} of {len(here)} dense tensors, {numbers:,} numbers"]
    if new:
        report.append(f"  new: {_listed(new)}")
    if gone := sorted(there.keys() - here.keys()):
        report.append(f"  left out: {_listed(gone)}, which this model does not have")
    return report


class _Moving:
    """Copies the rows of one checkpoint into the tables of a run."""

    def __init__(
        self, config: Config, identity: Mapping[str, Any], manifest: Manifest, rows: Rows, ranks: Ranks, now_s: int
    ) -> None:
        self._rows, self._ranks, self._now_s = rows, ranks, now_s
        self._dims = {one["name"]: one["dim"] for one in manifest.content.get("tables", [])}
        self._there, self._here = Schema.from_json(identity["schema"]), config.data.schema()
        own = identity["table"].get("features", {})
        default = identity["table"].get("name", "features")
        self._table_there = {name: own.get(name, {}).get("name", default) for name in self._there.sparse}
        self._table_here = {name: one.config.name for one in rows.plan for name in one.features}
        self._dim_here = {name: one.config.dim for one in rows.plan for name in one.features}

    def run(self, folder: str) -> list[str]:
        if not self._dims:
            return ["  left out: its rows, which were on parameter servers"]
        if self._there.raw or self._here.raw:
            return self._by_table(folder)
        why = {name: self._why_not(name) for name in self._there.sparse}
        slots: dict[tuple[str, int], str] = {}  # (table there, slot there) -> feature
        for name in self._there.sparse:
            key = self._table_there[name], self._there.slot(name)
            if key not in slots or why[slots[key]]:
                slots[key] = name
        taken, left = Counter[str](), Counter[str]()
        for table, batch in open_source(folder).scan():
            ids, weights = torch.from_numpy(batch.ids.copy()), torch.from_numpy(batch.weights.copy())
            of_slot = fid.slot_v2(ids)
            for slot in torch.unique(of_slot).tolist():
                name = slots.get((table, slot))
                mine = of_slot == slot
                if name is None or why[name]:
                    left[name or f"slot {slot} of table {table}"] += int(mine.sum())
                    continue
                taken[name] += int(mine.sum())
                self._assign(self._table_here[name], fid.make_v2(self._here.slot(name), ids[mine]), weights[mine])
        report = [f"  taken: {sum(taken.values()):,} rows of {len(taken)} features"]
        if new := [name for name in self._here.sparse if name not in self._there.sparse]:
            report.append(f"  new: {_listed(new)}, of which there are no rows")
        for name, count in left.items():
            report.append(f"  left out: {count:,} rows of {name}, {why.get(name) or 'which has no feature there'}")
        report += [f"  new: {name}, {why[name]}" for name in self._here.sparse if why.get(name) and not left[name]]
        return report

    def _why_not(self, name: str) -> str:
        """The reason why a feature's rows cannot be taken, or ""."""
        if name not in self._table_here:
            return "which is not a feature of this run"
        there, here = (schema.to_json().get("definitions", {}).get(name) for schema in (self._there, self._here))
        if there != here:
            return "which has another definition here"
        dim = self._dims.get(self._table_there[name])
        if dim is None:
            return "whose rows were on parameter servers"
        return "" if dim == self._dim_here[name] else f"of dim {dim}; here it is {self._dim_here[name]}"

    def _by_table(self, folder: str) -> list[str]:
        """Take the rows of tables with the same name: raw ids do not contain the feature."""
        taken, left = Counter[str](), Counter[str]()
        dims = {one.config.name: one.config.dim for one in self._rows.plan}
        for table, batch in open_source(folder).scan():
            if dims.get(table) != batch.dim or self._there.raw != self._here.raw:
                left[table] += len(batch)
                continue
            taken[table] += len(batch)
            self._assign(table, torch.from_numpy(batch.ids.copy()), torch.from_numpy(batch.weights.copy()))
        report = [f"  taken: {count:,} rows of table {name}" for name, count in taken.items()]
        report += [f"  left out: {count:,} rows of table {name}, which does not fit" for name, count in left.items()]
        return report

    def _assign(self, table: str, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Write this rank's share of the rows, so that each row is written once, also over ranks and on servers."""
        world, rank = self._ranks.world_size, self._ranks.rank
        self._rows.tables[table].assign(ids[rank::world], weights[rank::world], req_time=self._now_s)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
