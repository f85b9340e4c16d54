"""Eviction policies of a full table: `Lru`, `Slru`, `Lfu`, `EpochLru`, `EpochLfu`, `Score`, and the protocol of custom
ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.config.durations import seconds_of
from shoal.table.config.messages import EvictionConfig

Admit = Literal["always", "if_better"]
_ADMIT = ("always", "if_better")


@dataclass(frozen=True, kw_only=True)
class Evict:
    """The settings of all policies. Only writes count; a lookup changes nothing.

    Raises:
        ConfigError: a setting is invalid.
    """

    min_age: timedelta | str | None = None
    """Rows written more recently than this stay (``"10m"``, ``"2h"``); if no row can leave, a new id is refused."""
    admit: Admit = "always"
    """``"if_better"``: a new id is refused, and counted, if the policy ranks it below the rows it would replace."""

    name: ClassVar[str] = ""
    policy: ClassVar[Any]

    def __post_init__(self) -> None:
        if self.admit not in _ADMIT:
            raise ConfigError(f"admit must be one of {list(_ADMIT)}, got {self.admit!r}")
        self.min_age_s()

    def min_age_s(self) -> int:
        """Seconds."""
        return 0 if self.min_age is None else seconds_of(self.min_age, "min_age")


@dataclass(frozen=True, kw_only=True)
class Lru(Evict):
    """Rows that were written longest ago leave first."""

    name = "lru"
    policy = EvictionConfig.LRU


@dataclass(frozen=True, kw_only=True)
class Slru(Evict):
    """Like `Lru`, but a row that was written only once counts as four times as old, so that it leaves before rows of
    ids that return."""

    name = "slru"
    policy = EvictionConfig.SLRU


@dataclass(frozen=True, kw_only=True)
class Lfu(Evict):
    """Rows that were written least often leave first; among equals the oldest."""

    name = "lfu"
    policy = EvictionConfig.LFU


@dataclass(frozen=True, kw_only=True)
class _Epochs(Evict):
    every: timedelta | str | None = None
    """The length of an epoch, by the times of writes; None: until ``table.next_eviction_epoch()``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every is not None and not self.every_s():
            raise ConfigError(f"every must be at least a second, got {self.every!r}")

    def every_s(self) -> int:
        """Seconds."""
        return 0 if self.every is None else seconds_of(self.every, "every")


@dataclass(frozen=True, kw_only=True)
class EpochLru(_Epochs):
    """Rows last written in an earlier epoch leave first; among them, those written longest ago."""

    name = "epoch_lru"
    policy = EvictionConfig.EPOCH_LRU


@dataclass(frozen=True, kw_only=True)
class EpochLfu(_Epochs):
    """Rows last written in an earlier epoch leave first; among them, those written least often."""

    name = "epoch_lfu"
    policy = EvictionConfig.EPOCH_LFU


@dataclass(frozen=True, kw_only=True)
class Score(Evict):
    """Rows with the lowest score leave first; each write sets it (``scores=``, ``table.set_score``)."""

    name = "score"
    policy = EvictionConfig.SCORE


@runtime_checkable
class EvictionPolicy(Protocol):
    """A custom policy: it scores every row that is written, and rows with the lowest score leave first.

    It can have the attributes ``min_age`` and ``admit`` of `Evict`.
    """

    def scores(self, ids: Tensor, before: Tensor, known: Tensor, *, time_s: int) -> Tensor:
        """The scores of the ids being written: float32 ``[n]``.

        Args:
            ids: int64 ``[n]``, on the table's device; can contain equal ids, which must get equal scores.
            before: float32 ``[n]``, the current scores of their rows; 0 for an id without a row.
            known: bool ``[n]``, which ids have a row.
            time_s: the time of the write, in seconds.
        """
        ...


POLICIES: dict[str, type[Evict]] = {kind.name: kind for kind in (Lru, Slru, Lfu, EpochLru, EpochLfu, Score)}


def as_policy(evict: Any, where: str) -> Any:
    """The policy itself, or the policy of that name.

    Raises:
        ConfigError: ``evict`` is neither a policy nor the name of one.
    """
    if isinstance(evict, str):
        if evict not in POLICIES:
            raise ConfigError(f"{where}: evict must be one of {sorted(POLICIES)}, got {evict!r}")
        return POLICIES[evict]()
    if isinstance(evict, Evict) or (isinstance(evict, EvictionPolicy) and not isinstance(evict, type)):
        return evict
    raise ConfigError(f"{where}: evict must be a policy such as shoal.Lru(), or its name, got {evict!r}")


def policy_settings(policy: Any) -> dict[str, Any]:
    """The fields of `EvictionConfig` that a policy sets."""
    settings = policy if isinstance(policy, Evict) else Score(**own_settings(policy))
    found = {"policy": settings.policy, "min_age_s": settings.min_age_s(), "if_better": settings.admit == "if_better"}
    return {**found, "epoch_s": settings.every_s() if isinstance(settings, _Epochs) else 0}


def own_settings(policy: Any) -> dict[str, Any]:
    """The common settings that a custom policy defines."""
    return {field.name: getattr(policy, field.name) for field in fields(Score) if hasattr(policy, field.name)}
