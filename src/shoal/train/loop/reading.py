"""What a run reads: the streams of its files, epoch by epoch, and what is said of files and rows that are no good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.comm.ranks.ranks import Ranks
from shoal.data.source import BadRow
from shoal.data.stream import Batch, Stream
from shoal.errors import DataError
from shoal.train.loop.config import Config
from shoal.train.loop.reporter import Reporter

_LISTED = 5


class Reading:
    """The streams of ``[data]``, ``train`` and ``eval`` (None without files to evaluate on).

    Raises:
        DataError: all files of one of them are empty.
    """

    def __init__(self, config: Config, ranks: Ranks, reporter: Reporter, on_bad: Reporter) -> None:
        self._config, self._ranks, self._on_bad = config, ranks, on_bad
        self._first_bad: BadRow | None = None
        data, form = config.data, config.data.make_format()
        self.train = self._stream(form, data.train, config.train.epochs, data.shuffle_rows)
        self.eval = self._stream(form, data.eval, 1, 0) if data.eval else None
        for name, stream in (("train", self.train), ("eval", self.eval)):
            if stream is not None and stream.empty:
                self._tell_empty(name, stream, reporter)

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

    def _bad(self, row: BadRow) -> None:
        if self._config.train.strict:
            raise DataError(f"{row}; without --strict such rows are counted and left out")
        if self._first_bad is None:
            self._first_bad = row
            rest = "; the rest of the file is skipped" if row.rest else ""
            self._on_bad.bad_row(where=row.where(), why=row.why + rest)

    def _tell_empty(self, name: str, stream: Stream, reporter: Reporter) -> None:
        empty = f"{_listed(stream.empty)} {'is' if len(stream.empty) == 1 else 'are'} empty"
        if len(stream.empty) == len(stream.files):
            raise DataError(f"[data] {name}: there are no samples, since {empty}")
        reporter.note(f"[data] {name}: {empty}")


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


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return ", ".join(files[:_LISTED]) + more
