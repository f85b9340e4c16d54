"""Checkpoints of one shard: a series of sealed folders. A server recovers from the newest intact one."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from shoal.durable import Found, Saved, Series, move_folder, new_folder, read_folder
from shoal.errors import DataError
from shoal.sharded.ps.server.shard import Shard
from shoal.sharded.ps.server.snapshot import ShardSnapshot
from shoal.sharded.ps.server.streams import Streams
from shoal.sharded.ps.server.table_spec import build_table, same_counts
from shoal.table.checkpoint import restore_table
from shoal.table.checkpoint.filters import restore_hash_filter
from shoal.table.table import HashTable

log = logging.getLogger("shoal.ps")

FORMAT = 2
UNSEALED_FORMAT = 1  # of version 0.1: without digests


def series(directory: Path) -> Series:
    """The folders ``checkpoint-<number>`` of a directory; ``number`` is that of the last log record in it."""
    return Series(directory, "checkpoint-", 16)


class Checkpoints:
    """The checkpoints in a server's directory. It keeps ``keep`` intact ones, and the log since the oldest of them."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        self.directory = directory
        self.keep = max(2, keep)
        self._series = series(directory)
        self._ours: set[int] = set()  # loaded or written by this process
        directory.mkdir(parents=True, exist_ok=True)

    def newest(self) -> int:
        """The number of the newest checkpoint, damaged or not; 0 if there is none. Empty folders do not count."""
        found = self._series.all()
        return max((each.number for each in found if os.listdir(each.path)), default=0)

    def age_s(self) -> float | None:
        """Seconds since the newest checkpoint was written; None if there is none."""
        times = []
        for each in self._series.all():
            with contextlib.suppress(OSError):
                times.append(os.stat(each.path).st_mtime)
        return time.time() - max(times) if times else None

    def log_needed_from(self) -> int:
        """The first log record needed if the newest checkpoint turns out to be damaged; 0 (all of them) if there
        are fewer than two checkpoints."""
        whole = self._series.whole()
        return whole[0].number + 1 if len(whole) > 1 else 0

    def save(self, snapshot: ShardSnapshot) -> Path:
        """Write a snapshot, named after the last write in it. Writes to the shard can continue."""
        path = Path(self._series.path(snapshot.number))
        if snapshot.number in self._ours and path.exists():  # nothing has been written since
            return path
        if path.exists():
            self._set_aside(snapshot.number)
        with new_folder(path) as draft:
            fields, digests = snapshot.save(Path(draft.path))
            draft.seal({"format": FORMAT, **fields}, digests)
        self._ours.add(snapshot.number)
        self._series.prune(self.keep)
        return path

    def load(self, shard: Shard, streams: Streams, *, log_from: int | None) -> int:
        """Load the newest intact checkpoint into an empty shard; returns the number of its last write, 0 if none.

        Damaged ones are skipped with a logged message: the log reaches back to the previous one. If none is intact, the
        log is enough if ``log_from``, the number of its first record, is 1.

        Raises:
            DataError: there are checkpoints but none is intact, or the newest intact one is of another shard.
        """
        self._remove_drafts()
        loaded: tuple[Checkpoint, dict[str, HashTable]] | None
        try:
            loaded = self._series.load_newest(lambda found: _load(found.path, shard), log.error, _verify)
        except DataError as error:
            if log_from != 1 or not all(map(_is_damaged, self._series.all())):
                raise
            log.error("%s; the log, which begins with the first write, is used instead", error)
            return 0
        if loaded is None:
            return 0
        checkpoint, tables = loaded
        for name, table in tables.items():
            shard.add(checkpoint.tables[name]["spec"], table)
        shard.version = checkpoint["version"]
        shard.run = checkpoint.fields.get("run", 0)
        streams.load(checkpoint["streams"], checkpoint.fields.get("answers", {}))
        self._ours.add(checkpoint["number"])
        return checkpoint["number"]

    def set_aside_after(self, number: int) -> None:
        """Rename the checkpoints after ``number``, which are damaged, so that they do not count as intact."""
        for damaged in self._series.numbers():
            if damaged > number:
                self._set_aside(damaged)

    def _set_aside(self, number: int) -> None:
        path = self._series.look(number).path
        aside = self.directory / f"damaged-{os.path.basename(path)}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            move_folder(path, aside)
            log.error("checkpoint %s is kept as %s; remove it when it is no longer needed", path, aside)

    def _remove_drafts(self) -> None:
        for pattern in (".tmp-*", "draft-*"):  # the second is from version 0.1
            for draft in self.directory.glob(pattern):
                shutil.rmtree(draft, ignore_errors=True)


class Checkpoint:
    """The checked manifest of a checkpoint. Its fields are those of `ShardSnapshot.save`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a checkpoint's manifest.

        Raises:
            DataError: it is damaged, a file is missing, or its version is not supported. The error names the file.
        """
        self.path = Path(path)
        saved = self._read()
        self.sealed = saved.fields.get("format") == FORMAT
        self.saved: Saved | None = saved if self.sealed else None
        self.fields = saved.fields
        if self.fields.get("format") not in (FORMAT, UNSEALED_FORMAT):
            raise DataError(
                f"{saved.manifest} has format {self.fields.get('format')!r:.40}, but this version reads formats "
                f"{UNSEALED_FORMAT} and {FORMAT}"
            )
        for name, kind in _FIELDS.items():
            if not _is(self.fields.get(name), kind):
                raise DataError(
                    f"{saved.manifest}: {name!r} must be {kind.__name__}, got {self.fields.get(name)!r:.60}"
                )
        self.tables: dict[str, dict[str, Any]] = self.fields["tables"]
        for table, entry in self.tables.items():
            for name, kind in _ENTRY.items():
                if not isinstance(entry, dict) or not _is(entry.get(name), kind):
                    raise DataError(f"{saved.manifest}: {name!r} of table {table!r:.60} must be {kind.__name__}")

    def _read(self) -> Saved:
        try:
            return read_folder(self.path)
        except FileNotFoundError:
            raise DataError(f"{self.path} has no manifest.json") from None
        except DataError:
            with contextlib.suppress(DataError):
                unsealed = read_folder(self.path, unsealed=True)
                if unsealed.fields.get("format") == UNSEALED_FORMAT:
                    return unsealed
            raise

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def verify(self, name: str) -> None:
        """Read the files of a table; raises `DataError` if one is damaged. Version 0.1 wrote no digests."""
        if self.saved is not None:
            base = self.tables[name]["file"]
            self.saved.verify(file for file in self.saved.files if file.startswith((f"{base}-", f"{base}.")))

    def table(self, name: str, spec: dict[str, Any] | None = None) -> HashTable:
        """One of its tables, with the settings of ``spec``, or its saved settings by default."""
        entry = self.tables[name]
        spec = entry["spec"] if spec is None else spec
        try:
            table = build_table(spec)
            restore_table(table, self.path / entry["file"], saved=self.saved)
            if same_counts(entry["spec"], spec):
                restore_hash_filter(table.hash_filter, str(self.path / entry["filter"]), True)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path / 'manifest.json'}: table {name!r} cannot be created from it ({error})"
            ) from error
        table._native.raise_max_update_time(entry["max_update_time"])
        table._native.set_calls(entry["calls"])
        return table


_FIELDS: dict[str, type] = {"shard": int, "of": int, "number": int, "version": int, "streams": dict, "tables": dict}
_ENTRY: dict[str, type] = {"spec": dict, "file": str, "filter": str, "max_update_time": int, "calls": int}


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and (kind is not int or 0 <= value < 1 << 63)


def _load(path: str, shard: Shard) -> tuple[Checkpoint, dict[str, HashTable]]:
    checkpoint = Checkpoint(path)
    if (checkpoint["shard"], checkpoint["of"]) != (shard.index, shard.of):
        raise DataError(
            f"checkpoint {path} is of shard {checkpoint['shard']} of {checkpoint['of']}, but this server is shard "
            f"{shard.index} of {shard.of}; use `shoal ps reshard`"
        )
    try:
        Streams().load(checkpoint["streams"], checkpoint.fields.get("answers", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path}/manifest.json: its entries for workers cannot be read ({error})") from error
    return checkpoint, {name: checkpoint.table(name) for name in checkpoint.tables}


def _verify(found: Found) -> None:
    """Raise `DataError` for a damaged checkpoint. Checkpoints of version 0.1 have no digests: one that cannot be
    loaded counts as damaged, unless it is of another shard."""
    checkpoint = Checkpoint(found.path)
    if checkpoint.saved is not None:
        checkpoint.saved.verify()
    else:
        _load(found.path, Shard(checkpoint["shard"], checkpoint["of"]))


def _is_damaged(found: Found) -> bool:
    try:
        _verify(found)
        return False
    except DataError:
        return True
