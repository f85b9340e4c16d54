"""A table's budget: its limits in the configuration, and their native form."""

from __future__ import annotations

from typing import Any

from shoal import _core
from shoal.errors import ConfigError
from shoal.table.budget.policies import Lru, as_policy, policy_settings
from shoal.table.config.durations import bytes_of
from shoal.table.config.messages import EmbeddingHashTableConfig, EvictionConfig

MAX_ROWS = (1 << 32) - 16
LEAST_BYTES = 160 << 10
"""Enough for an empty CPU table and a few rows."""


class MemoryBudget:
    """Bytes that several tables on one device share: ``HashTable(..., max_bytes=budget)`` for each of them.

    A table takes what it needs while memory is left, and evicts its own rows from then on.
    """

    def __init__(self, max_bytes: int | str) -> None:
        self.native = _core.Budget(bytes_of(max_bytes, "max_bytes"))
        self._device: Any = None

    def use_on(self, device: Any, name: str) -> None:
        """Registers a table on ``device``.

        Raises:
            ConfigError: tables on another device use this budget.
        """
        if self._device not in (None, device):
            raise ConfigError(
                f"table {name!r}: all tables of a MemoryBudget must be on one device; this one is used on "
                f"{self._device}, the table is on {device}"
            )
        self._device = device

    @property
    def max_bytes(self) -> int:
        return self.native.limit()

    def memory_bytes(self) -> int:
        """The bytes that the tables take now; never more than ``max_bytes``."""
        return self.native.used()

    def __repr__(self) -> str:
        return f"MemoryBudget({self.max_bytes}, used={self.memory_bytes()})"


def write_budget(config: EmbeddingHashTableConfig, where: str, *, max_rows: Any, max_bytes: Any, evict: Any) -> None:
    """Writes a budget into a table's configuration, if there is a limit.

    Raises:
        ConfigError: a limit is not a number above 0, or there is a policy without a limit.
    """
    if max_rows is None and max_bytes is None:
        if evict is not None:
            raise ConfigError(
                f"{where}: evict={evict!r} needs max_rows or max_bytes: a table without a limit is never full"
            )
        return
    message = EvictionConfig(**policy_settings(as_policy(Lru() if evict is None else evict, where)))
    if max_rows is not None:
        if not isinstance(max_rows, int) or isinstance(max_rows, bool) or not 0 < max_rows <= MAX_ROWS:
            raise ConfigError(f"{where}: max_rows must be 1..{MAX_ROWS}, got {max_rows!r}")
        message.max_rows = max_rows
    if isinstance(max_bytes, MemoryBudget):
        message.max_bytes = max_bytes.max_bytes
    elif max_bytes is not None:
        message.max_bytes = bytes_of(max_bytes, f"{where}: max_bytes")
    config.eviction.CopyFrom(message)


def native_options(config: EmbeddingHashTableConfig, budget: MemoryBudget | None) -> _core.EvictOptions | None:
    """The native form of a configuration's budget; None: it has none."""
    if not config.HasField("eviction"):
        return None
    message = config.eviction
    native = budget.native if budget else _core.Budget(message.max_bytes) if message.max_bytes else None
    return _core.EvictOptions(
        message.policy, message.max_rows, native, message.min_age_s, message.epoch_s, message.if_better
    )
