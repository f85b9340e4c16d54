"""`Landing`: collects rows from a checkpoint, and keeps those of this process until they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.nn.state.saved import NUMBERS, specs
from shoal.table.checkpoint.shares import Share, Tile
from shoal.table.checkpoint.tensors import KEPT, RowLoad

ANY_ROWS = 1 << 40
"""More rows than any table has: requests all rows of a checkpoint."""


@dataclass
class _Block:
    """Rows that were saved together."""

    size: int
    """Number of the block's rows in the checkpoint."""
    index: Tensor | None
    """The positions of the rows that are kept; None: all."""
    ids: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    """Bytes of each row received so far, by column."""

    def own(self, values: Tensor) -> Tensor:
        return values if self.index is None else values[self.index]


class Landing:
    """Receives the columns of one table in any order; a block's ids decide which of its rows are kept."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.specs = specs(share, whole=False)
        self.config: Tensor | None = None
        """The configuration of the received rows; None: nothing was received yet."""
        self.blobs: dict[str, dict[int, Tensor]] = {}
        """Other bytes, by name and offset."""
        self._blocks: dict[int, _Block] = {}
        self._early: dict[int, list[tuple[str, int, Tensor]]] = {}
        """Columns received before their ids."""

    def wanted(self) -> list[tuple[int, int]]:
        """Return the begin and size of blocks with rows to keep: one block of everything before ids are received."""
        if not self._blocks:
            return [(0, ANY_ROWS)]
        return [(row, block.size) for row, block in self._blocks.items() if block.ids.numel()]

    def put(self, column: str, offsets: tuple[int, ...], values: Tensor) -> None:
        """Receive values that begin at ``offsets`` in a column of the complete table."""
        row = offsets[0]
        if column == "config":
            self.config = values.clone()
        elif column not in self.specs:
            self.blobs.setdefault(column, {})[row] = values.clone()
        elif column == "ids":
            mask = self.share.owned(values)
            index = None if bool(mask.all()) else mask.nonzero().view(-1)
            block = self._blocks[row] = _Block(values.numel(), index, values)
            block.ids = block.own(values).clone()
            for early in self._early.pop(row, ()):
                self._keep(block, *early)
        elif row in self._blocks:
            self._keep(self._blocks[row], column, offsets[1] if len(offsets) > 1 else 0, values)
        else:
            kept = column, offsets[1] if len(offsets) > 1 else 0, values.clone()
            self._early.setdefault(row, []).append(kept)

    def _keep(self, block: _Block, column: str, first: int, values: Tensor) -> None:
        if values.shape[0] != block.size:
            raise DataError(
                f"table {self.share.table.name!r}: the checkpoint has {column} in blocks of {values.shape[0]} rows but "
                f"ids in blocks of {block.size}; it was not written by shoal"
            )
        if not block.ids.numel():
            return
        values = block.own(values)
        if column in NUMBERS:
            block.columns[column] = values.clone() if block.index is None else values
            return
        spec = self.specs[column]
        item, raw = spec.dtype.itemsize, values.contiguous().view(torch.uint8)
        tiles = self.share.head_tiles() if column == "rows" else self.share.state_tiles(all_tails=True)
        begin, end = first * item, first * item + raw.shape[1]
        out = block.columns.get(column)
        if out is None:
            width = 0 if spec.width is None else spec.width * item
            if tiles == [Tile(0, width, 0)] and raw.shape[1] == width:
                block.columns[column] = raw.clone() if block.index is None else raw
                block.filled[column] = width
                return
            out = block.columns[column] = torch.empty(raw.shape[0], width, dtype=torch.uint8, device="cpu")
        for tile in tiles:
            low, high = max(begin, tile.at), min(end, tile.at + tile.end - tile.begin)
            if low < high:
                to = tile.begin + low - tile.at
                out[:, to : to + high - low] = raw[:, low - begin : high - begin]
                block.filled[column] = block.filled.get(column, 0) + high - low

    def count(self) -> int:
        """Number of rows kept so far."""
        return sum(block.ids.numel() for block in self._blocks.values())

    def rows(self) -> dict[str, Tensor]:
        """Return the columns of all rows that are kept."""
        blocks = [block for block in self._blocks.values() if block.ids.numel()]
        found = {"ids": torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(one.ids for one in blocks)])}
        for column in self._columns(blocks):
            spec = self.specs[column]
            none = torch.empty(spec.size(0), dtype=spec.dtype, device="cpu")
            found[column] = torch.cat([none, *(self._column(block, column) for block in blocks)])
        return found

    def _columns(self, blocks: list[_Block]) -> list[str]:
        """Return the names of the columns except ids, with `KEPT` if the table has a budget and received it."""
        received = KEPT in self.specs and all(KEPT in block.columns for block in blocks)
        return ["rows", "state", "times", *([KEPT] if received else [])]

    def _column(self, block: _Block, column: str) -> Tensor:
        spec, n = self.specs[column], block.ids.numel()
        if spec.width == 0:
            return torch.empty(n, 0, dtype=spec.dtype, device="cpu")
        values = block.columns.get(column)
        filled = values is not None and (spec.width is None or block.filled[column] == spec.width * spec.dtype.itemsize)
        if values is None or not filled:
            raise DataError(f"table {self.share.table.name!r}: the checkpoint has no {column} for {n} rows")
        return values.view(spec.dtype)

    def load(self, scales: Tensor) -> None:
        """Replace the rows of the table with those received, and drop them here.

        Raises:
            DataError: rows are incomplete, from another kind of table, or duplicated. The table is unchanged.
        """
        assert self.config is not None
        load = RowLoad(self.share.table, self.config, self.share.shape)
        if self._early:
            raise DataError(f"table {self.share.table.name!r}: the checkpoint has no ids for some rows")
        columns = self._columns([block for block in self._blocks.values() if block.ids.numel()])
        for row in list(self._blocks):
            block = self._blocks[row]
            if block.ids.numel():
                load.add(block.ids, *(self._column(block, column) for column in columns))
            del self._blocks[row]
        load.commit(scales)
