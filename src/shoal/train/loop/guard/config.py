"""``[serve.guard]``: the limits that a model must meet to be pushed and exported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shoal.errors import ConfigError
from shoal.train.loop.table_config import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """``[serve.guard]``: a run that violates a limit stops pushing and exporting. Without limits there is no guard."""

    min_auc: float | None = None
    """The lowest allowed AUC of the last ``window`` samples, each predicted before training on it."""
    calibration: tuple[float, float] | None = None
    """The band for the mean prediction over the mean label of the same samples, such as [0.8, 1.25]."""
    max_changed_rows: float | None = None
    """The largest share of all rows that may have changed since the last round of pushes."""
    window: int = 20_000
    """The number of newest samples that are judged, once there are that many. Lower it to stop earlier; raise it when
    the guard trips by chance."""
    min_samples: int = 100_000
    """The guard does nothing before the run has trained on this many samples, because a new model is not good yet."""
    training: Literal["continue", "stop"] = "continue"
    """When the guard trips, the run continues to train without pushing, or ends with exit code 3."""
    resume: Literal["rollback", "recovered"] = "rollback"
    """When pushes resume: after `shoal rollback`, or as soon as all values are back in their bands."""

    def __post_init__(self) -> None:
        at_least("serve.guard", self, window=1, min_samples=1, min_auc=0, max_changed_rows=0)
        if self.min_auc is not None and self.min_auc >= 1:
            raise ConfigError(f"[serve.guard] min_auc must be below 1, got {self.min_auc}")
        if self.calibration is not None:
            if len(self.calibration) != 2:
                raise ConfigError(
                    "[serve.guard] calibration must be two numbers, the lowest and the highest, such as [0.8, 1.25], "
                    f"got {list(self.calibration)}"
                )
            least, most = self.calibration
            if not 0 <= least < most < math.inf:
                raise ConfigError(
                    "[serve.guard] calibration must be two increasing numbers >= 0, such as [0.8, 1.25], "
                    f"got {list(self.calibration)}"
                )

    @property
    def active(self) -> bool:
        """Whether there is a limit."""
        return any(limit is not None for limit in (self.min_auc, self.calibration, self.max_changed_rows))
