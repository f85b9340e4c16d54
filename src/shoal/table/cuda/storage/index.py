"""`Index`: the ids of one or several tables with the same layout in GPU memory, and their rows.

Tables share one arena, and so the numbering of rows, so that one launch serves all of them. Numbers that kernels read
(the number of buckets, the number of rows in use) are in device memory, and memory grows in place: a captured CUDA
graph stays valid when the tables grow between its replays.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.table.clock import Now
from shoal.table.cuda.arena import MAX_ROWS, Arena
from shoal.table.cuda.kernels import index as ik
from shoal.table.cuda.launch import cdiv, launch, power_of_2
from shoal.table.cuda.layout import RowLayout
from shoal.table.cuda.memory import make_store
from shoal.table.cuda.shapes import find_shape, insert_shape
from shoal.table.cuda.storage.counts import Counts

EMPTY = ik.EMPTY.value
_SCANNED = 1 << 24  # slots of the index that are scanned at once


class Index:
    """Ids and rows of ``tables`` tables. Ids are int64 tensors on ``device``, distinct only where stated.

    ``table`` arguments are the number of one table, or an int32 tensor with that of each id.
    """

    def __init__(self, layout: RowLayout, device: torch.device, tables: int) -> None:
        self.layout, self.device, self.tables = layout, device, tables
        self.salt = secrets.randbits(62) | 3
        slots, cells = most_slots(tables)
        self.keys = make_store(tables, torch.int64, device, slots)
        self.rows = make_store(tables, torch.int32, device, slots)
        self.stash_keys = make_store(tables, torch.int64, device, cells)
        self.stash_rows = make_store(tables, torch.int32, device, cells)
        self.free_rows = make_store(1, torch.int32, device, MAX_ROWS)
        self.arena = Arena(layout, device)
        self.counts = Counts(tables, device)
        self.spare = torch.zeros(1 << 16, dtype=torch.int64, device=device)
        self._buckets = [0] * tables
        self._arguments: dict[int, Any] = {}
        # An id and its row have the same position.
        assert self.keys.stride == self.rows.stride
        assert self.stash_keys.stride == self.stash_rows.stride

    def bytes(self) -> int:
        stores = (self.keys, self.rows, self.stash_keys, self.stash_rows, self.free_rows)
        return sum(store.bytes() for store in stores) + self.arena.bytes()

    def cells(self, buckets: int) -> int:
        """The number of cells in the stash for ``buckets`` buckets."""
        return stash_cells(buckets)

    # --- ids ----------------------------------------------------------------------------------------------------------

    def _index_arguments(self, table: int | Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """The kernel arguments for the index of one table or, if ``table`` is a tensor, of all tables."""
        number = -1 if isinstance(table, Tensor) else table
        made = self._arguments.get(number)
        if made is None:
            stores = (self.keys, self.rows, self.stash_keys, self.stash_rows)
            tensors = [store.tensor if number < 0 else store.tensor[number] for store in stores]
            made = (*tensors, self.counts.of(max(number, 0))), (self.keys.stride, self.stash_keys.stride)
            if self.device.type == "cuda":  # elsewhere tensors change when they grow
                self._arguments[number] = made
        return made

    def find(self, ids: Tensor, table: int | Tensor, want: str) -> Tensor:
        """``rows`` int32, ``slots`` int64 or ``weights`` float32 ``[n, dim]`` of ids; -1, or zeros, if unknown."""
        if want == "weights" and self.layout.serving:
            return self.arena.decode(self.find(ids, table, "rows"))
        n = ids.numel()
        dim, width = self.layout.dim, power_of_2(self.layout.dim)
        if want == "weights":
            out = torch.empty(n, dim, dtype=torch.float32, device=self.device)
        else:
            out = torch.empty(n, dtype=torch.int32 if want == "rows" else torch.int64, device=self.device)
        if n == 0:
            return out
        multi = isinstance(table, Tensor)
        tensors, strides = self._index_arguments(table)
        block, warps = find_shape(width if want == "weights" else 1)
        launch(
            ik.find, cdiv(n, block), ids, table if multi else ids, *tensors, self.arena.tensor, out, out, n, self.salt,
            *strides,
            MULTI=multi, WANT=want, D=dim, WIDTH=width, STRIDE=self.layout.stride, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return out

    def _insert(
        self,
        ids: Tensor,
        table: int | Tensor,
        *,
        time: int = 0,
        only_new: bool = False,
        drop: Tensor | None = None,
        gate: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        n = ids.numel()
        # The result for given rows overwrites them, so that nothing is allocated while ids are being moved.
        out = given if given is not None else torch.empty(n, dtype=torch.int32, device=self.device)
        if n == 0:
            return out
        multi = isinstance(table, Tensor)
        tensors, strides = self._index_arguments(table)
        arena, epochs = self.arena, self.arena.epochs
        track = epochs is not None and arena.tracked
        block, warps, registers = insert_shape()
        launch(
            ik.insert, cdiv(n, block), ids, table if multi else ids, ids if drop is None else drop,
            ids if gate is None else gate, out if given is None else given, *tensors, self.counts.words,
            self.free_rows.tensor, arena.times.tensor, epochs.tensor if track else arena.times.tensor, self.spare, out,
            n, self.salt, int(time) - (1 << 32) if time >= 1 << 31 else int(time), *strides,
            MULTI=multi, DROP=drop is not None, GATE=gate is not None, GIVEN=given is not None,
            STAMP=0 if not arena.timed else 2 if only_new else 1, LATER=isinstance(time, Now),
            TRACK=0 if not track else 2 if only_new else 1,
            BLOCK=block, num_warps=warps, maxnreg=registers,
        )  # fmt: skip
        return out

    def chunks(self, table: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All ids of a table in chunks: ids, their rows, and their slots for `erase_slots`. Waits for the device."""
        cells = self.cells(self._buckets[table])
        stores = ((self.keys, self.rows, (self._buckets[table] + 1) * 8), (self.stash_keys, self.stash_rows, cells))
        for in_stash, (keys, rows, size) in enumerate(stores):
            for begin in range(0, size, _SCANNED):
                end = min(size, begin + _SCANNED)
                held = keys.tensor[table, begin:end]
                at = (held != EMPTY).nonzero().view(-1)
                ids, slots = held[at], at + begin
                if begin == 0 and not in_stash:
                    ids = torch.where(at < 8, EMPTY, ids)  # bucket 0 holds that id as 0
                yield ids, rows.tensor[table, begin:end][at], -2 - slots if in_stash else slots

    def entries(self, table: int) -> tuple[Tensor, Tensor]:
        """All ids of a table and their rows. Waits for the device."""
        ids, rows, _ = zip(*self.chunks(table), strict=True)
        return torch.cat(ids), torch.cat(rows)

    # --- growth -------------------------------------------------------------------------------------------------------

    def _new_index(self, table: int, buckets: int) -> None:
        slots = (buckets + 1) * 8
        self.keys.grow(table, slots)
        self.rows.grow(table, slots)
        self.keys.tensor[table, :slots].fill_(EMPTY)
        self.rows.tensor[table, :slots].fill_(-1)
        self._new_stash(table, buckets)
        self._set_buckets(table, buckets)

    def _set_buckets(self, table: int, buckets: int) -> None:
        self._buckets[table] = buckets
        self.counts.set_of(table, ik.BUCKETS.value, buckets)
        self.counts.set_of(table, ik.LOW_MASK.value, (1 << (buckets.bit_length() - 1)) - 1)

    def _new_stash(self, table: int, buckets: int) -> None:
        cells = self.cells(buckets)
        self.stash_keys.grow(table, cells)
        self.stash_rows.grow(table, cells)
        self.stash_keys.tensor[table, :cells].fill_(EMPTY)
        self.stash_rows.tensor[table, :cells].fill_(-1)
        self.counts.set_of(table, ik.STASH_MASK.value, cells - 1)

    def _grow_index(self, table: int, buckets: int, empty: bool) -> None:
        slots, cells = (buckets + 1) * 8, self.cells(buckets)
        # All memory first: if there is not enough, nothing has changed.
        self.keys.grow(table, slots)
        self.rows.grow(table, slots)
        self.stash_keys.grow(table, cells)
        self.stash_rows.grow(table, cells)
        if empty and self.counts.is_empty(table):
            return self._new_index(table, buckets)
        image = self._stash_image(table)
        while self._buckets[table] < buckets:
            have = self._buckets[table]
            base = 1 << (have.bit_length() - 1)
            to = min(buckets, 2 * base)
            count = (to - have) * 8
            low = (1 << (to.bit_length() - 1)) - 1
            launch(
                ik.split, cdiv(count, 1024), self.keys.tensor[table], self.rows.tensor[table], count, to, low,
                have - base, base, self.salt, BLOCK=1024,
            )  # fmt: skip
            self._set_buckets(table, to)
        self._restash(table, image)
        return None

    def _stash_image(self, table: int) -> tuple[Tensor, Tensor]:
        cells = self.cells(self._buckets[table])
        return self.stash_keys.tensor[table, :cells].clone(), self.stash_rows.tensor[table, :cells].clone()

    def _restash(self, table: int, image: tuple[Tensor, Tensor]) -> None:
        """Finds new places for ids in the stash, which holds ids whose two buckets are full."""
        self._new_stash(table, self._buckets[table])
        self._insert(image[0], table, given=image[1])


def most_slots(tables: int) -> tuple[int, int]:
    """The most slots and stash cells of each of ``tables`` tables: enough for `MAX_ROWS` ids, within an eighth of the
    47-bit address space per storage."""
    slots = min(4 * MAX_ROWS, max(1 << 26, (1 << 39) >> (tables - 1).bit_length()))
    return slots, slots >> 3


def stash_cells(buckets: int) -> int:
    """The number of cells in the stash for ``buckets`` buckets."""
    return max(1024, 1 << (buckets - 1).bit_length())
