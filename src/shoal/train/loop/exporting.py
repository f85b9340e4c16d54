"""`Exports`: decide when a run exports its model, and write the exports."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shoal.comm.ranks.ranks import Ranks
from shoal.errors import ConfigError, ShoalError
from shoal.serving.cluster.rollout import newest_version
from shoal.train.loop.config import Config
from shoal.train.loop.export import remove_drafts, write_export
from shoal.train.loop.learner import Learner
from shoal.train.loop.measure.reporter import Reporter
from shoal.train.loop.progress import Progress
from shoal.train.loop.publish import Publishing
from shoal.train.loop.rows.features import served_features
from shoal.train.loop.saving import why_not_writable


class Exports:
    """The exports of a run. All ranks must call its methods together, except `wants`."""

    def __init__(
        self, config: Config, ranks: Ranks, learner: Learner, publishing: Publishing, reporter: Reporter
    ) -> None:
        self.config, self.ranks, self.learner = config, ranks, learner
        self.publishing, self.reporter = publishing, reporter
        self.newest: str | None = None
        """The path of this run's last export into ``[serve] dir``."""
        self._step = -1
        self._at = time.monotonic()
        self.first_due = False
        """On the first rank: whether ``at_start`` asks for an export because there is no version yet."""
        folder = config.serve.dir
        if folder is None:
            return
        why = ranks.from_first(why_not_writable(folder) if ranks.first else None)
        if why:
            raise ConfigError(f"[serve] dir: exports cannot be written to {folder!r} ({why})")
        if ranks.first:
            remove_drafts(folder)
            self.first_due = config.serve.at_start and newest_version(Path(folder)) is None

    def wants(self) -> bool:
        """Whether a periodic export is due; True only on the first rank."""
        serve = self.config.serve
        return bool(serve.every_s) and not serve.when_better and self.ranks.first and self._old_enough()

    def wants_better(self) -> bool:
        """Whether to export after the best evaluation so far; the first rank decides."""
        serve = self.config.serve
        if serve.dir is None or not serve.when_better:
            return False
        return self.ranks.from_first(self.newest is None or self._old_enough())

    def _old_enough(self) -> bool:
        return time.monotonic() - self._at >= self.config.serve.every_s

    def make(self, at: Progress, *, last: bool = False, replace: bool = False) -> None:
        """Export into ``[serve] dir``, if it is set. A failure is reported; for the last export it raises.

        Args:
            last: whether the run ends with it.
            replace: whether to export again if there is an export of this step.
        """
        serve = self.config.serve
        if serve.dir is None or (self._step == at.step and not replace):
            return
        if last and serve.when_better and not replace and self.newest is not None:
            return  # training after the best evaluation is not exported
        if last and serve.when_better and at.best is None:
            self.reporter.note("[serve] when_better: there was no evaluation, so nothing was exported")
            return
        begun = time.perf_counter()
        try:
            path = self.write(at)
        except (OSError, ShoalError) as error:
            if last:
                raise
            self.reporter.failed("export", f"the export of step {at.step:,} failed ({error}); the run continues")
            return
        self.publishing.exported(int(os.path.basename(path)), at.stamp)
        self.reporter.exported(step=at.step, path=path, seconds=time.perf_counter() - begun)

    def write(self, at: Progress, folder: str | None = None, model: str | None = None) -> str:
        """Export the current model into a folder, by default ``[serve] dir``; return the version's path."""
        serve, rows = self.config.serve, self.learner.rows
        own = folder is None
        folder = serve.dir if own else folder
        if folder is None:
            raise ConfigError("export: folder must be given when [serve] dir is not set")
        self.first_due = self.first_due and not own
        self._at = time.monotonic() if own else self._at  # a failed export is retried when the next one is due
        path = write_export(
            folder,
            model_name=model or (serve.name if own else None) or os.path.basename(os.path.abspath(folder)),
            net=self.learner.model,
            features=served_features(self.config),
            tables=rows.exported(),
            ranks=self.ranks,
            step=at.step,
            stamps=lambda: rows.stamps(at.stamp),
            codec=serve.codec,
            keep=serve.keep if own else None,
            compiled=serve.compiled,
        )
        if own:
            self.newest, self._step, self._at = path, at.step, time.monotonic()
        return path
