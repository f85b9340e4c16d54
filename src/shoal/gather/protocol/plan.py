"""The plan of one window, and its distribution over ranks by pure functions of the plan that rank 0 broadcasts."""

import json
import math
import operator
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shoal.errors import ConfigError
from shoal.gather.payload.spec import GradientSpec, canonical_json

MAX_UID = 2**31
_NAME = re.compile(r"[0-9A-Za-z.+-]{1,32}", re.ASCII)


def _integer(value: Any) -> int | None:
    """Convert an int of any library to a plain one; None for anything else, including a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_uid(uid: Any) -> int:
    """Return a peer's number as a plain int, or raise ConfigError."""
    number = _integer(uid)
    if number is None or not 0 <= number < MAX_UID:
        raise ConfigError(f"a UID must be an int in 0..{MAX_UID - 1}, got {uid!r}")
    return number


def _listed(what: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ConfigError(f"{what} must be a list of ints, got {values!r}") from None


def check_window(window: Any) -> int:
    """Return a window's number as a plain int, or raise ConfigError."""
    number = _integer(window)
    if number is None or number < 0:
        raise ConfigError(f"a window must be an int >= 0, got {window!r}")
    return number


def check_name(what: str, value: Any) -> str:
    """Return a version or a key, which become part of paths, or raise ConfigError."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in (".", ".."):
        raise ConfigError(f"{what} must match [0-9A-Za-z.+-]{{1,32}}, got {value!r}")
    return value


def _microseconds(what: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=UTC)
        delta = value - datetime(1970, 1, 1, tzinfo=UTC)
        return (delta.days * 86400 + delta.seconds) * 1_000_000 + delta.microseconds
    number = _integer(value)
    if number is None:
        raise ConfigError(f"{what} must be a datetime or integer microseconds since the epoch, got {value!r}")
    return number


_WIRE = ("window", "gather_uids", "reserve_uids", "time_min_us", "time_max_us", "timeout_s", "version", "key")
"""The keys of a plan's JSON, in the order of the constructor's arguments."""


@dataclass(frozen=True, init=False)
class GatherPlan:
    """One window's peers and limits. Rank 0 broadcasts its plan, as canonical JSON; those of other ranks are ignored.

    Attributes:
        intended: the unique primaries, ascending.
        reserves: in the given order, duplicates removed.
        time_min_us, time_max_us: inclusive bounds of the store's timestamps, microseconds since the epoch.
        timeout_s: time limit of one round of fetches in seconds.
    """

    window: int
    intended: list[int]
    reserves: list[int]
    time_min_us: int | None
    time_max_us: int | None
    timeout_s: float
    version: str
    key: str
    gather_uids: list[int]
    reserve_uids: list[int]

    def __init__(
        self,
        window: int,
        gather_uids: Iterable[int],
        reserve_uids: Iterable[int] = (),
        time_min: datetime | int | None = None,
        time_max: datetime | int | None = None,
        timeout_s: float = 90.0,
        version: str = "0",
        key: str = "gradient",
    ) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("window", check_window(window))
        put("gather_uids", [check_uid(uid) for uid in _listed("GatherPlan: gather_uids", gather_uids)])
        put("reserve_uids", [check_uid(uid) for uid in _listed("GatherPlan: reserve_uids", reserve_uids)])
        put("intended", sorted(set(self.gather_uids)))
        put("reserves", list(dict.fromkeys(self.reserve_uids)))
        put("time_min_us", _microseconds("time_min", time_min))
        put("time_max_us", _microseconds("time_max", time_max))
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e9:
            raise ConfigError(f"GatherPlan: timeout_s must be a positive number of seconds, got {timeout_s!r}")
        put("timeout_s", float(timeout_s))
        put("version", check_name("GatherPlan: version", version))
        put("key", check_name("GatherPlan: key", key))

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        return canonical_json({name: getattr(self, name) for name in _WIRE})

    @classmethod
    def from_json(cls, text: str) -> "GatherPlan":
        try:
            fields = json.loads(text)
            return cls(*(fields[name] for name in _WIRE))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"the text is not the JSON of a gather plan: {error!r}") from error


def assign(uids: Iterable[int], W: int, fetch_ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Return each rank's share, ascending: the unique UIDs, distributed in turn over ``fetch_ranks`` (all ranks).

    Example:
        >>> assign([14, 3, 9, 3, 27, 8, 20], 3)
        [[3, 14], [8, 20], [9, 27]]
    """
    if W < 1:
        raise ConfigError(f"assign: the world size must be at least 1, got {W}")
    ranks = list(fetch_ranks or range(W))
    if any(not 0 <= r < W for r in ranks) or len(set(ranks)) != len(ranks):
        raise ConfigError(f"assign: fetch_ranks must be different ranks in 0..{W - 1}, got {ranks}")
    shares: list[list[int]] = [[] for _ in range(W)]
    for i, uid in enumerate(sorted(set(uids))):
        shares[ranks[i % len(ranks)]].append(uid)
    return shares


def select_reserves(plan: GatherPlan, attempted: Collection[int], accepted: Collection[int]) -> list[int]:
    """Return the next tier-1 list, sorted: one unattempted reserve for each missing peer.

    Example:
        >>> plan = GatherPlan(0, [3, 8, 9, 14, 20, 27], [9, 30, 5, 30, 41])
        >>> select_reserves(plan, attempted={3, 8, 9, 14, 20, 27}, accepted={3, 9, 27})
        [5, 30, 41]
    """
    short = len(plan.intended) - len(set(accepted))
    tried = set(attempted)
    candidates = [uid for uid in plan.reserves if uid not in tried]
    return sorted(candidates[: max(short, 0)])


def chunk_ranges(total: int, W: int) -> list[tuple[int, int]]:
    """Return ``W`` balanced contiguous ranges of ``total`` chunks; the first ``total % W`` have one more."""
    ranges, start = [], 0
    for r in range(W):
        stop = start + total // W + (r < total % W)
        ranges.append((start, stop))
        start = stop
    return ranges


_NONE = ("max_payload_bytes", "not_found_limit", "control_timeout_s")  # the limits that can be None
_REAL = ("retry_interval_s", "late_grace_s", "max_abs_value", "control_timeout_s")  # the other limits are counts


@dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """Settings of a gather. All ranks use rank 0's rounds, ``min_peers`` and ``fetch_ranks``."""

    retry_interval_s: float = 0.5
    late_grace_s: float = 3.0
    """Seconds after ``time_max`` in which a store may still list an object late."""
    max_concurrent_fetches: int = 8
    validate_workers: int = 2
    reserve_rounds: int = 1
    repair_rounds: int = 1
    min_peers: int = 1
    spill: str = "auto"
    """``"disk"``, ``"memory"``, or ``"auto"``: on disk once ``max_resident_bytes`` of payloads are in memory."""
    max_resident_bytes: int = 256 << 20
    max_abs_value: float = 1e4
    max_inflight_bytes: int = 1 << 30
    """Limit of the announced bytes of concurrent downloads on this rank; a larger object is downloaded alone."""
    max_payload_bytes: int | None = None
    """None: ``ceil(1.25 * spec.payload_bytes) + 1 MiB``."""
    not_found_limit: int | None = None
    """Give up after this many absences in a row; None: wait for the round's deadline."""
    fetch_ranks: tuple[int, ...] | None = None
    """Ranks that fetch, for example one per host with a shared network card; None: all."""
    spill_dir: str | os.PathLike[str] | None = None
    """Folder that keeps spilled payloads for a restart; None: a temporary folder, removed with the result."""
    control_timeout_s: float | None = None
    """The longest wait for other ranks; None: ``2 * timeout_s + 60``."""

    def __post_init__(self) -> None:
        if self.fetch_ranks is not None:
            ranks = tuple(_integer(rank) for rank in _listed("GatherConfig: fetch_ranks", self.fetch_ranks))
            if any(rank is None or rank < 0 for rank in ranks):
                raise ConfigError(f"GatherConfig: fetch_ranks must be ints >= 0, got {self.fetch_ranks!r}")
            object.__setattr__(self, "fetch_ranks", ranks)
        if self.spill not in ("disk", "memory", "auto"):
            raise ConfigError(f"GatherConfig: spill must be 'disk', 'memory' or 'auto', got {self.spill!r}")
        least: dict[str, float] = {
            "retry_interval_s": 0, "late_grace_s": 0, "max_concurrent_fetches": 1, "validate_workers": 1,
            "reserve_rounds": 0, "repair_rounds": 0, "min_peers": 0, "max_resident_bytes": 0, "max_abs_value": 0,
            "max_inflight_bytes": 1, "max_payload_bytes": 1, "not_found_limit": 1, "control_timeout_s": 1e-3,
        }  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            number = isinstance(value, int | float if name in _REAL else int) and not isinstance(value, bool)
            if not (number and value >= low) and not (value is None and name in _NONE):
                what = "a number" if name in _REAL else "an int"
                raise ConfigError(f"GatherConfig: {name} must be {what}, at least {low:g}, got {value!r}")

    def payload_limit(self, spec: GradientSpec) -> int:
        if self.max_payload_bytes is not None:
            return self.max_payload_bytes
        return math.ceil(1.25 * spec.payload_bytes) + (1 << 20)

    def control_timeout(self, plan: GatherPlan | None) -> float:
        if self.control_timeout_s is not None:
            return self.control_timeout_s
        return 2 * (plan.timeout_s if isinstance(plan, GatherPlan) else 90.0) + 60
