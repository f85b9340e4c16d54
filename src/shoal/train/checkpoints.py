"""`Checkpoints`: a training loop of your own that survives its ranks, and resumes with more or fewer of them."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.ranks.ranks import Ranks
from shoal.comm.ranks.torch_ranks import default_ranks
from shoal.data.live.stream import LiveStream
from shoal.data.stream import Stream
from shoal.durable import Found, StrPath
from shoal.errors import ConfigError
from shoal.nn.module import TableModule
from shoal.sharded import AllToAllHashTable
from shoal.sharded.all_to_all.moving import fill
from shoal.table.checkpoint.chain import checkpoints_of
from shoal.table.checkpoint.manifest import Manifest
from shoal.table.checkpoint.tensors import table_state
from shoal.table.table import HashTable
from shoal.train.loop.checkpoint import Snapshot, Target, load_checkpoint, save_checkpoint
from shoal.train.loop.tables import target_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a run continues."""

    step: int
    path: str
    """The checkpoint's folder."""
    world: int
    """The ranks that wrote it."""
    values: dict[str, Any] = field(default_factory=dict)
    """What was given to `Checkpoints.save`."""


class Checkpoints:
    """Checkpoints of model, optimizer, tables and positions in a folder that all ranks reach. All ranks call together.

    Rows of tables in this process and over ranks are saved with the model; those on parameter servers are the servers'.
    A checkpoint is there when it is whole, and has a digest of every file. On another number of ranks the rows, and
    what each rank had not read yet, are shared out anew.

    Args:
        folder: made if it is not there.
        model: its modules' tables are found. Give the model itself, not one wrapped for data parallelism.
        optimizer: that of the dense parameters.
        stream: what the ranks read (`shoal.data.Stream`); None: you keep positions yourself, in ``values``.
        ranks: `shoal.comm.start_ranks`'s; those of the default process group unless given.
        keep: how many checkpoints stay.

    Example:
        >>> import tempfile, torch
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.TemporaryDirectory()
        >>> checkpoints = Checkpoints(folder.name, model, torch.optim.Adam(model.parameters()))
        >>> checkpoints.resume() is None
        True
        >>> path = checkpoints.save(10, values={"note": "ten"})
        >>> at = checkpoints.resume()
        >>> at.step, at.values
        (10, {'note': 'ten'})
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: StrPath,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stream: Stream | LiveStream | None = None,
        ranks: Ranks | None = None,
        keep: int = 2,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"Checkpoints: keep must be at least 1, got {keep}")
        self.folder, self.keep = os.fspath(folder), keep
        self.ranks = ranks or default_ranks()
        self._model, self._optimizer, self._stream = model, optimizer, stream
        self._series = checkpoints_of(self.folder)
        modules = [one for one in model.modules() if isinstance(one, TableModule)]
        found = {keeper.handle: keeper for one in modules for keeper in one.keepers()}
        self._keepers = [keeper for keeper in found.values() if isinstance(keeper.table, HashTable | AllToAllHashTable)]
        names = [keeper.name for keeper in self._keepers]
        if len(set(names)) < len(names):
            raise ConfigError(f"Checkpoints: tables must have names of their own, got {', '.join(sorted(names))}")
        self.ranks.together(lambda: os.makedirs(self.folder, exist_ok=True))

    def save(
        self, step: int, state: Mapping[str, Any] | None = None, *, values: Mapping[str, Any] | None = None
    ) -> str:
        """Writes a checkpoint and returns its folder; older ones than the newest ``keep`` are removed.

        Args:
            step: its number; the same on all ranks.
            state: that of the last `shoal.data.Batch` that this rank has learnt from (``batch.state``); None before the
                first one.
            values: JSON values to find again, the same on all ranks.

        Raises:
            OSError: a rank could not write; all ranks raise, and older checkpoints are as they were.
        """
        if self._stream is None and state is not None:
            raise ConfigError(
                "Checkpoints.save: a state needs the stream that it is of; give it to Checkpoints(stream=)"
            )
        reader = dict(state if state is not None else self._stream.state if self._stream is not None else {})
        steps = {keeper.name: keeper.global_step for keeper in self._keepers}
        snapshot = self._snapshot(step, reader)
        snapshot.content = {"values": dict(values or {}), "table_steps": steps, "written_s": int(time.time())}
        target = self._series.path(step)
        tables = [keeper.table for keeper in self._keepers]
        rows = [_rows(table) for table in tables]
        ways = [str(table.way) if isinstance(table, AllToAllHashTable) else "row" for table in tables]
        save_checkpoint(target, snapshot, rows, self.ranks, lambda: shutil.rmtree(target, ignore_errors=True), ways)
        if self.ranks.first:
            self._series.prune(self.keep)
        self.ranks.barrier()
        return target

    def resume(self) -> Resumed | None:
        """Loads the newest whole checkpoint, and has the stream begin behind it; None if there is no checkpoint.

        Raises:
            DataError: there are checkpoints, and all are damaged.
            ConfigError: the checkpoint is of another model or other tables.
        """
        return self._series.load_newest(self._load, log.warning)

    def _load(self, found: Found) -> Resumed:
        saved = found.saved
        assert saved is not None
        snapshot = self._snapshot(found.number, {})
        if self._stream is not None:
            snapshot.deal = self._stream.dealt
        tables = [keeper.table for keeper in self._keepers]
        targets = [target_of(one) if _spread(one) else Target(_rows(one)) for one in tables]
        self.ranks.together(lambda: load_checkpoint(saved, snapshot, targets, self.ranks) and None)
        for table, target in zip(tables, targets, strict=True):
            if _spread(table) and target.table is not table.table:
                fill(table, table_state(target.table))
        content = Manifest.of(saved).content
        for keeper in self._keepers:
            keeper.global_step = content["table_steps"].get(keeper.name, snapshot.step)
        if self._stream is not None and snapshot.reader:
            self._stream.restart(snapshot.reader)
        if content["world"] != self.ranks.world_size:
            log.warning(
                "%s was written by %d rank(s) and there are %d: rows and positions are shared out anew",
                found.path, content["world"], self.ranks.world_size,
            )  # fmt: skip
        return Resumed(step=snapshot.step, path=found.path, world=content["world"], values=content["values"])

    def _snapshot(self, step: int, reader: dict[str, Any]) -> Snapshot:
        dense: Any = _Dense(self._model)
        return Snapshot(step=step, model=dense, optimizer=self._optimizer, reader=reader, metrics={})


class _Dense:
    """The parameters and buffers of a model, without the rows of its tables."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors

    def load_state_dict(self, given: Mapping[str, Tensor]) -> None:
        wrong = sorted(self._tensors.keys() ^ given.keys())
        wrong += [
            name for name, tensor in given.items() if name not in wrong and tensor.shape != self._tensors[name].shape
        ]
        if wrong:
            raise RuntimeError(f"it has other tensors: {', '.join(wrong[:5])}")
        with torch.no_grad():
            for name, tensor in given.items():
                self._tensors[name].copy_(tensor)


def _spread(table: Any) -> bool:
    return isinstance(table, AllToAllHashTable) and table.world_size > 1


def _rows(table: Any) -> HashTable:
    """The rows that this rank saves."""
    if _spread(table):
        return table.own_rows()
    return table.table if isinstance(table, AllToAllHashTable) else table
