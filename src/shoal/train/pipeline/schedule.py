"""Split a model into pipeline stages, and order a stage's work on micro-batches."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from shoal.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class PipelineParallelConfig:
    """Stages, micro-batches per step, and the order of work (``gpipe`` or ``1f1b``)."""

    num_stages: int
    num_micro_batches: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        counts = (self.num_stages, self.num_micro_batches)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
            raise ConfigError(
                "PipelineParallelConfig: num_stages and num_micro_batches must be ints, at least 1, got "
                f"{self.num_stages!r} and {self.num_micro_batches!r}"
            )
        _check_schedule(self.schedule)


@dataclass(frozen=True)
class PipelineStage:
    """Layers ``[start_layer, end_layer)`` on stage ``rank``."""

    start_layer: int
    end_layer: int
    rank: int


def _check_schedule(kind: str) -> None:
    if kind not in SCHEDULES:
        raise ConfigError(f"pipeline schedule must be one of {', '.join(SCHEDULES)}, got {kind!r}")


def _check_counts(num_layers: int, num_stages: int, who: str) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{who}: num_stages must be at least 1 and at most the number of layers ({num_layers}), got {num_stages}"
        )


def _stages(cuts: Sequence[int]) -> list[PipelineStage]:
    return [PipelineStage(a, b, i) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def split_into_stages(num_layers: int, num_stages: int) -> list[PipelineStage]:
    """Contiguous stages whose sizes differ by at most one, larger first.

    Example:
        >>> [(s.start_layer, s.end_layer) for s in split_into_stages(11, 4)]
        [(0, 3), (3, 6), (6, 9), (9, 11)]
    """
    from shoal.train.sharding import shard_sizes

    _check_counts(num_layers, num_stages, "split_into_stages")
    return _stages(list(itertools.accumulate(shard_sizes(num_layers, num_stages), initial=0)))


def split_by_cost(costs: Sequence[float], num_stages: int) -> list[PipelineStage]:
    """Contiguous, non-empty stages that minimize the largest sum of ``costs`` of a stage; ties go to the earliest cuts.

    Sums are exact on the decimal form of the costs, so 0.1 + 0.2 ties with 0.3. Takes ``O(S * L^2)`` time for S stages
    and L layers.
    """
    count = len(costs)
    _check_counts(count, num_stages, "split_by_cost")
    prefix = list(itertools.accumulate(_as_integers(costs), initial=0))
    # best[s][i]: the smallest possible largest sum when layers i.. form s stages
    best: list[list[float]] = [[math.inf] * (count + 1) for _ in range(num_stages + 1)]
    best[0][count] = 0
    for s in range(1, num_stages + 1):
        for i in range(count - s, -1, -1):
            best[s][i] = min(max(prefix[j] - prefix[i], best[s - 1][j]) for j in range(i + 1, count - s + 2))
    limit, cuts = best[num_stages][0], [0]
    for s in range(num_stages, 0, -1):
        i = cuts[-1]
        fits = (j for j in range(i + 1, count - s + 2) if max(prefix[j] - prefix[i], best[s - 1][j]) <= limit)
        cuts.append(next(fits))
    return _stages(cuts)


def _as_integers(costs: Sequence[float]) -> list[int]:
    """The costs as multiples of one common unit."""
    try:
        exact = [Fraction(c) if isinstance(c, int) else Fraction(repr(float(c))) for c in costs]
    except (TypeError, ValueError):
        exact = []
    if len(exact) != len(costs) or any(c < 0 for c in exact):
        raise ConfigError(f"split_by_cost: costs must be finite numbers >= 0, got {list(costs)}")
    unit = math.lcm(*(c.denominator for c in exact))
    return [int(c * unit) for c in exact]


def schedule_actions(kind: str, num_stages: int, num_micro_batches: int, stage: int) -> list[str]:
    """The actions of one stage in one step: ``F<i>`` (forward) and ``B<i>`` (backward) of micro-batch i.

    Example:
        >>> " ".join(schedule_actions("1f1b", 3, 4, 0))
        'F0 F1 F2 B0 F3 B1 B2 B3'
    """
    config = PipelineParallelConfig(num_stages, num_micro_batches, kind)
    if not 0 <= stage < num_stages:
        raise ConfigError(f"schedule_actions: stage must be in 0..{num_stages - 1}, got {stage}")
    total = config.num_micro_batches
    forward, backward = [f"F{i}" for i in range(total)], [f"B{i}" for i in range(total)]
    if kind == "gpipe":
        return forward + backward
    warm = min(total, num_stages - 1 - stage)
    actions = forward[:warm]
    for i in range(total - warm):
        actions += [forward[warm + i], backward[i]]
    return actions + backward[total - warm :]
