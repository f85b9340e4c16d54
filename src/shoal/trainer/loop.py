"""The training loop: read, look up, forward, backward (which updates the rows), step, and everything around it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal import _core
from shoal.data.prefetch import Prefetch
from shoal.data.samples import Samples
from shoal.data.source import BadRow
from shoal.data.stream import Batch, Stream
from shoal.errors import ConfigError, DataError
from shoal.models.build import build_model
from shoal.models.inputs import Inputs
from shoal.trainer.checkpoint import Snapshot
from shoal.trainer.config import Config
from shoal.trainer.machine import fair_threads, find_device, resident_bytes
from shoal.trainer.metrics import Metrics, merged
from shoal.trainer.ranks import GradientBucket, Ranks
from shoal.trainer.reporter import Reporter
from shoal.trainer.saving import Progress, Saver
from shoal.trainer.summaries import Summaries
from shoal.trainer.tables import Rows

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


class Trainer:
    """One run on this rank. ``stop`` is asked after every step whether to end early, with a checkpoint.

    Args:
        fresh: do not go on from the checkpoints in ``out.dir``; they are left alone and new ones must be newer.
    """

    def __init__(
        self,
        config: Config,
        *,
        ranks: Ranks | None = None,
        reporter: Reporter | None = None,
        stop: Callable[[], bool] = lambda: False,
        fresh: bool = False,
    ) -> None:
        self.config, self.ranks = config, ranks or Ranks()
        self.reporter = reporter if reporter is not None and self.ranks.first else Reporter()
        self._bad_reporter = reporter or Reporter()
        self.stop = stop
        train = config.train
        threads = train.threads or fair_threads()
        if threads is not None:
            torch.set_num_threads(threads)
            _core.set_num_threads(threads)
        self.device = find_device(train.device)
        self.schema = config.data.schema()
        torch.manual_seed(train.seed)
        inputs = Inputs(dense=self.schema.dense, sparse=self.schema.sparse, dim=config.table.dim)
        self.model = build_model(config.model.name, inputs, config.model.options).to(self.device)
        fused = self.device.type == "cpu" or train.optimizer != "adagrad"  # torch's Adagrad has no fused step on GPUs
        self.optimizer = _OPTIMIZERS[train.optimizer](self.model.parameters(), lr=train.lr, fused=fused)
        own = (train.seed * 1_000_003 + self.ranks.rank) & ((1 << 63) - 1)  # for dropout, which differs between ranks
        torch.manual_seed(own)
        self.rows = Rows(config, self.ranks, self.reporter.note).to(self.device)
        try:
            self._open(fresh)
        except BaseException:
            self.close()
            raise

    def _open(self, fresh: bool) -> None:
        """Files, metrics and checkpoints."""
        config, train = self.config, self.config.train
        self.bucket = GradientBucket(self.model.parameters(), numbers=3)
        self.metrics = Metrics(config.out.auc_window)
        self.at = Progress()
        self._shown_bad = False
        form = config.data.make_format()
        self.stream = self._stream(form, config.data.train, epochs=train.epochs, shuffle=config.data.shuffle_rows)
        self.eval_stream = self._stream(form, config.data.eval, epochs=1, shuffle=0) if config.data.eval else None
        self.reader: dict[str, Any] = dict(self.stream.state)
        self.summaries = Summaries(config.out.tensorboard, self.ranks)
        self._scale = 1.0 / (train.batch_size * self.ranks.world)
        self._exhausted = False
        self._files = [[os.path.basename(path), os.path.getsize(path)] for path in self.stream.files]
        self.saver: Saver | None = None
        self.resumed: str | None = None
        if config.out.dir is not None:
            self.saver = Saver(config, self.ranks, self.rows, self.reporter.note)
            self.resumed = self._resume(self.saver, fresh)

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Trains to the end, or until ``stop``; what came of it."""
        parameters = sum(p.numel() for p in self.model.parameters())
        self.reporter.start(
            step=self.at.step, resumed=self.resumed, world=self.ranks.world, model=self.config.model.name,
            parameters=parameters, files=len(self.stream.files), batch_size=self.config.train.batch_size,
        )  # fmt: skip
        why = "early_stop" if self._gives_up() else "finished"
        begun, first = time.perf_counter(), self.at.samples
        if why == "finished":
            self.stream.restart(self.reader)
            with Prefetch(self.stream, self.config.data.ahead()) as batches:
                why = self._loop(Epochs(iter(batches)))
        seconds = time.perf_counter() - begun
        path = self._save()
        best = self.at.best if self.at.best is None or self.config.eval.metric == "auc" else -self.at.best
        result = self._values() | {"why": why, "seconds": seconds, "best": best, "checkpoint": path}
        result["samples_per_s"] = (self.at.samples - first) / seconds if seconds else math.nan
        self.summaries.close()
        self.reporter.end(**result)
        return result

    def _loop(self, batches: Epochs) -> str:
        """Why it ended."""
        config, at = self.config, self.at
        mark, mark_samples = time.perf_counter(), at.samples
        while at.epoch < config.train.epochs:
            if config.train.max_steps is not None and at.step >= config.train.max_steps:
                return "max_steps"
            total, stop, save = self._step(batches.next_of(at.epoch))
            if not total:  # no rank has any more of this epoch
                at.epoch += 1
                if not config.eval.every_steps and self._evaluate():
                    return "early_stop"
                continue
            at.step += 1
            at.samples += total
            self.reporter.tick(step=at.step, epoch=at.epoch, samples=at.samples)
            if at.step % config.out.log_steps == 0:
                now = time.perf_counter()
                values = self._values() | {"samples_per_s": (at.samples - mark_samples) / (now - mark)}
                self.reporter.progress(**values)
                self.summaries.progress(values, self.rows)
                mark, mark_samples = time.perf_counter(), at.samples
            if config.eval.every_steps and at.step % config.eval.every_steps == 0 and self._evaluate():
                return "early_stop"
            if stop:
                return "interrupted"
            if save:
                self._save()
        self._exhausted = True
        return "finished"

    def _step(self, batch: Batch | None) -> tuple[int, bool, bool]:
        """Samples of all ranks, and whether some rank wants to stop or to save."""
        self.bucket.zero()
        samples = batch.samples if batch is not None and len(batch) else None
        if samples is None:
            self.rows.nothing(learn=True)
        else:
            self._learn(samples)
        wants_save = self.saver is not None and self.saver.wants(self.at.step + 1)
        numbers = (len(samples) if samples is not None else 0, float(self.stop()), float(wants_save))
        if self.ranks.world > 1:
            self.bucket.numbers.copy_(torch.tensor(numbers, device="cpu"))
            self.ranks.sum(self.bucket.flat)
            numbers = tuple(self.bucket.numbers.tolist())
        if numbers[0]:  # else it was the end of an epoch, and nobody learnt anything
            self.optimizer.step()
        if batch is not None:
            self.reader = batch.state
        return round(numbers[0]), numbers[1] > 0, numbers[2] > 0

    def _learn(self, samples: Samples) -> None:
        if samples.time is not None:
            self.rows.now_s = max(self.rows.now_s, int(samples.time.max()))
        elif self.config.table.expire_after is not None:
            self.rows.now_s = int(time.time())
        else:
            self.rows.now_s = self.at.started_s  # the same however often a run is taken up again
        logits = self._logits(samples)
        label = samples.label.to(self.device)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="sum") * self._scale
        if not math.isfinite(loss.item()):
            raise DataError(
                f"step {self.at.step + 1}: the loss is {loss.item()}; lower [table] lr or [train] lr, or look for huge "
                "numbers in the dense columns (log_dense = true makes them small)"
            )
        loss.backward()
        self.metrics.add(logits.detach().cpu().numpy(), samples.label.numpy())

    def _logits(self, samples: Samples) -> Tensor:
        least, most = samples.label.aminmax()
        if least < 0 or most > 1:
            got = float(least if least < 0 else most)
            raise ConfigError(
                f"[data] label {self.schema.label!r}: labels are between 0 and 1, got {got:g}; with positive_above = T "
                "those above T are 1 and the others 0"
            )
        logits = self.model(samples.dense.to(self.device), self.rows(samples))
        if logits.shape != (len(samples),):
            raise ConfigError(
                f"model {self.config.model.name!r}: forward gives logits of shape [{len(samples)}], "
                f"got {list(logits.shape)}"
            )
        return logits

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Whether to give up."""
        if self.eval_stream is None:
            return False
        values = self.evaluate()
        metric = self.config.eval.metric
        value = values[metric] if metric == "auc" else -values[metric]
        is_best = value > (-math.inf if self.at.best is None else self.at.best)  # NaN never is
        if is_best:
            self.at.best, self.at.since_best = value, 0
        else:
            self.at.since_best += 1
        self.reporter.evaluated(step=self.at.step, **values, is_best=is_best)
        self.summaries.evaluated(self.at.step, values)
        return self._gives_up()

    def _gives_up(self) -> bool:
        return 0 < self.config.eval.patience <= self.at.since_best

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """AUC, logloss and calibration on the evaluation files; no row is made or changed."""
        assert self.eval_stream is not None
        metrics = Metrics(1)
        self.model.eval(), self.rows.eval()
        try:
            with Prefetch(self.eval_stream, self.config.data.ahead()) as batches:
                each, number = iter(batches), 0
                while number != self.config.eval.max_batches:
                    batch = next(each, None)
                    if batch is None:
                        self.rows.nothing(learn=False)
                    else:
                        logits = self._logits(batch.samples)
                        metrics.add(logits.cpu().numpy(), batch.samples.label.numpy())
                    if not int(self.ranks.sum(torch.tensor([0 if batch is None else 1], device="cpu"))):
                        break
                    number += 1
        finally:
            self.model.train(), self.rows.train()
        return merged(metrics, self.ranks)

    def _values(self) -> dict[str, Any]:
        """What a report tells; all ranks ask together."""
        values = merged(self.metrics, self.ranks)
        values.pop("samples")
        bad = self.stream.bad_rows if self._exhausted else self.reader["bad"]  # the last ones are behind the last batch
        sums = torch.tensor([float(bad), self.rows.memory_bytes(), resident_bytes()], dtype=torch.float64, device="cpu")
        bad_rows, table_bytes, resident = map(int, self.ranks.sum(sums).tolist())
        return {
            "step": self.at.step, "epoch": self.at.epoch, "samples": self.at.samples, **values,
            "window_auc": self.metrics.window_auc(), "rows": self.rows.size(), "table_bytes": table_bytes,
            "resident_bytes": resident, "bad_rows": bad_rows,
        }  # fmt: skip

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.at.step, model=self.model, optimizer=self.optimizer, reader=self.reader,
            metrics=self.metrics.state(),
        )  # fmt: skip

    def _save(self) -> str | None:
        if self.saver is None:
            return None
        begun = time.perf_counter()
        path = self.saver.save(self._snapshot(), self.at, self._files)
        self.reporter.saved(step=self.at.step, path=path, seconds=time.perf_counter() - begun)
        return path

    def _resume(self, saver: Saver, fresh: bool) -> str | None:
        path = saver.newest()
        if path is None:
            return None
        if fresh:
            raise ConfigError(
                f"--fresh: {saver.directory} has checkpoints of another run; remove them or name another folder with "
                "--out"
            )
        snapshot = self._snapshot()
        snapshot.reader, snapshot.metrics = {}, {}
        self.at = saver.load(path, snapshot, self._files)
        self.reader = snapshot.reader or {**self.reader, "epoch": self.at.epoch}
        if snapshot.metrics:
            self.metrics.load(snapshot.metrics)
        return path

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _stream(self, form: Any, files: tuple[str, ...], *, epochs: int, shuffle: int) -> Stream:
        train = self.config.train
        return Stream(
            files, form, self.schema, batch_size=train.batch_size, shuffle_rows=shuffle, seed=train.seed, epochs=epochs,
            rank=self.ranks.rank, world=self.ranks.world, on_bad=self._on_bad,
        )  # fmt: skip

    def _on_bad(self, row: BadRow) -> None:
        if self.config.train.strict:
            raise DataError(f"{row}; without --strict such rows are counted and left out")
        if not self._shown_bad:
            self._shown_bad = True
            rest = "; the rest of the file is skipped" if row.rest else ""
            self._bad_reporter.bad_row(where=row.where(), why=row.why + rest)

    def close(self) -> None:
        """Lets go of servers and ranks."""
        self.rows.close()
        self.ranks.close()


class Epochs:
    """Batches of one epoch after the other."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._held: Batch | None = None

    def next_of(self, epoch: int) -> Batch | None:
        """The next batch of an epoch; None when it has ended."""
        batch = self._held if self._held is not None else next(self._batches, None)
        self._held = None
        if batch is not None and batch.state["epoch"] > epoch:
            self._held, batch = batch, None
        return batch


@contextmanager
def trainer(config: Config, **options: Any) -> Iterator[Trainer]:
    """A `Trainer` that is closed at the end."""
    one = Trainer(config, **options)
    try:
        yield one
    finally:
        one.close()


def train(config: Config, **options: Any) -> dict[str, Any]:
    """Runs a configuration to its end: ``shoal.trainer.train(load_config("criteo.toml"))``."""
    with trainer(config, **options) as one:
        return one.run()
