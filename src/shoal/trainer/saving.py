"""Where a run stands, and how it is put into checkpoints and taken from them again."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.errors import ConfigError
from shoal.table.checkpoint import list_checkpoints
from shoal.table.checkpoint.manifest import Manifest
from shoal.trainer import checkpoint
from shoal.trainer.checkpoint import Snapshot
from shoal.trainer.config import Config
from shoal.trainer.ranks import Ranks
from shoal.trainer.tables import Rows


@dataclass(slots=True)
class Progress:
    """What goes on over a checkpoint."""

    step: int = 0
    samples: int = 0
    started_s: int = field(default_factory=lambda: int(time.time()))
    best: float | None = None
    """Of the evaluations, the more the better."""
    since_best: int = 0
    epoch: int = 0
    """Whose end has not been evaluated yet."""
    run: str = field(default_factory=lambda: secrets.token_hex(8))
    """The name of the run on parameter servers; that of the first rank counts."""


class Saver:
    """The checkpoints of a run in ``out.dir``. All ranks call it together."""

    def __init__(self, config: Config, ranks: Ranks, rows: Rows, note: Callable[[str], None]) -> None:
        assert config.out.dir is not None
        self.directory = config.out.dir
        self.config, self.ranks, self.rows, self._note = config, ranks, rows, note
        self._saved_at = time.monotonic()
        self._told_inexact = False
        why = ranks.from_first(_why_not_writable(self.directory) if ranks.first else None)
        if why:
            raise ConfigError(f"[out] dir: checkpoints cannot be written to {self.directory!r} ({why})")

    def wants(self, step: int) -> bool:
        """Whether this rank asks for a checkpoint after a step."""
        out = self.config.out
        if out.every_steps and step % out.every_steps == 0:
            return True
        return bool(out.every_s) and self.ranks.first and time.monotonic() - self._saved_at > out.every_s

    def save(self, snapshot: Snapshot, at: Progress, files: list[list[Any]]) -> str:
        """Writes a checkpoint unless that of the step is there; its path."""
        values = asdict(at) | {"now_s": self.rows.now_s, "sparse_step": self.rows.slot.global_step}
        del values["step"]
        snapshot.content = {"identity": self.config.identity(), "progress": values, "files": files}
        local = self.rows.local
        if local is None:
            snapshot.content["servers"] = self._keep_on_servers(at)
        elif self.config.table.expire_after is not None:
            local.evict()
        path = checkpoint.save_checkpoint(self.directory, snapshot, local, self.ranks, self.config.out.keep)
        self._saved_at = time.monotonic()
        return path

    def _keep_on_servers(self, at: Progress) -> dict[str, Any]:
        """The servers' part of a checkpoint: they keep their rows as they are now, for as long as it stays."""
        self.rows.client.flush()
        self.ranks.barrier()
        kept: str | None = None
        if self.ranks.first:
            there = {one.step: Manifest.read(os.path.join(one.path, checkpoint.MANIFEST)) for one in self._all()}
            others = [servers["kept"] for one in there.values() if (servers := _servers(one)) and servers["kept"]]
            name = f"{at.run}-{at.step}"
            kept = name if at.step in there else self.rows.keep_on_servers(name, others)
            if kept is None and not self._told_inexact:
                self._told_inexact = True
                self._note(
                    "the parameter servers have no --dir to keep rows in: a run that is resumed will not be exact"
                )
        return {"addresses": list(self.config.train.ps), "kept": kept}

    def _all(self) -> list[Any]:
        return list_checkpoints(self.directory)

    def newest(self) -> str | None:
        """The newest complete checkpoint, the same for all ranks."""
        return self.ranks.from_first(checkpoint.newest(self.directory))

    def load(self, path: str, snapshot: Snapshot, files: list[list[Any]]) -> Progress:
        """Takes a run up again: rows, weights and random state; ``snapshot`` gets reader and metrics where they fit."""
        checkpoint.check_identity(path, self.config.identity())
        manifest = checkpoint.load_checkpoint(path, snapshot, self.rows.local, self.ranks)
        content = manifest.content
        values = dict(content["progress"])
        self.rows.now_s = values.pop("now_s")
        self.rows.slot.global_step = values.pop("sparse_step")
        at = Progress(step=manifest.step, **values)
        if self.rows.client is not None:
            self._restore_on_servers(path, manifest)
        if content.get("files", files) != files:
            snapshot.reader, at.epoch = {}, 0
            self._note(f"{path} was reading other files: rows and weights go on, reading begins at the first file")
        elif not snapshot.reader:
            self._note(
                f"{path} was written by {content['world']} ranks and this run has {self.ranks.world}: rows and weights "
                f"go on, reading begins at the first file of epoch {at.epoch + 1} again"
            )
        return at

    def _restore_on_servers(self, path: str, manifest: Manifest) -> None:
        servers = _servers(manifest)
        if self.config.train.ps_restore:
            if servers is None or servers["kept"] is None or len(servers["addresses"]) != len(self.config.train.ps):
                self._note(f"{path} has no rows for these parameter servers: they go on with those that they hold")
            elif self.ranks.first:
                self.rows.restore_on_servers(servers["kept"])
        self.ranks.barrier()


def _servers(manifest: Manifest) -> dict[str, Any] | None:
    found = manifest.content.get("servers")
    return found if isinstance(found, dict) else None


def _why_not_writable(directory: str) -> str | None:
    """Tried now rather than after the first hour."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return None
