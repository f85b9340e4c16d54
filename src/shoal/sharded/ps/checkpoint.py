"""Checkpoints of one shard: a folder per checkpoint, whole once its manifest is there and the folder has its name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal.sharded.ps.log import sync_directory
from shoal.sharded.ps.shard import Shard, build_table
from shoal.sharded.ps.streams import Streams
from shoal.table.checkpoint import naming, restore_table
from shoal.table.checkpoint.filters import restore_hash_filter, save_hash_filter
from shoal.table.checkpoint.scales import has_scales, save_scales
from shoal.table.checkpoint.single import save_shards
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

    def save(self, shard: Shard, streams: Streams, number: int) -> Path:
        """Writes the shard as it is, under the name of the last write in it. The caller holds writes back."""
        path = self.path(number)
        if path.exists():
            return path
        draft = self.directory / f"draft-{number:016d}-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            tables = {}
            for position, (name, table) in enumerate(sorted(shard.tables.items())):
                save_rows(table, str(draft / f"table-{position:05d}"))
                save_hash_filter(table.hash_filter, str(draft / f"filter-{position:05d}"), True)
                tables[name] = {
                    "file": f"table-{position:05d}",
                    "filter": f"filter-{position:05d}",
                    "spec": shard.specs[name],
                    "rows": table.size(),
                    "max_update_time": table.max_update_time,
                    "calls": table._native.calls(),
                }
            manifest = {
                "format": FORMAT, "shard": shard.index, "of": shard.of, "number": number, "version": shard.version,
                "streams": streams.dump(), "tables": tables,
            }  # fmt: skip
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
            table = build_table(entry["spec"])
            restore_table(table, path / entry["file"])
            restore_hash_filter(table.hash_filter, str(path / entry["filter"]), True)
            table._native.raise_max_update_time(entry["max_update_time"])
            table._native.set_calls(entry["calls"])
            shard.add(entry["spec"], table)
        shard.version = manifest["version"]
        streams.load(manifest["streams"])
        return manifest["number"]


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {path}: its manifest cannot be read ({error})") from error
    if manifest.get("format") != FORMAT:
        raise DataError(f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def save_rows(table: HashTable, basename: str) -> None:
    """All rows, stale ones too: what is loaded again is what was there."""
    count = naming.shard_count(table.saver_parallel, table.size())
    save_shards([(table._native, None, 0)], basename, count)
    save_scales(basename, {table.name: table._native.scales()} if has_scales(table.table_config) else {})
