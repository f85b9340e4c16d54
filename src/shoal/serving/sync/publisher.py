"""`Publisher`: sends the changes of one source to every live replica of a model, in rounds."""

import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.errors import ConfigError
from shoal.metrics import emit_counter, emit_timer
from shoal.serving.security import ClientSecurity
from shoal.serving.status import Code, StatusError
from shoal.serving.sync.catching_up import every_row, lacking, unknown_tables
from shoal.serving.sync.history import History, Ids, count, merge
from shoal.serving.sync.publication import Changes, Source
from shoal.serving.sync.replica import PublisherStatus, Replica, TargetStatus
from shoal.serving.sync.target import Package, Target, Wire
from shoal.stamps import Stamp

log = logging.getLogger(__name__)


HISTORY_IDS = 8 * 1024 * 1024
BACKLOG_ROWS = 200_000
"""Rows that one round reads for a replica that catches up. The trainer waits while they are read."""
CHECK_SECS = 5.0
"""After this time without a message a replica is asked whether it is still the same process."""
PATIENCE_SECS = 2.0
"""A round waits this long for slow replicas. Then the next round starts, and they join it when they are done."""
HELLO_SECS = 10.0
MAX_PARALLEL = 32
MANY_TIMES = 1024


@dataclass(slots=True)
class _Job:
    """One round for the thread: the rows that were read, and the replicas that get them."""

    stamp: Stamp
    packages: dict[str, tuple[Package, Ids, float]] = field(default_factory=dict)
    """target -> what it gets, the backlog that remains afterwards, and since when it lacks what it gets (Unix time)"""


class Publisher:
    """Sends the changes of a source to every live replica, from its own thread.

    Args:
        source: the source of the changes.
        targets: the addresses ``host:port`` of the live replicas, or a function that returns them; the thread calls it
            in each round.
        model: the name under which replicas serve the model.
        security: the credentials to present to replicas.
        history: number of ids kept for replicas that start late or were unreachable; beyond that, they are sent every
            row.
        timeout_s: for one round to one replica.
        connect: address -> the connection to that replica; by default `Target`.
        backlog_rows: rows that one round reads for a replica that catches up.
        forgot: called with the number of ids that the history dropped.
    """

    def __init__(
        self,
        source: Source,
        targets: Sequence[str] | Callable[[], Sequence[str]],
        *,
        model: str,
        security: ClientSecurity | None = None,
        history: int = HISTORY_IDS,
        timeout_s: float = 60.0,
        connect: Callable[[str], Wire] | None = None,
        backlog_rows: int = BACKLOG_ROWS,
        forgot: Callable[[int], None] = lambda ids: None,
    ) -> None:
        self._source, self._model, self._timeout = source, model, timeout_s
        fixed = None if callable(targets) else list(dict.fromkeys(targets))
        self._targets: Callable[[], Sequence[str]] = targets if callable(targets) else lambda: fixed or []
        self._connect = connect or (lambda address: Target(address, model, security))
        self._backlog_rows, self._forgot = backlog_rows, forgot
        self._capacity = history
        self._history: History | None = None
        self._run = 0
        self._weights: Mapping[str, torch.Tensor] | None = None
        self._times: list[tuple[Stamp, float]] = []  # of rounds with changes: since when they have been made
        self._exported: Stamp | None = None
        self._replicas: dict[str, Replica] = {}
        self._broken: dict[str, str] = {}  # address -> why there is no replica
        self._asked = False  # whether the targets have ever been asked for
        self._targets_error = ""
        self._rounds = 0
        self._stamp: Stamp | None = None
        self._changed = threading.Condition()
        self._job: _Job | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, f"shoal-publish-{source.name}")
        self._thread: threading.Thread | None = None

    # --- the caller's side --------------------------------------------------------------------------------------------

    def round(self) -> bool:
        """Copy the changes and pass them to the thread. Returns False if the thread is busy; changes then accumulate.

        A trainer calls it between two steps, so that rows and weights are of one step.
        """
        with self._changed:
            if self._closed:
                raise ConfigError(f"the publisher of {self._source.name} is closed")
            if self._job is not None:
                return False
        job = self._plan(self._note())
        with self._changed:
            self._job = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"shoal-publish-{self._source.name}")
                self._thread.daemon = True
                self._thread.start()
            self._changed.notify_all()
        return True

    def run(self) -> None:
        """Run a complete round on the calling thread: get the targets, copy the changes and send them to all.

        Returns when all have answered; `status` says what they have. Do not mix it with `round`.
        """
        changes = self._note()
        self._refresh()
        for address, replica in self._replicas.items():
            if replica.session is None or replica.greeted != self._run:
                self._serve(address, replica, _Job(changes.stamp))
        job = self._plan(changes)
        works = [self._pool.submit(self._serve, address, self._replicas[address], job) for address in job.packages]
        for work in works:
            work.result()
        self._rounds += bool(works)

    def forget_targets(self) -> None:
        """Drop all replicas; any that appear later are new. Changes stay at the source."""
        self._replace({}, {})

    def _note(self) -> Changes:
        """Take the source's changes and record them."""
        changes = self._source.take()
        first = self._history is None
        if self._history is None or changes.stamp.run != self._run:  # the first round, or the source was rolled back
            self._run = changes.stamp.run
            self._history = History(Stamp(self._run, -1), self._capacity)
            self._times = []
        if changes.lost:
            if first:
                log.info("%s: sending replicas every row, then the changes", self._source.name)
            else:
                log.warning("%s: more changed than is tracked; sending every row again", self._source.name)
            self._history = History(changes.stamp, self._capacity)
        self._stamp = changes.stamp
        if changes.since:
            self._times.append((changes.stamp, changes.since))
            if len(self._times) > MANY_TIMES:
                del self._times[1]  # the oldest one stays: the reported age may be too high, never too low
        self._weights = changes.weights if changes.weights is not None else self._weights
        fresh = {table: ids.numpy() for table, ids in changes.ids.items() if len(ids)}
        if dropped := self._history.add(changes.stamp, fresh):
            self._forgot(dropped)
            log.warning(
                "%s: more than %d ids wait for replicas; those that lack older ones are asked what they have",
                self._source.name, self._capacity,
            )  # fmt: skip
        return changes

    def _plan(self, changes: Changes) -> _Job:
        """Plan what each replica gets, and read the rows."""
        assert self._history is not None
        job = _Job(changes.stamp)
        wanted: dict[str, Ids] = {}
        leftovers: dict[str, Ids] = {}
        for address, replica in self._replicas.items():
            if replica.busy or replica.session is None or replica.greeted != self._run:
                continue
            lacks = self._history.since(replica.since)
            if lacks is None:
                replica.session = None  # ask it again what it has
                continue
            now, left = _first(replica.backlog, self._backlog_rows)
            wanted[address] = merge(lacks, now) if now else lacks
            if wanted[address] or changes.weights is not None or replica.complete is None:
                leftovers[address] = left
            else:
                replica.since = replica.complete = changes.stamp  # nothing changed for it
        self._read(job, {address: wanted[address] for address in leftovers}, leftovers)
        self._forget()
        return job

    def _lacks_since(self, replica: Replica) -> float:
        """Unix time of the oldest change that a replica lacks; 0 if unknown."""
        first = next((since for stamp, since in self._times if stamp > replica.since), 0.0)
        return min(filter(None, (first, replica.backlog_since)), default=0.0)

    def _read(self, job: _Job, wanted: dict[str, Ids], leftovers: dict[str, Ids]) -> None:
        """Read each wanted row once; replicas that want the same rows share a package."""
        built: list[tuple[Ids, Package]] = []
        every = merge(*wanted.values())
        rows = {table: self._source.read(table, torch.from_numpy(ids)) for table, ids in every.items() if len(ids)}
        read_at = time.time()  # after reading: an export that begins later has these rows or newer ones
        for address, ids in wanted.items():
            package = next((package for same, package in built if _equal(same, ids)), None)
            if package is None:
                package = Package(
                    self._model, self._source.name, self._source.tables, job.stamp, uuid.uuid4().hex[:16], {}, {},
                    self._weights, read_at,
                )  # fmt: skip
                for table, mine in ids.items():
                    if not len(mine):
                        continue
                    values, present = (each.numpy() for each in rows[table])
                    if len(mine) != len(every[table]):
                        at = np.searchsorted(every[table], mine)
                        values, present = values[at], present[at]
                    if present.all():
                        package.rows[table] = (mine, values)
                    else:
                        package.rows[table], package.gone[table] = (mine[present], values[present]), mine[~present]
                built.append((ids, package))
            job.packages[address] = (package, leftovers[address], self._lacks_since(self._replicas[address]))

    def _forget(self) -> None:
        """Drop ids that are on all replicas and in all exports that a replica may start from."""
        assert self._history is not None
        have = [replica.since for replica in self._replicas.values()]
        if have:
            self._times = [(stamp, since) for stamp, since in self._times if stamp > min(have)]
            if self._exported is not None:
                self._history.forget(min(self._exported, *have))

    def flush(self, timeout_s: float = 60.0) -> None:
        """Send rounds until every live replica has all changes made so far. Call it between two steps.

        Raises:
            TimeoutError: names the replicas that lack changes, and why.
        """
        end = time.monotonic() + timeout_s
        first: Stamp | None = None
        while True:
            with self._changed:
                idle = self._changed.wait_for(lambda: self._job is None, max(0.0, end - time.monotonic()))
                behind = self._behind(first) if first is not None else []
                if idle and first is not None and self._asked and not behind and not self._targets_error:
                    return
            if time.monotonic() >= end:
                said = "; ".join(f"{address}: {error}" for address, error in behind) or self._targets_error
                said = said or "a round is on its way"
                raise TimeoutError(
                    f"{self._source.name}: after {timeout_s:g} s not every replica has all rows ({said})"
                )
            if first is not None:
                time.sleep(min(0.02, max(0.0, end - time.monotonic())))
            if self.round() and first is None:
                first = self._stamp

    def _behind(self, stamp: Stamp) -> list[tuple[str, str]]:
        return list(self._broken.items()) + [
            (address, replica.error or f"{count(replica.backlog)} rows are left")
            for address, replica in self._replicas.items()
            if replica.session is None or replica.complete is None or replica.complete < stamp
        ]

    def exported(self, version: int, stamp: Stamp) -> None:
        """Report an export with all changes up to ``stamp``; replicas that start later start from it."""
        log.info("%s: replicas start with version %d from now on", self._source.name, version)
        self.forget(stamp)

    def forget(self, stamp: Stamp) -> None:
        """Report that no replica will ask for changes up to ``stamp``; those that current replicas lack are kept."""
        with self._changed:
            self._exported = stamp

    @property
    def floor(self) -> Stamp:
        """All changes after this stamp are known."""
        return Stamp(self._run, -1) if self._history is None else self._history.floor

    def status(self) -> PublisherStatus:
        """The state of the publisher and of each replica."""
        with self._changed:
            waiting = {address: self._waiting(replica) for address, replica in self._replicas.items()}
            targets = [
                TargetStatus(
                    address,
                    replica.session.version if replica.session is not None else None,
                    replica.complete, waiting[address], replica.freshness, replica.error,
                    replica.session is not None and replica.session.plain,
                )
                for address, replica in sorted(self._replicas.items())
            ]  # fmt: skip
            targets += [TargetStatus(address, error=error) for address, error in sorted(self._broken.items())]
            kept = len(self._history) if self._history is not None else 0
            most = max(waiting.values()) if waiting else kept
            return PublisherStatus(self._source.name, self._rounds, self._stamp, most, targets, self._asked)

    def _waiting(self, replica: Replica) -> int:
        if self._history is None:
            return 0
        lacks = self._history.since(replica.since) if replica.session is not None else None
        return count(replica.backlog) + (len(self._history) if lacks is None else count(lacks))

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the round that it is sending."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._thread is None or not self._thread.is_alive():
            for replica in self._replicas.values():
                replica.target.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                job = self._job
                if job is None:
                    return
            try:
                self._send(job)
            except Exception:
                log.exception("%s: a round failed", self._source.name)
            with self._changed:
                self._job = None
                self._changed.notify_all()

    def _send(self, job: _Job) -> None:
        self._refresh()
        replicas = [(address, replica) for address, replica in self._replicas.items() if not replica.busy]
        for address, replica in replicas:
            replica.work = self._pool.submit(self._serve, address, replica, job)
        works = [replica.work for _, replica in replicas if replica.work is not None]
        wait(works, PATIENCE_SECS)  # the others are not delayed
        self._rounds += any(address in job.packages for address, _ in replicas)

    def _refresh(self) -> None:
        """Look up the live replicas. If that fails, keep the last known ones."""
        try:
            wanted = list(dict.fromkeys(self._targets()))
        except Exception as error:
            self._targets_error = f"cannot look up the targets: {error}"
            log.exception("%s: cannot look up the targets; sending rounds to the last known ones", self._source.name)
            return
        replicas = {each: self._replicas[each] for each in wanted if each in self._replicas}
        broken: dict[str, str] = {}
        for address in wanted:
            if address not in replicas:
                try:
                    replicas[address] = Replica(self._connect(address))
                except Exception as error:
                    broken[address] = f"it cannot be used: {error}"
                    if self._broken.get(address) != broken[address]:
                        log.warning("%s: %s cannot be used: %s", self._source.name, address, error)
        self._replace(replicas, broken)

    def _replace(self, replicas: dict[str, Replica], broken: dict[str, str]) -> None:
        gone = [replica for address, replica in self._replicas.items() if address not in replicas]
        with self._changed:
            self._replicas, self._broken, self._asked, self._targets_error = replicas, broken, True, ""
        for replica in gone:
            replica.target.close()

    def _serve(self, address: str, replica: Replica, job: _Job) -> None:
        """Send one replica its part of a round; if its state is unknown, ask for that first."""
        try:
            if replica.greeted != job.stamp.run:
                replica.session = None  # the source was rolled back
            if replica.session is not None and address in job.packages:
                self._push(replica, job, *job.packages[address])
            elif replica.session is None or time.monotonic() - replica.checked > CHECK_SECS:
                self._greet(replica, job.stamp)
            replica.error = ""
        except StatusError as error:
            if replica.tell(error.message, time.monotonic()):
                log.warning("%s: %s: %s", self._source.name, address, error)
            replica.error, replica.session = error.message or "the call failed", None
            if error.code == Code.FAILED_PRECONDITION and address in job.packages:  # it says what it has now
                with contextlib.suppress(StatusError):
                    before = replica.since
                    self._greet(replica, job.stamp)
                    if not replica.backlog and replica.since >= before:  # what it lacks is in this package
                        self._push(replica, job, *job.packages[address])
                        replica.error = ""
        except Exception as error:
            log.exception("%s: %s", self._source.name, address)
            replica.error, replica.session = repr(error), None
        if replica.error:
            emit_counter("parameter_sync_failures", 1, self._tags(replica))

    def _push(self, replica: Replica, job: _Job, package: Package, left: Ids, touched_at: float) -> None:
        session = replica.session
        assert session is not None
        try:
            package.blob(session)
        except StatusError as error:
            if replica.digest != "unfit":
                log.error("%s: %s: %s", self._source.name, replica.target.address, error)
            replica.digest = "unfit"
            package = dataclasses.replace(package, weights=None)
        sent = replica.target.send(package, session, replica.digest, not left, touched_at, self._timeout)
        replica.digest, replica.backlog = sent.digest, merge(sent.left, left) if sent.left else left
        replica.since = job.stamp if sent.since is None else sent.since
        replica.backlog_since = touched_at if replica.backlog else 0.0
        replica.checked = time.monotonic()
        if not replica.backlog and replica.since == job.stamp:
            replica.complete = job.stamp
            if touched_at:
                replica.freshness = time.time() - touched_at
                emit_timer("parameter_sync_freshness_seconds", replica.freshness, self._tags(replica))

    def _tags(self, replica: Replica) -> str:
        return f"source={self._source.name}|model_name={self._model}|target={replica.target.address}"

    def _greet(self, replica: Replica, stamp: Stamp) -> None:
        """Ask a replica what it has, and plan what it gets from the next round on."""
        source, former = self._source, replica.session
        session = replica.target.hello(source.name, self._run, source.base, False, HELLO_SECS)
        replica.checked, replica.greeted = time.monotonic(), self._run
        if former is not None and (former.version, former.replica) == (session.version, session.replica):
            return
        if unknown := unknown_tables(source, session):
            log.warning("%s: %s has no tables %s of these dims: their rows are not sent",
                        source.name, replica.target.address, unknown)  # fmt: skip
        replica.complete, replica.digest, replica.backlog_since = None, "", 0.0
        assert self._history is not None
        lacks = lacking(source, self._history, self._run, session, stamp)
        if lacks is None:
            listed = replica.target.hello(source.name, self._run, source.base, True, self._timeout).listed
            session = dataclasses.replace(session, listed={})
            lacks = stamp, every_row(source, session, listed)
            log.info("%s: the changes missing at %s are unknown; sending it all %d rows",
                     source.name, replica.target.address, count(lacks[1]))  # fmt: skip
        replica.since, replica.backlog = lacks
        replica.session = session


def _first(ids: Ids, most: int) -> tuple[Ids, Ids]:
    """(at most this many of the ids, the rest)."""
    now: Ids = {}
    left: Ids = {}
    for table, each in ids.items():
        room = most - count(now)
        if room and len(each):
            now[table] = each[:room]
        if len(each) > room:
            left[table] = each[room:]
    return now, left


def _equal(one: Ids, two: Ids) -> bool:
    return one is two or (one.keys() == two.keys() and all(np.array_equal(one[table], two[table]) for table in one))
