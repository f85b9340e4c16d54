"""`publish`: keeps serving replicas up to date while tables and a model are trained."""

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
    """The addresses of live replicas, queried before each round."""

    def __call__(self) -> list[str]: ...
    def close(self) -> None: ...


class Publication:
    """Sends rounds of pushes until `close`; returned by `publish`. A context manager. Any thread may call it.

    Args:
        publisher: sends the changes of a source.
        source: the tables and weights to publish.
        targets: the replicas to send to.
        every_s: seconds between rounds, which a background thread runs; None: the caller runs them with `round`.
        call: runs a round; it blocks writers if all rows must be of the same step.
        servers: parameter servers that send their own rows.
        net: the background thread's rounds do not run during its optimizers' steps; None: they run at any time.
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
        """Whether the thread runs rounds only when `nudge` is called."""
        self._one_round = threading.Lock()
        self._stop = threading.Event()
        self._now = threading.Event()
        self._due = Due()
        self._boundaries: StepBoundaries | None = None
        if net is not None:
            self._boundaries = StepBoundaries(net, self._on_step_end)
            source.between_steps = self._boundaries.between_steps
        self._thread: threading.Thread | None = None
        if every_s is not None:
            self._thread = threading.Thread(target=self._loop, name=f"publish-{source.name}", daemon=True)
            self._thread.start()

    def round(self) -> bool:
        """Copy and send the changes. Returns False if the last round is still being sent; a later one then has them.

        Called between two steps, it copies rows and weights of the same step. Another thread sends them.
        """
        with self._one_round:
            return self._call(self.publisher.round)

    def flush(self, timeout: timedelta | float = 60.0) -> None:
        """Block until every live replica has all changes made so far. Call it between two steps.

        Raises:
            DeadlineError: a replica did not get them in time; the message says which, and why.
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
        """Make the background thread send a round now."""
        self._now.set()

    def status(self) -> list[PublisherStatus]:
        """The state of each source and its replicas: this process first, then parameter servers."""
        return [self.publisher.status(), *(one for servers in self.servers for one in servers.status())]

    def exported(self, version: int, stamp: Stamp) -> None:
        """Report that an export with all changes up to ``stamp`` exists; see `Publisher.exported`."""
        self.publisher.exported(version, stamp)

    def close(self) -> None:
        """Stop the rounds. Unsent changes are dropped; call `flush` first to send them."""
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
            steps, made = self._boundaries, False
            while not made and not self._stop.is_set() and steps is not None and steps.stepping():
                made = self._due.ask(self._every_s)
            if not made and not self._stop.is_set():  # no optimizer has stepped for a while
                self._try_round()

    def _try_round(self) -> None:
        try:
            self.round()
        except ShoalError as error:
            if not self._stop.is_set():
                log.error("%s: a round of pushes failed: %s", self.source.name, error)
        except Exception:
            log.exception("%s: a round of pushes failed", self.source.name)

    def _on_step_end(self) -> None:
        """Run the round that is due, on the training thread."""
        if self._due.wanted and self._one_round.acquire(blocking=False):  # otherwise a flush is running
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
    """Send tables and weights to a model's replicas while they are trained. Works with every kind of table.

    Each round sends the rows written since the last one, removes erased, evicted and expired rows from the replicas,
    and updates the weights; a replica applies all of it at once::

        with shoal.serving.publish(model, registry="dir:///srv/registry", model="ctr"):
            train(model)

    Tables can be on the CPU, on a GPU or cached there. With an `AllToAllHashTable`, every rank calls this and sends its
    own rows; rank 0 also sends the weights. With tables on parameter servers, each server sends its own rows (`shoal ps
    --publish`, or started from here if the servers allow it), and this process sends the weights.

    Args:
        model_or_tables: an `nn.Module` with tables, a table, a list of tables, or a dict of tables by their names in
            the export.
        registry: the registry of `shoal serve --registry`: ``dir:///path``, a folder, ``zk://host:port``.
        targets: addresses of replicas, instead of a registry.
        model: the name under which replicas serve it.
        every: time between rounds, such as ``"1s"``. A round that is due is copied by the training thread at the end of
            a step of a torch optimizer that changes the net, so its rows and weights are of the same step; if no
            optimizer has stepped for five seconds, a background thread copies it. None: call `Publication.round`
            between two steps yourself.
        net: the module whose weights are in the export, under its parameter names; by default the model.
        name: this source's name, unique among the model's sources.
        run: the number of this run (`shoal.stamps.new_run`).
        base: the stamp of the checkpoint that the tables were loaded from. Without it, nothing that replicas have from
            earlier runs is trusted.
    """
    tables = tables_of(model_or_tables)
    clients = {id(client): client for table in tables.values() if (client := client_of(table)) is not None}
    if not tables and net is None:
        raise ConfigError("publish: model_or_tables must have at least one table or weight, got none")
    if (registry is None) == (targets is None):
        raise ConfigError("publish: exactly one of registry and targets must be given")
    if not model:
        raise ConfigError("publish: model must be the name under which replicas serve it, got none")
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
    """Start a publication of a source; see `publish` and `Publication`."""
    where: Targets = RegistryTargets(registry, model) if registry is not None else FixedTargets(targets or ())
    try:
        publisher = Publisher(source, where, model=model, security=security)
    except BaseException:
        where.close()
        source.close()
        raise
    return Publication(publisher, source, where, every_s=every_s, call=call, servers=servers, net=net)


def tables_of(model_or_tables: Any) -> dict[str, Any]:
    """Name -> table of a model."""
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
    """The part of a table in this process."""
    inner = getattr(table, "table", table)  # the local part of a table that is spread over all ranks
    if not isinstance(inner, HashTable):
        raise ConfigError(
            f"table {getattr(table, 'name', table)!r} of type {type(table).__name__} has no rows in this process"
        )
    return inner


def _part_of(tables: Mapping[str, Any]) -> tuple[int, int]:
    """(rank, number of ranks) over which the rows are spread."""
    parts = {(getattr(one, "rank", 0), getattr(one, "world_size", 1)) for one in tables.values()}
    if len(parts) > 1:
        raise ConfigError("publish: all tables must be spread over the same ranks; publish the others separately")
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
