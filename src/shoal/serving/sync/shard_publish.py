"""`ShardPublishing`: how a parameter server sends its own rows to replicas."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, DataError
from shoal.serving.sync.tables_source import TablesSource
from shoal.sharded.ps.server.engine import Engine
from shoal.sharded.ps.server.server import ParameterServer

if TYPE_CHECKING:
    from shoal.serving.security import ClientSecurity
    from shoal.serving.sync.publish import Publication

FIELDS = ("registry", "targets", "model", "every_s", "paced")
KEPT = "publish.json"


class ShardPublishing:
    """What one server publishes: what it was started with, or what a worker asks for first.

    Rounds are made between two writes, so that a round has the rows of one moment, under the number of the last write.
    What a worker asked for is kept in the server's directory: one that comes back after a crash goes on with it.

    Args:
        engine: of the server; before it recovers.
        settings: ``registry`` or ``targets``, ``model`` and ``every_s``; None: until a worker says so, nothing is sent.
    """

    def __init__(
        self, engine: Engine, settings: dict[str, Any] | None = None, security: ClientSecurity | None = None
    ) -> None:
        self._engine, self._security = engine, security
        kept = None if engine.checkpoints is None else engine.checkpoints.directory / KEPT
        self._kept = kept
        if settings is None and kept is not None and kept.exists():
            with contextlib.suppress(OSError, ValueError):  # half written: the worker will ask again
                settings = json.loads(kept.read_text())
        self.settings = None if settings is None else _checked(settings)
        self.server: ParameterServer | None = None
        """Set before the server starts."""
        self.publication: Publication | None = None
        self._source: TablesSource | None = None
        self._lock = threading.Lock()
        if self.settings is not None:
            engine.loaded = lambda: self._follow(complete=True)  # what the log has since the checkpoint is told, too

    def _follow(self, complete: bool) -> None:
        shard = self._engine.shard
        self._source = TablesSource(
            lambda: shard.tables,
            lambda: shard.stamp,
            base=self._engine.base if complete else None,
            name=f"ps_{shard.index}",
            part=(shard.index, shard.of),
            complete=complete,
        )

    def start(self) -> None:
        """Starts the rounds. Call it after the server has started."""
        from shoal.serving.sync.publish import publish_source  # needs gRPC, which a server alone does not

        assert self.server is not None
        assert self.settings is not None
        if self._source is None:
            self.server.between_writes(lambda: self._follow(complete=False))
        assert self._source is not None
        given = {name: value for name, value in self.settings.items() if name != "paced"}
        self.publication = publish_source(
            self._source, **given, security=self._security, call=self.server.between_writes
        )
        self.publication.paced = self.settings["paced"]

    def ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        """What a worker asks for: settings to begin with, ``nudge`` for a round at once, or nothing; the status.

        A server that publishes already goes on as it was told first; only ``paced`` is changed: with it rounds are made
        when a worker nudges, not by the clock.

        Raises:
            ConfigError: the server publishes another model already.
        """
        wish = dict(wish)
        nudge = wish.pop("nudge", False)
        with self._lock:
            if wish:
                settings = _checked(wish)
                if self.publication is None:
                    self.settings = settings
                    self.start()
                    self._keep()
                elif self.settings is not None and settings["model"] != self.settings["model"]:
                    raise ConfigError(
                        f"shard {self._engine.shard.index} publishes its rows for model {self.settings['model']!r} "
                        f"already, asked for was {settings['model']!r}"
                    )
                elif self.settings is not None and settings["paced"] != self.settings["paced"]:
                    self.settings = self.settings | {"paced": settings["paced"]}
                    self.publication.paced = settings["paced"]
                    self._keep()
        if self.publication is None:
            return {"publishing": False, "now": list(self._engine.shard.stamp)}
        if nudge:
            self.publication.nudge()
        changed, rows = self._source.pending() if self._source is not None else (0, 0)
        return {
            "publishing": True, "settings": self.settings, "now": list(self._engine.shard.stamp), "changed": changed,
            "rows": rows, **asdict(self.publication.publisher.status()),
        }  # fmt: skip

    def _keep(self) -> None:
        if self._kept is not None:
            self._kept.write_text(json.dumps(self.settings))

    def close(self) -> None:
        """Ends the rounds."""
        if self.publication is not None:
            self.publication.close()


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(settings) - set(FIELDS)):
        raise DataError(f"settings of PUBLISH must be among {list(FIELDS)}, got {unknown}")
    found = {"registry": None, "targets": None, "model": "", "every_s": 1.0, "paced": False} | settings
    if (found["registry"] is None) == (found["targets"] is None):
        raise ConfigError("PUBLISH: exactly one of registry and targets must be given")
    if not isinstance(found["model"], str) or not found["model"]:
        raise ConfigError(f"PUBLISH: model must be the name that the replicas serve, got {found['model']!r}")
    if not isinstance(found["every_s"], int | float) or not 0 < found["every_s"] < float("inf"):
        raise ConfigError(f"every_s must be a number of seconds above 0, got {found['every_s']!r}")
    if not isinstance(found["paced"], bool):
        raise ConfigError(f"PUBLISH: paced must be true or false, got {found['paced']!r}")
    return found
