"""The settings of a gather, all with defaults that suit a node with a few ranks."""

import math
import os
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.protocol.plan import GatherPlan

_REAL = ("retry_interval_s", "late_grace_s", "max_abs_value", "control_timeout_s")  # the other limits are counts


@dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """How a gather fetches, checks and waits. Rounds, ``min_peers`` and ``fetch_ranks`` are rank 0's on every rank."""

    retry_interval_s: float = 0.5
    late_grace_s: float = 3.0
    """Seconds after ``time_max`` in which an absent object may still be listed late by its store."""
    max_concurrent_fetches: int = 8
    validate_workers: int = 2
    reserve_rounds: int = 1
    repair_rounds: int = 1
    min_peers: int = 1
    spill: str = "auto"
    """``"disk"``, ``"memory"``, or ``"auto"``: to disk once ``max_resident_bytes`` of payloads lie in memory."""
    max_resident_bytes: int = 256 << 20
    max_abs_value: float = 1e4
    max_inflight_bytes: int = 1 << 30
    """Announced bytes of the downloads under way on this rank; a larger object goes alone."""
    max_payload_bytes: int | None = None
    """None: ``ceil(1.25 * spec.payload_bytes) + 1 MiB``."""
    not_found_limit: int | None = None
    """Gives up after so many absences in a row; None waits for the round's deadline."""
    fetch_ranks: tuple[int, ...] | None = None
    """Ranks that fetch, say one per host that shares a network card; None is all."""
    spill_dir: str | os.PathLike[str] | None = None
    """Keeps spilled payloads for a restart; None is a temporary folder that goes with the result."""
    control_timeout_s: float | None = None
    """The longest wait for other ranks; None: ``2 * timeout_s + 60``."""

    def __post_init__(self) -> None:
        if self.fetch_ranks is not None:
            object.__setattr__(self, "fetch_ranks", tuple(int(r) for r in self.fetch_ranks))
        if self.spill not in ("disk", "memory", "auto"):
            raise ConfigError(f"GatherConfig: spill is 'disk', 'memory' or 'auto', got {self.spill!r}")
        least: dict[str, float] = {
            "retry_interval_s": 0, "late_grace_s": 0, "max_concurrent_fetches": 1, "validate_workers": 1,
            "reserve_rounds": 0, "repair_rounds": 0, "min_peers": 0, "max_resident_bytes": 0, "max_abs_value": 0,
            "max_inflight_bytes": 1, "max_payload_bytes": 1, "not_found_limit": 1, "control_timeout_s": 1e-3,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            number = isinstance(value, int | float if name in _REAL else int) and not isinstance(value, bool)
            if value is not None and not (number and value >= low):
                what = "a number" if name in _REAL else "an int"
                raise ConfigError(f"GatherConfig: {name} must be {what}, at least {low:g}, got {value!r}")

    def payload_limit(self, spec: GradientSpec) -> int:
        if self.max_payload_bytes is not None:
            return self.max_payload_bytes
        return math.ceil(1.25 * spec.payload_bytes) + (1 << 20)

    def control_timeout(self, plan: GatherPlan | None) -> float:
        if self.control_timeout_s is not None:
            return self.control_timeout_s
        return 2 * (plan.timeout_s if plan is not None else 90.0) + 60
