"""`Group`: the index and the rows of one or several tables of equal layout, in GPU memory.

Tables of a group share one arena of rows and so one row number space, which lets one launch serve all of them. Numbers
that kernels read (how many buckets, how many rows are given out) are in device memory, and memory grows in place: a
captured CUDA graph stays good when the tables grow between its replays.
"""

from __future__ import annotations

import secrets
import threading
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CapacityError, ConfigError
from shoal.table.cuda import index_kernels as ik
from shoal.table.cuda import row_kernels as rk
from shoal.table.cuda.backend import capturing, interpreted
from shoal.table.cuda.launch import cdiv, launch, power_of_2
from shoal.table.cuda.layout import RowLayout
from shoal.table.cuda.memory import make_store

EMPTY = ik.EMPTY.value
MAX_ROWS = 1 << 30
_COMMON, _WORDS = ik.COMMON_WORDS.value, ik.TABLE_WORDS.value
_TAKEN, _FREE, _NEXT, _ROOM, _LOST = (x.value for x in (ik.TAKEN, ik.FREE, ik.NEXT, ik.ROOM, ik.LOST))


class Group:
    """Ids, rows and times of ``tables`` tables. Ids are int64 tensors on ``device``, distinct only where said so.

    ``table`` arguments are the number of one table, or an int32 tensor with that of each id.
    """

    max_load = 0.75

    def __init__(self, layout: RowLayout, device: torch.device, tables: int = 1) -> None:
        self.layout, self.device, self.tables = layout, device, tables
        self.salt = secrets.randbits(62) | 3
        self.keys = make_store(tables, torch.int64, device)
        self.rows = make_store(tables, torch.int32, device)
        self.stash_keys = make_store(tables, torch.int64, device)
        self.stash_rows = make_store(tables, torch.int32, device)
        self.arena = make_store(1, torch.float32, device)
        self.times = make_store(1, torch.int32, device)
        self.free_rows = make_store(1, torch.int32, device)
        self.state = torch.zeros(_COMMON + _WORDS * tables, dtype=torch.int64, device=device)
        self.spare = torch.zeros(1 << 16, dtype=torch.int64, device=device)
        self.timed = False
        """Whether any write so far had a time other than 0; until then no row's time is stored."""
        self._lock = threading.RLock()
        self._stream: torch.cuda.Stream | None = None
        self._buckets = [0] * tables
        self._arguments: dict[int, Any] = {}
        self._pinned = torch.zeros_like(self.state, device="cpu", pin_memory=device.type == "cuda")
        self._event: torch.cuda.Event | None = None
        self._pending = [0] * tables  # ids since the counts were last known: as many new ones at most
        self._covered = [0] * tables
        self._start()

    def __enter__(self) -> Group:
        """One call at a time, from any thread and stream: the stream waits for that of the call before."""
        self._lock.acquire()
        if self.device.type == "cuda" and not capturing(self.device):
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """An empty group."""
        self._set(_NEXT, 1)  # row 0 is nobody's
        for word in (_TAKEN, _FREE, _LOST):
            self._set(word, 0)
        self._room = 1
        self._absorb([0] * self.state.numel())
        self._known[_NEXT] = 1
        for table in range(self.tables):
            self._set(_COMMON + _WORDS * table + ik.SIZE.value, 0)
            self._new_index(table, 16 if interpreted() else 1024)

    def _set(self, word: int, value: int) -> None:
        self.state[word].fill_(value)

    def _absorb(self, known: list[int]) -> None:
        self._known = known

    def _look(self, wait: bool = False) -> None:
        """Takes in what the device has counted so far, if it has arrived; ``wait``: all of it."""
        if self.device.type != "cuda":
            self._absorb(self.state.tolist())
            self._pending = [0] * self.tables
            return
        while True:
            if self._event is not None:
                if wait:
                    self._event.synchronize()
                elif not self._event.query():
                    return
                self._absorb(self._pinned.tolist())
                self._pending = [p - c for p, c in zip(self._pending, self._covered, strict=True)]
                self._event = None
            if not wait or not any(self._pending):
                return
            self._watch()

    def _watch(self) -> None:
        """Has the counts sent to the host, unless that is under way."""
        if self.device.type != "cuda" or self._event is not None:
            return
        self._pinned.copy_(self.state, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()
        self._covered = list(self._pending)

    def sizes(self) -> list[int]:
        """Ids of each table; waits for the device."""
        counts = self.state.tolist()
        self._check_lost(counts[_LOST])
        return [counts[_COMMON + _WORDS * t + ik.SIZE.value] for t in range(self.tables)]

    def _check_lost(self, lost: int) -> None:
        if lost:
            raise CapacityError(
                f"{lost} ids found no room in a captured graph; call reserve() or make_room() between its replays"
            )

    def bytes(self) -> int:
        stores = (self.keys, self.rows, self.stash_keys, self.stash_rows, self.arena, self.times, self.free_rows)
        return sum(store.bytes() for store in stores)

    def words(self, table: int) -> Tensor:
        return self.state[_COMMON + _WORDS * table :]

    # --- growth -------------------------------------------------------------------------------------------------------

    def make_room(self, counts: list[int]) -> None:
        """Makes sure that so many new ids of each table fit. Waits for the device only when they might not.

        Raises:
            CapacityError: the GPU is full; the group is as it was.
        """
        if capturing(self.device):
            return
        self._look()
        if not self._fits(counts):
            self._look(wait=True)
            self._check_lost(self._known[_LOST])
        if not self._fits(counts):
            self._grow(counts)

    def _rows_needed(self, counts: list[int]) -> int:
        taken = self._known[_TAKEN] + sum(self._pending) + sum(counts)
        return self._known[_NEXT] + max(0, taken - self._known[_FREE])

    def _sizes_needed(self, counts: list[int]) -> list[int]:
        sizes = self._known[_COMMON + ik.SIZE.value :: _WORDS]
        return [s + p + c for s, p, c in zip(sizes, self._pending, counts, strict=True)]

    def _fits(self, counts: list[int]) -> bool:
        return self._rows_needed(counts) <= self._room and all(
            size <= self._capacity(buckets)
            for size, buckets in zip(self._sizes_needed(counts), self._buckets, strict=True)
        )

    def _capacity(self, buckets: int) -> int:
        return int(buckets * 8 * self.max_load)

    def _grow(self, counts: list[int]) -> None:
        rows = self._rows_needed(counts)
        if rows > self._room:
            self._grow_rows(rows)
        for table, size in enumerate(self._sizes_needed(counts)):
            buckets = self._buckets[table]
            while self._capacity(buckets) < size:
                buckets *= 2 if buckets >= 1 << 20 else 4
            if buckets > self._buckets[table]:
                self._grow_index(table, buckets, empty=size == counts[table])

    def _grow_rows(self, rows: int) -> None:
        if rows > MAX_ROWS:
            raise CapacityError(f"a group of GPU tables holds {MAX_ROWS} rows at most, {rows} are needed")
        # As much again while that is little: taking pages costs the host time.
        more = min(self._room, (4 << 30) // (4 * self.layout.stride))
        wanted = min(MAX_ROWS, max(rows, self._room + max(more, self._room // 8)))
        self.arena.grow(0, wanted * self.layout.stride)
        if self.timed:
            self._grow_times(wanted)
        room = min(MAX_ROWS, self.arena.size(0) // self.layout.stride)
        if self.timed:
            room = min(room, self.times.size(0))
        self._room = room
        self._set(_ROOM, room)

    def _grow_times(self, rows: int) -> None:
        had = self.times.size(0) if self.times.bytes() else 0
        self.times.grow(0, rows)
        self.times.tensor[0, had : self.times.size(0)].zero_()

    def keep_times(self) -> None:
        """From now on rows have times; until now all were 0."""
        if not self.timed:
            rows = max(1, self._room)
            self.times.grow(0, rows)
            self.times.tensor[0, : self.times.size(0)].zero_()
            self.timed = True

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
        words = _COMMON + _WORDS * table
        self._set(words + ik.BUCKETS.value, buckets)
        self._set(words + ik.LOW_MASK.value, (1 << (buckets.bit_length() - 1)) - 1)

    def _new_stash(self, table: int, buckets: int) -> None:
        cells = max(1024, 1 << (buckets - 1).bit_length())
        self.stash_keys.grow(table, cells)
        self.stash_rows.grow(table, cells)
        self.stash_keys.tensor[table, :cells].fill_(EMPTY)
        self.stash_rows.tensor[table, :cells].fill_(-1)
        self._set(_COMMON + _WORDS * table + ik.STASH_MASK.value, cells - 1)

    def _stash_cells(self, table: int) -> int:
        return max(1024, 1 << (self._buckets[table] - 1).bit_length())

    def _grow_index(self, table: int, buckets: int, empty: bool) -> None:
        slots = (buckets + 1) * 8
        cells = max(1024, 1 << (buckets - 1).bit_length())
        # All memory first: when there is not enough, nothing has changed.
        self.keys.grow(table, slots)
        self.rows.grow(table, slots)
        self.stash_keys.grow(table, cells)
        self.stash_rows.grow(table, cells)
        if empty and self._known[_COMMON + _WORDS * table + ik.SIZE.value] == 0 and not self._pending[table]:
            return self._new_index(table, buckets)
        image = self._stash_image(table)
        while self._buckets[table] < buckets:
            have = self._buckets[table]
            base = 1 << (have.bit_length() - 1)
            to = min(buckets, 2 * base)
            count = (to - have) * 8
            low = (1 << (to.bit_length() - 1)) - 1
            launch(
                ik.split,
                cdiv(count, 1024),
                self.keys.tensor[table],
                self.rows.tensor[table],
                count,
                to,
                low,
                have - base,
                base,
                self.salt,
                BLOCK=1024,
            )
            self._set_buckets(table, to)
        self._restash(table, image)
        return None

    def _stash_image(self, table: int) -> tuple[Tensor, Tensor]:
        cells = self._stash_cells(table)
        return self.stash_keys.tensor[table, :cells].clone(), self.stash_rows.tensor[table, :cells].clone()

    def _restash(self, table: int, image: tuple[Tensor, Tensor]) -> None:
        """Finds new places for ids that were in the stash: its ids are those whose two buckets are full."""
        self._new_stash(table, self._buckets[table])
        self._insert(image[0], table, given=image[1])

    def reserve(self, counts: list[int]) -> None:
        """Takes memory for so many ids in all of each table, so that no later call takes any before they are there."""
        self._look(wait=True)
        sizes = self._known[_COMMON + ik.SIZE.value :: _WORDS]
        self.make_room([max(0, c - s) for c, s in zip(counts, sizes, strict=True)])

    # --- ids ----------------------------------------------------------------------------------------------------------

    def _index_arguments(self, table: int | Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """What kernels need of the index: of one table, or, for a tensor, of all."""
        number = -1 if isinstance(table, Tensor) else table
        made = self._arguments.get(number)
        if made is None:
            stores = (self.keys, self.rows, self.stash_keys, self.stash_rows)
            tensors = [store.tensor if number < 0 else store.tensor[number] for store in stores]
            made = (*tensors, self.words(max(number, 0))), (self.keys.stride, self.stash_keys.stride)
            if self.device.type == "cuda":  # elsewhere tensors change when they grow
                self._arguments[number] = made
        return made

    def find(self, ids: Tensor, table: int | Tensor, want: str) -> Tensor:
        """``rows`` int32, ``slots`` int64 or ``weights`` float32 ``[n, dim]`` of ids; -1, or zeros, if unknown."""
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
            ik.find,
            cdiv(n, block),
            ids,
            table if multi else ids,
            *tensors,
            self.arena.tensor,
            out,
            out,
            n,
            self.salt,
            *strides,
            MULTI=multi,
            WANT=want,
            D=dim,
            WIDTH=width,
            STRIDE=self.layout.stride,
            BLOCK=block,
            num_warps=warps,
        )
        return out

    def insert(
        self,
        ids: Tensor,
        table: int | Tensor,
        *,
        counts: list[int],
        time: int = 0,
        only_new: bool = False,
        drop: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """int32 row numbers of ids; an id without a row gets one, marked FRESH at one of its occurrences.

        ``drop`` (uint8) passes ids over, which have -1 then; ``gate`` (int64) passes all of them over unless it is 0.
        ``time`` is written to the rows, ``only_new`` to new ones alone.
        """
        if time and not self.timed:
            self.keep_times()
        self.make_room(counts)
        out = self._insert(ids, table, time=time, only_new=only_new, drop=drop, gate=gate)
        if not capturing(self.device):
            for t, count in enumerate(counts):
                self._pending[t] += count
            # Only when what may have come since the last look is much of the room that is left.
            if 8 * sum(self._pending) > self._room - self._rows_needed([0] * self.tables):
                self._watch()
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
        out = torch.empty(n, dtype=torch.int32, device=self.device)
        if n == 0:
            return out
        multi = isinstance(table, Tensor)
        tensors, strides = self._index_arguments(table)
        block, warps = insert_shape()
        launch(
            ik.insert,
            cdiv(n, block),
            ids,
            table if multi else ids,
            ids if drop is None else drop,
            ids if gate is None else gate,
            out if given is None else given,
            *tensors,
            self.state,
            self.free_rows.tensor,
            self.times.tensor,
            self.spare,
            out,
            n,
            self.salt,
            time - (1 << 32) if time >= 1 << 31 else time,
            *strides,
            MULTI=multi,
            DROP=drop is not None,
            GATE=gate is not None,
            GIVEN=given is not None,
            STAMP=0 if not self.timed else 2 if only_new else 1,
            BLOCK=block,
            num_warps=warps,
        )
        return out

    def erase(self, ids: Tensor, table: int) -> int:
        """Removes ids; how many there were. Waits for the device."""
        slots = torch.unique(self.find(ids, table, "slots"))
        slots = slots[slots != -1]
        return self._free(slots, table)

    def _free(self, slots: Tensor, table: int) -> int:
        n = slots.numel()
        if n == 0:
            return 0
        freed = torch.empty(n, dtype=torch.int32, device=self.device)
        tensors, _ = self._index_arguments(table)
        launch(ik.erase, cdiv(n, 256), slots, *tensors[:4], freed, n, BLOCK=256)
        self._restash(table, self._stash_image(table))
        self._recycle(freed[freed > 0], table, n)
        return n

    def _recycle(self, freed: Tensor, table: int, removed: int) -> None:
        """Puts rows on the list of free ones."""
        counts = self.state.tolist()
        taken, free = counts[_TAKEN], counts[_FREE]
        left = self.free_rows.tensor[0, min(taken, free) : free].clone()
        rows = torch.cat([freed, left])
        self.free_rows.grow(0, max(1, rows.numel()))
        self.free_rows.tensor[0, : rows.numel()] = rows
        self._set(_NEXT, counts[_NEXT] + max(0, taken - free))
        self._set(_FREE, rows.numel())
        self._set(_TAKEN, 0)
        self.state[_COMMON + _WORDS * table + ik.SIZE.value] -= removed
        self._forget_counts()

    def _forget_counts(self) -> None:
        """The host looks at the counts anew."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        self._pending = [0] * self.tables
        self._absorb(self.state.tolist())

    def entries(self, table: int) -> tuple[Tensor, Tensor]:
        """All ids of a table and their rows. Waits for the device."""
        parts = []
        slots, cells = (self._buckets[table] + 1) * 8, self._stash_cells(table)
        for keys, rows, size in (
            (self.keys.tensor[table], self.rows.tensor[table], slots),
            (self.stash_keys.tensor[table], self.stash_rows.tensor[table], cells),
        ):
            at = (keys[:size] != EMPTY).nonzero().view(-1)
            parts.append((keys[at], rows[at], at if size == slots else at + slots))
        ids = torch.cat([p[0] for p in parts])
        ids = torch.where(torch.cat([p[2] for p in parts]) < 8, EMPTY, ids)  # bucket 0 holds that id as 0
        return ids, torch.cat([p[1] for p in parts])

    def clear(self, table: int) -> None:
        """Removes all ids of a table; of the only one: gives memory back, too."""
        if self.tables == 1:
            self._look(wait=True)
            for store in (self.keys, self.rows, self.stash_keys, self.stash_rows, self.arena, self.times):
                store.shrink()
            self.free_rows.shrink()
            self.timed = False
            self._event = None
            self._pending = [0]
            self._start()
            return
        ids, rows = self.entries(table)
        self._new_index(table, 16 if interpreted() else 1024)
        self._recycle(rows[rows > 0], table, ids.numel())

    def swap(self, other: Group) -> None:
        """Takes the contents of another group of the same layout, which gets this one's."""
        if other.layout.words != self.layout.words or other.tables != self.tables:
            raise ConfigError("groups of different layouts cannot be exchanged")
        kept = ("_lock", "_stream")
        mine = {name: value for name, value in self.__dict__.items() if name not in kept}
        theirs = {name: value for name, value in other.__dict__.items() if name not in kept}
        for group, old, new in ((self, mine, theirs), (other, theirs, mine)):
            for name in old.keys() - new.keys():
                del group.__dict__[name]
            group.__dict__.update(new)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def start_fresh(
        self, rows: Tensor, ids: Tensor, seed: int, *, every: bool = False, out: Tensor | None = None
    ) -> None:
        """Initial weights and states of rows marked FRESH (``every``: of all), and takes the mark away.

        With ``out [n, dim]`` their weights are written there, too, and the mark stays.
        """
        n = rows.numel()
        if n == 0:
            return
        for i, s in enumerate(self.layout.segments):
            block, warps = row_shape(s.width)
            span = max(block, 256)
            launch(
                rk.fresh,
                cdiv(n, span),
                rows,
                ids,
                self.arena.tensor,
                self.arena.tensor if out is None else out,
                n,
                signed(seed),
                *s.first,
                s.accumulator,
                s.native.beta1,
                s.native.beta2,
                INIT=s.init,
                INDEX=s.index,
                D=s.dim,
                WIDTH=s.width,
                STRIDE=self.layout.stride,
                WEIGHT=s.weight,
                STATE=s.state,
                VECTORS=s.vectors,
                TAIL=s.tail,
                DIM=self.layout.dim,
                ALL=every,
                OUT=out is not None,
                CLEAN=out is None and i == len(self.layout.segments) - 1,
                BLOCK=block,
                SPAN=span,
                num_warps=warps,
            )

    def gather(self, rows: Tensor, words: int, out: Tensor | None = None) -> Tensor:
        """The first ``words`` words of rows as float32 ``[n, words]``; zeros for row -1.

        With ``out`` rows marked FRESH are left out: `start_fresh` has written them there.
        """
        n = rows.numel()
        skip = out is not None
        if out is None:
            out = torch.empty(n, words, dtype=torch.float32, device=self.device)
        if n:
            width = power_of_2(words)
            block, warps = row_shape(width)
            launch(
                rk.gather,
                cdiv(n, block),
                rows,
                self.arena.tensor,
                out,
                n,
                SKIP=skip,
                D=words,
                WIDTH=width,
                STRIDE=self.layout.stride,
                BLOCK=block,
                num_warps=warps,
            )
        return out

    def scatter(self, rows: Tensor, values: Tensor) -> None:
        """Sets the first words of distinct rows to ``values [n, words]``."""
        n = rows.numel()
        if n:
            words = values.shape[1]
            width = power_of_2(words)
            block, warps = row_shape(width)
            launch(
                rk.scatter,
                cdiv(n, block),
                rows,
                self.arena.tensor,
                values,
                n,
                D=words,
                WIDTH=width,
                STRIDE=self.layout.stride,
                BLOCK=block,
                num_warps=warps,
            )

    def assign(self, rows: Tensor, values: Tensor, add: bool) -> None:
        """Sets weights, the last of equal rows winning, or adds every occurrence in order."""
        n = rows.numel()
        if n == 0:
            return
        ordered, order = torch.sort(rows, stable=True)
        width = power_of_2(self.layout.dim)
        block, warps = row_shape(width)
        launch(
            rk.assign_sorted,
            cdiv(n, block),
            ordered,
            order,
            self.arena.tensor,
            values,
            n,
            ADD=add,
            D=self.layout.dim,
            WIDTH=width,
            STRIDE=self.layout.stride,
            BLOCK=block,
            num_warps=warps,
        )

    def row_times(self, rows: Tensor) -> Tensor:
        """int64 seconds of rows."""
        if not self.timed:
            return torch.zeros(rows.numel(), dtype=torch.int64, device=self.device)
        return self.times.tensor[0][rows.long()].long() & 0xFFFFFFFF

    def set_times(self, rows: Tensor, times: Tensor) -> None:
        """Sets the seconds of distinct rows."""
        if not self.timed:
            if not bool((times != 0).any()):
                return
            self.keep_times()
        self.times.tensor[0][rows.long()] = torch.where(times >= 1 << 31, times - (1 << 32), times).int()


def signed(number: int) -> int:
    """A 64-bit number as kernels take it."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def find_shape(width: int) -> tuple[int, int]:
    """Ids of one program, and its warps."""
    if interpreted():
        return 256, 1
    if width >= 64:
        return max(1, 4096 // width), 4
    return 64, 2


def insert_shape() -> tuple[int, int]:
    """Ids of one program, and its warps."""
    return (256, 1) if interpreted() else (128, 4)


def row_shape(width: int) -> tuple[int, int]:
    """Rows of one program, and its warps."""
    if interpreted():
        return max(1, min(256, 16384 // width)), 1
    return max(1, min(128, 2048 // width)), 4
