"""`Guard`: stops the pushes and exports of a run that violates its limits, also after a restart."""

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
"""The file in ``[out] dir`` that holds the `Trip` while the guard has tripped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Why and when a guard stopped the pushes."""

    reason: str
    step: int
    at: float
    """Unix seconds."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the complete checkpoints at that moment; they are kept until the run is rolled back."""
    measures: dict[str, Any] = field(default_factory=dict)


def read_trip(folder: str | None) -> Trip | None:
    """The trip of the run in ``[out] dir``; None if its guard has not tripped."""
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
        raise DataError(f"{path} cannot be read ({error}); remove it if pushes may resume") from None


def clear_trip(folder: str) -> None:
    """Forget the trip of a run, so that pushes resume at its next start."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, FILE))


class Guard:
    """Decides before each push and export on the first rank, from the samples and rows of that rank.

    Args:
        limits: the bands; without any, everything is allowed.
        learnt: returns the number of samples of the run so far.
        recent: returns the newest predictions, (logits, labels) of at most the given number of samples.
        changed_rows: returns the share of rows that changed since the last round; None if unknown.
        folder: ``[out] dir``, where a trip is stored.
        checkpoints: returns the steps of the complete checkpoints.
        alert: called with a text when the guard trips or recovers.
        every_s: how long to wait before values outside their bands are checked again.
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
        """Whether the run must end."""
        return self.trip is not None and self.limits.training == "stop"

    @property
    def pinned(self) -> list[int]:
        """Steps whose checkpoints must be kept for a roll-back."""
        return [] if self.trip is None else self.trip.checkpoints

    @property
    def _how(self) -> str:
        if self.limits.resume == "recovered":
            return "; they resume when the values are back in their bands"
        return "; run `shoal rollback CONFIG` to return to an earlier checkpoint and resume them"

    def allows(self, step: int) -> bool:
        """Whether the model of a step may be pushed and exported."""
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
        end = "the run ends" if self.stops else "training continues"
        self._alert(f"pushes and exports stopped at step {step:,}: {reason}; replicas keep their current model, "
                    f"{end}{self._how}")  # fmt: skip

    def _recovered(self, step: int) -> None:
        self.trip = None
        if self._folder is not None:
            clear_trip(self._folder)
        self._alert(f"pushes and exports resume at step {step:,}: all values are back in their bands")


def _plain(value: Any) -> Any:
    """``value`` with NaN and infinities as text, because JSON does not have them."""
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
