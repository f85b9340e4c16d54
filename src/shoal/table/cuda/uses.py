"""`Uses`: which rows leave a cache first, by the eviction policies of budgets. In a cache, reads count too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.budget.policies import EpochLfu, EpochLru, Evict, Lfu, Score, Slru, as_policy, own_settings
from shoal.table.cuda.budgets.budget import score_codes
from shoal.table.cuda.kernels.policy import ONCE

_NEVER = 1 << 62


class Uses:
    """The eviction policy's state of each row of a cache, by row number. ``evict`` is a policy or its name.

    Raises:
        ConfigError: caches do not support the policy.
    """

    def __init__(self, evict: Any, where: str) -> None:
        self.policy = as_policy(evict, where)
        settings = self.policy if isinstance(self.policy, Evict) else Score(**own_settings(self.policy))
        if isinstance(self.policy, Score) or settings.min_age is not None or settings.admit != "always":
            raise ConfigError(
                f"{where}: evict of a cache must be Lru(), Slru(), Lfu(), EpochLru(), EpochLfu() or an object with a "
                f"method scores, without min_age and admit; every row of a batch must fit into the cache. Got {evict!r}"
            )
        self._every_s = self.policy.every_s() if isinstance(self.policy, EpochLru | EpochLfu) else 0
        self.has_epochs = isinstance(self.policy, EpochLru | EpochLfu)
        self.call = 0
        self.epoch = 1

    def start(self, rows: int, device: torch.device) -> None:
        """Allocates the state for ``rows`` rows. Row 0 is never used."""
        self._last = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # the last call that used the row
        self._counts = torch.zeros_like(self._last) if isinstance(self.policy, Slru | Lfu | EpochLfu) else None
        self._epochs = torch.zeros_like(self._last) if self.has_epochs else None
        own = not isinstance(self.policy, Evict)
        self._scores = torch.zeros(rows + 1, dtype=torch.float32, device=device) if own else None

    def begin(self, time_s: int) -> None:
        """Starts the next call; the latest write was at ``time_s``."""
        self.call += 1
        self._time_s = time_s
        if self._every_s:
            self.epoch = max(self.epoch, time_s // self._every_s)

    def note(self, ids: Tensor, rows: Tensor, *, new: bool) -> None:
        """Records that the rows of ids are used now, ``new`` in the cache or not; -1: no row. Equal ids count once."""
        at = rows.clamp(min=0).long()
        self._last[at] = self.call
        if self._counts is not None:
            self._counts[at] = 1 if new else self._counts[at] + 1
        if self._epochs is not None:
            self._epochs[at] = self.epoch
        if self._scores is not None:
            known = torch.zeros_like(rows, dtype=torch.bool) if new else rows >= 0
            before = torch.where(known, self._scores[at], 0.0)
            self._scores[at] = self.policy.scores(ids, before, known, time_s=self._time_s).to(before)

    def order(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rank of each row, int64 (lowest leaves first), and how many can leave: all but the current call's."""
        at = rows.long()
        last = self._last[at]
        order = last
        if self._scores is not None:
            order = score_codes(self._scores[at])
        elif self._epochs is not None:
            order = (self._epochs[at] << 40) + (last if self._counts is None else self._counts[at])
        elif isinstance(self.policy, Slru) and self._counts is not None:
            age = self.call - last
            order = (1 << 40) - torch.where(self._counts[at] > 1, age, age * ONCE.value)
        elif self._counts is not None:
            order = (self._counts[at] << 40) + last
        idle = last < self.call
        return torch.where(idle, order, _NEVER), int(idle.sum())
