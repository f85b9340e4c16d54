"""`plan`: chooses the way of each table, for the shortest predicted step that fits in memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

import numpy as np

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.ways import KINDS, Way
from shoal.sharded.placement.costs import Costs, known_costs
from shoal.sharded.placement.model import Links, Loads, TableLoad, spread, step_of
from shoal.sharded.placement.plan import Placement, Plan

_PASSES = 4
_NARROWEST = 4  # the fewest columns of a slice
_MOST_RANKS = 1 << 17
_MOST_NEAR = 8  # ranks that `shoal plan --measure` runs at once


class PlanError(ConfigError):
    """The tables do not fit. ``nearest`` is a plan with the fewest ranks on which they fit, or None."""

    nearest: Plan | None = None


def plan(
    tables: Sequence[TableLoad],
    ranks: int,
    costs: Costs | None = None,
    *,
    memory_gb: float | None = None,
    cores: int = 1,
    links: Links | None = None,
    per_machine: int | None = None,
    ways: Sequence[str] = KINDS,
) -> Plan:
    """Choose a way for each table.

    >>> from shoal.sharded import TableLoad, plan
    >>> tables = [TableLoad(name="user", dim=64, rows=1e8, ids=4096, distinct=4000, bags=4096),
    ...           TableLoad(name="country", dim=8, rows=200, ids=4096, distinct=200, bags=4096)]
    >>> made = plan(tables, 8, memory_gb=16)
    >>> str(made.way_of("user")), made.fits  # 59 GB of rows do not fit on one rank
    ('row', True)

    Args:
        tables: the load of one rank's step on each table; `loads_of` measures it in some steps of a model.
        ranks: the number of ranks.
        costs: the costs of this machine; by default those of ``shoal plan --measure``, or assumed ones.
        memory_gb: the most memory for rows per rank; None: no limit.
        cores: the number of cores per rank that work on tables.
        links: the network between ranks; by default as fast as the software.
        per_machine: the number of ranks on one machine, which slow each other by ``costs.crowd``. Default: 1 if
            ``links`` is given, else torchrun's ``LOCAL_WORLD_SIZE``, else all ranks but at most 8.
        ways: the kinds of ways that may be used. A table for which none is possible is spread by row.

    Raises:
        PlanError: the rows do not fit in any way; the message names the tables and the nearest plan that fits.
    """
    if ranks < 1:
        raise ConfigError(f"ranks must be >= 1, got {ranks}")
    if unknown := [kind for kind in ways if kind not in KINDS]:
        raise ConfigError(f"ways must be among {', '.join(KINDS)}, got {unknown[0]!r}")
    names = [table.name for table in tables]
    if len(set(names)) != len(names):
        raise ConfigError(f"tables must have distinct names, got {sorted(names)}")
    if per_machine is None:
        per_machine = 1 if links else _near(ranks)
    if not 1 <= per_machine <= ranks:
        raise ConfigError(f"per_machine must be 1 to {ranks}, the number of ranks, got {per_machine}")
    costs = (costs or known_costs()).beside(per_machine)
    search = _Search(list(tables), ranks, costs, memory_gb, cores, links or Links(), tuple(ways))
    best = search.run()
    if search.excess(best) > 0:
        raise search.refusal(best)
    return search.made(best)


def _near(ranks: int) -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(ranks, max(1, int(local)) if local.isdecimal() else _MOST_NEAR)


class _Search:
    """A search that starts from plans with one way, and changes one table at a time while the step gets shorter."""

    def __init__(
        self, loads: list[TableLoad], ranks: int, costs: Costs, memory_gb: float | None, cores: int, links: Links,
        kinds: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.loads, self.ranks, self.costs, self.cores, self.links = loads, ranks, costs, cores, links
        self.memory_gb, self.kinds = memory_gb, kinds
        self.limit = float("inf") if memory_gb is None else memory_gb * 1e9
        self._spread: dict[tuple[int, Way], Loads] = {}

    def run(self) -> list[Way]:
        if self.ranks == 1:
            return [Way()] * len(self.loads)
        heavy = sorted(range(len(self.loads)), key=lambda t: -self.alone(t))
        found = [self.improved(self.start(kind, heavy), heavy) for kind in self.kinds]
        return min(found, key=self.value)

    def alone(self, table: int) -> float:
        return float(self.of(table, Way()).compute_s[0])

    def of(self, table: int, way: Way) -> Loads:
        key = table, way
        if key not in self._spread:
            self._spread[key] = spread(self.loads[table], way, self.ranks, self.costs)
        return self._spread[key]

    def total(self, ways: Sequence[Way]) -> Loads:
        total = Loads.none(self.ranks)
        for table, way in enumerate(ways):
            total.add(self.of(table, way))
        return total

    def excess(self, ways: Sequence[Way]) -> float:
        """Bytes by which the fullest rank exceeds the limit."""
        return float(self.total(ways).memory.max()) - self.limit if self.loads else 0.0

    def seconds(self, ways: Sequence[Way], total: Loads) -> float:
        return step_of(self.loads, ways, total, self.costs, self.cores, self.links).seconds

    def value(self, ways: Sequence[Way], total: Loads | None = None) -> tuple[float, float]:
        """The bytes that do not fit, and the time plus a little of the total work, for ties. Smaller is better."""
        total = self.total(ways) if total is None else total
        over = max(0.0, float(total.memory.max()) - self.limit) if np.isfinite(self.limit) else 0.0
        return over, self.seconds(ways, total) + 1e-3 * float(total.compute_s.mean()) / self.cores

    def start(self, kind: str, heavy: Sequence[int]) -> list[Way]:
        ways = [Way()] * len(self.loads)
        total = Loads.none(self.ranks)
        for table in heavy:
            options = [way for way in self.options(table, total) if way.kind == kind] or [Way()]
            ways[table] = options[-1]
            total.add(self.of(table, ways[table]))
        return ways

    def options(self, table: int, total: Loads) -> Iterator[Way]:
        """The possible ways of a table, on the ranks with the least other work."""
        load = self.loads[table]
        fits = total.memory <= self.limit - load.rows  # at least a byte per row
        order = [int(rank) for rank in np.lexsort((total.memory, total.compute_s, ~fits))]
        for kind in self.kinds:
            if kind == "table":
                yield Way("table", (order[0],))
            elif kind == "column":
                slices = 2
                while load.cuttable and slices <= min(self.ranks, max(2, load.dim // _NARROWEST), load.dim):
                    yield Way("column", tuple(sorted(order[:slices])))
                    slices *= 2
            elif kind == "row" or load.copyable:
                yield Way(kind)  # pyrefly: ignore[bad-argument-type]

    def improved(self, ways: list[Way], heavy: Sequence[int]) -> list[Way]:
        total = self.total(ways)
        best = self.value(ways, total)
        for _ in range(_PASSES):
            before = best
            for table in heavy:
                own = ways[table]
                total.add(self.of(table, own), -1.0)
                chosen = own
                for way in list(self.options(table, total)):
                    ways[table] = way
                    total.add(self.of(table, way))
                    value = self.value(ways, total)
                    total.add(self.of(table, way), -1.0)
                    if value < best:
                        best, chosen = value, way
                ways[table] = chosen
                total.add(self.of(table, chosen))
            if best >= before:
                break
        return ways

    def made(self, ways: Sequence[Way]) -> Plan:
        placed = [
            Placement(load=load, way=way, why=self.why(ways, table))
            for table, (load, way) in enumerate(zip(self.loads, ways, strict=True))
        ]
        return Plan(
            tables=tuple(placed), ranks=self.ranks, costs=self.costs, memory_gb=self.memory_gb, cores=self.cores,
            links=self.links,
        )  # fmt: skip

    def why(self, ways: Sequence[Way], table: int) -> str:
        """How each other way of this table would change the step."""
        if self.ranks == 1:
            return "there is only one rank"
        now, total = self.value(ways)[1], self.total(ways)
        rest = total.add(self.of(table, ways[table]), -1.0)
        reasons: dict[str, str] = {}
        best: dict[str, float] = {}
        for way in self.options(table, rest):
            if way.kind == ways[table].kind:
                continue
            other = list(ways)
            other[table] = way
            over, seconds = self.value(other)
            if over:
                reasons.setdefault(way.kind, f"{way.kind} does not fit")
            elif seconds < best.get(way.kind, float("inf")):
                best[way.kind] = seconds
                reasons[way.kind] = f"{way.kind} {1e3 * (seconds - now):+.2f} ms"
        load = self.loads[table]
        if not load.copyable:
            reasons["data"] = "a table with a budget cannot have copies" + (" or slices" if not load.cuttable else "")
        elif not load.cuttable and "column" in self.kinds:
            reasons["column"] = "columns cannot be cut"
        return ", ".join(reasons.values()) or "no other way is allowed"

    def refusal(self, ways: Sequence[Way]) -> PlanError:
        total = self.total(ways)
        rank = int(total.memory.argmax())
        largest = sorted(range(len(self.loads)), key=lambda t: -float(self.of(t, ways[t]).memory[rank]))[:3]
        held = [float(self.of(t, ways[t]).memory[rank]) / 1e9 for t in largest]
        named = ", ".join(
            f"{self.loads[t].name!r} {gb:.3g} GB ({ways[t].kind})"
            for t, gb in zip(largest, held, strict=True)
            if gb >= 0.01 * held[0]
        )
        least_gb = float(total.memory[rank]) / 1e9
        text = (
            f"the tables do not fit on {self.ranks} ranks of {self.memory_gb:g} GB: rank {rank} would hold "
            f"at least {least_gb:.3g} GB, including {named}"
        )
        by_row = lambda more: _Search(  # noqa: E731
            self.loads, more, self.costs, self.memory_gb, self.cores, self.links, ("row",)
        )
        every, low, more = [Way()] * len(self.loads), self.ranks, 2 * self.ranks
        while more < _MOST_RANKS and by_row(more).excess(every) > 0:
            low, more = more, 2 * more
        nearest: Plan | None = None
        if more < _MOST_RANKS:
            while more - low > 1:  # the fewest ranks are above low
                middle = (low + more) // 2
                low, more = (low, middle) if by_row(middle).excess(every) <= 0 else (middle, more)
            nearest = by_row(more).made(every)
        if nearest is not None:
            text += f". The nearest plan that fits has {more} ranks; or give each rank {_above(least_gb)} GB"
        elif limited := [load.name for load in self.loads if load.limited]:
            text += (
                ". More ranks do not help, because max_rows and max_bytes apply to each rank: lower them for "
                f"{', '.join(map(repr, limited[:3]))}, or give each rank {_above(least_gb)} GB"
            )
        else:
            text += f". Give each rank {_above(least_gb)} GB"
        error = PlanError(text)
        error.nearest = nearest
        return error


def _above(gb: float) -> str:
    """``gb`` with three digits, rounded up."""
    digits = 2 - math.floor(math.log10(gb))
    return f"{math.ceil(gb * 10**digits) / 10**digits:.{max(0, digits)}f}"
