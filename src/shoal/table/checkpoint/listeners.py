"""Listeners that a training loop calls when it saves or restores its model, to save and restore the tables too."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from google.protobuf import text_format

from shoal.durable import StrPath, file_bases, make_parents, write_whole
from shoal.errors import DataError
from shoal.table import registry
from shoal.table.checkpoint import naming
from shoal.table.checkpoint.assets import base_in, find_assets, save_assets, settle
from shoal.table.checkpoint.multi import feature_stat, restore_multi_table, save_multi_table
from shoal.table.checkpoint.single import restore_table, save_table
from shoal.table.config.messages import CkptInfo
from shoal.table.table import HashTable

_HASHED = re.compile(r"MonolithHashTable_[0-9a-f]{32}(.*)", re.DOTALL)
_AT_ONCE = 32


class PsMonitor(Protocol):
    """Reports which processes lost their tables, so that only those tables are restored."""

    def is_ps_uninitialized(self, table: Any) -> bool:
        """Whether the process that holds ``table`` reports itself uninitialized."""
        ...


class _Kind:
    """The differences between listeners for single tables and for multi tables."""

    name = "tables"

    @staticmethod
    def registered() -> list[Any]:
        return registry.registered(HashTable)

    save: Callable[..., None] = staticmethod(save_table)
    restore: Callable[..., None] = staticmethod(restore_table)


class _MultiKind(_Kind):
    name = "multi_tables"

    @staticmethod
    def registered() -> list[Any]:
        from shoal.table.multi import MultiHashTable

        return registry.registered(MultiHashTable)

    save = staticmethod(save_multi_table)
    restore = staticmethod(restore_multi_table)


class _Listener:
    kind: type[_Kind] = _Kind

    def __init__(self, basename: StrPath) -> None:
        self.basename = os.fspath(basename)

    def _save(self, step: int) -> list[str]:
        tables = self.kind.registered()
        if not tables:
            return []
        sleep_ms = 15 * min(len(tables), _AT_ONCE)  # spreads the tables that are saved at the same time
        bases = file_bases(table.name for table in tables)

        def fill(folder: str) -> None:
            _each(
                lambda table, base: self.kind.save(table, os.path.join(folder, base), random_sleep_ms=sleep_ms),
                tables,
                list(bases.values()),
            )

        folder = save_assets(self.basename, step, self.kind.name, bases, fill)
        return [os.path.join(folder, base) for base in bases.values()]

    def _restore(self, folder: str, tables: Sequence[Any]) -> None:
        if os.path.isdir(folder):
            settle(folder, [base_in(folder, name) for table in tables for name in _candidates(table)])
        bases = [_find_base(folder, table) for table in tables]  # all of them, before the first table changes
        _each(self.kind.restore, tables, bases)


class HashTableCheckpointSaverListener(_Listener):
    """Saves every registered table to ``<basename>-<step>.assets/`` before the step's model is saved."""

    def before_save(self, step: int) -> None:
        self._save(step)


class HashTableCheckpointRestorerListener(_Listener):
    """Restores every registered table from the newest checkpoint before a model is restored."""

    def __init__(self, basename: StrPath, ps_monitor: PsMonitor | None = None) -> None:
        super().__init__(basename)
        self.ps_monitor = ps_monitor

    def before_restore(self) -> bool:
        """Restores the tables; returns whether there was a checkpoint.

        Nothing happens without a checkpoint, or if there are several and none is known to be the newest.

        Raises:
            DataError: the checkpoint is damaged, or has no table with the table's name or its ``extra_restore_names``.
        """
        tables = [
            table
            for table in self.kind.registered()
            if self.ps_monitor is None or self.ps_monitor.is_ps_uninitialized(table)
        ]
        folder = find_assets(
            self.basename, self.kind.name, lambda f: all(_first_base(f, table) is not None for table in tables)
        )
        if folder is None:
            return False
        self._restore(folder, tables)
        return True


class HashTableRestorerSaverListener(_Listener):
    """Restores the tables from a step after it was saved, which drops stale rows from memory."""

    def after_save(self, step: int) -> None:
        self._restore(naming.assets_dir(self.basename, step), self.kind.registered())


class MultiHashTableCheckpointSaverListener(HashTableCheckpointSaverListener):
    """Saves every registered multi table; also writes ``ckpt.info-<step>`` next to the model: the rows per table."""

    kind = _MultiKind

    def __init__(self, basename: StrPath, write_ckpt_info: bool = True) -> None:
        super().__init__(basename)
        self.write_ckpt_info = write_ckpt_info

    def before_save(self, step: int) -> None:
        saved = self._save(step)
        if not self.write_ckpt_info:
            return
        info = CkptInfo()
        for base in saved:
            for name, count in feature_stat(base).items():
                info.feature_counts[name] += count
        path = os.path.join(os.path.dirname(self.basename), f"ckpt.info-{int(step)}")
        make_parents(path)
        write_whole(path, text_format.MessageToString(info))


class MultiHashTableCheckpointRestorerListener(HashTableCheckpointRestorerListener):
    """Restores every registered multi table from the newest checkpoint before a model is restored."""

    kind = _MultiKind


class MultiHashTableRestorerSaverListener(HashTableRestorerSaverListener):
    """Restores the multi tables from a step after it was saved, which drops stale rows from memory."""

    kind = _MultiKind


def _each(do: Callable[..., Any], tables: Sequence[Any], bases: Sequence[str]) -> None:
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(tables))), "shoal-checkpoint") as pool:
        list(pool.map(do, tables, bases))


def _candidates(table: Any) -> Iterator[str]:
    """The names that a table's files can have: its own, then its older ones, with and without prefix and suffix."""
    yield table.name
    match = _HASHED.fullmatch(table.name)
    for name in getattr(table, "extra_restore_names", ()):
        yield name
        if match and match[1]:
            yield f"MonolithHashTable_{name}{match[1]}"
        yield f"MonolithHashTable_{name}"


def _first_base(folder: str, table: Any) -> str | None:
    for name in _candidates(table):
        base = os.path.join(folder, base_in(folder, name)) if os.path.isdir(folder) else folder
        if naming.has_shards(base):
            return base
    return None


def _find_base(folder: str, table: Any) -> str:
    base = _first_base(folder, table)
    if base is None:
        tried = ", ".join(dict.fromkeys(_candidates(table)))
        raise DataError(
            f"unable to find table checkpoint: table {table.name!r} has no files in {folder} (tried {tried})"
        )
    return base
