"""``[serve] push_every_s``: push fresh rows and weights to the replicas between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from shoal.comm.ranks.ranks import Ranks
from shoal.errors import ConfigError, ShoalError
from shoal.stamps import Stamp
from shoal.train.loop.config import Config
from shoal.train.loop.rows.rows import Rows, source_name

if TYPE_CHECKING:
    from shoal.serving.sync.publish import Publication
    from shoal.train.loop.progress import Progress

LAST_S = 60.0  # how long to wait at the end until replicas have the last changes
AGAIN_S = 0.05  # how long to wait before trying again when the previous round is still being sent


def model_name(config: Config) -> str:
    """The name under which replicas serve the model."""
    name = config.serve.name
    if name is None:
        raise ConfigError(
            '[serve] model must be set with push_every_s, to the name under which replicas serve it: model = "NAME"'
        )
    return name


class Publishing:
    """The pushes of a run: each rank sends its own rows, the first rank also the weights.

    Parameter servers push their own rows, in separate rounds; the first rank starts that. All ranks must call its
    methods together.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        rows: Rows,
        model: nn.Module,
        at: Callable[[], Progress],
        note: Callable[[str], None],
    ) -> None:
        self._every_s = config.serve.push_every_s
        self._guarded = config.serve.guard.active
        self._ranks, self._note, self._at = ranks, note, at
        self._next_at = time.monotonic() + self._every_s
        self._publication: Publication | None = None
        if not self._every_s:
            return
        name, registry = model_name(config), config.serve.registry
        assert registry is not None
        if ranks.rank < rows.pushing_ranks:
            self._publication = self._begin(rows, model, at, name, registry)

    def _begin(self, rows: Rows, model: nn.Module, at: Callable[[], Progress], name: str, registry: str) -> Publication:
        from shoal.serving.sync.publish import publish_source
        from shoal.serving.sync.tables_source import TablesSource, dense_weights

        world = rows.pushing_ranks
        servers = rows.publications(name, registry, every_s=self._every_s, paced=self._guarded)
        source = TablesSource(
            dict(zip(rows.tables, rows.published(), strict=False)),
            lambda: at().stamp,
            base=at().base,
            name=source_name(self._ranks.rank, world),
            weights=(lambda: dense_weights(model)) if self._ranks.first else None,
            part=(self._ranks.rank, world),
        )
        return publish_source(source, model=name, registry=registry, servers=servers)

    def wants(self, pause: bool = False) -> bool:
        """Whether a round is due, by the first rank's clock.

        It is always due before a ``pause`` in training (a checkpoint, an export, an evaluation), so that the push runs
        meanwhile.
        """
        return bool(self._every_s) and self._ranks.first and (pause or time.monotonic() >= self._next_at)

    def round(self) -> None:
        """Copy the changes up to this step and start sending them."""
        if self._publication is not None and self._guarded:  # otherwise servers start rounds by their own clocks
            for servers in self._publication.servers:
                servers.nudge()
        begun = self._publication is None or self._publication.round()
        now = time.monotonic()
        self._next_at = max(min(self._next_at, now) + self._every_s, now) if begun else now + AGAIN_S

    def changed_rows(self) -> float | None:
        """The share of rows, on this rank or the servers, that changed since the last round; None without rows."""
        if self._publication is None:
            return None
        counts = [self._publication.source.pending(), *(one.pending() for one in self._publication.servers)]
        changed, rows = (sum(part) for part in zip(*counts, strict=True))
        return changed / rows if rows else None

    def exported(self, version: int, stamp: Stamp) -> None:
        """Report an export that contains everything up to ``stamp``; replicas that start later load it first."""
        if self._publication is not None:
            self._publication.exported(version, stamp)

    def finish(self) -> None:
        """Wait until every live replica has the last changes; log a note if one does not get them in time."""
        self._at().other_changes += 1  # for changes outside of steps since the last round
        if self._publication is not None:
            try:
                self._publication.flush(LAST_S)
            except ShoalError as error:
                self._note(f"some replicas do not have the last changes: {error}")

    def status(self) -> list[Any]:
        """The state of each source and its replicas."""
        return [] if self._publication is None else self._publication.status()

    def close(self) -> None:
        if self._publication is not None:
            self._publication.close()
            self._publication = None
