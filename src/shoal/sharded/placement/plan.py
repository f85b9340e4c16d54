"""`Plan`: how a model's tables are spread over ranks, with costs and reasons; can be printed, edited and saved."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from shoal.errors import ConfigError, DataError, did_you_mean
from shoal.sharded.all_to_all.ways import Way
from shoal.sharded.placement.costs import Costs
from shoal.sharded.placement.model import Links, Loads, Step, TableLoad, spread, step_of

_FORMAT = "shoal.sharding-plan"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The way of one table, and the reason for it."""

    load: TableLoad
    way: Way
    why: str = ""

    @property
    def name(self) -> str:
        return self.load.name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How tables are spread over ranks; made by `plan`, used by `shard`.

    Predictions are computed from its ways, loads and costs, also after `edited` and `load`.
    """

    tables: tuple[Placement, ...]
    ranks: int
    costs: Costs
    memory_gb: float | None = None
    cores: int = 1
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        for placed in self.tables:
            placed.way.check(placed.name, placed.load.dim, self.ranks)
            if placed.way.kind in ("column", "data") and not placed.load.copyable:
                raise ConfigError(
                    f"table {placed.name!r} has max_rows or max_bytes, so it must be spread by row or be on one rank, "
                    f"got {placed.way}"
                )
            if placed.way.kind == "column" and not placed.load.cuttable:
                raise ConfigError(f"table {placed.name!r} cannot be sharded by column; use row or table")

    # --- contents and predictions -------------------------------------------------------------------------------------

    def way_of(self, name: str) -> Way:
        """The way of a table."""
        for placed in self.tables:
            if placed.name == name:
                return placed.way
        names = [placed.name for placed in self.tables]
        raise ConfigError(f"the plan has no table {name!r}{did_you_mean(name, names)}; it has {', '.join(names)}")

    @cached_property
    def total(self) -> Loads:
        """The load of a step on every rank: seconds of work on rows, bytes sent and received, bytes of rows."""
        total = Loads.none(self.ranks)
        for placed in self.tables:
            total.add(spread(placed.load, placed.way, self.ranks, self.costs))
        return total

    @cached_property
    def step(self) -> Step:
        """The predicted step of the tables, without the rest of the model."""
        loads, ways = [placed.load for placed in self.tables], [placed.way for placed in self.tables]
        return step_of(loads, ways, self.total, self.costs, self.cores, self.links)

    @property
    def fits(self) -> bool:
        return self.memory_gb is None or float(self.total.memory.max()) <= self.memory_gb * 1e9

    def edited(self, **ways: str | Way) -> Plan:
        """The plan with other ways for some tables, by name: ``plan.edited(item="table:3")``."""
        for name in ways:
            self.way_of(name)
        return replace(
            self,
            tables=tuple(
                replace(placed, way=Way.parse(ways[placed.name]), why="edited") if placed.name in ways else placed
                for placed in self.tables
            ),
        )

    def compared(self, other: Plan) -> str:
        """The differences from another plan, as text."""
        lines = []
        for placed in self.tables:
            theirs = other.way_of(placed.name)
            if theirs != placed.way:
                lines.append(f"{placed.name}: {placed.way} -> {theirs}")
        a, b = self.step.seconds, other.step.seconds
        lines.append(f"step {1e3 * a:.3f} ms -> {1e3 * b:.3f} ms (x {b / max(a, 1e-12):.2f})")
        for what, name in (("memory", "fullest rank"), ("sent", "sent by the busiest rank")):
            mine, theirs = (float(getattr(one.total, what).max()) for one in (self, other))
            lines.append(f"{name} {_bytes(mine)} -> {_bytes(theirs)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
        return "\n".join([*lines, *self.summary()])

    def rows(self) -> list[list[str]]:
        """The cells of a printed plan: a header, then one row per table."""
        found = [["table", "way", "dim", "rows", "ids", "memory/rank", "sent/rank", "other ways"]]
        for placed in self.tables:
            own = spread(placed.load, placed.way, self.ranks, self.costs)
            found.append([
                placed.name, str(placed.way), str(placed.load.dim), f"{placed.load.rows:,.0f}",
                f"{placed.load.ids:,.0f}", _bytes(float(own.memory.max())), _bytes(float(own.sent.max())), placed.why,
            ])  # fmt: skip
        return found

    def summary(self) -> list[str]:
        total, step = self.total, self.step
        parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in step.parts.items() if seconds)
        limit = "" if self.memory_gb is None else f" of {self.memory_gb:g} GB" + ("" if self.fits else ": does not fit")
        return [
            f"{self.ranks} rank{'s'[: self.ranks > 1]}: the tables' part of a step takes {1e3 * step.seconds:.2f} ms "
            f"({parts})",
            f"memory per rank {_bytes(float(total.memory.min()))} to {_bytes(float(total.memory.max()))}{limit}; sent "
            f"per rank and step {_bytes(float(total.sent.min()))} to {_bytes(float(total.sent.max()))}, received "
            f"{_bytes(float(total.received.min()))} to {_bytes(float(total.received.max()))}",
        ]

    def show(self) -> None:
        """Print the plan."""
        from rich.console import Console
        from rich.table import Table

        head, *rows = self.rows()
        table = Table(*head, title=f"{self.ranks} ranks")
        for row in rows:
            table.add_row(*row)
        console = Console()
        console.print(table)
        for line in self.summary():
            console.print(line)

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Plan:
        """Write the plan as JSON; its ways can be edited in the file: ``"way": "table:3"``."""
        from shoal.durable import write_whole

        tables = [{"name": p.name, "way": str(p.way), "why": p.why, "load": asdict(p.load)} for p in self.tables]
        links = {name: value for name, value in asdict(self.links).items() if value != float("inf")}
        content = {
            "format": _FORMAT, "version": 1, "ranks": self.ranks, "tables": tables, "memory_gb": self.memory_gb,
            "cores": self.cores, "links": links, "costs": asdict(self.costs),
        }  # fmt: skip
        write_whole(path, json.dumps(content, indent=1))
        return self

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote; predictions are computed again.

        Raises:
            DataError: the file cannot be read or is not a plan.
            ConfigError: a way in it is not possible.
        """
        try:
            with open(path) as file:
                content: Any = json.load(file)
            if content.get("format") != _FORMAT or content.get("version") != 1:
                raise ValueError(f"its format must be {_FORMAT!r}, version 1")
            return Plan(
                tables=tuple(
                    Placement(load=TableLoad(**one["load"]), way=Way.parse(one["way"]), why=one.get("why", ""))
                    for one in content["tables"]
                ),
                ranks=int(content["ranks"]), costs=Costs(**content["costs"]), memory_gb=content.get("memory_gb"),
                cores=int(content.get("cores", 1)), links=Links(**content.get("links", {})),
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{os.fspath(path)} is not a sharding plan ({error})") from None


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.3g} {unit}"
        n /= 1000
    raise AssertionError
