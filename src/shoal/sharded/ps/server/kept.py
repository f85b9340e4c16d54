"""Checkpoints that a server keeps under a name, so that a table can be restored from one of them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal.durable import Draft, move_folder, remove_folder, sync_folder
from shoal.errors import ConfigError
from shoal.sharded.ps.server.checkpoint import Checkpoint
from shoal.sharded.ps.server.shard import Shard
from shoal.sharded.ps.server.table_spec import check_change
from shoal.table.table import HashTable

_RELEASED = re.compile(r"released-(\d{16,})-(.+)")


class Kept:
    """The folders ``kept-<name>`` in a server's directory, which link to a checkpoint's files.

    A released one is renamed ``released-<number>-<name>``, where ``number`` is the last log record that can name it.
    It is removed once the log begins after that record.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, path: Path, name: str, others: Sequence[str], number: int) -> None:
        """Keep the checkpoint at ``path``, of record ``number``, however many follow it.

        Names are ``<run>-<what>``; those of the same run that are not in ``others`` are released.
        """
        run = _checked(name).rpartition("-")[0]
        target = self.directory / f"kept-{name}"
        draft = Draft(target).begin()
        try:
            for file in path.iterdir():
                _link(file, Path(draft.path) / file.name)
            sync_folder(draft.path)
            if target.exists():
                self._release(target, number)
            draft.publish()
        except BaseException:
            draft.discard()
            raise
        stay = {f"kept-{one}" for one in (name, *others)}
        for old in self.directory.glob("kept-*"):
            if old.name.rpartition("-")[0] == f"kept-{run}" and old.name not in stay:
                self._release(old, number)

    def _release(self, path: Path, number: int) -> None:
        released = self.directory / f"released-{number:016d}-{path.name.removeprefix('kept-')}"
        if released.exists():
            remove_folder(path)
        else:
            move_folder(path, released)

    def drop_before(self, number: int) -> None:
        """Remove released checkpoints that neither record ``number`` nor a later one can name."""
        for path in self.directory.glob("released-*"):
            match = _RELEASED.fullmatch(path.name)
            if match and int(match[1]) < number:
                remove_folder(path)

    def table(self, name: str, table: str, shard: Shard, record: int | None = None) -> HashTable:
        """A table's rows from the checkpoint kept as ``name``, with the table's current settings.

        Args:
            name: the name of the kept checkpoint.
            table: the table's name.
            shard: holds the table now.
            record: while the log is replayed, the record that names it: the name may have been released since then.
        """
        path = self._path(_checked(name), record)
        if path is None:
            raise ConfigError(f"shard {shard.index} keeps no checkpoint {name!r}")
        checkpoint = Checkpoint(path)
        if table not in checkpoint.tables or (checkpoint["shard"], checkpoint["of"]) != (shard.index, shard.of):
            raise ConfigError(f"the checkpoint {name!r} of shard {shard.index} has no table {table!r} of this shard")
        try:
            check_change(checkpoint.tables[table]["spec"], shard.specs[table])
        except ConfigError as error:
            raise ConfigError(f"the checkpoint {name!r} of shard {shard.index} does not fit: {error}") from None
        return checkpoint.table(table, shard.specs[table])

    def _path(self, name: str, record: int | None) -> Path | None:
        if record is not None:
            released = (_RELEASED.fullmatch(path.name) for path in self.directory.glob("released-*"))
            found = sorted((int(m[1]), m[0]) for m in released if m and m[2] == name and int(m[1]) >= record)
            if found:
                return self.directory / found[0][1]
        path = self.directory / f"kept-{name}"
        return path if path.is_dir() else None


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]+-[A-Za-z0-9_]+", name):
        raise ConfigError(f"a kept checkpoint must be named RUN-WHAT in letters, digits and underscores, got {name!r}")
    return name


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
