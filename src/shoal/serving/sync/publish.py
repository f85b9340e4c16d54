"""`publish`: keeps serving replicas up to date with tables and a model that are being trained."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import nn

from shoal.errors import ConfigError, DeadlineError, ShoalError
from shoal.nn.module import TableModule
from shoal.serving.security import ClientSecurity
from shoal.serving.sync.boundaries import Due, StepBoundaries
from shoal.serving.sync.publisher import Publisher, PublisherStatus
from shoal.serving.sync.replica_targets import FixedTargets, RegistryTargets
from shoal.serving.sync.servers_publish import ServersPublication
from shoal.serving.sync.tables_source import TablesSource, dense_weights
from shoal.sharded.ps.client.client import PsClient
from shoal.stamps import Stamp, new_run
from shoal.table.multi import MultiHashTable
from shoal.table.table import HashTable

log = logging.getLogger(__name__)


class Targets(Protocol):
    """The addresses of live replicas, asked for before each round."""

    def __call__(self) -> list[str]: ...
    def close(self) -> None: ...


class Publication:
    """What `publish` returns: sends rounds of pushes until `close`. A context manager. Any thread may call it.

    Args:
        publisher: sends the changes of a source.
        source: what is published.
        targets: where to.
        every_s: seconds between rounds, which a thread makes; None: `round` makes them.
        call: how a round is called; in it nobody writes, where rows of one step are wanted.
        servers: parameter servers that send their own rows beside it.
        net: whose optimizers' steps the rounds of the thread keep out of; None: of none.
    """

    def __init__(
        self,
        publisher: Publisher,
        source: TablesSource,
        targets: Targets,
        *,
        every_s: float | None,
        call: Callable[[Callable[[], Any]], Any] = lambda round_: round_(),
        servers: Sequence[ServersPublication] = (),
        net: nn.Module | None = None,
    ) -> None:
        self.servers = list(servers)
        self.publisher, self.source = publisher, source
        self._targets, self._call, self._every_s = targets, call, every_s
        self.paced = False
        """Whether the thread makes rounds only when it is nudged."""
        self._one_round = threading.Lock()
        self._stop = threading.Event()
        self._now = threading.Event()
        self._due = Due()
        self._boundaries: StepBoundaries | None = None
        if net is not None:
            self._boundaries = StepBoundaries(net, self._at_the_end_of_a_step)
            source.whole = self._boundaries.whole
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(target=self._loop, name=f"publish-{source.name}", daemon=True)
            self._thread.start()

    def round(self) -> bool:
        """Copies and sends what changed. Returns False if the last round is still being sent; the next one has it all.

        Between two steps it copies rows and weights of one step. Sending is done by another thread.
        """
        with self._one_round:
            return self._call(self.publisher.round)

    def flush(self, timeout: timedelta | float = 60.0) -> None:
        """Blocks until every live replica has everything up to now. Call it between two steps.

        Raises:
            DeadlineError: one does not have it in time; the message says which, and why.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        end = time.monotonic() + seconds
        for servers in self.servers:
            servers.flush(max(0.1, end - time.monotonic()))
        try:
            with self._one_round:
                self.publisher.flush(max(0.1, end - time.monotonic()))
        except TimeoutError as error:
            raise DeadlineError(str(error)) from error

    def nudge(self) -> None:
        """Makes the thread send a round at once."""
        self._now.set()

    def status(self) -> list[PublisherStatus]:
        """The state of each source and its replicas: this process first, then parameter servers."""
        return [self.publisher.status(), *(one for servers in self.servers for one in servers.status())]

    def exported(self, version: int, stamp: Stamp) -> None:
        """Says that an export with everything up to ``stamp`` exists; see `Publisher.exported`."""
        self.publisher.exported(version, stamp)

    def close(self) -> None:
        """Ends the rounds. Changes that were not sent yet are not sent; call `flush` first to send them."""
        self._stop.set()
        self._now.set()
        self._due.made.set()
        if self._boundaries is not None:
            self._boundaries.close()
        if self._thread is not None:
            self._thread.join(30)
        self.publisher.close()
        self.source.close()
        self._targets.close()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _loop(self) -> None:
        assert self._every_s is not None
        next_at = time.monotonic() + self._every_s
        while not self._stop.is_set():
            nudged = self._now.wait(self._every_s if self.paced else max(0.0, next_at - time.monotonic()))
            self._now.clear()
            if self._stop.is_set():
                return
            if self.paced and not nudged:
                continue
            next_at = max(next_at + self._every_s, time.monotonic())
            steps = self._boundaries
            made = steps is not None and steps.stepping() and self._due.ask(self._every_s)
            if not made and not self._stop.is_set():  # nobody steps now
                self._try_round()

    def _try_round(self) -> None:
        try:
            self.round()
        except ShoalError as error:
            if not self._stop.is_set():
                log.error("%s: a round of pushes failed: %s", self.source.name, error)
        except Exception:
            log.exception("%s: a round of pushes failed", self.source.name)

    def _at_the_end_of_a_step(self) -> None:
        """Makes the round that is due, on the thread that trains."""
        if self._due.wanted and self._one_round.acquire(blocking=False):  # else somebody flushes
            self._one_round.release()
            self._due.wanted = False
            self._try_round()
            self._due.made.set()


def publish(
    model_or_tables: Any,
    *,
    registry: str | None = None,
    targets: Sequence[str] | None = None,
    model: str | None = None,
    every: str | float | timedelta | None = "1s",
    net: nn.Module | None = None,
    name: str = "trainer",
    run: int | None = None,
    base: Stamp | None = None,
    security: ClientSecurity | None = None,
) -> Publication:
    """Sends tables and weights to the replicas of a model while they are trained. Works with every kind of table.

    Rows that were written since the last round are sent, those that were erased, evicted or have expired leave the
    replicas, and weights go with the rows of the same round, all at once::

        with shoal.serving.publish(model, registry="dir:///srv/registry", model="ctr"):
            train(model)

    Tables on the CPU, on a GPU or cached there are followed as they are. Of an `AllToAllHashTable` each rank calls this
    and sends the rows that it has, rank 0 the weights, too. Of tables on parameter servers each server sends its own
    rows (`shoal ps --publish`, or from here where the servers allow it), and this process the weights.

    Args:
        model_or_tables: an `nn.Module` with tables, a table, a list of tables, or tables by the names that the export
            has.
        registry: where `shoal serve --registry` enters its replicas: ``dir:///path``, a folder, ``zk://host:port``.
        targets: addresses of replicas, in place of a registry.
        model: the name that the replicas serve it by.
        every: time between rounds, such as ``"1s"``; None: rounds are made by `Publication.round`, which copies rows
            and weights of one step where it is called between two steps. A round that is due is copied by the training
            thread, at the end of the step of a torch optimizer that changes the net, so that it has rows and weights of
            one step, too. Where no optimizer steps for that long, a thread copies it.
        net: whose weights the export has, by its names; by default the model.
        name: of this source among those of the model.
        run: the number of this run (`shoal.stamps.new_run`).
        base: the stamp of the checkpoint that the tables were loaded from. Without it replicas take nothing that they
            have from earlier runs for granted.
    """
    tables = tables_of(model_or_tables)
    clients = {id(client): client for table in tables.values() if (client := client_of(table)) is not None}
    if not tables and net is None:
        raise ConfigError("publish: model_or_tables must have at least one table or weight, got none")
    if (registry is None) == (targets is None):
        raise ConfigError("publish: exactly one of registry and targets must be given")
    if not model:
        raise ConfigError("publish: model must be the name that the replicas serve, got none")
    every_s = seconds_of(every, "publish: every")
    dense = net if net is not None else model_or_tables if isinstance(model_or_tables, nn.Module) else None
    here = {key: table for key, table in tables.items() if client_of(table) is None}
    part = _part_of(here)
    number = new_run() if run is None else run
    rounds = iter(range(1, 1 << 62))
    source = TablesSource(
        {key: _local(table) for key, table in here.items()},
        lambda: Stamp(number, next(rounds)),
        base=base,
        name=name if part == (0, 1) else f"{name}_{part[0]}",
        weights=None if dense is None or part[0] else lambda: dense_weights(dense),
        part=part,
    )
    servers = [
        ServersPublication(client, model=model, registry=registry, targets=targets, every_s=every_s or 1.0)
        for client in clients.values()
    ]
    return publish_source(
        source, registry=registry, targets=targets, model=model, every_s=every_s, security=security, servers=servers,
        net=dense if part[0] == 0 else None,
    )  # fmt: skip


def publish_source(
    source: TablesSource,
    *,
    model: str,
    registry: str | None = None,
    targets: Sequence[str] | None = None,
    every_s: float | None = None,
    security: ClientSecurity | None = None,
    call: Callable[[Callable[[], Any]], Any] = lambda round_: round_(),
    servers: Sequence[ServersPublication] = (),
    net: nn.Module | None = None,
) -> Publication:
    """A publication of a source; see `publish` and `Publication`."""
    where: Targets = RegistryTargets(registry, model) if registry is not None else FixedTargets(targets or ())
    try:
        publisher = Publisher(source, where, model=model, security=security)
    except BaseException:
        where.close()
        source.close()
        raise
    return Publication(publisher, source, where, every_s=every_s, call=call, servers=servers, net=net)


def tables_of(model_or_tables: Any) -> dict[str, Any]:
    """The tables of a model, by name."""
    if isinstance(model_or_tables, nn.Module):
        found: dict[str, Any] = {}
        for module in model_or_tables.modules():
            if isinstance(module, TableModule):
                found |= {keeper.name: keeper.table for keeper in module.keepers()}
        return found
    if isinstance(model_or_tables, MultiHashTable):
        return dict(model_or_tables.tables)
    if isinstance(model_or_tables, Mapping):
        return dict(model_or_tables)
    if isinstance(model_or_tables, Sequence):
        return {table.name: table for table in model_or_tables}
    if hasattr(model_or_tables, "dim_size") or hasattr(model_or_tables, "name"):
        return {model_or_tables.name: model_or_tables}
    raise ConfigError(
        f"publish: model_or_tables must be a model, tables or a mapping of tables, got {type(model_or_tables).__name__}"
    )


def client_of(table: Any) -> PsClient | None:
    """The client of the servers that hold a table's rows; None if this process holds them."""
    parts = getattr(table, "tables", None)
    first = parts[0] if isinstance(parts, list) and parts else table
    client = getattr(first, "client", None)
    return client if isinstance(client, PsClient) else None


def _local(table: Any) -> HashTable:
    """The rows of this process."""
    inner = getattr(table, "table", table)  # of a table over all ranks
    if not isinstance(inner, HashTable):
        raise ConfigError(
            f"table {getattr(table, 'name', table)!r} of type {type(table).__name__} has no rows in this process"
        )
    return inner


def _part_of(tables: Mapping[str, Any]) -> tuple[int, int]:
    """(rank, ranks) that the rows are spread over."""
    parts = {(getattr(one, "rank", 0), getattr(one, "world_size", 1)) for one in tables.values()}
    if len(parts) > 1:
        raise ConfigError("publish: all tables must be spread over the same ranks; publish the others by themselves")
    return next(iter(parts), (0, 1))


def seconds_of(every: str | float | timedelta | None, what: str) -> float | None:
    """``"1s"``, ``"200ms"``, ``"1m"``, seconds, or a ``timedelta``, as seconds above 0."""
    if every is None:
        return None
    units = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    if isinstance(every, timedelta):
        seconds = every.total_seconds()
    elif isinstance(every, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)\s*", every)
        seconds = float(match[1]) * units[match[2]] if match else 0.0
    else:
        seconds = float(every)
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{what} must be a time above 0 such as '1s' or '200ms', got {every!r}")
    return seconds
