"""`Guard`: stops the pushes and exports of a run when it leaves its bands, and remembers that over restarts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shoal.durable import write_whole
from shoal.errors import DataError
from shoal.metrics import emit_counter
from shoal.train.loop.guard.config import GuardConfig
from shoal.train.loop.guard.judge import Measures, judge, measure

FILE = "guard.json"
"""In ``[out] dir`` while the guard has tripped: why, when, and which checkpoints there were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """What made a guard stop the pushes."""

    reason: str
    step: int
    at: float
    """Unix seconds."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the whole checkpoints at that moment; they stay until the run is rolled back."""
    measures: dict[str, Any] = field(default_factory=dict)


def read_trip(folder: str | None) -> Trip | None:
    """The trip that a run in ``[out] dir`` is in; None where its guard has not tripped."""
    if folder is None:
        return None
    path = os.path.join(folder, FILE)
    try:
        with open(path) as file:
            content = json.load(file)
        return Trip(**{name: content[name] for name in Trip.__dataclass_fields__ if name in content})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it if pushes may begin again") from None


def clear_trip(folder: str) -> None:
    """Forgets the trip of a run: pushes begin again at its next start."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, FILE))


class Guard:
    """Asked before each push and each export of the first rank, whose samples and rows it judges.

    Args:
        limits: the bands; without one everything is allowed.
        learnt: samples of the run so far.
        recent: the newest predictions: (logits, labels) of at most so many samples.
        changed_rows: the share of rows that changed since the last round; None where that is not known.
        folder: ``[out] dir``, where a trip is remembered.
        checkpoints: the steps of the whole checkpoints now.
        alert: is told of a trip, and of its end.
        every_s: values that left their bands are looked at again after this time.
    """

    def __init__(
        self,
        limits: GuardConfig,
        *,
        learnt: Callable[[], int],
        recent: Callable[[int], tuple[np.ndarray, np.ndarray]],
        changed_rows: Callable[[], float | None] = lambda: None,
        folder: str | None = None,
        checkpoints: Callable[[], list[int]] = list,
        alert: Callable[[str], None] = lambda text: None,
        every_s: float = 1.0,
    ) -> None:
        self.limits, self._folder, self._every_s = limits, folder, every_s
        self._learnt = learnt
        self._recent, self._changed_rows, self._checkpoints, self._alert = recent, changed_rows, checkpoints, alert
        self._next_at = 0.0
        self.trip: Trip | None = read_trip(folder) if limits.active else None
        if self.trip is not None:
            alert(f"pushes and exports are still stopped, since step {self.trip.step:,}: {self.trip.reason}{self._how}")

    @property
    def stops(self) -> bool:
        """Whether the run is to end."""
        return self.trip is not None and self.limits.training == "stop"

    @property
    def pinned(self) -> list[int]:
        """Checkpoints that must stay, for a roll-back."""
        return [] if self.trip is None else self.trip.checkpoints

    @property
    def _how(self) -> str:
        if self.limits.resume == "recovered":
            return "; they begin again when the values are back in their bands"
        return "; `shoal rollback CONFIG` brings an earlier checkpoint back and begins again"

    def allows(self, step: int) -> bool:
        """Whether what was learnt up to a step may be pushed and exported."""
        if not self.limits.active:
            return True
        if self.trip is not None and (self.limits.resume == "rollback" or time.monotonic() < self._next_at):
            return False
        found = measure(self._learnt(), *self._recent(self.limits.window), self._changed_rows())
        reason = judge(self.limits, found)
        self._next_at = time.monotonic() + self._every_s
        if reason and self.trip is None:
            self._tripped(reason, step, found)
        elif not reason and self.trip is not None:
            self._recovered(step)
        return self.trip is None

    def _tripped(self, reason: str, step: int, found: Measures) -> None:
        self.trip = Trip(
            reason=reason, step=step, at=time.time(), checkpoints=self._checkpoints(), measures=asdict(found)
        )
        if self._folder is not None:
            write_whole(os.path.join(self._folder, FILE), json.dumps(_plain(asdict(self.trip)), indent=1))
        emit_counter("shoal_train_guard_trips", 1)
        end = "the run ends" if self.stops else "training goes on"
        self._alert(f"pushes and exports stopped at step {step:,}: {reason}; replicas keep what they have, "
                    f"{end}{self._how}")  # fmt: skip

    def _recovered(self, step: int) -> None:
        self.trip = None
        if self._folder is not None:
            clear_trip(self._folder)
        self._alert(f"pushes and exports begin again at step {step:,}: all values are back in their bands")


def _plain(value: Any) -> Any:
    """As JSON has it, which has no infinities."""
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
