"""`Progress`: how far a run is."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from shoal.stamps import Stamp, new_run


@dataclass(slots=True)
class Progress:
    """The state of a run that a checkpoint keeps."""

    step: int = 0
    samples: int = 0
    started_s: int = field(default_factory=lambda: int(time.time()))
    best: float | None = None
    """The best evaluation so far; higher is better."""
    since_best: int = 0
    kept_step: int | None = None
    """The step of the best model that has a checkpoint. That checkpoint is kept in addition to the newest ones."""
    kept_value: float | None = None
    """The evaluation of that step; higher is better."""
    restored: bool = False
    """Whether rows and weights are those of ``kept_step`` rather than those of ``step``."""
    epoch: int = 0
    """The epoch whose end has not been evaluated yet."""
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """The name under which parameter servers keep their checkpoints; the first rank's is used."""
    run: int = field(default_factory=new_run, compare=False)
    """The run in `Stamp`s: a new one at each start, the same on all ranks."""
    base: Stamp | None = None
    """The stamp of the checkpoint that this start resumed from; None if it began without one."""

    other_changes: int = 0
    """The number of changes outside of steps, such as removing expired rows. Stamps count them as well."""

    @property
    def stamp(self) -> Stamp:
        """The stamp of the current rows and weights."""
        return Stamp(self.run, self.step + self.other_changes)

    def judge(self, value: float) -> bool:
        """Record an evaluation; return whether it is the best so far. NaN never is."""
        is_best = value > (float("-inf") if self.best is None else self.best)
        if is_best:
            self.best, self.since_best = value, 0
        else:
            self.since_best += 1
        return is_best
