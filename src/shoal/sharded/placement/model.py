"""What a step costs each rank when a table is spread in a certain way: a pure function of its load and of `Costs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.ways import WHOLE_ROW, Way
from shoal.sharded.placement.costs import Costs

PEER_SHARE = 0.05
"""What one more peer adds to an exchange, as a share of an exchange with one. Assumed: two processes cannot show it."""
ID_BYTES, FLOAT_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """What one rank asks of a table in a step, and how large the table is."""

    name: str
    dim: int
    rows: float
    """Of the whole table."""
    ids: float
    """That one rank looks up in a step."""
    distinct: float
    """Of them."""
    bags: float
    """That they are pooled into, over all features of the table; without pooling as many as ids."""
    optimizer: str = "adagrad"
    cut: bool = True
    """Whether its columns may be on several ranks."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"table {self.name!r}: dim must be >= 1, got {self.dim}")
        for name in ("rows", "ids", "distinct", "bags"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"table {self.name!r}: {name} must be >= 0, got {getattr(self, name):g}")

    @property
    def cuttable(self) -> bool:
        return self.cut and self.optimizer not in WHOLE_ROW and self.dim > 1


@dataclass(frozen=True, kw_only=True)
class Links:
    """The connections between ranks: the slower of these and of the software counts."""

    gb_per_s: float = float("inf")
    """Of one rank, each way."""
    latency_us: float = 0.0


@dataclass
class Loads:
    """Per rank ``[W]``: what tables add to a step."""

    compute_s: np.ndarray
    """Of one core."""
    sent: np.ndarray
    """Bytes."""
    received: np.ndarray
    memory: np.ndarray

    @staticmethod
    def none(ranks: int) -> Loads:
        return Loads(*(np.zeros(ranks) for _ in range(4)))

    def add(self, other: Loads, sign: float = 1.0) -> Loads:
        self.compute_s += sign * other.compute_s
        self.sent += sign * other.sent
        self.received += sign * other.received
        self.memory += sign * other.memory
        return self


@lru_cache(maxsize=256)
def state_bytes(optimizer: str, dim: int) -> int:
    """Bytes of optimizer state in a row."""
    from shoal.table.config.messages import OptimizerDump
    from shoal.table.offline.exchange import initial_state

    floats = 0
    for element in OptimizerDump.FromString(initial_state(optimizer, dim)).dump:
        kind = element.WhichOneof("type")
        for descriptor, value in getattr(element, kind).ListFields() if kind else ():
            floats += len(value) if descriptor.is_repeated else 1
    return FLOAT_BYTES * floats


def row_bytes(dim: int, optimizer: str, costs: Costs) -> float:
    """Memory of a row."""
    return FLOAT_BYTES * dim + state_bytes(optimizer, dim) + costs.row_overhead_bytes


def local_ns(load: TableLoad, dim: int, costs: Costs) -> float:
    """A step of one rank's ids on a table in its own process."""
    return load.ids * costs.rows("pool", dim) + load.distinct * (costs.rows("lookup", dim) + costs.rows("update", dim))


def spread(load: TableLoad, way: Way, ranks: int, costs: Costs) -> Loads:
    """What a table adds to a step of every rank."""
    found, dim = Loads.none(ranks), load.dim
    if ranks == 1:
        found.compute_s += local_ns(load, dim, costs) * 1e-9
        found.memory += load.rows * row_bytes(dim, load.optimizer, costs)
        return found
    others = ranks - 1
    if way.kind == "row":
        found.compute_s += (local_ns(load, dim, costs) + load.ids * costs.rows("route", dim)) * 1e-9
        moved = others / ranks * load.distinct * (ID_BYTES + 2 * FLOAT_BYTES * dim)
        found.sent += moved
        found.received += moved
        found.memory += load.rows / ranks * row_bytes(dim, load.optimizer, costs)
    elif way.kind == "data":
        more = load.ids * costs.copy_fixed + others * load.distinct * costs.rows("update", dim)
        found.compute_s += (local_ns(load, dim, costs) + more) * 1e-9
        moved = others * load.distinct * (ID_BYTES + FLOAT_BYTES * dim)
        found.sent += moved
        found.received += moved
        found.memory += load.rows * row_bytes(dim, load.optimizer, costs)
    else:
        for rank, begin, end in way.slices(dim, ranks):
            width = end - begin
            answer = load.bags * FLOAT_BYTES * width
            asked = load.ids * ID_BYTES + load.bags * ID_BYTES
            found.compute_s += (load.ids * costs.bag_fixed + load.bags * width * costs.bag_per_dim) * 1e-9
            found.compute_s[rank] += ranks * local_ns(load, width, costs) * 1e-9
            found.sent += asked + answer
            found.received += answer
            found.sent[rank] += others * answer - asked - answer
            found.received[rank] += others * (asked + answer) - answer
            found.memory[rank] += load.rows * row_bytes(width, load.optimizer, costs)
    return found


@dataclass(frozen=True, kw_only=True)
class Step:
    """The tables' part of a step, in seconds of the slowest rank."""

    compute_s: float
    network_s: float
    latency_s: float
    calls_s: float
    merging_s: float
    parts: dict[str, float] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = {"tables": "compute_s", "network": "network_s", "latency": "latency_s", "calls": "calls_s",
                 "sharing exchanges": "merging_s"}  # fmt: skip
        object.__setattr__(self, "parts", {name: getattr(self, value) for name, value in names.items()})

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_of(
    loads: Sequence[TableLoad], ways: Sequence[Way], total: Loads, costs: Costs, cores: int, links: Links
) -> Step:
    """The step of all tables, whose loads add up to ``total``. Parts of it follow each other; nothing overlaps."""
    ranks = total.compute_s.shape[0]
    compute = float(total.compute_s.max()) / cores
    groups = {("owned" if way.kind in ("table", "column") else way.kind, load.dim)
              for load, way in zip(loads, ways, strict=True)}  # fmt: skip
    if ranks == 1:
        return Step(compute_s=compute, network_s=0.0, latency_s=0.0, calls_s=0.0, merging_s=0.0)
    moved = float(max(total.sent.max(), total.received.max()))
    link = min(links.gb_per_s, costs.link_gb_per_s * max(1, cores // 2)) * 1e9
    rounds = 2 if all(kind == "data" for kind, _ in groups) else 4
    call = costs.link_latency_us * (1 + PEER_SHARE * (ranks - 2)) + links.latency_us
    merged = float((total.sent + total.received).max()) if len(groups) > 1 else 0.0
    return Step(
        compute_s=compute, network_s=moved / link, latency_s=rounds * call * 1e-6,
        calls_s=len(groups) * costs.group_us * 1e-6, merging_s=merged / (costs.merge_gb_per_s * 1e9),
    )  # fmt: skip
