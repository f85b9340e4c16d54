"""Checkpoints of one shard: a folder per checkpoint, whole once its manifest is there and the folder has its name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, DataError
from shoal.sharded.ps.log import sync_directory
from shoal.sharded.ps.shard import Shard
from shoal.sharded.ps.snapshot import ShardSnapshot
from shoal.sharded.ps.streams import Streams
from shoal.sharded.ps.table_spec import build_table, check_change, same_counts
from shoal.table.checkpoint import restore_table
from shoal.table.checkpoint.filters import restore_hash_filter
from shoal.table.table import HashTable

FORMAT = 1


class Checkpoints:
    """The checkpoints ``checkpoint-<number>`` of a directory, ``number`` being the last log record inside."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = max(1, keep)
        directory.mkdir(parents=True, exist_ok=True)

    def numbers(self) -> list[int]:
        found = []
        for path in self.directory.glob("checkpoint-*"):
            number = path.name.removeprefix("checkpoint-")
            if number.isdigit() and (path / "manifest.json").is_file():
                found.append(int(number))
        return sorted(found)

    def oldest(self) -> int:
        return min(self.numbers(), default=0)

    def path(self, number: int) -> Path:
        return self.directory / f"checkpoint-{number:016d}"

    def save(self, snapshot: ShardSnapshot) -> Path:
        """Writes a snapshot, under the name of the last write in it. Writes to the shard may go on."""
        path = self.path(snapshot.number)
        if path.exists():
            return path
        draft = self.directory / f"draft-{snapshot.number:016d}-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            manifest = {"format": FORMAT, **snapshot.save(draft)}
            with open(draft / "manifest.json", "w") as file:
                json.dump(manifest, file)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(draft)
            draft.rename(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_directory(self.directory)
        for old in self.numbers()[: -self.keep]:
            shutil.rmtree(self.path(old))
        return path

    def load(self, shard: Shard, streams: Streams) -> int:
        """Loads the newest checkpoint into an empty shard; the number of its last write, 0 without one."""
        for draft in self.directory.glob("draft-*"):
            shutil.rmtree(draft, ignore_errors=True)
        numbers = self.numbers()
        if not numbers:
            return 0
        path = self.path(numbers[-1])
        manifest = read_manifest(path)
        if (manifest["shard"], manifest["of"]) != (shard.index, shard.of):
            raise DataError(
                f"checkpoint {path} is of shard {manifest['shard']} of {manifest['of']}, this server is shard "
                f"{shard.index} of {shard.of}; use `shoal ps reshard`"
            )
        for entry in manifest["tables"].values():
            shard.add(entry["spec"], _table(path, entry, entry["spec"]))
        shard.version = manifest["version"]
        streams.load(manifest["streams"], manifest.get("answers", {}))
        return manifest["number"]

    # --- kept by name -----------------------------------------------------------------------------------------------

    def keep_as(self, path: Path, name: str, others: Sequence[str]) -> None:
        """Holds on to a checkpoint under a name, by links to its files, however many come after it.

        Names are ``<run>-<what>``; those of the same run that are not among ``others`` are let go.
        """
        run = _checked(name).rpartition("-")[0]
        target, draft = self.directory / f"kept-{name}", self.directory / f"draft-kept-{name}-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            for file in path.iterdir():
                _link(file, draft / file.name)
            sync_directory(draft)
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_directory(self.directory)
        stay = {f"kept-{one}" for one in (name, *others)}
        for old in self.directory.glob("kept-*"):
            if old.name.rpartition("-")[0] == f"kept-{run}" and old.name not in stay:
                shutil.rmtree(old, ignore_errors=True)

    def kept_table(self, name: str, table: str, shard: Shard) -> HashTable:
        """A table as it was in the checkpoint of that name, with the settings that it has now."""
        path = self.directory / f"kept-{_checked(name)}"
        if not (path / "manifest.json").is_file():
            raise ConfigError(f"shard {shard.index} keeps no checkpoint {name!r}")
        manifest = read_manifest(path)
        entry = manifest["tables"].get(table)
        if entry is None or (manifest["shard"], manifest["of"]) != (shard.index, shard.of):
            raise ConfigError(f"the checkpoint {name!r} of shard {shard.index} has no table {table!r} of this shard")
        try:
            check_change(entry["spec"], shard.specs[table])
        except ConfigError as error:
            raise ConfigError(f"the checkpoint {name!r} of shard {shard.index} does not fit: {error}") from None
        return _table(path, entry, shard.specs[table])


def _table(path: Path, entry: Mapping[str, Any], spec: dict[str, Any]) -> HashTable:
    """A table from its entry in the manifest of a checkpoint, with the settings of ``spec``."""
    table = build_table(spec)
    restore_table(table, path / entry["file"])
    if same_counts(entry["spec"], spec):
        restore_hash_filter(table.hash_filter, str(path / entry["filter"]), True)
    table._native.raise_max_update_time(entry["max_update_time"])
    table._native.set_calls(entry["calls"])
    return table


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]+-[A-Za-z0-9_]+", name):
        raise ConfigError(f"a kept checkpoint is named RUN-WHAT in letters, digits and underscores, got {name!r}")
    return name


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {path}: its manifest cannot be read ({error})") from error
    if manifest.get("format") != FORMAT:
        raise DataError(f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}")
    return manifest
