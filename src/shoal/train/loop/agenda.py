"""`Agenda`: what there is to do after a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from shoal.train.loop.config import Config
from shoal.train.loop.exporting import Exports
from shoal.train.loop.guard.guard import Guard
from shoal.train.loop.publish import Publishing
from shoal.train.loop.saving import Saver


class Wishes(NamedTuple):
    """Actions to take after a step if any rank wants them."""

    stop: bool
    save: bool
    push: bool
    export: bool
    report: bool
    evaluate: bool
    has_more: bool
    """Whether there can be more to read, even if nothing is ready now."""


class Agenda:
    """What this rank wants to do after each step. All ranks then do what some rank wants.

    Args:
        stop: whether the run must end.
        clock: whether this rank starts what is due by time; the first rank does, if the run reads live sources.
    """

    def __init__(
        self, config: Config, saver: Saver | None, exports: Exports, publishing: Publishing, guard: Guard, *,
        stop: Callable[[], bool], clock: bool,
    ) -> None:  # fmt: skip
        self._config, self._saver, self._exports = config, saver, exports
        self._publishing, self._guard = publishing, guard
        self._stop, self._clock = stop, clock
        self._reported = self._evaluated = time.monotonic()

    def after(self, step: int, *, has_more: bool) -> Wishes:
        """What to do when the step after ``step``, which has been computed, is complete."""
        every = self._config.eval.every_steps
        save = self._saver is not None and self._saver.wants(step + 1)
        export, evaluate = self._exports.wants(), self._due(self._evaluated, self._config.eval.every_s)
        pause = save or export or evaluate or bool(every and (step + 1) % every == 0)
        push = self._publishing.wants(pause)
        if push or export:
            allowed = self._guard.allows(step)
            push, export = push and allowed, export and allowed
        return Wishes(
            stop=self._stop() or self._guard.stops, save=save, push=push, export=export,
            report=self._due(self._reported, self._config.out.log_s), evaluate=evaluate, has_more=has_more,
        )  # fmt: skip

    def reported(self) -> None:
        self._reported = time.monotonic()

    def evaluated(self) -> None:
        self._evaluated = time.monotonic()

    def _due(self, last: float, every_s: float) -> bool:
        return self._clock and every_s > 0 and time.monotonic() - last >= every_s
