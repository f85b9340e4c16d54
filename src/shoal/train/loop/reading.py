"""What a run reads: the streams of its files, epoch by epoch, and what is said of files and rows that are no good."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.comm.ranks.ranks import Ranks
from shoal.data.live.stream import LiveStream
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
        history = self._stream(form, data.history, config.train.epochs, data.shuffle_rows) if data.history else None
        self.live = self._live(history) if data.live else None
        train = self.live if self.live is not None else history
        assert train is not None
        self.train: Stream | LiveStream = train
        self.epochs = self.live.epochs if self.live is not None else config.train.epochs
        """Passes over the files, and one for what never ends."""
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
        """The names of what never ends."""
        return self.live.sources if self.live is not None else []

    def lag(self, ranks: Ranks) -> dict[str, Any]:
        """How far all ranks are behind: records together, seconds of the one that is furthest. They ask together."""
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
        """What was read up to ``state`` is in a checkpoint that will stay."""
        if self.live is not None:
            self.live.acknowledge(state)

    def forget(self) -> None:
        """Begins without the journal and the dead letters of the run before."""
        if self.live is not None:
            self.live.forget()

    def close(self) -> None:
        if self.live is not None:
            self.live.close()

    def _bad(self, row: BadRow) -> None:
        if self._config.train.strict:
            raise DataError(f"{row}; without --strict such rows are counted and left out")
        if self._first_bad is None:
            self._first_bad = row
            rest = "; the rest of the file is skipped" if row.rest else ""
            self._on_bad.bad_row(where=row.where(), why=row.why + rest)

    def _tell_empty(self, name: str, stream: Stream | LiveStream, reporter: Reporter) -> None:
        empty = f"{_listed(stream.empty)} {'is' if len(stream.empty) == 1 else 'are'} empty"
        if len(stream.empty) == len(stream.files) and stream is not self.live:
            raise DataError(f"[data] {name}: there are no samples, since {empty}")
        reporter.note(f"[data] {name}: {empty}")


class Wishes(NamedTuple):
    """What is to happen after a step, if some rank wants it."""

    stop: bool
    save: bool
    push: bool
    export: bool
    report: bool
    evaluate: bool
    goes_on: bool
    """There may be more to read, even if there was nothing now."""


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

    def parts_of(self, epoch: int, count: int) -> list[Batch | None]:
        """Batches of one step; None for those that are missing at the end of an epoch, or while nothing comes."""
        parts: list[Batch | None] = []
        while len(parts) < count:
            batch = self.next_of(epoch)
            parts.append(batch)
            if batch is not None and not len(batch):  # nothing came for a moment: learn from what there is
                break
        return parts + [None] * (count - len(parts))


def _listed(files: list[str]) -> str:
    more = f" and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return ", ".join(files[:_LISTED]) + more
