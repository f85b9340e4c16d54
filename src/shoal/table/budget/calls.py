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
"""Policies that have epochs."""


class BudgetCalls:
    """What `HashTable` has for its budget. Tables without one refuse these calls."""

    name: str
    table_config: Any
    _native: Any
    own_policy: Any = None
    """A policy of the user's, which gives rows their numbers."""

    @property
    def has_budget(self) -> bool:
        """Whether rows leave when the table is full."""
        return self.table_config.HasField("eviction")

    @property
    def max_rows(self) -> int | None:
        """Rows that the table may have; None: unlimited."""
        return self.table_config.eviction.max_rows or None

    @property
    def max_bytes(self) -> int | None:
        """Bytes that index and rows may take; None: unlimited."""
        return self.table_config.eviction.max_bytes or None

    def _check_budget(self, call: str) -> None:
        if not self.has_budget:
            raise ConfigError(f"table {self.name!r}: {call} needs a table with max_rows or max_bytes")

    def pin(self, ids: Tensor) -> None:
        """Keeps the rows of these ids, now or once they have one, until `unpin`. Expiry and `erase` remove them."""
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
        """Keeps what leaves the table inside a ``with``: ids, weights, states.

        At most ``limit`` rows are kept until they are taken; further ones are counted.

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
        return Collected(self, limit)

    def eviction_stats(self) -> EvictionStats:
        """How many rows left, how old they were, how many ids were refused, and how many writes found their row."""
        self._check_budget("eviction_stats")
        return EvictionStats.of_counters(_core.eviction_counters(self._native))

    def miss_ratio_curve(self) -> MissRatioCurve:
        """What `Lru` tables of other sizes would miss, estimated from the ids that were written so far."""
        self._check_budget("miss_ratio_curve")
        rows, misses, sampled = _core.miss_ratio_curve(self._native)
        return MissRatioCurve(rows, misses, sampled)

    def next_eviction_epoch(self) -> int:
        """Starts an epoch of `EpochLru` or `EpochLfu`, and returns its number."""
        self._check_epochs()
        return _core.next_eviction_epoch(self._native)

    def set_score(self, score: float | None) -> None:
        """The score of rows that are written from now on without ``scores=``.

        None: rows keep the score that they have, and new ones get 0.
        """
        self._check_scores()
        try:
            number = 0.0 if score is None else float(score)
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise ConfigError(f"table {self.name!r}: the score must be a number and not NaN, got {score!r}")
        _core.set_eviction_score(self._native, number, score is not None)

    def budget_report(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the budget, as JSON: limits, counts and the miss-ratio curve."""
        if not self.has_budget:
            return {}
        limits = {"max_rows": self.max_rows, "max_bytes": self.max_bytes}
        curve = self.miss_ratio_curve().to_json()
        return {"budget": {**limits, **self.eviction_stats().to_json(), "curve": curve}}

    def _eviction_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
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
        """The score of each id that is about to be written; None: as they are."""
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
        """The numbers that the rows of ids have, 0 where there is none, and which ids have a row."""
        keys = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        _core.policy_keys(self._native, ids.data_ptr(), ids.numel(), keys.data_ptr())
        known = keys >= 0
        return torch.where(known, code_scores(keys), 0.0), known


def code_scores(codes: Tensor) -> Tensor:
    """Floats of integers that have their order (csrc/table/budget/policy.h)."""
    negative = codes < 1 << 31
    bits = torch.where(negative, ~codes & 0xFFFFFFFF, codes & 0x7FFFFFFF)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def own_policy(evict: Any) -> Any:
    """The policy itself where it is the user's, which no configuration can hold."""
    return None if evict is None or isinstance(evict, str | Evict) else evict
