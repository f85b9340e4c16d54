"""`Way`: how the rows of one table are spread over ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from shoal.errors import ConfigError, did_you_mean

Kind = Literal["row", "table", "column", "data"]
KINDS: tuple[str, ...] = get_args(Kind)
WHOLE_ROW = frozenset({"rowwise_adagrad", "group_adagrad", "group_ftrl", "lamb", "batch_softmax"})
"""Optimizers whose step for one column depends on the other columns, so that tables cannot be spread by column."""


class Slice(NamedTuple):
    """Columns ``begin`` to ``end`` of every row of a table, and the rank that holds them."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class Way:
    """How a table is spread: by row, on one rank, by column, or as copies.

    >>> Way.parse("column:0,2").ranks
    (0, 2)
    >>> str(Way("table", (3,)))
    'table:3'

    ``"row"``: a row is on the rank ``id mod W``. ``"table"``: all rows are on ``ranks[0]``. ``"column"``: every row is
    cut into slices, one for each of ``ranks``. ``"data"``: every rank has all rows and applies every update.
    """

    kind: Kind = "row"
    ranks: tuple[int, ...] = ()
    """For "table" and "column": the ranks that hold rows. If empty: rank 0 for "table", all ranks for "column"."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"a way must be one of {', '.join(KINDS)}, got {self.kind!r}{did_you_mean(self.kind, KINDS)}"
            )
        if self.ranks and self.kind in ("row", "data"):
            raise ConfigError(
                f"ranks must be empty for a table sharded by {self.kind}, which is on all ranks, got {self.ranks}"
            )
        if self.kind == "table" and len(self.ranks) > 1:
            raise ConfigError(f"a table sharded by table must be on one rank, got {self.ranks}")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks, default=0) < 0:
            raise ConfigError(f"the ranks of a table must be distinct and >= 0, got {self.ranks}")

    @staticmethod
    def parse(text: str | Way) -> Way:
        """Parse ``"row"``, ``"table"``, ``"table:3"``, ``"column"``, ``"column:0,2"`` or ``"data"``."""
        if isinstance(text, Way):
            return text
        kind, _, ranks = str(text).partition(":")
        try:
            return Way(kind, tuple(int(rank) for rank in ranks.split(",")) if ranks else ())  # pyrefly: ignore
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the ranks of a way must be numbers, as in 'column:0,2', got {text!r}") from None

    def __str__(self) -> str:
        return self.kind + (":" + ",".join(map(str, self.ranks)) if self.ranks else "")

    def check(self, name: str, dim: int, world_size: int, table: Any = None) -> None:
        """Raise for ranks that do not exist, and for "column" if the table cannot be cut into columns."""
        if any(rank >= world_size for rank in self.ranks):
            raise ConfigError(f"table {name!r}: the ranks of its way must be in 0..{world_size - 1}, got {self}")
        if self.kind != "column":
            return
        if len(self.holders(world_size)) > dim:
            raise ConfigError(
                f"table {name!r}: {dim} columns cannot be cut into {len(self.holders(world_size))} slices; name at "
                f"most {dim} ranks"
            )
        why = None if table is None else uncuttable(table)
        if why:
            raise ConfigError(f"table {name!r} cannot be sharded by column: {why}; use row or table")

    def holders(self, world_size: int) -> tuple[int, ...]:
        """The ranks that hold rows."""
        if self.ranks or self.kind == "table":
            return self.ranks or (0,)
        return tuple(range(world_size))

    def slices(self, dim: int, world_size: int) -> list[Slice]:
        """The slices of a "table" or "column" way. Their widths differ by at most one."""
        ranks = self.holders(world_size)
        edges = [dim * i // len(ranks) for i in range(len(ranks) + 1)]
        return [Slice(rank, a, b) for rank, (a, b) in zip(ranks, itertools.pairwise(edges), strict=True)]


def uncuttable(table: Any) -> str | None:
    """Why the rows of a table cannot be cut into slices; None if they can."""
    segments = table.table_config.entry_config.segments
    if len(segments) > 1:
        return f"it has {len(segments)} segments"
    kind = segments[0].opt_config.WhichOneof("type")
    if kind in WHOLE_ROW:
        return f"a step of its optimizer {kind} depends on the whole row"
    if segments[0].comp_config.WhichOneof("type") not in (None, "fp32", "fp16"):
        return "its rows are quantized"
    return None
