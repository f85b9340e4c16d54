"""`Share`: one process's part of a table's rows, for code that saves or loads the entire table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal import _core
from shoal.fid import shard_of

if TYPE_CHECKING:
    from shoal.table.table import HashTable

_VECTOR, _TAIL_BYTES = 0, {1: 4, 2: 8}
_STATES: dict[str, list[tuple[int, int]]] = dict(_core.OPTIMIZERS)


class Tile(NamedTuple):
    """Bytes of this process's slice of a row, and where they start in the full row."""

    begin: int
    end: int
    at: int


@dataclass(frozen=True)
class Share:
    """The rows, or slices of rows, of one process.

    A process has the rows with ``id mod count == index``, or only some of their columns.
    """

    table: HashTable
    """The table with this process's rows."""
    shape: HashTable
    """A table with the layout of full rows."""
    rank: int = 0
    ranks: int = 1
    first_column: int = 0
    saves: tuple[int, int] | None = (0, 1)
    """Index and count of the ids whose rows this process saves; None: other processes save them."""
    keeps: tuple[int, int] | None = (0, 1)
    """Index and count of the ids whose rows this process has."""
    sliced: bool = False
    """Whether processes divide the columns of rows, each with slices of all ids."""
    leads: bool = True
    """Whether this process saves the data that the slices of a row share: its id, its time and the state per row."""
    gather: Callable[[int], list[int]] = lambda number: [number]
    """Gathers one number from every process; all processes must call it together."""

    @property
    def compatible(self) -> tuple[Any, ...]:
        """A key that is equal for shares with the same rows of a table."""
        return self.keeps, self.first_column, self.table.dim_size, self.shape.dim_size

    def owned(self, ids: Tensor) -> Tensor:
        """Which of ``ids`` belong to this process."""
        return _of(ids, self.keeps)

    def saved_ids(self, rows: Any) -> Tensor:
        """The ids in ``rows`` (its table or a copy) whose rows this process saves, in no particular order."""
        if self.saves is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        ids = torch.cat(list(rows.all_ids()))
        return ids if self.saves == self.keeps else ids[_of(ids, self.saves)]

    def bytes_of_rows(self) -> tuple[int, int, int, int]:
        """Bytes of weights and of state, in this process's rows and in full rows."""
        return *layout_bytes(self.table), *layout_bytes(self.shape)

    def head_tiles(self) -> list[Tile]:
        """Where this process's weights are in a full row's weights."""
        head, _ = layout_bytes(self.table)
        return [Tile(0, head, 4 * self.first_column)]

    def state_tiles(self, *, all_tails: bool) -> list[Tile]:
        """Where this process's state is in a full row's state. State per row is in the leader's slice, or in all."""
        _, state, head, _ = self.bytes_of_rows()
        if not self.sliced:
            return [Tile(0, state, 0)]
        kind = self.shape.table_config.entry_config.segments[0].opt_config.WhichOneof("type")
        vectors = [field for field, _ in _STATES[kind or "sgd"]].count(_VECTOR)
        width = 4 * self.table.dim_size
        tiles = [Tile(v * width, (v + 1) * width, v * head + 4 * self.first_column) for v in range(vectors)]
        if state > vectors * width and (self.leads or all_tails):
            tiles.append(Tile(vectors * width, state, vectors * head))
        return tiles


def share_of(table: Any) -> Share | None:
    """The share of this process; None for a table whose rows are elsewhere."""
    if hasattr(table, "share"):
        return table.share()
    return Share(table, table) if getattr(table, "local_state", False) else None


def layout_bytes(table: HashTable) -> tuple[int, int]:
    """Bytes of weights and of state in a row; a serving row has only weights."""
    layout = table.staging()._native.layout
    head = layout.row_bytes if table.serving else 4 * layout.dim
    return head, layout.row_bytes - head


def _of(ids: Tensor, share: tuple[int, int] | None) -> Tensor:
    if share is None:
        return torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
    index, count = share
    return torch.ones(ids.shape, dtype=torch.bool, device="cpu") if count == 1 else shard_of(ids, count) == index
