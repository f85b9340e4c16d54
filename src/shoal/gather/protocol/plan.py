"""What one window gathers, and who fetches what: pure functions of the plan that rank 0 broadcasts."""

import json
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shoal.errors import ConfigError
from shoal.gather.payload.spec import canonical_json

MAX_UID = 2**31
_NAME = re.compile(r"[0-9A-Za-z.+-]{1,32}", re.ASCII)


def _integer(value: Any) -> int | None:
    """An int of any library as a plain one; None for what is no int, bools among it."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_uid(uid: Any) -> int:
    """A peer's number as a plain int, or ConfigError."""
    number = _integer(uid)
    if number is None or not 0 <= number < MAX_UID:
        raise ConfigError(f"a UID is an int in 0..{MAX_UID - 1}, got {uid!r}")
    return number


def check_window(window: Any) -> int:
    """A window's number as a plain int, or ConfigError."""
    number = _integer(window)
    if number is None or number < 0:
        raise ConfigError(f"a window is a non-negative int, got {window!r}")
    return number


def check_name(what: str, value: Any) -> str:
    """A version or a key, which become part of paths, or ConfigError."""
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


@dataclass(frozen=True, init=False)
class GatherPlan:
    """One window's peers and limits. Only rank 0's counts; it travels as canonical JSON.

    Attributes:
        intended: the unique primaries, ascending.
        reserves: in the given order, duplicates removed.
        time_min_us, time_max_us: inclusive bounds of the store's timestamps, microseconds since the epoch.
        timeout_s: seconds that one round of fetches may take.
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
        put("gather_uids", [check_uid(uid) for uid in gather_uids])
        put("reserve_uids", [check_uid(uid) for uid in reserve_uids])
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
        return canonical_json(
            {
                "window": self.window,
                "gather_uids": self.gather_uids,
                "reserve_uids": self.reserve_uids,
                "time_min_us": self.time_min_us,
                "time_max_us": self.time_max_us,
                "timeout_s": self.timeout_s,
                "version": self.version,
                "key": self.key,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "GatherPlan":
        try:
            f = json.loads(text)
            return cls(
                f["window"],
                f["gather_uids"],
                f["reserve_uids"],
                f["time_min_us"],
                f["time_max_us"],
                f["timeout_s"],
                f["version"],
                f["key"],
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"not the JSON of a gather plan: {error!r}") from error


def assign(uids: Iterable[int], W: int, fetch_ranks: Sequence[int] | None = None) -> list[list[int]]:
    """Each rank's share, ascending: the unique UIDs dealt out one by one over ``fetch_ranks`` (all ranks).

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
    """The next tier-1 list, sorted: as many reserves as are short, none that was attempted before.

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
    """``W`` balanced contiguous ranges of ``total`` chunks; the first ``total % W`` have one more."""
    ranges, start = [], 0
    for r in range(W):
        stop = start + total // W + (r < total % W)
        ranges.append((start, stop))
        start = stop
    return ranges
