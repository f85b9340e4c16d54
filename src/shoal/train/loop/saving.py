"""`Saver`: writes the checkpoints of a run, and resumes from them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

from shoal.comm.ranks.ranks import Ranks
from shoal.durable import Found, move_folder, remove_folder, sync_folder
from shoal.errors import ConfigError, DataError
from shoal.stamps import Stamp, new_run
from shoal.table.checkpoint.chain import checkpoints_of
from shoal.table.checkpoint.manifest import Manifest
from shoal.train.loop import checkpoint
from shoal.train.loop.checkpoint import Snapshot
from shoal.train.loop.config import Config
from shoal.train.loop.guard.guard import clear_trip
from shoal.train.loop.guard.rollback import folder_aside, forget_rollback, rolled_back, running
from shoal.train.loop.hooks import SaveTimer
from shoal.train.loop.measure.reporter import Reporter
from shoal.train.loop.progress import Progress
from shoal.train.loop.rows.features import served_features
from shoal.train.loop.rows.rows import Rows

_ENDING_S = 10.0  # how long a run that was stopped or killed just now may still hold its folder


class Saver:
    """The checkpoints of a run in ``out.dir``.

    All ranks must call its methods together, except `wants`, `has` and `release`.
    """

    def __init__(self, config: Config, ranks: Ranks, rows: Rows, reporter: Reporter, timer: SaveTimer) -> None:
        assert config.out.dir is not None
        self.directory = config.out.dir
        self.series = checkpoints_of(self.directory)
        self.config, self.ranks, self.rows, self.reporter = config, ranks, rows, reporter
        self.timer = timer
        self._saved_at = time.monotonic()
        self.newest: str | None = None
        """The checkpoint that this run wrote last, or resumed from."""
        self.rolled_back = False
        """Whether the run resumed from a checkpoint that `shoal rollback` chose."""
        self._damaged: set[int] = set()
        self._lock, self._alone = ExitStack(), False
        self.pinned: Callable[[], list[int]] = list
        """Returns the steps whose checkpoints must be kept in addition to the newest ones."""
        why = ranks.from_first(why_not_writable(self.directory) if ranks.first else None)
        if why:
            raise ConfigError(f"[out] dir: checkpoints cannot be written to {self.directory!r} ({why})")

    def hold(self, *, must: bool) -> None:
        """Lock the folder until `release`: two runs would remove each other's checkpoints.

        It waits for a run that is ending, whose last checkpoint may not be written yet.

        Raises:
            ConfigError: with ``must``, if another run has the lock.
        """
        if self._alone:
            return
        self._lock.close()
        alone = None
        if self.ranks.first:
            alone = self._lock.enter_context(running(self.directory, wait_s=_ENDING_S))
        self._alone = self.ranks.from_first(alone)
        if must and not self._alone:
            raise ConfigError(
                f"[out] dir: another run uses {self.directory!r}; stop it first, or set another folder (--out) for this"
                " run"
            )

    def hold_to_run(self) -> None:
        """Lock the folder for a run, unless it has been locked since this run was started.

        Raises:
            ConfigError: another run has the lock, or has changed the checkpoints since this run was started.
        """
        if self._alone:
            return
        self.hold(must=True)
        if self.ranks.from_first(self._newest_here() != self.newest if self.ranks.first else None):
            self.release()
            raise ConfigError(
                f"[out] dir: another run has changed the checkpoints in {self.directory!r} since this run was "
                "started; start it again"
            )

    def _newest_here(self) -> str | None:
        """The newest checkpoint in the folder, except those that were damaged when this run resumed."""
        numbers = [number for number in self.series.numbers() if number not in self._damaged]
        return self.series.path(numbers[-1]) if numbers else None

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.close()
        self._alone = False

    # --- saving -------------------------------------------------------------------------------------------------------

    def wants(self, step: int) -> bool:
        """Whether this rank wants a checkpoint after ``step``."""
        out = self.config.out
        if not self.timer.enabled:
            return False
        if out.every_steps and step % out.every_steps == 0:
            return True
        return bool(out.every_s) and self.ranks.first and time.monotonic() - self._saved_at > out.every_s

    def has(self, step: int) -> bool:
        """Whether this run wrote the checkpoint of a step, or resumed from it."""
        return self.newest == self.series.path(step)

    def save(
        self, take: Callable[[], Snapshot], at: Progress, files: list[list[Any]], *, last: bool = False
    ) -> str | None:
        """Write a checkpoint; return its path, or None if that failed. A failure is reported.

        Args:
            take: returns the state to write.
            last: whether a failure raises instead, because the run ends with this checkpoint.

        Raises:
            OSError: with ``last``: some rank could not write it; older checkpoints are unchanged.
        """
        begun = time.perf_counter()
        try:
            path = self._write(take(), at, files)
        except OSError as error:
            what = f"the checkpoint of step {at.step:,} could not be written ({error})"
            newest = f"The newest is {self.newest}" if self.newest else "There is no other checkpoint"
            if last:
                raise OSError(f"{what} at the end of the run. {newest}") from error
            text = f"{what}; the run continues and tries again at the next one. {newest}"
            self.reporter.failed("checkpoint", text)
            return None
        self.reporter.saved(step=at.step, path=path, seconds=time.perf_counter() - begun)
        return path

    def _write(self, snapshot: Snapshot, at: Progress, files: list[list[Any]]) -> str:
        target = self.series.path(at.step)
        self._saved_at = time.monotonic()  # a failed checkpoint is retried when the next one is due
        if self.rows.evict():
            at.other_changes += 1
        values = asdict(at) | {"now_s": self.rows.now_s} | _steps_to_json(self.rows.steps())
        del values["step"], values["base"]
        snapshot.content = {**self._settings, "progress": values, "files": files}
        snapshot.content |= self.rows.keep(f"{at.name}-{at.step}" + "_best" * at.restored, self._contents)
        checkpoint.save_checkpoint(
            target, snapshot, self.rows.saved(), self.ranks, lambda: self._make_room(at.step), self.rows.ways()
        )
        self.newest = target
        self._damaged.discard(at.step)
        self._saved_at = time.monotonic()
        self._prune(at)
        return target

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The values that are the same in every checkpoint."""
        return {"identity": self.config.identity(), "served": served_features(self.config).to_json()}

    def _make_room(self, step: int) -> None:
        """Move or remove an existing folder with the name of the new checkpoint."""
        target = self.series.path(step)
        if not os.path.lexists(target):
            return
        damage = self.series.look(step).damage
        if target == self.newest or damage is not None or step in self._damaged:
            remove_folder(target)
            if target != self.newest:
                self.reporter.note(f"the damaged checkpoint {target} was replaced by a new one")
        else:
            self.reporter.note(f"{target} belongs to another run and was moved to {self._move_aside([step])}")

    def _prune(self, at: Progress) -> None:
        if self.ranks.first:
            try:
                best = () if at.kept_step is None else (at.kept_step,)
                # A damaged checkpoint can look complete; if it counted, a new one before it would be removed.
                self.series.prune(self.config.out.keep, (*best, *self.pinned(), *self._damaged))
                forget_rollback(self.directory)
                _remove_drafts(self.directory)
            except OSError as error:
                self.reporter.note(f"old checkpoints could not be removed from {self.directory} ({error})")
        self.ranks.barrier()

    def _contents(self) -> list[dict[str, Any]]:
        """The manifests' contents of all complete checkpoints."""
        return [Manifest.of(found.saved).content for found in self.series.whole() if found.saved is not None]

    # --- resuming -----------------------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Move all checkpoints, complete or damaged, into a new folder.

        What the guard or a roll-back noted about the earlier run is removed.
        """

        def start() -> str | None:
            if not self.ranks.first:
                return None
            moved = self._move_aside(self.series.numbers())
            clear_trip(self.directory)
            forget_rollback(self.directory)
            return moved

        moved = self.ranks.together(start)[0]
        if moved is not None:
            self.reporter.note(f"--fresh: the checkpoints of {self.directory} were moved to {moved}")

    def _move_aside(self, steps: list[int]) -> str | None:
        if not steps:
            return None
        folder = folder_aside(self.directory)
        os.mkdir(folder)
        for step in steps:  # the newest last, so that a run that is killed meanwhile resumes from it
            path = self.series.path(step)
            move_folder(path, os.path.join(folder, os.path.basename(path)))
        sync_folder(folder)
        sync_folder(self.directory)
        return folder

    def resume(self, snapshot: Snapshot, files: list[list[Any]]) -> Progress | None:
        """Resume from the newest complete checkpoint; return None if there is no checkpoint.

        Rows, weights and random state are loaded; ``snapshot`` gets reader and metrics if they fit.

        Raises:
            DataError: all checkpoints are damaged.
        """
        why: DataError | None = None

        def load(found: Found) -> Progress:
            nonlocal why
            try:
                return self._load(found, snapshot, files)
            except DataError as error:
                why = error
                raise

        def verify(found: Found) -> None:
            assert found.saved is not None
            found.saved.verify()
            if why is not None and any(digest.crc32c is None for digest in found.saved.files.values()):
                raise why  # a checkpoint of version 0.1 has no digests: it is damaged if it cannot be read

        try:
            at = self.series.load_newest(load, self.reporter.note, verify)
        except DataError as error:
            if error is why:  # not about damage
                raise
            raise DataError(f"{error}; --fresh moves them aside and starts over") from error
        if at is not None:
            self.newest = self.series.path(at.step)
            self._damaged = {number for number in self.series.numbers() if number > at.step}
            self._keep_position(snapshot, at, files)
        return at

    def _keep_position(self, snapshot: Snapshot, at: Progress, files: list[list[Any]]) -> None:
        """After a roll-back, read from where the run was, not from the position of the earlier checkpoint."""
        request = self.ranks.from_first(rolled_back(self.directory, at.step) if self.ranks.first else None)
        if request is None:
            return
        self.rolled_back = True
        later = request["reader"]
        if later is None:
            self.reporter.note(f"rolled back to step {at.step:,}; the samples since then are read again")
        elif later.get("files", files) == files:
            readers = later["readers"]
            same = later.get("world") == self.ranks.world_size
            snapshot.reader = readers[self.ranks.rank] if same else snapshot.deal(readers)
            at.epoch = later["progress"]["epoch"]
            self.reporter.note(
                f"rolled back to step {at.step:,}; samples that were already trained on are not read again"
            )
        else:
            self.reporter.note(
                f"rolled back to step {at.step:,}; the files have changed, so the later position is not used"
            )

    def _load(self, found: Found, snapshot: Snapshot, files: list[list[Any]]) -> Progress:
        saved = found.saved
        assert saved is not None

        targets = self.rows.targets()
        content = Manifest.of(saved).content
        if content.get("files", files) != files and not _begun(content):
            snapshot.deal = lambda readers: {}  # the positions are in other files

        def load() -> None:
            checkpoint.check_identity(saved, self.config.identity())
            checkpoint.load_checkpoint(saved, snapshot, targets, self.ranks)

        self.ranks.together(load)
        self.rows.loaded()
        manifest = Manifest.of(saved)
        content = manifest.content
        values = dict(content["progress"])
        self.rows.now_s = values.pop("now_s")
        self.rows.set_steps(values.get("sparse_steps") or dict.fromkeys(self.rows.tables, values["sparse_step"]))
        if isinstance(values.get("run"), str):  # written by a version without stamps
            values["name"] = values.pop("run")
        base = Stamp(values.pop("run", 0), manifest.step + values.get("other_changes", 0))
        known = {one.name for one in fields(Progress)}
        at = Progress(
            step=manifest.step, run=new_run(base.run), base=base,
            **{name: value for name, value in values.items() if name in known},
        )  # fmt: skip
        self.rows.restore(found.path, content)
        if content.get("files", files) != files and not snapshot.reader.get("begun"):
            snapshot.reader, at.epoch = {}, 0
            self.reporter.note(
                f"{found.path} was reading other files; rows and weights are kept, and reading starts at the first file"
            )
        elif content["world"] != self.ranks.world_size:
            self.reporter.note(
                f"{found.path} was written by {content['world']} rank(s) and this run has {self.ranks.world_size}; "
                f"redistributing the rows and the rest of epoch {at.epoch + 1}"
            )
        return at

    def restore_best(self, take: Callable[[], Snapshot], at: Progress, files: list[list[Any]]) -> bool:
        """Restore the rows and weights of the best evaluation; return whether that changed any."""
        if at.kept_step in (None, at.step) or at.restored:
            return False
        why_not = self._load_best(take(), at, files)
        if why_not is not None:
            self.reporter.note(f"{why_not}; the run ends with the model of the last step")
            return False
        at.restored = True
        at.other_changes += 1
        return True

    def _load_best(self, snapshot: Snapshot, at: Progress, files: list[list[Any]]) -> str | None:
        """Restore the rows and weights of ``at.kept_step``. Return None, or the reason why that failed."""
        assert at.kept_step is not None
        found = self.series.look(at.kept_step)
        if found.saved is None:
            return f"the checkpoint of the best step, {at.kept_step}, is damaged: {found.damage}"
        if not self.rows.can_restore(Manifest.of(found.saved).content):
            return "the parameter servers have not kept the rows of the best step"
        try:
            self._load(found, snapshot, files)
        except DataError as error:
            return f"the checkpoint of the best step, {at.kept_step}, is damaged: {error}"
        return None


def _steps_to_json(steps: dict[str, int]) -> dict[str, Any]:
    """The numbers of updates: for one table in the form of version 0.1, for several by name."""
    return {"sparse_step": next(iter(steps.values()))} if len(steps) == 1 else {"sparse_steps": steps}


def _begun(content: dict[str, Any]) -> bool:
    """Whether a checkpoint's run had finished its files and was reading live sources."""
    return all(reader.get("begun") for reader in content["readers"])


def _remove_drafts(directory: str) -> None:
    """Remove incomplete files left by a killed process."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(".tmp-ckpt-"):
                shutil.rmtree(entry.path, ignore_errors=True)


def why_not_writable(directory: str) -> str | None:
    """Why files cannot be written to a folder; None if they can. Checked at the start of a run."""
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return None
