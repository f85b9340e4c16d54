"""Stores a server's log and checkpoints in an object store, while it serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shoal.errors import DataError
from shoal.sharded.ps.archive.store import MANIFEST, Archive, Segment
from shoal.sharded.ps.replica.log_reader import LogReader, RecordsGone, records
from shoal.sharded.ps.server.checkpoint import Checkpoint, series

log = logging.getLogger("shoal.ps")

SEGMENT_BYTES = 64 << 20


class Uploading:
    """Stores new log records, complete checkpoints and the names of kept ones, in rounds.

    Args:
        directory: the server's directory.
        durable: returns the number of the last record on the disk.
        term: returns the leader's term, 0 without a group. Records of a later term replace earlier ones.
        keep: how long to keep checkpoints, and the log since the oldest of them; None keeps them forever.
    """

    def __init__(
        self,
        archive: Archive,
        directory: Path,
        *,
        durable: Callable[[], int],
        term: Callable[[], int] = lambda: 0,
        leads: Callable[[], bool] = lambda: True,
        keep: timedelta | None = None,
    ) -> None:
        self.archive, self._directory = archive, directory
        self._durable, self._term, self._leads, self._keep = durable, term, leads, keep
        self._reader = LogReader(directory)
        self._stored: int | None = None
        self._checkpoints: set[int] = set()
        self.failures = 0
        self.stored_at = 0.0
        """Unix time up to which everything on the disk is stored."""

    @property
    def lag_records(self) -> int:
        return max(0, self._durable() - (self._stored or 0))

    def loop(self, stopped: threading.Event, every: timedelta) -> None:
        """Run rounds until the server stops, and one more at the end; failed rounds are retried."""
        last_error = ""
        while True:
            ended = stopped.wait(every.total_seconds())
            try:
                if self._leads():
                    self.round()
                    if last_error:
                        log.warning("the archive %s can be reached again", self.archive.url)
                    last_error = ""
            except Exception as error:  # whatever a store's client raises
                self.failures += 1
                if str(error) != last_error:
                    log.error("cannot write to the archive %s, will retry: %s", self.archive.url, error)
                last_error = str(error)
            if ended:
                return

    def round(self) -> None:
        begun = time.time()
        if self._stored is None:
            self._stored = self._begin()
        self._store_checkpoints()
        self._store_log()
        self._store_kept()
        if self._keep is not None:
            self._drop_before(datetime.now(UTC) - self._keep)
        self.stored_at = begun

    def _begin(self) -> int:
        """The last record up to which the archive and this server's log agree."""
        segments, term = self.archive.segments(), self._term()
        self._checkpoints = {one.number for one in self.archive.checkpoints()}
        last = max([one.last for one in segments] + [*self._checkpoints], default=0)
        mine = self._durable()
        if last > mine:
            later = [one for one in segments if one.last > mine]
            if not term or any(one.term >= term for one in later) or max(self._checkpoints, default=0) > mine:
                raise DataError(
                    f"{self.archive.url} has records up to {last}, but {self._directory} ends at {mine}; fill an empty "
                    "directory with `shoal ps restore`, or choose another archive"
                )
        return min(last, mine)

    def _store_log(self) -> None:
        assert self._stored is not None
        while self._stored < (last := self._durable()):
            try:
                data = self._reader.read(self._stored, last, SEGMENT_BYTES)
            except RecordsGone:  # a checkpoint replaced these records before they were stored
                numbers = [one for one in self._checkpoints if one > self._stored]
                if not numbers:
                    raise
                self._stored = min(numbers)
                continue
            if not data:
                return
            count = self._count(data)
            segment = Segment(self._term(), self._stored + 1, self._stored + count, int(time.time() * 1000))
            self.archive.put(f"log/{segment.name}", data)
            self._stored += count

    def _count(self, data: bytes) -> int:
        assert self._stored is not None
        return sum(1 for _ in records(memoryview(data), self._stored + 1))

    def _store_checkpoints(self) -> None:
        for found in series(self._directory).whole():
            if found.number not in self._checkpoints:
                self._store_checkpoint(Path(found.path), found.number)

    def _store_checkpoint(self, folder: Path, number: int) -> None:
        Checkpoint(folder)  # refuses one that is damaged
        below = f"checkpoints/checkpoint-{number:016d}"
        try:
            files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
            for path in files:
                self.archive.put(f"{below}/{path.name}", path)
            self.archive.put(f"{below}/{MANIFEST}", folder / MANIFEST)
        except FileNotFoundError:  # a newer checkpoint has replaced it
            return
        self._checkpoints.add(number)

    def _store_kept(self) -> None:
        here: dict[str, int] = {}
        for folder in self._directory.glob("kept-*"):
            number = Checkpoint(folder)["number"]
            if number not in self._checkpoints:
                self._store_checkpoint(folder, number)
            here[folder.name.removeprefix("kept-")] = number
        there = self.archive.kept()
        for name, number in here.items():
            if there.get(name) != number:
                self.archive.put(f"kept/{name}", str(number).encode())
        for name in there.keys() - here.keys():
            self.archive.delete(f"kept/{name}")

    def _drop_before(self, time_: datetime) -> None:
        """Remove checkpoints from before ``time_`` except the newest, and the log before the oldest that stays."""
        stored, kept = self.archive.checkpoints(), set(self.archive.kept().values())
        old = [one for one in stored if one.stored < time_][:-1]
        for one in old:
            if one.number in kept:
                continue
            below = f"checkpoints/checkpoint-{one.number:016d}"
            for name in sorted(self.archive.files(one.number), key=lambda name: name != MANIFEST):
                self.archive.delete(f"{below}/{name}")
            self._checkpoints.discard(one.number)
        oldest = next((one.number for one in stored if one not in old), 0)
        for segment in self.archive.segments():
            if segment.last <= oldest:
                self.archive.delete(f"log/{segment.name}")

    def status(self) -> dict[str, Any]:
        """Metrics by name, without their ``shoal_ps_`` prefix."""
        return {
            "archive_failures_total": self.failures,
            "archive_lag_records": self.lag_records,
            "archive_age_seconds": time.time() - self.stored_at if self.stored_at else -1,
        }
