"""`Trainer`: the training loop of `shoal train`, with its checkpoints, evaluations, exports and pushes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shoal import _core
from shoal.comm.ranks.ranks import Ranks
from shoal.comm.ranks.torch_ranks import start_ranks
from shoal.data.samples import Samples
from shoal.data.stream import Batch
from shoal.observe.endpoint import HttpPort
from shoal.train.loop.agenda import Agenda, Wishes
from shoal.train.loop.checkpoint import Snapshot
from shoal.train.loop.config import Config
from shoal.train.loop.exporting import Exports
from shoal.train.loop.guard.config import GuardConfig
from shoal.train.loop.guard.guard import Guard
from shoal.train.loop.hooks import Hooks, SaveTimer, TrainContext, make_hooks
from shoal.train.loop.learner import Learner
from shoal.train.loop.machine import fair_threads
from shoal.train.loop.measure.endpoint import Run, Watched
from shoal.train.loop.measure.evaluation import evaluate
from shoal.train.loop.measure.report import Report, verdict
from shoal.train.loop.measure.reporter import Reporter
from shoal.train.loop.measure.summaries import Summaries
from shoal.train.loop.progress import Progress
from shoal.train.loop.publish import Publishing
from shoal.train.loop.reading import Epochs, Feed, Reading
from shoal.train.loop.rows.writes import NamedWrites
from shoal.train.loop.saving import Saver
from shoal.train.loop.warm_start import warm_start


class Trainer:
    """One run on this rank.

    Args:
        stop: called after every step; the run ends early, with a checkpoint, if it returns True on any rank.
        fresh: do not resume from the checkpoints in ``out.dir``; move them to a folder there.
        hooks: called around every step, after those of ``[train] hooks``: objects of `shoal.train.SessionRunHook`, or
            functions that take the trainer and return one.
        init_from: a checkpoint of another run, from which to take rows and weights as far as they fit. Ignored if the
            run resumes from its own checkpoint.
    """

    def __init__(
        self,
        config: Config,
        *,
        ranks: Ranks | None = None,
        reporter: Reporter | None = None,
        stop: Callable[[], bool] = lambda: False,
        fresh: bool = False,
        hooks: Sequence[Any] = (),
        init_from: str | None = None,
    ) -> None:
        self.config, self.ranks = config, ranks or start_ranks()
        self.reporter = reporter if reporter is not None and self.ranks.first else Reporter()
        self._shown = Run(config.model.name, lambda: (self.at.step, self.at.samples), self._trip)
        if config.out.page is not None and self.ranks.first:
            self.reporter = Watched(self.reporter, self._shown)
        self._bad_reporter = self.reporter if self.ranks.first else reporter or Reporter()
        self.stop = stop
        train = config.train
        threads = train.threads or fair_threads()
        if threads is not None:
            torch.set_num_threads(threads)
            _core.set_num_threads(threads)
        self.schema = config.data.schema()
        self.learner = Learner(config, self.ranks, self.reporter.note)
        self.model, self.optimizer, self.rows = self.learner.model, self.learner.optimizer, self.learner.rows
        self.metrics = self.learner.metrics
        self.save_timer = SaveTimer()
        self.saver: Saver | None = None
        self._opened = ExitStack()
        self._opened.callback(self.ranks.close)
        self._opened.callback(self._release_folder)  # when nothing can write to it, or to rows on servers, any more
        self._opened.callback(self.rows.close)
        try:
            self.hooks = Hooks(make_hooks([*train.hooks, *hooks], self), self._context())
            self.hooks.begin()
            self._open(fresh, init_from)
        except BaseException:
            self.close()
            raise

    def _context(self) -> TrainContext:
        """The context that hooks get."""
        tables = self.rows.tables
        return TrainContext(self.model, dict(zip(tables, self.rows.local or tables.values(), strict=True)))

    def _open(self, fresh: bool, init_from: str | None) -> None:
        """Open files, checkpoints, pushes and exports, and restore the run's state."""
        config = self.config
        self.at = Progress()
        self.reading = Reading(config, self.ranks, self.reporter, self._bad_reporter)
        self._opened.callback(self.reading.close)
        self.stream = self.reading.train
        if self.reading.live is not None:
            self.reading.live.stopped = self.stop
        self.reader: dict[str, Any] = dict(self.stream.state)
        self.summaries = Summaries(config.out.tensorboard, self.ranks)
        self.report = Report(self.metrics, self.rows, self.ranks, config.train.max_steps)
        self._exhausted = False
        self._loss = math.nan
        self._last_batch: Batch | None = None
        self._files = [[os.path.basename(path), os.path.getsize(path)] for path in self.stream.files]
        self.resumed: str | None = None
        if config.out.dir is not None:
            self.saver = Saver(config, self.ranks, self.rows, self.reporter, self.save_timer)
            restores = self.rows.remote and config.train.ps_restore  # rows that another run may be training
            self.saver.hold(must=fresh or restores)
            self.resumed = None if fresh else self._resume(self.saver)
        if init_from is not None:
            self._init_from(init_from)
        if fresh and self.saver is not None:  # after reading from ``init_from``, which can be the same folder
            self.saver.start_over()
            self.reading.forget()
            if self.rows.remote:
                self.reporter.note("--fresh: the parameter servers keep their current rows")
        self._writes = self._name_writes()
        self.at.run = self.ranks.from_first(self.at.run)
        self.publishing = Publishing(config, self.ranks, self.rows, self.model, lambda: self.at, self.reporter.note)
        self._opened.callback(self.publishing.close)
        self.exports = Exports(config, self.ranks, self.learner, self.publishing, self.reporter)
        self.guard = self._make_guard()
        self._agenda = Agenda(
            config, self.saver, self.exports, self.publishing, self.guard,
            stop=self.stop, clock=self.reading.live is not None and self.ranks.first,
        )  # fmt: skip
        self._page: HttpPort | None = None
        if config.out.page is not None and self.ranks.first:
            self._page = HttpPort(config.out.page, self._shown, config.out.security()).start()
            self._opened.callback(self._page.stop)

    def _trip(self) -> str:
        """Why the guard has stopped pushes and exports; "" if it has not."""
        trip = self.guard.trip if hasattr(self, "guard") else None  # the guard's constructor can send an alert
        return "" if trip is None else trip.reason

    def _name_writes(self) -> NamedWrites | None:
        """Names for updates on servers that other runs share and that are not reset to this run's checkpoint."""
        live = self.reading.live
        if live is None:
            return None
        self.at.name = self.ranks.from_first(self.at.name)
        writes = self.rows.name_writes(self.reader, self.at, resumed=self.resumed is not None)
        if writes is None:
            return None
        if self.saver is None:
            self.reporter.note("without [out] dir, a restarted run reads the stream from its beginning again")
        live.note = self.reporter.note
        writes.follow(live, self.config.train)
        return writes

    def _make_guard(self) -> Guard:
        """The guard of the first rank, which decides for all; those of other ranks have no limits."""
        serve, saver = self.config.serve, self.saver
        guard = Guard(
            serve.guard if self.ranks.first else GuardConfig(),
            learnt=lambda: self.at.samples,
            recent=self.metrics.recent,
            changed_rows=self.publishing.changed_rows,
            folder=self.config.out.dir,
            checkpoints=lambda: [] if saver is None else [one.number for one in saver.series.whole()],
            alert=self.reporter.alert,
            every_s=serve.push_every_s or 1.0,
        )
        if saver is not None:
            saver.pinned = lambda: guard.pinned
        return guard

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end, or until ``stop``; return the last report, with the reason why the run ended."""
        if self.saver is not None:
            self.saver.hold_to_run()
        parameters = sum(p.numel() for p in self.model.parameters())
        self.reporter.start(
            step=self.at.step, resumed=self.resumed, world=self.ranks.world_size, model=self.config.model.name,
            parameters=parameters, files=len(self.stream.files), batch_size=self.config.train.batch_size,
            tables=self.rows.describe(), metrics=None if self._page is None else self._page.address,
            sources=self.reading.sources,
        )  # fmt: skip
        self.hooks.after_create_session(self.at.step)
        why = "early_stop" if self._out_of_patience() else "finished"
        begun, first = time.perf_counter(), self.at.samples
        if why == "finished":
            if self.at.restored:
                self.at.restored = False
                self.reporter.note(f"continues with the rows and weights of the best step, {self.at.kept_step:,}")
            unread = self.at.epoch < self.config.train.epochs and not self._rows_read()
            self.stream.restart(self.reader)
            if (self._writes is not None and self._writes.new) or (self.rows.remote and self.resumed is None):
                # If this run is killed before its first checkpoint, the next start finds the names of its updates, or
                # resets the rows on the servers.
                self._save(replace=True)
            with Feed(self.config, self.stream, self.rows) as feed:
                why = self._loop(feed)
                feed.settle()
            if unread and why == "finished" and self.at.samples == first and self.reading.live is None:
                raise self.reading.no_samples()
        seconds = time.perf_counter() - begun
        replace = False
        if why == "early_stop" and self.saver is not None:
            replace = self.saver.restore_best(self._snapshot, self.at, self._files)
        allowed = self.ranks.from_first(self.guard.allows(self.at.step))
        if allowed:
            self.publishing.round()  # pushed while the checkpoint is written
        path = self._save(last=True, replace=replace)
        if allowed:
            self.publishing.finish()
            self.exports.make(self.at, last=True, replace=replace)
        result = (
            self._values() | verdict(self.config.eval, self.at) | {"why": why, "seconds": seconds, "checkpoint": path}
        )
        result["samples_per_s"] = (self.at.samples - first) / seconds if seconds else math.nan
        self.hooks.end()
        self.summaries.close()
        self.reading.close()  # writes its journal, which is in the folder
        self.ranks.barrier()
        self._release_folder()
        self.reporter.end(**result)
        return result

    def _loop(self, feed: Feed) -> str:
        """Train; return the reason why training ended."""
        config, at = self.config, self.at
        batches = Epochs(iter(feed), in_step=feed.in_step)
        mark, mark_samples = time.perf_counter(), at.samples
        rolled_back = self.saver is not None and self.saver.rolled_back
        if self.ranks.from_first((self.exports.first_due or rolled_back) and self.guard.allows(at.step)):
            self.exports.make(self.at)  # so that replicas do not start from a version that was rolled back
        while at.epoch < self.reading.epochs:
            if config.train.max_steps is not None and at.step >= config.train.max_steps:
                return "max_steps"
            first_part = batches.next_of(at.epoch)
            if first_part or self.ranks.world_size > 1:
                self.hooks.before_run()
            records = first_part.records if first_part else None  # if set, the step has only this batch
            with self.rows.records(records):
                total, wishes = self._step(batches.parts_of(at.epoch, config.train.accumulate, first_part))
            if not total and not wishes.has_more:  # the epoch has ended on all ranks
                at.epoch += 1
                feed.settle()
                if not config.eval.every_steps and self._evaluate():
                    return "early_stop"
                continue
            stop, save = wishes.stop, wishes.save
            if total:
                at.step += 1
                at.samples += total
                if self.hooks:
                    stop, save = self._after_run(total, stop, save)
            due = total and config.eval.every_steps and at.step % config.eval.every_steps == 0
            if wishes.push or due or wishes.evaluate or stop or save or wishes.export:
                feed.settle()
            if wishes.push:
                self.publishing.round()
            self.reporter.tick(step=at.step, epoch=at.epoch, samples=at.samples)
            if wishes.report or (total and at.step % config.out.log_steps == 0):
                now = time.perf_counter()
                rate = (at.samples - mark_samples) / (now - mark)
                self._send_report(rate)
                mark, mark_samples = time.perf_counter(), at.samples
            if (due or wishes.evaluate) and self._evaluate():
                return "early_stop"
            if stop:
                return self.ranks.from_first(self._why_stopped())
            if save:
                self._save()
            if wishes.export:
                self.exports.make(self.at)
        self._exhausted = True
        return "finished"

    def _why_stopped(self) -> str:
        if self.hooks.context.stop_requested:
            return "stopped"
        return "guard" if self.guard.stops and not self.stop() else "interrupted"

    def _send_report(self, rate: float) -> None:
        """Send a report to the reporter, the hooks and the summaries."""
        eta_s = self.report.eta_s(self.at, rate, self.stream.total_rows())
        values = self._values() | {"samples_per_s": rate, "eta_s": eta_s}
        self._agenda.reported()
        self.reporter.progress(**values)
        self.hooks.on_progress(self.at.step, values)
        self.summaries.progress(values, self.rows)

    def _step(self, batches: Iterable[Batch | None]) -> tuple[int, Wishes]:
        """Train one step; return the number of samples on all ranks, and the actions that some rank wants."""
        self._last_batch = None
        self._loss, count = self.learner.learn(self._samples_of(batches), self.at.step + 1)
        has_more = self.reading.live is not None and self._last_batch is not None
        wants = self._agenda.after(self.at.step, has_more=has_more)
        total, *wishes = self.learner.step((count, *map(float, wants)), self.at.step)
        if self._last_batch is not None:
            self.reader = self._last_batch.state
        return round(total), Wishes(*(one > 0 for one in wishes))

    def _samples_of(self, batches: Iterable[Batch | None]) -> Iterator[Samples | None]:
        """Yield the samples of each batch of a step, and record the batch and its time."""
        for batch in batches:
            if batch is not None:
                self._last_batch = batch
                self.rows.set_time(batch.samples, self.at.started_s)
            yield None if batch is None else batch.samples

    def _after_run(self, total: int, stop: bool, save: bool) -> tuple[bool, bool]:
        """Call the hooks after a step; return whether to stop and whether to save, the same on all ranks."""
        values: dict[str, Any] = {"loss": self._loss, "samples": total}
        batch = self._last_batch
        if batch is not None and batch.samples.time is not None and len(batch):
            values["req_time"] = int(batch.samples.time.max())
        self.hooks.after_run(self.at.step, values)
        timer = self.save_timer
        wants = [self.hooks.context.stop_requested, timer.asked]
        timer.asked = False
        asked_to_stop, asked_to_save = self.ranks.sum(torch.tensor(wants, dtype=torch.int64, device="cpu")).tolist()
        self.hooks.context.stop_requested = asked_to_stop > 0
        return stop or asked_to_stop > 0, save or asked_to_save > 0

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluate; return whether patience is used up."""
        if self.reading.eval is None:
            return False
        values = self.evaluate()
        self._agenda.evaluated()
        if not values["samples"]:
            self.reporter.note("there are no samples in the files of [data] eval, so the evaluation has no result")
        is_best = self.at.judge(self.config.eval.sign * values[self.config.eval.metric])
        self.reporter.evaluated(step=self.at.step, **values, is_best=is_best)
        self.hooks.on_evaluated(self.at.step, values)
        self.summaries.evaluated(self.at.step, values)
        if is_best and (self.config.eval.patience or self.config.out.keep_best) and self.saver is not None:
            self._keep_best()
        if is_best and self.exports.wants_better() and self.ranks.from_first(self.guard.allows(self.at.step)):
            self.exports.make(self.at)
        return self._out_of_patience()

    def _out_of_patience(self) -> bool:
        return 0 < self.config.eval.patience <= self.at.since_best

    def evaluate(self) -> dict[str, Any]:
        """AUC, logloss, calibration and more on the evaluation files; rows are neither created nor changed."""
        assert self.reading.eval is not None
        return evaluate(
            self.reading.eval, self.model, self.rows, self.learner.logits, self.ranks, ahead=self.config.data.ahead(),
            max_batches=self.config.eval.max_batches, ndcg_at=self.config.eval.ndcg_at,
            log_odds=self.config.eval_log_odds(),
            group=None if self.config.eval.group is None else self.schema.sparse.index(self.config.eval.group),
        )  # fmt: skip

    def _keep_best(self) -> None:
        """Write a checkpoint that is kept until there is a better one."""
        at = self.at
        before = at.kept_step, at.kept_value
        at.kept_step, at.kept_value = at.step, at.best
        if self._save() is None:
            at.kept_step, at.kept_value = before

    def _rows_read(self) -> int:
        """The number of rows that all ranks have read from the current files, up to the last complete window."""
        return int(self.ranks.sum(torch.tensor([self.reader["rows"]], device="cpu")))

    def _values(self) -> dict[str, Any]:
        """The values of a report. All ranks must call it together."""
        bad = self.stream.bad_rows if self._exhausted else self.reader["bad"]  # bad rows can follow the last batch
        return self.report.values(self.at, bad) | self.reading.lag(self.ranks)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.at.step, model=self.model, optimizer=self.optimizer, reader=self.reader,
            metrics=self.metrics.state(), deal=self.stream.dealt,
        )  # fmt: skip

    def _save(self, *, last: bool = False, replace: bool = False) -> str | None:
        """Write a checkpoint and return its path. A failure is reported; for the last checkpoint it raises."""
        if self.saver is None:
            return None
        if self.saver.has(self.at.step) and not replace:
            return self.saver.newest

        def take() -> Snapshot:
            snapshot = self._snapshot()
            if self._writes is not None:
                snapshot.reader = {**self.reader, **self._writes.state()}
            return snapshot

        self.hooks.before_save(self.at.step)
        path = self.saver.save(take, self.at, self._files, last=last)
        if path is not None:
            self.reading.acknowledge(self.reader)
            self.hooks.after_save(self.at.step)
        return path

    def _init_from(self, path: str) -> None:
        """Load rows and weights from another run, and report which."""
        if self.resumed is not None:
            self.reporter.note(f"--init-from {path} is ignored, because the run resumes from {self.resumed}")
            return
        for line in warm_start(path, self.config, self.model, self.rows, self.ranks, self.at.started_s):
            self.reporter.note(line)

    def _resume(self, saver: Saver) -> str | None:
        snapshot = self._snapshot()
        snapshot.reader, snapshot.metrics = {}, {}
        at = saver.resume(snapshot, self._files)
        if at is None:
            return None
        self.at = at
        if self.reading.live is not None:
            at.epoch = min(at.epoch, self.reading.epochs - 1)  # a run that ended idle can continue
        self.reader = {**self.reader, **(snapshot.reader or {"epoch": self.at.epoch})}
        if snapshot.metrics:
            self.metrics.load(snapshot.metrics)
        return saver.newest

    # --- exports ------------------------------------------------------------------------------------------------------

    def export(self, dir: str | None = None, *, model: str | None = None) -> str:
        """Write the current model for `shoal serve` into a folder, by default ``[serve] dir``; return its path.

        All ranks must call it together. The version takes raw features and ids, and appears once it is complete.
        """
        return self.exports.write(self.at, dir, model)

    def _release_folder(self) -> None:
        if self.saver is not None:
            self.saver.release()

    def close(self) -> None:
        """Close the connections to replicas, servers and ranks."""
        self._opened.close()


@contextmanager
def trainer(config: Config, **options: Any) -> Iterator[Trainer]:
    """A `Trainer` that is closed at the end."""
    one = Trainer(config, **options)
    try:
        yield one
    finally:
        one.close()


def train(config: Config, **options: Any) -> dict[str, Any]:
    """Run a configuration to its end, such as ``train(load_config("criteo.toml"))``."""
    with trainer(config, **options) as one:
        return one.run()
