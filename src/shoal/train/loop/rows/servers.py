"""The rows of a run that are on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from shoal.errors import ConfigError, DeadlineError, UnsupportedError
from shoal.stamps import Stamp
from shoal.table.config.optim import Sgd
from shoal.table.table import HashTable
from shoal.train.loop.progress import Progress
from shoal.train.loop.rows.exported import ExportedRows, Page
from shoal.train.loop.rows.rows import Rows
from shoal.train.loop.rows.writes import NamedWrites

_AT_ONCE = timedelta(seconds=5)


class ServerRows(Rows):
    """Rows on the servers ``train.ps``, which also keep, export and push them; the first rank asks them to."""

    remote = True

    @property
    def local(self) -> list[HashTable]:
        return []

    def _over_ranks(self) -> bool:
        return False

    def _make(self, device: str) -> dict[str, Any]:
        from shoal.sharded import PsClient, ps_table

        config = self._config
        addresses = _addresses(config.train.ps, config.train.ps_deadline_s)
        self.client = PsClient(addresses, deadline=timedelta(seconds=config.train.ps_deadline_s))
        self._noted_inexact = False
        try:
            self._contact()
            return {
                one.config.name: ps_table(
                    self.client, one.config.dim, filter=one.config.filter(), seed=config.train.seed,
                    **one.config.arguments(),
                )
                for one in self.plan
            }  # fmt: skip
        except BaseException:
            self.client.close()
            raise

    def _contact(self) -> None:
        """Log a note about servers that do not answer at once."""
        try:
            self.client.info(min(_AT_ONCE, self.client.deadline))
        except DeadlineError as error:
            if self.client.deadline > _AT_ONCE:
                self._note(f"{str(error).partition(';')[0]}; waiting up to {self.client.deadline}")

    @property
    def pushing_ranks(self) -> int:
        return 1

    def publications(self, model: str, registry: str, *, every_s: float, paced: bool) -> list[Any]:
        from shoal.serving.sync.servers_publish import ServersPublication

        try:
            return [
                ServersPublication(
                    self.client, model=model, registry=registry, targets=None, every_s=every_s, paced=paced
                )
            ]
        except UnsupportedError as error:
            self._note(f"{error}; until then only weights are pushed, not rows")
            return []

    def saved(self) -> list[HashTable]:
        return []

    def exported(self) -> list[ExportedRows]:
        def pages(name: str) -> Callable[[], Iterator[Page]]:
            return lambda: self.client.scan(name)

        return [
            ExportedRows(
                HashTable(one.config.dim, optimizer=Sgd(), initializer="zeros", name=one.config.name),
                pages(one.config.name),
            )
            for one in self.plan
        ]

    def stamps(self, stamp: Stamp) -> dict[str, Stamp]:
        self.client.flush()
        return {"trainer": stamp, **self.client.stamps()}

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def keep(self, name: str, checkpoints: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        def keep() -> str | None:
            if not self._ranks.first:
                return None
            others = [found["kept"] for one in checkpoints() if (found := _kept(one)) and found["kept"]]
            self.client.flush()
            try:
                self.client.checkpoint(keep_as=name, others=others)
            except UnsupportedError:  # a server without a directory
                return None
            return name

        self._ranks.together(self.client.flush)
        kept = self._ranks.together(keep)[0]
        if kept is None and not self._noted_inexact:
            self._noted_inexact = True
            self._note("the parameter servers have no --dir to keep rows in, so resuming this run will not be exact")
        return {"servers": {"addresses": list(self._config.train.ps), "kept": kept}}

    def can_restore(self, content: Mapping[str, Any]) -> bool:
        kept, train = _kept(content), self._config.train
        if kept is None or not train.ps_restore:
            return False
        return kept["kept"] is not None and len(kept["addresses"]) == len(train.ps)

    def restore(self, path: str, content: Mapping[str, Any]) -> None:
        if not self._config.train.ps_restore:
            return
        if self.can_restore(content):
            self._ranks.together(lambda: self._restore(content["servers"]["kept"]) if self._ranks.first else None)
        else:
            self._note(f"{path} has no rows for these parameter servers; they keep their current rows")

    def _restore(self, name: str) -> None:
        try:
            for table in self.tables:
                self.client.restore(table, name)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; start the servers with the --dir that they had, or continue with their current rows by "
                "--set train.ps_restore=false"
            ) from None
        self.client.checkpoint()  # so that recovery after a crash does not depend on the kept checkpoint

    # --- updates ------------------------------------------------------------------------------------------------------

    def name_writes(self, reader: dict[str, Any], at: Progress, *, resumed: bool) -> NamedWrites | None:
        if self._config.train.ps_restore:
            return None  # a restart resets the servers, so that no update is sent to them twice
        return NamedWrites(self.client, reader, at, self._ranks.rank, resumed, self._note)

    def records(self, records: Sequence[Any] | None) -> AbstractContextManager[Any]:
        return nullcontext() if records is None else self.client.records(*records)

    def close(self) -> None:
        self.client.close()


def _kept(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part about servers of a checkpoint's manifest: their addresses, and the name under which they keep rows."""
    found = content.get("servers")
    return found if isinstance(found, dict) else None


def _addresses(given: Sequence[str], deadline_s: float) -> Sequence[str]:
    """The addresses of servers; a single ``REGISTRY#GROUP`` such as ``zk://host:2181#ctr`` gives those of the group."""
    registry, _, group = given[0].partition("#")
    if len(given) > 1 or not registry.startswith(("zk://", "dir:")):
        return given
    from shoal.serving.cluster.discovery.leaders import group_addresses

    return group_addresses(registry, group or "ps", deadline_s=deadline_s)
