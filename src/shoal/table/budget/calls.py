"""`BudgetCalls`: the methods of a table with a budget."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.table.arguments import as_ids
from shoal.table.budget.evicted import Collected, EvictionStats, MissRatioCurve
from shoal.table.budget.policies import Evict
from shoal.table.config.messages import EvictionConfig

EPOCHS = (EvictionConfig.EPOCH_LRU, EvictionConfig.EPOCH_LFU)
"""Policies with epochs."""


class BudgetCalls:
    """The methods of `HashTable` that need a budget; tables without one raise ConfigError."""

    name: str
    table_config: Any
    _native: Any
    own_policy: Any = None
    """The user's `EvictionPolicy`, which scores rows; None: one of the library's."""

    @property
    def has_budget(self) -> bool:
        """Whether the table has a limit, and evicts rows when it is full."""
        return self.table_config.HasField("eviction")

    @property
    def max_rows(self) -> int | None:
        """The maximum number of rows; None: unlimited."""
        return self.table_config.eviction.max_rows or None

    @property
    def max_bytes(self) -> int | None:
        """The maximum number of bytes of index and rows; None: unlimited."""
        return self.table_config.eviction.max_bytes or None

    def _check_budget(self, call: str) -> None:
        if not self.has_budget:
            raise ConfigError(f"table {self.name!r}: {call} needs a table with max_rows or max_bytes")

    def pin(self, ids: Tensor) -> None:
        """Protects the rows of these ids, also rows created later, from eviction until `unpin`.

        Expiry and `erase` still remove them.
        """
        self._check_budget("pin")
        ids = as_ids(ids, self.name)
        _core.pin(self._native, ids.data_ptr(), ids.numel())

    def unpin(self, ids: Tensor) -> None:
        """Undoes `pin`."""
        self._check_budget("unpin")
        ids = as_ids(ids, self.name)
        _core.unpin(self._native, ids.data_ptr(), ids.numel())

    def pinned(self) -> Tensor:
        """The pinned ids, int64, sorted."""
        self._check_budget("pinned")
        return torch.tensor(sorted(_core.pinned(self._native)), dtype=torch.int64, device="cpu")

    def collect_evicted(self, limit: int = 1 << 20) -> Collected:
        """Collects the rows evicted inside a ``with``: ids, weights, states.

        At most ``limit`` rows are kept until `take`; further ones are only counted.

        >>> import shoal, torch
        >>> table = shoal.HashTable(dim=2, max_rows=1, initializer="zeros")
        >>> with table.collect_evicted() as evicted:
        ...     for id in (7, 8):
        ...         _ = table.assign(torch.tensor([id]), torch.ones(1, 2))
        >>> evicted.take().ids
        tensor([7])
        """
        self._check_budget("collect_evicted")
        if limit < 0:
            raise ConfigError(f"table {self.name!r}: limit must be >= 0, got {limit}")
        return self._collector(limit)

    def _collector(self, limit: int) -> Any:
        return Collected(self, limit)

    def eviction_stats(self) -> EvictionStats:
        """Counts of evicted rows and their ages, of refused ids, and of writes that found their row."""
        self._check_budget("eviction_stats")
        return EvictionStats.of_counters(_core.eviction_counters(self._native))

    def miss_ratio_curve(self) -> MissRatioCurve:
        """The estimated miss ratios of `Lru` tables of other sizes, from the ids written so far."""
        self._check_budget("miss_ratio_curve")
        rows, misses, sampled = _core.miss_ratio_curve(self._native)
        return MissRatioCurve(rows, misses, sampled)

    def next_eviction_epoch(self) -> int:
        """Starts the next epoch of `EpochLru` or `EpochLfu`, and returns its number."""
        self._check_epochs()
        return _core.next_eviction_epoch(self._native)

    def set_score(self, score: float | None) -> None:
        """Sets the score of rows that are written without ``scores=`` from now on.

        None: existing rows keep their scores, and new ones get 0.
        """
        self._check_scores()
        try:
            number = 0.0 if score is None else float(score)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ConfigError(f"table {self.name!r}: the score must be a number and not NaN, got {score!r}")
        self._set_score(number, score is not None)

    def _set_score(self, score: float, given: bool) -> None:
        _core.set_eviction_score(self._native, score, given)

    def budget_report(self) -> dict[str, Any]:
        """The entry of the budget in a checkpoint's manifest, as JSON: limits, counts and the miss-ratio curve."""
        if not self.has_budget:
            return {}
        limits = {"max_rows": self.max_rows, "max_bytes": self.max_bytes}
        curve = self.miss_ratio_curve().to_json()
        return {"budget": {**limits, **self.eviction_stats().to_json(), "curve": curve}}

    def _eviction_state(self) -> dict[str, Any]:
        """The state of the budget in a checkpoint, as JSON."""
        curve = self.miss_ratio_curve()
        return {
            "counters": list(_core.eviction_counters(self._native)),
            "epoch": _core.eviction_epoch(self._native),
            "pinned": self.pinned().tolist(),
            "curve": curve.to_json(),
        }

    def _set_eviction_state(self, state: dict[str, Any]) -> None:
        _core.set_eviction_counters(self._native, state["counters"])
        _core.set_eviction_epoch(self._native, state["epoch"])
        self.pin(torch.tensor(state["pinned"], dtype=torch.int64, device="cpu"))

    def _check_epochs(self) -> None:
        self._check_budget("next_eviction_epoch")
        if self.table_config.eviction.policy not in EPOCHS:
            raise ConfigError(f"table {self.name!r}: next_eviction_epoch needs evict=EpochLru() or EpochLfu()")

    def _check_scores(self) -> None:
        if self.table_config.eviction.policy != EvictionConfig.SCORE or self.own_policy is not None:
            raise ConfigError(f"table {self.name!r}: scores need a budget with evict=Score()")

    def _scores(self, ids: Tensor, scores: Any, seconds: int) -> Tensor | None:
        """The score of each id that is about to be written; None: scores are not set."""
        if scores is None:
            return None if self.own_policy is None else self._own_scores(ids, seconds)
        self._check_scores()
        given = torch.as_tensor(scores, dtype=torch.float32, device=ids.device)
        if given.dim() == 0:
            given = given.expand(ids.numel())
        if given.numel() != ids.numel():
            raise ConfigError(
                f"table {self.name!r}: scores must have one number per id, {ids.numel()}, or be one number, "
                f"got {given.numel()}"
            )
        self._refuse_nan(given)
        return given.reshape(-1).contiguous()

    def _refuse_nan(self, scores: Tensor) -> None:
        if bool(scores.isnan().any()):
            raise ConfigError(f"table {self.name!r}: scores must not be NaN")

    def _own_scores(self, ids: Tensor, seconds: int) -> Tensor:
        before, known = self._scores_before(ids)
        scores = self.own_policy.scores(ids, before, known, time_s=int(seconds))
        if not isinstance(scores, Tensor) or scores.numel() != ids.numel():
            raise ConfigError(
                f"table {self.name!r}: {type(self.own_policy).__name__}.scores must return a tensor of "
                f"{ids.numel()} numbers, one per id"
            )
        return scores.to(ids.device, torch.float32).reshape(-1).contiguous()

    def _scores_before(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The current scores of ids, 0 for an id without a row, and which ids have a row."""
        keys = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.policy_keys(self._native, ids.data_ptr(), ids.numel(), keys.data_ptr())
        known = keys >= 0
        return torch.where(known, code_scores(keys), 0.0), known


def code_scores(codes: Tensor) -> Tensor:
    """The scores that codes represent; codes are integers in the same order (csrc/table/budget/policy.h)."""
    negative = codes < 1 << 31
    bits = torch.where(negative, ~codes & 0xFFFFFFFF, codes & 0x7FFFFFFF)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def own_policy(evict: Any) -> Any:
    """``evict`` if it is the user's own policy, which a configuration cannot contain; else None."""
    return None if evict is None or isinstance(evict, str | Evict) else evict
