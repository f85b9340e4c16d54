"""`Checkpoints`: save and resume your own training loop, also with another number of ranks."""

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
from shoal.train.loop.rows.rows import target_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint from which a run was resumed."""

    step: int
    path: str
    """The checkpoint's folder."""
    world: int
    """The number of ranks that wrote it."""
    values: dict[str, Any] = field(default_factory=dict)
    """The ``values`` passed to `Checkpoints.save`."""


class Checkpoints:
    """Saves model, optimizer, tables and positions in a folder that all ranks can access.

    All ranks must make every call together. Rows in this process and over ranks are saved with the model; parameter
    servers save their own rows. A checkpoint appears once it is complete, and has a digest of every file. If the number
    of ranks has changed, rows and unread data are redistributed.

    Args:
        folder: created if it does not exist.
        model: includes the tables of its modules. Pass the model itself, not one wrapped for data parallelism.
        optimizer: the optimizer of the dense parameters.
        stream: the stream that the ranks read (`shoal.data.Stream`). With None, keep positions yourself, in ``values``.
        ranks: the result of `shoal.comm.start_ranks`; by default, the ranks of the default process group.
        keep: number of checkpoints to keep.

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
            raise ConfigError(f"Checkpoints: tables must have different names, got {', '.join(sorted(names))}")
        self.ranks.together(lambda: os.makedirs(self.folder, exist_ok=True))

    def save(
        self, step: int, state: Mapping[str, Any] | None = None, *, values: Mapping[str, Any] | None = None
    ) -> str:
        """Write a checkpoint, return its folder, and remove all but the newest ``keep`` checkpoints.

        Args:
            step: the number of the step, the same on all ranks.
            state: the state of the last `shoal.data.Batch` that this rank has trained on (``batch.state``); None before
                the first batch.
            values: JSON values that `resume` returns, the same on all ranks.

        Raises:
            OSError: a rank could not write; all ranks raise, and older checkpoints are unchanged.
        """
        if self._stream is None and state is not None:
            raise ConfigError("Checkpoints.save: state needs a stream; pass the stream to Checkpoints(stream=)")
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
        """Load the newest complete checkpoint and move the stream to its position; None if there is no checkpoint.

        Raises:
            DataError: all checkpoints are damaged.
            ConfigError: the checkpoint was written for another model or other tables.
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
                "%s was written by %d rank(s), now there are %d; redistributing rows and positions",
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
            raise RuntimeError(f"these tensors differ: {', '.join(wrong[:5])}")
        with torch.no_grad():
            for name, tensor in given.items():
                self._tensors[name].copy_(tensor)


def _spread(table: Any) -> bool:
    return isinstance(table, AllToAllHashTable) and table.world_size > 1


def _rows(table: Any) -> HashTable:
    """The table of the rows that this rank saves."""
    if _spread(table):
        return table.own_rows()
    return table.table if isinstance(table, AllToAllHashTable) else table
