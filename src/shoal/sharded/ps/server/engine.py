"""One shard with its write history and its log: how a server applies a batch of writes, and how it recovers."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from shoal.errors import ConfigError, DataError, UnsupportedError
from shoal.sharded.ps.outcomes import Outcomes
from shoal.sharded.ps.protocol import FLOAT16, NOW, RECORDS, Op, Reply, Request, Status, error_reply, parse_request
from shoal.sharded.ps.server import directory_lock
from shoal.sharded.ps.server.checkpoint import Checkpoints
from shoal.sharded.ps.server.kept import Kept
from shoal.sharded.ps.server.log import Log, log_files, replay
from shoal.sharded.ps.server.shard import Shard, status_of
from shoal.sharded.ps.server.snapshot import WHOLE_TABLE, ShardSnapshot
from shoal.sharded.ps.server.streams import Answer, Streams, Verdict
from shoal.stamps import Stamp, new_run
from shoal.table.clock import now
from shoal.table.table import HashTable

log = logging.getLogger("shoal.ps")

UNORDERED = bytes(16)
FULL_FOR_S = 10.0
"""How long a server counts as full after a write failed on a full disk. Workers keep retrying meanwhile."""
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk
ROOM_EVERY_S = 1.0  # between two checks for free space
IDEMPOTENT = (Op.INSERT, Op.CREATE, Op.EVICT)  # replaying one has no effect, so they need no number in a stream


class Durability(StrEnum):
    """What survives a crash of the server."""

    NONE = "none"
    """Nothing."""
    CHECKPOINT = "checkpoint"
    """Everything up to the last checkpoint."""
    LOG = "log"
    """Everything that was acknowledged: a write is on the disk before its reply is sent."""


class Engine:
    """Applies the writes of one shard, in order. Only one thread at a time may call `apply` and `begin_checkpoint`.

    A checkpoint begins between two writes; another thread can finish it while writes continue.
    """

    def __init__(
        self,
        shard: Shard,
        durability: Durability | str = Durability.NONE,
        directory: str | os.PathLike[str] | None = None,
        *,
        keep_checkpoints: int = 2,
    ) -> None:
        self.shard = shard
        self.streams = Streams()
        self.durability = Durability(durability)
        self.log: Log | None = None
        self.checkpoints: Checkpoints | None = None
        self.kept: Kept | None = None
        self.duplicates = 0
        self.recovered_records = 0
        self.logged: Callable[[], None] = lambda: None
        """Called when a write is in the log but not applied yet, so that the wait for the disk can begin."""
        self.base: Stamp | None = None
        """The stamp of the checkpoint that the server recovered from. Later log records belong to this run."""
        self.loaded: Callable[[], None] = lambda: None
        """Called by `recover` after the checkpoint is loaded and before the log is replayed."""
        self.read_only = ""
        """Why writes are refused until the disk has free space; empty while they are accepted."""
        self._full_at = -FULL_FOR_S
        self.marks_checkpoints = False
        """Whether a checkpoint that is kept by name is recorded in the log, so that followers keep it too."""
        self.retain: Callable[[], int | None] = lambda: None
        """The first log record that a follower still needs."""
        self._outcomes = Outcomes(shard)
        self._held: tuple[int, Request] | None = None
        """The last write read from the log. The next record says which rows it evicted, so it is applied after that."""
        self._follows = False
        self._room_at = 0.0
        self._lock = -1
        self._snapshot: ShardSnapshot | None = None
        self._offset = 0  # from the shard's version to the number of a checkpoint, if there is no log
        if directory is not None:
            self.checkpoints = Checkpoints(Path(directory), keep=keep_checkpoints)
            self.kept = Kept(Path(directory))
        elif self.durability != Durability.NONE:
            raise ConfigError(f"durability {self.durability.value!r} needs a directory to keep its files in")

    def lock(self) -> None:
        """Lock the directory until `close` or the end of the process; waits briefly for a server that is ending."""
        if self.checkpoints is not None:
            try:
                self._lock = directory_lock.lock(self.checkpoints.directory)
            except ConfigError as error:
                raise ConfigError(f"shard {self.shard.index}: {error}") from None

    def recover(self) -> None:
        """Load the newest intact checkpoint, replay the log after it, and open the log for appending."""
        if self.checkpoints is None:
            self.loaded()
            return
        newest, files = self.checkpoints.newest(), log_files(self.checkpoints.directory)
        loaded = self.checkpoints.load(self.shard, self.streams, log_from=files[0][0] if files else None)
        self._begin_run(loaded > 0)
        self.loaded()
        last = loaded
        for number, header, ids, values in replay(self.checkpoints.directory, last):
            self._redo(number, parse_request(header, ids, values))
            last = number
            self.recovered_records += 1
        if last < newest and (self.durability == Durability.LOG or not loaded):
            way_out = f", or continue from write {last} with --durability checkpoint" if loaded else ""
            raise DataError(
                f"shard {self.shard.index}: the checkpoint of write {newest} in {self.checkpoints.directory} is "
                f"damaged, and the log has no writes {last + 1} to {newest}; restore the folder from a copy{way_out}"
            )
        self.checkpoints.set_aside_after(loaded)
        self._offset = last - self.shard.version
        if self.durability == Durability.LOG:
            self._next_number = last + 1
            self.make_room()
        else:
            self._finish_held()
            self._outcomes.stop()

    def begin_run(self) -> None:
        """Begin a run: later updates count as newer than any that this shard's servers made before."""
        self._begin_run(True)

    def _begin_run(self, loaded: bool) -> None:
        """Set a run that is later than all earlier ones, including one that left no checkpoint."""
        assert self.checkpoints is not None
        shard, path = self.shard, self.checkpoints.directory / "run"
        former = shard.run if loaded else 0
        self.base = Stamp(former, shard.version) if loaded else None
        with contextlib.suppress(OSError, ValueError):
            former = max(former, int(path.read_text()))
        shard.run = new_run(former)
        draft = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk; the clock is sufficient
            draft.write_text(str(shard.run))
            draft.replace(path)

    def make_room(self) -> bool:
        """Start the log if a full disk prevented it; returns whether it exists. Without it the server is read-only."""
        if self.log is not None or self.durability != Durability.LOG:
            return True
        assert self.checkpoints is not None
        if time.monotonic() < self._room_at:
            return False
        directory = self.checkpoints.directory
        try:
            self.log = Log(directory, next_number=self._next_number)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._room_at = time.monotonic() + ROOM_EVERY_S
            if not self.read_only:
                self.read_only = (
                    f"shard {self.shard.index} is read-only: {directory} has no room for its log ({error.strerror}); "
                    "free some space, and writes resume automatically"
                )
                log.error("%s", self.read_only)
            return False
        if self.read_only:
            log.warning("shard %d: %s has room again; writes continue", self.shard.index, directory)
        self.read_only = ""
        return True

    @property
    def full(self) -> str:
        """Why writes are waiting for free disk space; empty if they are not."""
        if self.read_only or self.log is None or time.monotonic() > self._full_at + FULL_FOR_S:
            return self.read_only
        return f"shard {self.shard.index}: {self.log.directory} has no room for its log; free some space to resume"

    def take(
        self,
        records: Sequence[tuple[int, bytes, memoryview, memoryview]],
        begin_marked: Callable[[Request], None],
    ) -> int:
        """Log and apply records of the leader's log, in order; returns their number.

        It stops before a record that has to wait for a checkpoint that is being written. ``begin_marked`` begins a
        checkpoint that the leader kept by name.
        """
        assert self.log is not None
        for taken, (number, header, ids, values) in enumerate(records):
            if number != self.log.next_number:
                raise DataError(
                    f"shard {self.shard.index}: record {self.log.next_number} must come next, got record {number}"
                )
            request = parse_request(header, bytearray(ids), bytearray(values))  # aligned copies, not copied again
            if self._snapshot is not None and (request.op in WHOLE_TABLE or request.op == Op.CHECKPOINT):
                return taken
            self.log.append([header, ids, values])
            self._redo(number, request)
            if request.op == Op.CHECKPOINT:
                try:
                    begin_marked(request)
                except OSError as error:
                    log.error("shard %d: the checkpoint at record %d failed: %s", self.shard.index, number, error)
        self._follows = True
        return len(records)

    def mark_checkpoint(self, request: Request) -> None:
        """Record in the log that a checkpoint is kept here, so that followers keep it too."""
        if self.marks_checkpoints and self.log is not None:
            self._finish_held()
            self.log.append(request.frames())

    def _redo(self, number: int, request: Request) -> None:
        """Apply a record of the log. A write to tables with budgets is applied once the next record is read."""
        held, self._held = self._held, None
        if held is not None:
            self._redo_one(*held, request if request.op == Op.OUTCOME else None)
        if self._outcomes.budgets(request):
            self._held = number, replace(request, ids=bytes(request.ids), values=bytes(request.values))
        elif request.op not in (Op.CHECKPOINT, Op.OUTCOME):
            self._redo_one(number, request, None)

    def _finish_held(self) -> None:
        """Apply the last write of the log. No record of its evictions follows, so it chooses them itself."""
        held, self._held = self._held, None
        if held is None:
            return
        self._redo_one(*held, None)
        if self.log is not None:
            self._log_outcome(self._outcomes.budgets(held[1]))

    def _redo_one(self, number: int, request: Request, outcome: Request | None) -> None:
        asked, stay = request, None
        self._outcomes.begin(self._outcomes.budgets(request), follow=outcome is not None)
        if outcome is not None:
            request, stay = self._outcomes.prepare(request, outcome)
        kept: dict[str, HashTable] = {}
        if request.op == Op.RESTORE:
            try:
                kept = self._kept(request, number)
            except (ConfigError, DataError) as error:  # it existed when the record was written
                raise DataError(f"shard {self.shard.index}: log record {number} cannot be applied: {error}") from error
        answer, error = self._write(request, kept)
        if stay is not None and asked.op == Op.REINITIALIZE and asked.stream != UNORDERED and error is None:
            existed = torch.zeros(stay.numel(), dtype=torch.int32, device="cpu")
            existed[stay] = answer.payload[0]
            self.streams.remember(asked.stream, asked.seq, Answer(answer.status, [existed]), asked.acked)
        if isinstance(error, MemoryError | OSError):  # any other error also occurred the first time
            raise DataError(f"shard {self.shard.index}: log record {number} cannot be applied: {error}") from error

    def _write(self, request: Request, kept: Mapping[str, HashTable]) -> tuple[Answer, Exception | None]:
        """Apply a write and remember its outcome; returns the answer, and the error, if any. RESTORE uses ``kept``."""
        failed: Exception | None = None
        snapshot = self._snapshot  # another thread can finish it at any time
        try:
            if snapshot is not None:
                snapshot.before_write(request)
            answer = Answer(Status.OK, self._replace(kept) if request.op == Op.RESTORE else self.shard.write(request))
        except Exception as error:
            failed, answer = error, Answer(status_of(error), [str(error).encode()])
        if request.stream != UNORDERED:
            again = Answer(answer.status) if request.op == Op.INSERT else answer  # its rows can be read again
            self.streams.remember(request.stream, request.seq, again, request.acked)
        return answer, failed

    def apply(self, requests: Sequence[Request]) -> list[Reply]:
        """Check, log and apply writes in order; returns one reply for each. Send them after `Log.sync` has returned."""
        return [self._apply(request) for request in requests]

    def _apply(self, request: Request) -> Reply:
        if not request.op.writes:
            return error_reply(request.request, Status.BAD_REQUEST, f"{request.op.name} is not a write of this server")
        if request.stream == UNORDERED and request.op not in IDEMPOTENT:
            return error_reply(request.request, Status.BAD_REQUEST, f"{request.op.name} needs a stream and a number")
        if request.stream != UNORDERED and not request.seq:
            return error_reply(request.request, Status.BAD_REQUEST, "writes of a stream must be numbered from 1, got 0")
        if self.read_only:
            return error_reply(request.request, Status.UNAVAILABLE, self.read_only, self.shard.version)
        self._follows = False
        self._finish_held()
        verdict = self._judge(request)
        if verdict is Verdict.DONE:
            self.duplicates += 1
            return self._answer_again(request)
        if verdict is Verdict.GAP:
            return error_reply(
                request.request, Status.GAP, f"write {self.streams.last(request.stream) + 1} must come first"
            )
        if verdict is Verdict.OVERLAP:
            return error_reply(
                request.request, Status.BAD_REQUEST,
                f"shard {self.shard.index}: another trainer has learnt this partition up to record "
                f"{self.streams.last(request.stream)}, but this update is for records {request.acked + 1} to "
                f"{request.seq}; two trainers must not read the same partition. If restarted, this one resumes after "
                "the learnt records",
            )  # fmt: skip
        if self._snapshot is not None and request.op in WHOLE_TABLE:
            return error_reply(
                request.request,
                Status.UNAVAILABLE,
                f"shard {self.shard.index} is writing a checkpoint; {request.op.name.lower()} must wait for it",
            )
        if request.flags & NOW or (request.op == Op.REINITIALIZE and not request.req_time):
            request.req_time = now()  # before logging, so that a replay gives the same times
        kept: dict[str, HashTable] = {}
        try:
            self.shard.check(request)
            self.shard.check_time(request)
            if request.op == Op.RESTORE:
                kept = self._kept(request)
        except Exception as error:
            return error_reply(request.request, status_of(error), str(error), self.shard.version)
        if self.log is not None:
            try:
                self.log.append(request.frames())
            except OSError as error:
                if error.errno in FULL:
                    self._full_at = time.monotonic()
                return error_reply(
                    request.request,
                    Status.UNAVAILABLE,
                    f"shard {self.shard.index} cannot write its log in {self.log.directory} ({error}); nothing was "
                    "applied",
                )
            self.logged()
        tables = self._outcomes.budgets(request) if self.log is not None else []
        self._outcomes.begin(tables)
        answer, _ = self._write(request, kept)
        if tables and self.log is not None:
            self._log_outcome(tables)
        return Reply(answer.status, request.request, self.shard.version, answer.payload)

    def _log_outcome(self, tables: list[tuple[str, HashTable]]) -> None:
        assert self.log is not None
        try:
            self.log.append(self._outcomes.record(tables).frames())
        except OSError as error:  # the write stays applied; a replay chooses again which rows to evict
            log.error("shard %d: the evicted rows could not be written to the log: %s", self.shard.index, error)

    def _kept(self, request: Request, record: int | None = None) -> dict[str, HashTable]:
        """The tables that a RESTORE names, from the checkpoint that it names; see `Kept.table`."""
        if self.kept is None:
            raise ConfigError(f"shard {self.shard.index} keeps no checkpoints; start the server with a directory")
        name = bytes(request.values).decode("utf-8", "replace")
        return {table: self.kept.table(name, table, self.shard, record) for table in request.names}

    def _replace(self, kept: Mapping[str, HashTable]) -> list[Any]:
        for name, table in kept.items():
            self.shard.replace(name, table)
        return []

    def _judge(self, request: Request) -> Verdict:
        if request.stream == UNORDERED:
            return Verdict.NEW
        judge = self.streams.judge_records if request.flags & RECORDS else self.streams.judge
        return judge(request.stream, request.seq, request.acked)

    def _answer_again(self, request: Request) -> Reply:
        status, payload = self.streams.answer(request.stream, request.seq)
        if request.op == Op.INSERT and status == Status.OK:  # the current rows are an equally valid answer
            flags, counts, names = request.flags & FLOAT16, request.counts, request.names
            try:
                payload = self.shard.read(Request(Op.LOOKUP, flags=flags, counts=counts, names=names, ids=request.ids))
            except Exception as error:
                return error_reply(request.request, status_of(error), str(error), self.shard.version)
        return Reply(status, request.request, self.shard.version, payload)

    def learnt(self, request: Request) -> list[Any]:
        """The payload of the reply to LEARNT."""
        try:
            streams = [bytes.fromhex(text) for text in json.loads(bytes(request.values))]
        except (ValueError, TypeError) as error:
            raise DataError(f"LEARNT must have a list of hexadecimal ids as JSON ({error})") from None
        return [json.dumps([self.streams.last(stream) for stream in streams]).encode()]

    @property
    def in_checkpoint(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._snapshot is not None

    def begin_checkpoint(self) -> ShardSnapshot:
        """Take a snapshot of the shard after the last write. `finish_checkpoint` must follow, in any thread."""
        if self.checkpoints is None:
            raise UnsupportedError(f"shard {self.shard.index}: checkpoints need a directory; start the server with one")
        if self._snapshot is not None:
            raise ConfigError(f"shard {self.shard.index}: a checkpoint is already being written")
        if self.read_only:
            raise OSError(errno.ENOSPC, self.read_only)
        if self._held is not None and self._follows:
            raise ConfigError(f"shard {self.shard.index}: the leader's next record must come first; try again")
        self._finish_held()
        number = self.log.rotate() - 1 if self.log is not None else self.shard.version + self._offset
        self._snapshot = snapshot = ShardSnapshot(self.shard, self.streams, number)
        return snapshot

    def finish_checkpoint(self, snapshot: ShardSnapshot, keep_as: str = "", others: Sequence[str] = ()) -> str:
        """Write the checkpoint and drop the records that are no longer needed; returns its path. See `Kept.keep`."""
        assert self.checkpoints is not None
        assert self.kept is not None
        try:
            path = self.checkpoints.save(snapshot)
            if keep_as:
                self.kept.keep(path, keep_as, others, snapshot.number)
        finally:
            self._snapshot = None
        needed = self.checkpoints.log_needed_from()
        followed = self.retain()
        needed = needed if followed is None else min(needed, followed)
        self.kept.drop_before(needed)
        if self.log is not None:
            self.log.drop_before(needed)
        return str(path)

    def checkpoint(self) -> str:
        """Write a checkpoint; returns its path."""
        return self.finish_checkpoint(self.begin_checkpoint())

    def close(self) -> None:
        if self.log is not None:
            with contextlib.suppress(OSError):
                self.log.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
