"""`Rounds`: batches with their located ids, the same number of them on every rank."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from shoal.train.ahead.batches import Mover, tensors_of
from shoal.train.ahead.locator import Entry, Locator, tensors_of_entries
from shoal.train.ahead.uneven import CANNOT_JOIN, ENDED, FAILED, HAS, Agreement, without_samples

_TICK_S = 0.2


@dataclass(slots=True)
class Round:
    """A batch that is ready for its step."""

    number: int
    batch: Any
    section: int
    joined: bool
    """Whether this batch has no samples, because this rank has run out of batches."""
    entries: list[Entry] = field(default_factory=list)
    ready: Any = None
    """The CUDA event to wait for before data prepared on another stream is used; None if there is none."""

    def read(self) -> Round:
        """Read the rows for the forward."""
        for entry in self.entries:
            entry.located.read()
        return self

    def arrive(self, mover: Mover) -> None:
        """Make the step's stream wait for data prepared on another stream."""
        if self.ready is not None:
            mover.arrived(self.ready, chain(tensors_of(self.batch), tensors_of_entries(self.entries)))


class Held:
    """Wraps a batch, which can itself be None; an unwrapped None means that there are no more batches."""

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class Rounds:
    """Turns batches that another thread has read into rounds. It can be iterated over once.

    Args:
        batches: the batches of this rank.
        section: returns a batch's section, a number that never falls, such as the epoch. Ranks finish a section
            before they start the next.
        empty_batch: makes a batch without samples from another batch.
        in_step: whether all ranks, or all runs, must locate the same batches ahead.
    """

    def __init__(
        self,
        batches: Iterator[Held],
        locator: Locator,
        agreement: Agreement,
        mover: Mover,
        *,
        section: Callable[[Any], int],
        empty_batch: Callable[[Any], Any] | None,
        in_step: bool,
    ) -> None:
        self._batches = batches
        self._locator, self._agreement, self._mover = locator, agreement, mover
        self._section, self._empty = section, empty_batch
        self._in_step = in_step
        self._closed = threading.Event()
        self._first_done = threading.Event()

    def close(self) -> None:
        """Stop making rounds."""
        self._closed.set()

    def first_done(self) -> None:
        """Report that the step of the first batch has ended."""
        self._first_done.set()

    def __iter__(self) -> Iterator[Round]:
        held: Held | None = None
        last: Held | None = None
        ended = False
        number = 0
        try:
            while not self._closed.is_set():
                if held is None and not ended:
                    held = self._next()
                    ended = held is None
                joins = last is not None or self._empty is not None
                status = HAS if held is not None else ENDED if joins else CANNOT_JOIN
                section = 0 if held is None else self._section(held.batch)
                verdict = self._agreement.next(status, section)
                if not verdict.proceeds:
                    return
                if verdict.use_mine:
                    assert held is not None
                    last, held = held, None
                    made = Round(number, last.batch, verdict.section, False)
                else:
                    made = Round(number, self._without_samples(last), verdict.section, True)
                self._locate(made)
                yield made
                if self._in_step and not self._locator.learned:
                    self._wait_for_first()
                number += 1
        except GeneratorExit:
            self._leave()
            raise
        self._leave()

    def _next(self) -> Held | None:
        try:
            return next(self._batches, None)
        except BaseException:
            with contextlib.suppress(Exception):
                self._agreement.next(FAILED)
            raise

    def _without_samples(self, last: Held | None) -> Any:
        if self._empty is not None:
            return self._empty(None if last is None else last.batch)
        assert last is not None  # otherwise this rank has sent CANNOT_JOIN
        return without_samples(last.batch, self._locator.offsets(last.batch))

    def _locate(self, made: Round) -> None:
        try:
            if self._locator.learned:
                made.entries = self._locator.locate(made.batch)
        except Exception as error:
            error.add_note(f"Raised while locating the ids of batch {made.number} ahead of its step")
            raise
        made.ready = self._mover.mark()

    def _wait_for_first(self) -> None:
        while not self._first_done.wait(_TICK_S):
            if self._closed.is_set():
                return

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            self._agreement.leave()
