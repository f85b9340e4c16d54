"""`Arena`: the rows of a group of tables in GPU memory, by number, with their times and the epochs of their writes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CapacityError
from shoal.table.cuda.kernels import rows as rk
from shoal.table.cuda.kernels import serving as sk
from shoal.table.cuda.kernels.index import ROW as _ROW
from shoal.table.cuda.kernels.policy import HELD
from shoal.table.cuda.launch import cdiv, launch, power_of_2, signed
from shoal.table.cuda.layout import RowLayout, Segment
from shoal.table.cuda.memory import Store, make_store, most_words
from shoal.table.cuda.shapes import row_shape

MAX_ROWS = 1 << 30
ROW = _ROW.value
UNUSED = HELD.value
"""The policy state of unused rows."""


class Arena:
    """Rows of one layout. Row 0 is never used. ``rows`` arguments are int32 tensors on ``device``."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.room = 1
        """The number of rows that memory is allocated for."""
        self.words = make_store(1, torch.float32, device, min(MAX_ROWS * layout.stride, most_words(device)))
        self.times = make_store(1, torch.int32, device, MAX_ROWS)
        self.epochs: Store | None = None
        self.scores: Store | None = None
        """The eviction policy's state of each row (kernels/policy.py); None without a budget."""
        self.timed = False
        """Whether any write so far had a time other than 0; until then no row's time is stored."""
        self.tracked = False
        """Whether the epoch of the last write of each row is stored."""
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Objects whose ``changed()`` is called when memory for rows, times or epochs has grown."""

    def notify(self) -> None:
        """Calls the watchers."""
        for watcher in list(self.watchers):
            watcher.changed()

    @property
    def tensor(self) -> Tensor:
        return self.words.tensor

    def bytes(self) -> int:
        return sum(store.bytes() for store in self._stores())

    def _stores(self) -> list[Store]:
        return [store for store in (self.words, self.times, self.epochs, self.scores) if store is not None]

    def grow(self, rows: int) -> int:
        """Allocates memory for at least ``rows`` rows, usually more; returns the new room.

        Raises:
            CapacityError: the GPU is full; nothing has changed.
        """
        if rows > MAX_ROWS:
            raise CapacityError(f"a group of GPU tables must have at most {MAX_ROWS} rows, got {rows}")
        # Double while that is cheap, because allocating pages takes time on the host.
        more = min(self.room, (4 << 30) // (4 * self.layout.stride))
        wanted = max(rows, min(MAX_ROWS, self.room + max(more, self.room // 8)))
        try:
            self.words.grow(0, wanted * self.layout.stride)
        except CapacityError:
            if wanted == rows:
                raise
            self.words.grow(0, rows * self.layout.stride)  # not enough memory for more: allocate only what is needed
        room = min(MAX_ROWS, self.words.size(0) // self.layout.stride)
        for store, used in ((self.times, self.timed), (self.epochs, self.tracked)):
            if used and store is not None:
                had = store.size(0)
                store.grow(0, room)
                store.tensor[0, had : store.size(0)].zero_()
        self.room = room
        self.notify()
        return room

    def set_room(self, room: int) -> None:
        """Sets the number of rows with memory, and grows the arrays of their times, epochs and scores."""
        for store, first in ((self.times, 0), (self.epochs, 0), (self.scores, UNUSED)):
            if store is not None:
                store.tensor[0, self.room : room].fill_(first)
        self.room = room
        self.notify()

    def shrink(self) -> None:
        """Frees all memory."""
        for store in self._stores():
            store.shrink()
        self.room, self.timed, self.tracked = 1, False, False
        self.notify()

    def keep_times(self) -> None:
        """Starts to store the times of rows; all times so far were 0."""
        if not self.timed:
            self._zeros(self.times)
            self.timed = True
            self.notify()

    def track(self) -> None:
        """Starts to store the epochs of writes; all epochs so far are 0."""
        if not self.tracked:
            self.epochs = self.epochs or make_store(1, torch.int32, self.device, MAX_ROWS)
            self._zeros(self.epochs)
            self.tracked = True
            self.notify()

    def keep_scores(self) -> None:
        """Starts to store an eviction policy's state of rows, and epochs, so that the memory per row never changes."""
        self.scores = make_store(1, torch.int32, self.device, MAX_ROWS)
        self.epochs = make_store(1, torch.int32, self.device, MAX_ROWS)
        self.scores.tensor[0, :1].fill_(UNUSED)

    def forget_scores(self, rows: Tensor) -> None:
        """Resets the scores of rows that are no longer used."""
        if self.scores is not None:
            self.scores.tensor[0][rows.long()] = UNUSED

    def _zeros(self, store: Store) -> None:
        store.grow(0, self.room)
        store.tensor[0, : store.size(0)].zero_()

    # --- weights and states -------------------------------------------------------------------------------------------

    def start_fresh(
        self, rows: Tensor, ids: Tensor, seed: int, *, every: bool = False, out: Tensor | None = None,
        refused: bool = False,
    ) -> None:  # fmt: skip
        """Initializes weights and states of rows marked FRESH (``every``: of all rows), and clears the mark.

        With ``out [n, dim]``, their weights are also written there, and the mark stays; with ``refused``, the initial
        weights of ids without a row are written there, too.
        """
        n = rows.numel()
        if n == 0:
            return
        if self.layout.serving:  # a new row holds the values written to it, or zeros
            if every:
                self.assign(rows, torch.zeros(n, self.layout.dim, device=self.device), False)
            return
        for i, s in enumerate(self.layout.segments):
            block, warps = row_shape(s.width)
            span = max(block, 256)
            launch(
                rk.fresh, cdiv(n, span), rows, ids, self.tensor, self.tensor if out is None else out, n, signed(seed),
                *s.first, s.accumulator, s.native.beta1, s.native.beta2,
                INIT=s.init, INDEX=s.index, D=s.dim, WIDTH=s.width, STRIDE=self.layout.stride, WEIGHT=s.weight,
                STATE=s.state, VECTORS=s.vectors, TAIL=s.tail, DIM=self.layout.dim, ALL=every, OUT=out is not None,
                REFUSED=refused, CLEAN=out is None and i == len(self.layout.segments) - 1, BLOCK=block, SPAN=span,
                num_warps=warps,
            )  # fmt: skip

    def first_rows(self, ids: Tensor, seed: int) -> Tensor:
        """float32 ``[n, dim]``: the initial weights of ids."""
        n = ids.numel()
        out = torch.empty(n, self.layout.dim, dtype=torch.float32, device=self.device)
        for s in self.layout.segments:
            block, warps = row_shape(s.width)
            launch(
                rk.first, cdiv(n, block), ids, out, n, signed(seed), *s.first, INIT=s.init, INDEX=s.index, D=s.dim,
                WIDTH=s.width, WEIGHT=s.weight, DIM=self.layout.dim, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        return out

    def gather(self, rows: Tensor, words: int, out: Tensor | None = None, refused: bool = False) -> Tensor:
        """The first ``words`` words of rows as float32 ``[n, words]``; zeros for row -1.

        With ``out``, rows marked FRESH are skipped, and with ``refused`` also row -1: `start_fresh` has written them.
        """
        n = rows.numel()
        skip = 0 if out is None else 2 if refused else 1
        if out is None:
            out = torch.empty(n, words, dtype=torch.float32, device=self.device)
        if n:
            width = power_of_2(words)
            block, warps = row_shape(width)
            launch(
                rk.gather, cdiv(n, block), rows, self.tensor, out, n,
                SKIP=skip, D=words, WIDTH=width, STRIDE=self.layout.stride, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        return out

    def scatter(self, rows: Tensor, values: Tensor) -> None:
        """Sets the first words of distinct rows to ``values [n, words]``."""
        n = rows.numel()
        if n:
            words = values.shape[1]
            width = power_of_2(words)
            block, warps = row_shape(width)
            launch(
                rk.scatter, cdiv(n, block), rows, self.tensor, values, n,
                D=words, WIDTH=width, STRIDE=self.layout.stride, BLOCK=block, num_warps=warps,
            )  # fmt: skip

    def assign(self, rows: Tensor, values: Tensor, add: bool) -> None:
        """Sets weights (of equal rows, the last one counts), or adds every occurrence in order."""
        n = rows.numel()
        if n == 0:
            return None
        if self.layout.serving:
            return self._encode(rows, values, add)
        ordered, order = torch.sort(rows, stable=True)
        width = power_of_2(self.layout.dim)
        block, warps = row_shape(width)
        launch(
            rk.assign_sorted, cdiv(n, block), ordered, order, self.tensor, values, n,
            ADD=add, D=self.layout.dim, WIDTH=width, STRIDE=self.layout.stride, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return None

    # --- serving rows -------------------------------------------------------------------------------------------------

    def decode(self, rows: Tensor) -> Tensor:
        """The weights of serving rows as float32 ``[n, dim]``; zeros for row -1."""
        n = rows.numel()
        out = torch.empty(n, self.layout.dim, dtype=torch.float32, device=self.device)
        for s in self.layout.segments if n else ():
            block, warps = row_shape(s.width)
            launch(
                sk.decode, cdiv(n, block), rows, self.tensor, out, n, s.unit, **self._codec(s), BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
        return out

    def _encode(self, rows: Tensor, values: Tensor, add: bool) -> None:
        """`assign` for serving rows, which can be marked FRESH."""
        n = rows.numel()
        ordered, order = torch.sort(torch.where(rows >= 0, rows & ROW, rows), stable=True)
        codes = rows[order]
        for s in self.layout.segments:
            block, warps = row_shape(s.width)
            launch(
                sk.encode_sorted, cdiv(n, block), ordered, codes, order, self.tensor, values, n, s.unit,
                ADD=add, **self._codec(s), BLOCK=block, num_warps=warps,
            )  # fmt: skip

    def _codec(self, s: Segment) -> dict[str, Any]:
        return {"CODEC": s.native.codec, "CODE": s.code, "D": s.dim, "WIDTH": s.width, "STRIDE": self.layout.stride,
                "WEIGHT": s.weight, "DIM": self.layout.dim}  # fmt: skip

    # --- times and epochs of writes -----------------------------------------------------------------------------------

    def row_times(self, rows: Tensor) -> Tensor:
        """The times of rows in seconds, int64."""
        if not self.timed:
            return torch.zeros(rows.numel(), dtype=torch.int64, device=self.device)
        return self.times.tensor[0][rows.long()].long() & 0xFFFFFFFF

    def set_times(self, rows: Tensor, times: Tensor) -> None:
        """Sets the times of distinct rows."""
        if not self.timed:
            if not bool((times != 0).any()):
                return
            self.keep_times()
        self.times.tensor[0][rows.long()] = torch.where(times >= 1 << 31, times - (1 << 32), times).int()

    def forget_times(self, rows: Tensor) -> None:
        """Sets the times of rows that are no longer used to 0."""
        if self.timed:
            self.times.tensor[0][rows.long()] = 0

    def written_since(self, rows: Tensor, epoch: int) -> Tensor:
        """bool: which rows were written in ``epoch`` or later."""
        assert self.epochs is not None
        return self.epochs.tensor[0][rows.long()] >= epoch
