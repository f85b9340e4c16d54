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
    from shoal.serving.sync.publish import Publication

FIELDS = ("registry", "targets", "model", "every_s", "paced")
KEPT = "publish.json"


class ShardPublishing:
    """Publishes the rows of one server, with settings from its start or from the first worker that sends them.

    Rounds are copied between two writes, so a round is a consistent state, stamped with the number of the last write. A
    worker's settings are kept in the server's directory, so a server that restarts after a crash resumes with them.

    Args:
        engine: the server's engine, before it recovers.
        settings: ``registry`` or ``targets``, ``model`` and ``every_s``; None: a worker sends them later.
    """

    def __init__(self, engine: Engine, settings: dict[str, Any] | None = None) -> None:
        self._engine = engine
        self._kept = kept = None if engine.checkpoints is None else engine.checkpoints.directory / KEPT
        if settings is None and kept is not None and kept.exists():
            with contextlib.suppress(OSError, ValueError):  # an incomplete file: a worker sends them again
                settings = json.loads(kept.read_text())
        self.settings = None if settings is None else _checked(settings)
        self.server: ParameterServer | None = None
        """Set before the server starts."""
        self.publication: Publication | None = None
        self._source: TablesSource | None = None
        self._lock = threading.Lock()
        if self.settings is not None:
            engine.loaded = lambda: self._follow(complete=True)  # includes the log's changes since the checkpoint

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
        """Start the rounds. Call it after the server has started."""
        from shoal.serving.sync.publish import publish_source  # needs gRPC, which other servers can do without

        assert self.server is not None
        assert self.settings is not None
        if self._source is None:
            self.server.between_writes(lambda: self._follow(complete=False))
        assert self._source is not None
        given = {name: value for name, value in self.settings.items() if name != "paced"}
        self.publication = publish_source(self._source, **given, call=self.server.between_writes)
        self.publication.paced = self.settings["paced"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a worker's request: settings, ``nudge`` (run a round now), or neither; returns the status.

        A server that already publishes keeps its first settings; only ``paced`` changes: with it, rounds run when a
        worker nudges, not periodically.

        Raises:
            ConfigError: the server already publishes another model.
        """
        request = dict(request)
        nudge = request.pop("nudge", False)
        with self._lock:
            if request:
                settings = _checked(request)
                if self.publication is None:
                    self.settings = settings
                    self.start()
                    self._keep()
                elif self.settings is not None and settings["model"] != self.settings["model"]:
                    raise ConfigError(
                        f"shard {self._engine.shard.index} already publishes its rows for model "
                        f"{self.settings['model']!r}, so it cannot publish them for {settings['model']!r}"
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
        """End the rounds."""
        if self.publication is not None:
            self.publication.close()


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(settings) - set(FIELDS)):
        raise DataError(f"settings of PUBLISH must be among {list(FIELDS)}, got {unknown}")
    found = {"registry": None, "targets": None, "model": "", "every_s": 1.0, "paced": False} | settings
    if (found["registry"] is None) == (found["targets"] is None):
        raise ConfigError("PUBLISH: exactly one of registry and targets must be given")
    if not isinstance(found["model"], str) or not found["model"]:
        raise ConfigError(f"PUBLISH: model must be the name under which replicas serve it, got {found['model']!r}")
    if not isinstance(found["every_s"], int | float) or not 0 < found["every_s"] < float("inf"):
        raise ConfigError(f"every_s must be a number of seconds above 0, got {found['every_s']!r}")
    if not isinstance(found["paced"], bool):
        raise ConfigError(f"PUBLISH: paced must be true or false, got {found['paced']!r}")
    return found
