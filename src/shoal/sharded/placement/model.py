"""The predicted cost of a step on each rank, for given ways of the tables: a pure function of loads and `Costs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.ways import WHOLE_ROW, Way
from shoal.sharded.placement.costs import Costs

ID_BYTES, FLOAT_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class TableLoad:
    """The load of one rank's step on a table, and the size of the table."""

    name: str
    dim: int
    rows: float
    """The number of rows of the whole table."""
    ids: float
    """The number of ids that one rank looks up in a step."""
    distinct: float
    """The number of distinct ids among them."""
    bags: float
    """The number of bags that these ids are pooled into, over all features; without pooling, the number of ids."""
    optimizer: str = "adagrad"
    cut: bool = True
    """Whether its columns may be split over ranks."""
    copies: bool = True
    """Whether every rank may have all of its rows."""
    max_rows: float = 0.0
    """The most rows of its part on a rank; 0: unlimited. A part with a limit is planned as full."""
    max_bytes: float = 0.0
    """The most bytes of its part on a rank; 0: unlimited."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"table {self.name!r}: dim must be >= 1, got {self.dim}")
        for name in ("rows", "ids", "distinct", "bags", "max_rows", "max_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"table {self.name!r}: {name} must be >= 0, got {getattr(self, name):g}")

    @property
    def cuttable(self) -> bool:
        return self.cut and not self.limited and self.optimizer not in WHOLE_ROW and self.dim > 1

    @property
    def copyable(self) -> bool:
        return self.copies and not self.limited

    @property
    def limited(self) -> bool:
        """Whether its parts have a budget, so that ranks would evict slices or copies of a row at different times."""
        return bool(self.max_rows or self.max_bytes)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The network between ranks. The slower of network and software determines the time of an exchange."""

    gb_per_s: float = float("inf")
    """Bandwidth of one rank, in each direction."""
    latency_us: float = 0.0


@dataclass
class Loads:
    """The load that tables add to a step, per rank ``[W]``."""

    compute_s: np.ndarray
    """Seconds on one core."""
    calls_s: np.ndarray
    """Seconds in Python, which more cores do not reduce."""
    sent: np.ndarray
    """Bytes."""
    received: np.ndarray
    memory: np.ndarray

    @staticmethod
    def none(ranks: int) -> Loads:
        return Loads(*(np.zeros(ranks) for _ in range(5)))

    def add(self, other: Loads, sign: float = 1.0) -> Loads:
        self.compute_s += sign * other.compute_s
        self.calls_s += sign * other.calls_s
        self.sent += sign * other.sent
        self.received += sign * other.received
        self.memory += sign * other.memory
        return self


@lru_cache(maxsize=256)
def state_bytes(optimizer: str, dim: int) -> int:
    """Bytes of optimizer state per row."""
    from shoal.table.config.messages import OptimizerDump
    from shoal.table.offline.exchange import initial_state

    floats = 0
    for element in OptimizerDump.FromString(initial_state(optimizer, dim)).dump:
        kind = element.WhichOneof("type")
        for descriptor, value in getattr(element, kind).ListFields() if kind else ():
            floats += len(value) if descriptor.is_repeated else 1
    return FLOAT_BYTES * floats


def row_bytes(dim: int, optimizer: str, costs: Costs) -> float:
    """Bytes of memory per row."""
    return FLOAT_BYTES * dim + state_bytes(optimizer, dim) + costs.row_overhead_bytes


def part_bytes(load: TableLoad, rows: float, width: int, costs: Costs) -> float:
    """Bytes of memory of a part of a table."""
    row = row_bytes(width, load.optimizer, costs)
    if not load.limited:
        return rows * row
    return min(limit for limit in (load.max_rows * row, load.max_bytes) if limit)


def local_ns(load: TableLoad, dim: int, costs: Costs) -> float:
    """The time of one rank's step on a table in its own process."""
    return load.ids * costs.rows("pool", dim) + load.distinct * (costs.rows("lookup", dim) + costs.rows("update", dim))


def work(load: TableLoad, way: Way, ranks: int, costs: Costs) -> dict[str, np.ndarray]:
    """How often, ``[W]``, a table incurs each cost, by the cost's name; without the work on the rank's own ids."""
    every = np.ones(ranks)
    if way.kind == "row":
        return {"route_fixed": every * load.ids, "route_per_dim": every * load.ids * load.dim}
    if way.kind == "data":
        updates = (ranks - 1) * load.distinct * costs.rows("update", load.dim)
        return {"copy_fixed": every * load.ids, "copied_share": every * updates}
    held, asked, bags = np.zeros(ranks), np.zeros(ranks), 0.0
    slices = way.slices(load.dim, ranks)
    for rank, begin, end in slices:
        held[rank] += ranks * local_ns(load, end - begin, costs)
        asked[rank] += ranks
        bags += load.bags * (end - begin)
    return {"bag_fixed": every * load.ids * len(slices), "bag_per_dim": every * bags, "held_share": held,
            "held_us": asked}  # fmt: skip


def spread(load: TableLoad, way: Way, ranks: int, costs: Costs) -> Loads:
    """The load that a table adds to a step on every rank."""
    found, dim = Loads.none(ranks), load.dim
    if ranks == 1:
        found.compute_s += local_ns(load, dim, costs) * 1e-9
        found.memory += part_bytes(load, load.rows, dim, costs)
        return found
    others = ranks - 1
    for name, often in work(load, way, ranks, costs).items():
        if name.endswith("_us"):
            found.calls_s += often * getattr(costs, name) * 1e-6
        else:
            found.compute_s += often * getattr(costs, name) * 1e-9
    if way.kind in ("row", "data"):
        found.compute_s += local_ns(load, dim, costs) * 1e-9
    if way.kind == "row":
        moved = others / ranks * load.distinct * (ID_BYTES + 2 * FLOAT_BYTES * dim)
        found.sent += moved
        found.received += moved
        found.memory += part_bytes(load, load.rows / ranks, dim, costs)
    elif way.kind == "data":
        moved = others * load.distinct * (ID_BYTES + FLOAT_BYTES * dim)
        found.sent += moved
        found.received += moved
        found.memory += part_bytes(load, load.rows, dim, costs)
    else:
        for rank, begin, end in way.slices(dim, ranks):
            width = end - begin
            answer = load.bags * FLOAT_BYTES * width
            asked = load.ids * ID_BYTES + load.bags * ID_BYTES
            found.sent += asked + answer
            found.received += answer
            found.sent[rank] += others * answer - asked - answer
            found.received[rank] += others * (asked + answer) - answer
            found.memory[rank] += part_bytes(load, load.rows, width, costs)
    return found


def calls(loads: Sequence[TableLoad], ways: Sequence[Way], ranks: int) -> dict[str, float]:
    """How often a step incurs each fixed cost, by the cost's name.

    Tables of one dim that are spread alike are read together, as a group.
    """
    kinds = ["owned" if way.kind in ("table", "column") else way.kind for way in ways]
    groups = {(kind, load.dim) for kind, load in zip(kinds, loads, strict=True)}
    copied = sum(kind == "data" for kind, _ in groups)
    return {"ranks_us": float(bool(groups)), "group_us": len(groups), "peer_us": len(groups) * (ranks - 2),
            "copied_us": copied * (ranks - 1), "table_us": len(loads)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Step:
    """The tables' part of a step, in seconds on the slowest rank."""

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
    """The predicted step of all tables, whose loads add up to ``total``. Its parts do not overlap."""
    ranks = total.compute_s.shape[0]
    if ranks == 1:
        compute = float(total.compute_s.max()) / cores
        return Step(compute_s=compute, network_s=0.0, latency_s=0.0, calls_s=0.0, merging_s=0.0)
    slowest = int((total.compute_s / cores + total.calls_s).argmax())
    moved = float(max(total.sent.max(), total.received.max()))
    link = min(links.gb_per_s, costs.link_gb_per_s * max(1, cores // 2)) * 1e9
    rounds = 2 if all(way.kind == "data" for way in ways) else 4
    often = calls(loads, ways, ranks)
    calls_us = sum(count * getattr(costs, name) for name, count in often.items())
    merged = float((total.sent + total.received).max()) if often["group_us"] > 1 else 0.0
    return Step(
        compute_s=float(total.compute_s[slowest]) / cores, network_s=moved / link,
        latency_s=rounds * (costs.link_latency_us + links.latency_us) * 1e-6,
        calls_s=calls_us * 1e-6 + float(total.calls_s[slowest]), merging_s=merged / (costs.merge_gb_per_s * 1e9),
    )  # fmt: skip
