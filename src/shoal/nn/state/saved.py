"""`SavedRows`: the rows of a table that one process saves, in blocks that can be read one at a time."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.errors import DataError
from shoal.table.checkpoint.shares import Share, Tile
from shoal.table.checkpoint.tensors import KEPT

COLUMNS = ("ids", "rows", "state", "times")
"""The columns of a table's rows; each is a tensor whose first dimension is the row. A budget adds `KEPT`."""
NUMBERS = ("ids", "times", KEPT)
"""The columns with one number per row."""
_BLOCK_BYTES = 16 << 20
_PART_BYTES = 8 << 20
_PARTS = (2520, 840, 120, 60, 12, 6, 2, 1)


class Piece(NamedTuple):
    """A part of a column that is written at once: some bytes of this process's rows ``begin`` to ``end``."""

    column: str
    begin: int
    end: int
    tile: Tile
    offsets: tuple[int, ...]
    """The piece's position in the column of the complete table."""
    sizes: tuple[int, ...]


class Spec(NamedTuple):
    """A column of the complete table."""

    width: int | None
    """Elements per row; None: one number, so that the column is 1-D."""
    dtype: torch.dtype

    def size(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.width is None else (rows, self.width)


def specs(share: Share, *, whole: bool) -> dict[str, Spec]:
    """Return the columns of the complete table, or of this process's rows."""
    head, state, whole_head, whole_state = share.bytes_of_rows()
    head, state = (whole_head, whole_state) if whole else (head, state)
    rows = Spec(head, torch.uint8) if share.table.serving else Spec(head // 4, torch.float32)
    number = Spec(None, torch.int64)
    columns = {"ids": number, "rows": rows, "state": Spec(state, torch.uint8), "times": number}
    return columns | {KEPT: number} if share.table.has_budget else columns


class Rows(Protocol):
    """A source of rows: a table, or a copy of its rows."""

    def all_ids(self) -> Iterator[Tensor]: ...
    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]: ...
    def fetch_times(self, ids: Tensor) -> Tensor: ...
    def fetch_kept(self, ids: Tensor) -> Tensor: ...


class CopiedRows:
    """A copy of rows, made by `shoal.table.checkpoint.tensors.table_state`, with the reading methods of a table."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._sorted: tuple[Tensor, Tensor] | None = None

    def all_ids(self) -> Iterator[Tensor]:
        yield self.tensors["ids"]

    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]:
        heads, states = (self.tensors[name].view(torch.uint8) for name in ("rows", "state"))
        at, head = self._at(ids), heads.shape[1]
        if end <= head or not states.shape[1]:
            return heads[at, begin:end], ids.numel()
        if begin >= head:
            return states[at, begin - head : end - head], ids.numel()
        return torch.cat([heads[at, begin:], states[at, : end - head]], 1), ids.numel()

    def fetch_times(self, ids: Tensor) -> Tensor:
        return self.tensors["times"][self._at(ids)]

    def fetch_kept(self, ids: Tensor) -> Tensor:
        return self.tensors[KEPT][self._at(ids)]

    def _at(self, ids: Tensor) -> Tensor:
        if self._sorted is None:
            found = self.tensors["ids"].sort()
            self._sorted = found.values, found.indices
        return self._sorted[1][torch.searchsorted(self._sorted[0], ids)]


class SavedRows:
    """Rows with their positions in the complete table.

    Rows whose ids have the same residue modulo some number are next to each other, so that a process that needs those
    with a residue modulo another number finds them in few blocks. Only the ids are copied until a piece is read. The
    constructor counts the rows of all processes: all of them must call it together, in the training thread.

    Raises:
        DataError: column slices have rows for different ids.
    """

    def __init__(self, share: Share, source: Rows) -> None:
        self.share, self.name, self.source = share, share.table.name, source
        self.specs = specs(share, whole=True)
        ids = share.saved_ids(source)
        if share.sliced:
            ids = ids.sort().values
        row_bytes = sum(share.bytes_of_rows()[2:]) + 16
        self.ids, edges = _in_parts(ids, share.saves or (0, 1), ids.numel() * row_bytes)
        self.offset, self.total = self._places()
        rows = max(1, _BLOCK_BYTES // row_bytes)
        self.blocks = [(begin, min(begin + rows, high)) for low, high in itertools.pairwise(edges)
                       for begin in range(low, high, rows)]  # fmt: skip

    def _places(self) -> tuple[int, int]:
        """Return the position of this process's first row in the complete table, and that table's number of rows."""
        share, n = self.share, self.ids.numel()
        counts = share.gather(n if share.leads else 0)
        if not share.sliced:
            return sum(counts[: share.rank]), sum(counts)
        own_digest = zlib.crc32(self.ids.numpy().tobytes())
        digests = share.gather(own_digest if share.saves is not None else -1)
        if len({digest for digest in digests if digest >= 0}) > 1:
            raise DataError(
                f"table {self.name!r}: all column slices must have rows for the same ids; was one changed alone?"
            )
        return 0, sum(counts)

    def pieces(self, column: str) -> Iterator[Piece]:
        """Yield the pieces of a column that this process writes; the first process writes a table without rows."""
        share = self.share
        if column in NUMBERS:
            tiles = [Tile(0, 8, 0)] if share.leads and share.saves is not None else []
        else:
            tiles = share.head_tiles() if column == "rows" else share.state_tiles(all_tails=False)
            tiles = tiles if share.saves is not None else []
        spec = self.specs[column]
        item = spec.dtype.itemsize
        if not self.total or spec.width == 0:
            if share.rank == 0:
                yield Piece(column, 0, 0, Tile(0, 0, 0), (0,) * len(spec.size(0)), spec.size(self.total))
            return
        for begin, end in self.blocks:
            for tile in tiles:
                at = self.offset + begin
                if spec.width is None:
                    yield Piece(column, begin, end, tile, (at,), (end - begin,))
                else:
                    width = (tile.end - tile.begin) // item
                    yield Piece(column, begin, end, tile, (at, tile.at // item), (end - begin, width))

    def read(self, piece: Piece) -> Tensor:
        """Read the current rows of a piece.

        Raises:
            DataError: some of them were removed.
        """
        spec = self.specs[piece.column]
        if piece.begin == piece.end:
            return torch.empty(piece.sizes, dtype=spec.dtype, device="cpu")
        ids = self.ids[piece.begin : piece.end]
        if piece.column == "ids":
            return ids
        if piece.column == "times":
            return self.source.fetch_times(ids)
        if piece.column == KEPT:
            return self.source.fetch_kept(ids)
        before = 0 if piece.column == "rows" else self.share.bytes_of_rows()[0]
        raw, found = self.source.fetch_bytes(ids, before + piece.tile.begin, before + piece.tile.end)
        if found != ids.numel():
            raise DataError(
                f"table {self.name!r}: {ids.numel() - found} rows were removed while they were saved; call state_dict "
                "again, and do not evict rows until the save has ended"
            )
        return raw.view(spec.dtype)


def _in_parts(ids: Tensor, share: tuple[int, int], nbytes: int) -> tuple[Tensor, list[int]]:
    """Sort ids by residue, and return the begin of each part; the modulus is small enough to avoid small parts."""
    parts = next(count for count in _PARTS if count == 1 or nbytes // count >= _PART_BYTES)
    if parts == 1:
        return ids, [0, ids.numel()]
    part = (torch.div(ids, share[1], rounding_mode="floor") % parts).to(torch.int32)
    order = part.sort(stable=True).indices
    sizes = torch.bincount(part, minlength=parts)
    return ids[order], [0, *sizes.cumsum(0).tolist()]
