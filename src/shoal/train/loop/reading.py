"""The input of a run: the streams of its files, epoch by epoch, and messages about bad files and rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from shoal.background.ahead import ReadAheadIfSlow
from shoal.comm.ranks.ranks import Ranks
from shoal.data.live.stream import LiveStream
from shoal.data.source import BadRow
from shoal.data.stream import Batch, Stream
from shoal.errors import DataError
from shoal.train.ahead.pipeline import Pipeline
from shoal.train.loop.config import Config
from shoal.train.loop.measure.reporter import Reporter
from shoal.train.loop.rows.rows import Rows

_LISTED = 5
_SLOW_AHEAD = 4  # batches that are read ahead once reading is seen to wait


class Reading:
    """The streams of ``[data]``: ``train``, and ``eval`` (None without files to evaluate on).

    Raises:
        DataError: all files of one of them are empty.
    """

    def __init__(self, config: Config, ranks: Ranks, reporter: Reporter, on_bad: Reporter) -> None:
        self._config, self._ranks, self._on_bad = config, ranks, on_bad
        self._first_bad: BadRow | None = None
        data, form = config.data, config.data.make_format()
        history = self._stream(form, data.history, config.train.epochs, data.shuffle_rows) if data.history else None
        self.live = self._live(history) if data.live else None
        train = self.live if self.live is not None else history
        assert train is not None
        self.train: Stream | LiveStream = train
        self.epochs = self.live.epochs if self.live is not None else config.train.epochs
        """Passes over the files, plus one for live sources."""
        self.eval = self._stream(form, data.eval, 1, 0) if data.eval else None
        for name, stream in (("train", self.train), ("eval", self.eval)):
            if stream is not None and stream.empty:
                self._report_empty(name, stream, reporter)

    def no_samples(self) -> DataError:
        """The error of a run whose files were read to their end without finding a sample."""
        where = "[data] train: there are no samples"
        if self._first_bad is None:
            return DataError(f"{where} in {_listed(self.train.files)}")
        return DataError(
            f"{where} that can be read ({self._first_bad}); is format = {self._config.data.format!r} right?"
        )

    def _stream(self, form: Any, files: tuple[str, ...], epochs: int, shuffle: int) -> Stream:
        train = self._config.train
        return Stream(
            files, form, self._config.data.schema(), batch_size=train.batch_size, shuffle_rows=shuffle, seed=train.seed,
            epochs=epochs, rank=self._ranks.rank, world=self._ranks.world_size, on_bad=self._bad,
        )  # fmt: skip

    def _live(self, history: Stream | None) -> LiveStream:
        name, form = self._config.data.make_message_format()
        data, train, ranks, out = self._config.data, self._config.train, self._ranks, self._config.out.dir
        letters = data.dead_letters
        if letters is None and out is not None:
            letters = os.path.join(out, "dead-letters.jsonl")
        if letters is not None:
            letters += f".{ranks.rank}" * (ranks.world_size > 1)
            os.makedirs(os.path.dirname(os.path.abspath(letters)), exist_ok=True)
        journal = None
        if out is not None:
            os.makedirs(out, exist_ok=True)
            journal = os.path.join(out, "batches.jsonl" + f".{ranks.rank}" * (ranks.world_size > 1))
        return LiveStream(
            data.live, form, data.schema(), format_name=name, batch_size=train.batch_size, history=history,
            max_wait_s=data.max_wait_s, idle_s=data.idle_s, dead_letters=letters, journal=journal, rank=ranks.rank,
            world=ranks.world_size, on_bad=self._bad,
        )  # fmt: skip

    @property
    def sources(self) -> list[str]:
        """The names of the live sources."""
        return self.live.sources if self.live is not None else []

    def lag(self, ranks: Ranks) -> dict[str, Any]:
        """The lag of all ranks: the sum of records, the maximum of seconds. All ranks must call it together."""
        if self.live is None:
            return {}
        lag = self.live.lag()
        unknown = math.inf
        records, seconds = (unknown if one is None else one for one in (lag.records, lag.seconds))
        each = ranks.gather((records, seconds))
        total, most = sum(one[0] for one in each), max(one[1] for one in each)
        return {
            "lag_records": None if math.isinf(total) else int(total), "lag_s": None if math.isinf(most) else most,
        }  # fmt: skip

    def acknowledge(self, state: dict[str, Any]) -> None:
        """Record that a durable checkpoint has everything up to ``state``."""
        if self.live is not None:
            self.live.acknowledge(state)

    def forget(self) -> None:
        """Remove the journal and the dead letters of the previous run."""
        if self.live is not None:
            self.live.forget()

    def close(self) -> None:
        if self.live is not None:
            self.live.close()

    def _bad(self, row: BadRow) -> None:
        if self._config.train.strict:
            raise DataError(f"{row}; without --strict such rows are counted and skipped")
        if self._first_bad is None:
            self._first_bad = row
            rest = "; the rest of the file is skipped" if row.rest else ""
            self._on_bad.bad_row(where=row.where(), why=row.why + rest)

    def _report_empty(self, name: str, stream: Stream | LiveStream, reporter: Reporter) -> None:
        empty = f"{_listed(stream.empty)} {'is' if len(stream.empty) == 1 else 'are'} empty"
        if len(stream.empty) == len(stream.files) and stream is not self.live:
            raise DataError(f"[data] {name}: there are no samples, because {empty}")
        reporter.note(f"[data] {name}: {empty}")


class Feed:
    """Yields the batches of a run; with ``[train] pipeline`` it reads them and locates their ids ahead of their step.

    Iterate over it once, in a ``with`` statement.
    """

    def __init__(self, config: Config, stream: Stream | LiveStream, rows: Rows) -> None:
        self._stream, self._rows = stream, rows
        train = config.train
        depth = config.data.ahead() if train.pipeline else 0
        self._source: Any = stream
        if train.pipeline and not depth and config.data.prefetch is None:
            self._source = ReadAheadIfSlow(stream, _SLOW_AHEAD)
        self._pipeline = None
        if train.pipeline:
            self._pipeline = Pipeline(
                rows, staleness=train.staleness, ahead=depth, empty_batch=self._without_samples,
                section=lambda batch: batch.state["epoch"],
            )  # fmt: skip
        self.in_step = rows.together and train.pipeline
        """Whether all ranks get a batch in every step, which can have no samples."""

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Yield batches with their epochs; the caller must finish a step before it requests the next batch."""
        pipeline = self._pipeline
        if pipeline is None:
            yield from ((batch, batch.state["epoch"]) for batch in self._stream)
            return
        with closing(pipeline.batches(self._source)) as batches:
            for batch in batches:
                yield batch, pipeline.section

    def settle(self) -> None:
        """Wait until all updates are applied to the rows. All ranks must call it together."""
        if self._pipeline is not None:
            self._pipeline.flush()

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        if isinstance(self._source, ReadAheadIfSlow):
            self._source.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _without_samples(self, last: Batch | None) -> Batch:
        """An empty batch at the current position, for a rank that has read all of its data."""
        return Batch(samples=self._rows.no_samples(), state=self._stream.state if last is None else last.state)


class Epochs:
    """Splits batches by epoch and step.

    Args:
        batches: pairs of a batch and its epoch.
        in_step: whether all ranks get a batch in every step, which can have no samples.
    """

    def __init__(self, batches: Iterator[tuple[Batch, int]], *, in_step: bool = False) -> None:
        self._batches, self._in_step = batches, in_step
        self._held: tuple[Batch, int] | None = None

    def next_of(self, epoch: int) -> Batch | None:
        """The next batch of an epoch; None when it has ended."""
        held = self._held if self._held is not None else next(self._batches, None)
        self._held = None
        if held is None:
            return None
        if held[1] > epoch:
            self._held = held
            return None
        return held[0]

    def parts_of(self, epoch: int, count: int, first: Batch | None) -> Iterator[Batch | None]:
        """Yield the ``count`` batches of a step, starting with ``first``.

        Yields None for batches that are missing at the end of an epoch, or while a live source has no records.
        """
        batch, idle = first, False
        for number in range(count):
            if number:
                batch = None if idle else self.next_of(epoch)
            yield batch
            # The source is idle: do not wait for more batches.
            idle = idle or (batch is not None and not len(batch) and not self._in_step)


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return ", ".join(files[:_LISTED]) + more
