"""``[serve.guard]``: the bands in which a model must be to be pushed and exported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shoal.errors import ConfigError
from shoal.train.loop.table_config import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """``[serve.guard]``. Without a limit there is no guard. A run that leaves a band stops pushing and exporting."""

    min_auc: float | None = None
    """The least AUC of the last ``window`` samples, each predicted before it was learnt."""
    calibration: tuple[float, float] | None = None
    """The band of the mean prediction over the mean label of the same samples, such as [0.8, 1.25]."""
    max_changed_rows: float | None = None
    """The largest share of all rows that may have changed since the round of pushes before."""
    window: int = 20_000
    """Samples that are judged, the newest ones, once there are as many. Lower it to stop earlier; raise it when chance
    trips the guard."""
    min_samples: int = 100_000
    """Nothing is judged before the run has learnt as many samples, since a new model is not good at once."""
    training: Literal["continue", "stop"] = "continue"
    """What the run does when the guard trips: it learns on without pushing, or it ends with exit code 3."""
    resume: Literal["rollback", "recovered"] = "rollback"
    """When pushes begin again: after `shoal rollback`, or as soon as all values are back in their bands."""

    def __post_init__(self) -> None:
        at_least("serve.guard", self, window=1, min_samples=1, min_auc=0, max_changed_rows=0)
        if self.min_auc is not None and self.min_auc >= 1:
            raise ConfigError(f"[serve.guard] min_auc must be below 1, got {self.min_auc}")
        if self.calibration is not None:
            if len(self.calibration) != 2:
                raise ConfigError(
                    "[serve.guard] calibration must be two numbers, the least and the largest, such as [0.8, 1.25], "
                    f"got {list(self.calibration)}"
                )
            least, most = self.calibration
            if not 0 <= least < most < math.inf:
                raise ConfigError(
                    "[serve.guard] calibration must be two rising numbers >= 0, such as [0.8, 1.25], "
                    f"got {list(self.calibration)}"
                )

    @property
    def active(self) -> bool:
        """Whether there is a limit."""
        return any(limit is not None for limit in (self.min_auc, self.calibration, self.max_changed_rows))
