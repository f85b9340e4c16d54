"""`Storage`: the index and the rows of one or several tables of equal layout, in GPU memory.

Tables of a storage share one arena of rows and so one row number space, so that one launch serves all of them. Numbers
that kernels read (how many buckets, how many rows are given out) are in device memory, and memory grows in place: a
captured CUDA graph stays good when the tables grow between its replays.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table.clock import Now
from shoal.table.cuda import counts as c
from shoal.table.cuda.arena import MAX_ROWS, Arena
from shoal.table.cuda.backend import capturing, interpreted
from shoal.table.cuda.counts import Counts
from shoal.table.cuda.kernels import index as ik
from shoal.table.cuda.launch import cdiv, launch, power_of_2
from shoal.table.cuda.layout import RowLayout
from shoal.table.cuda.memory import make_store
from shoal.table.cuda.shapes import find_shape, insert_shape

EMPTY = ik.EMPTY.value
ROW = ik.ROW.value
FRESH = ik.FRESH.value
_serials = itertools.count()
_SCANNED = 1 << 24  # slots of the index that are looked through at once


class Storage:
    """Ids and rows of ``tables`` tables. Ids are int64 tensors on ``device``, distinct only where said so.

    ``table`` arguments are the number of one table, or an int32 tensor with that of each id.
    """

    max_load = 0.75

    def __init__(self, layout: RowLayout, device: torch.device, tables: int = 1) -> None:
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
        self.kept: dict[Any, Any] = {}
        """What callers made once for many batches, such as learning rates on the device."""
        self.epoch = 0
        """Which rows that are written now carry; 0: none, nobody keeps track of changes."""
        self.untracked_graph = False
        """Whether a CUDA graph was captured that writes rows without their epoch."""
        self.captured: list[Any] = []
        """What captured graphs read, beside the storage itself."""
        self.replayed = False
        """Whether there is a captured graph that inserts ids, which the host does not count."""
        self.serial = next(_serials)
        """Locks of several storages are taken in this order."""
        self._window = 0  # ids that may come before the host has to look how many there are
        self._lock = threading.RLock()
        self._former: list[int] = []  # current devices before each entrance
        self._stream: torch.cuda.Stream | None = None
        self.stream: int | None = None
        """The last call's, as CUDA names it."""
        self._buckets = [0] * tables
        self._arguments: dict[int, Any] = {}
        self._start()
        # Ids and their rows are found by one number.
        assert self.keys.stride == self.rows.stride
        assert self.stash_keys.stride == self.stash_rows.stride

    def __enter__(self) -> Storage:
        """One call at a time, from any thread and stream: the stream waits for that of the call before.

        The storage's device is the current one inside.
        """
        self._lock.acquire()
        if self.device.type == "cuda":
            try:
                former = torch.cuda.current_device()
                if former != self.device.index:
                    torch.cuda.set_device(self.device.index)
                self.follow(torch._C._cuda_getCurrentRawStream(self.device.index))
                self._former.append(former)
            except BaseException:
                self._lock.release()
                raise
        return self

    @property
    def turn(self) -> Any:
        """The lock that keeps other threads out; who takes that of several storages has each `follow` its stream."""
        return self._lock

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            former = self._former.pop()
            if former != self.device.index:
                torch.cuda.set_device(former)
        self._lock.release()

    def follow(self, handle: int) -> None:
        """Has the current stream, which CUDA names so, wait for that of the call before."""
        if handle == self.stream or capturing(self.device):
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        # Memory that torch gave on one stream is used on another: it must not be given away too early.
        for tensor in (self.counts.words, self.spare, *self.kept.values()):
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)
        self._stream, self.stream = stream, handle

    def keep(self, key: Any, make: Any, limit: int = 64) -> Any:
        """``make()``, or what it gave for the same key before; ``limit`` things in all."""
        found = self.kept.get(key)
        if found is None and capturing(self.device):  # nothing is in it before the graph runs
            return make()
        if found is None:
            if len(self.kept) >= limit:
                self.kept.clear()
            found = self.kept[key] = make()
        return self.hold(found)

    def hold(self, thing: Any) -> Any:
        """Keeps what is read now for as long as a graph that is being captured may read it."""
        if capturing(self.device) and not any(held is thing for held in self.captured):
            self.captured.append(thing)
        return thing

    # --- growth -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """An empty storage."""
        self._window = 0
        self.counts.start()
        self.counts.set(c.ROOM, self.arena.room)
        for table in range(self.tables):
            self._new_index(table, 16 if interpreted() else 1024)

    def bytes(self) -> int:
        stores = (self.keys, self.rows, self.stash_keys, self.stash_rows, self.free_rows)
        return sum(store.bytes() for store in stores) + self.arena.bytes()

    def make_room(self, counts: list[int]) -> None:
        """Makes sure that so many new ids of each table fit. Waits for the device only when they might not.

        Raises:
            CapacityError: the GPU is full; the storage is as it was.
        """
        if capturing(self.device):
            return
        if self.replayed:
            self.counts.look_anew()
        self.counts.look()
        while not self._fits(counts):  # waits no longer than for calls before the last ones, if that is enough
            if not self.counts.wait_for_one():
                break
        else:
            return
        self.counts.look(wait=True)
        self.counts.check_lost()
        if not self._fits(counts):
            try:
                self._grow(counts)
            except torch.OutOfMemoryError as error:
                raise CapacityError(str(error).partition("\n")[0]) from None

    def expect(self, own: list[tuple[int, int]], total: int) -> None:
        """`make_room` for ids that are under way, not in a graph: ``total`` of pairs of a table and a count.

        Mostly a comparison: the host looks how many ids there are when half of what was room for may be taken. The
        other half is left to captured graphs, which it does not count.

        Raises:
            CapacityError: the GPU is full; the storage is as it was.
        """
        if total <= self._window:
            self._window -= total
            for table, count in own:
                self.counts.expect(table, count)
        else:
            counts = [0] * self.tables
            for table, count in own:
                counts[table] += count
            self.make_room(counts)
            self.counts.watch_if_near(self.arena.room)  # which counts the calls before this one
            for table, count in own:
                self.counts.expect(table, count)
            self._window = self._sure() // 2

    def expect_replays(self) -> None:
        """A graph that inserts ids is being captured."""
        self.replayed = True
        if not self.arena.tracked:
            self.untracked_graph = True

    def _sure(self) -> int:
        """Ids that fit, whatever they are."""
        none = [0] * self.tables
        left = [
            self._capacity(buckets) - size
            for size, buckets in zip(self.counts.sizes_needed(none), self._buckets, strict=True)
        ]
        return max(0, min(self.arena.room - self.counts.rows_needed(), *left))

    def _fits(self, counts: list[int]) -> bool:
        return self.counts.rows_needed(counts) <= self.arena.room and all(
            size <= self._capacity(buckets)
            for size, buckets in zip(self.counts.sizes_needed(counts), self._buckets, strict=True)
        )

    def _capacity(self, buckets: int) -> int:
        return int(buckets * 8 * self.max_load)

    def _grow(self, counts: list[int]) -> None:
        rows = self.counts.rows_needed(counts)
        if rows > self.arena.room:
            self._grow_rows(rows)
        for table, size in enumerate(self.counts.sizes_needed(counts)):
            buckets = self._buckets[table]
            while self._capacity(buckets) < size:
                buckets *= 2 if buckets >= 1 << 20 else 4
            if buckets > self._buckets[table]:
                self._grow_index(table, buckets, empty=size == counts[table])

    def _grow_rows(self, rows: int) -> None:
        self.counts.set(c.ROOM, self.arena.grow(rows))

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
        cells = stash_cells(buckets)
        self.stash_keys.grow(table, cells)
        self.stash_rows.grow(table, cells)
        self.stash_keys.tensor[table, :cells].fill_(EMPTY)
        self.stash_rows.tensor[table, :cells].fill_(-1)
        self.counts.set_of(table, ik.STASH_MASK.value, cells - 1)

    def _grow_index(self, table: int, buckets: int, empty: bool) -> None:
        slots, cells = (buckets + 1) * 8, stash_cells(buckets)
        # All memory first: when there is not enough, nothing has changed.
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
        cells = stash_cells(self._buckets[table])
        return self.stash_keys.tensor[table, :cells].clone(), self.stash_rows.tensor[table, :cells].clone()

    def _restash(self, table: int, image: tuple[Tensor, Tensor]) -> None:
        """Finds new places for ids that were in the stash: its ids are those whose two buckets are full."""
        self._new_stash(table, self._buckets[table])
        self._insert(image[0], table, given=image[1])

    def reserve(self, counts: list[int]) -> None:
        """Takes memory for so many ids in all of each table, so that no later call takes any before they are there."""
        self.counts.look(wait=True)
        self._window = 0
        self.make_room([max(0, count - size) for count, size in zip(counts, self.counts.sure_sizes(), strict=True)])

    # --- ids ----------------------------------------------------------------------------------------------------------

    def _index_arguments(self, table: int | Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """What kernels need of the index: of one table, or, for a tensor, of all."""
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
        ``time`` is written to the rows, ``only_new`` to new ones alone; so is the epoch. Of a `Now` the later of it and
        a row's own time.

        Raises:
            CapacityError: the GPU is full; the storage is as it was.
        """
        if time and not self.arena.timed:
            if capturing(self.device):  # each replay would forget the times
                raise UnsupportedError("the first write that has a time cannot be captured; run the step once before")
            self.arena.keep_times()
        self.make_room(counts)
        out = self._insert(ids, table, time=time, only_new=only_new, drop=drop, gate=gate)
        if not capturing(self.device):
            self.counts.add(counts, self.arena.room)
            self._window = 0
            return out
        self.expect_replays()
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
        # Rows that are given are not given back: so nothing takes memory while ids are between places.
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

    def erase(self, ids: Tensor, table: int) -> int:
        """Removes ids; how many there were. Waits for the device."""
        slots = torch.unique(self.find(ids, table, "slots"))
        return self.erase_slots(slots[slots != -1], table)

    def erase_slots(self, slots: Tensor, table: int) -> int:
        """Removes the ids of distinct slots, which `find` or `chunks` gave; how many there were. Waits."""
        n = slots.numel()
        if n == 0:
            return 0
        image = self._stash_image(table)
        rows, left = self._room_for_free(n)
        tensors, _ = self._index_arguments(table)
        arena = self.arena
        launch(ik.erase, cdiv(n, 256), slots, *tensors[:4], arena.times.tensor, rows, n, TIMED=arena.timed, BLOCK=256)
        for copy, store in zip(image, (self.stash_keys, self.stash_rows), strict=True):
            copy.copy_(store.tensor[table, : copy.numel()])
        self._restash(table, image)
        self._recycle(rows, left, table, n)
        return n

    def _room_for_free(self, n: int) -> tuple[Tensor, list[int]]:
        """int32: a place for ``n`` rows that are about to be free, then those that are; and the counts. Waits.

        All memory that it takes to free rows is there now: what is begun will end.
        """
        counts = self.counts.now()
        begin, end = min(counts[c.TAKEN], counts[c.FREE]), counts[c.FREE]
        rows = torch.empty(n + end - begin, dtype=torch.int32, device=self.device)
        self.free_rows.grow(0, max(1, rows.numel()))
        rows[n:] = self.free_rows.tensor[0, begin:end]
        return rows, counts

    def _recycle(self, rows: Tensor, counts: list[int], table: int, removed: int) -> None:
        """Makes ``rows`` the list of free ones; ``removed`` ids of a table are gone."""
        if counts[c.LOST]:
            rows = rows[rows > 0]  # ids that found no room have row 0, which is nobody's
        self.free_rows.tensor[0, : rows.numel()] = rows
        self.counts.set(c.NEXT, counts[c.NEXT] + max(0, counts[c.TAKEN] - counts[c.FREE]))
        self.counts.set(c.FREE, rows.numel())
        self.counts.set(c.TAKEN, 0)
        self.counts.of(table)[ik.SIZE.value].sub_(removed)
        self.counts.rows_freed()
        self.counts.look_anew()
        self._window = 0

    def chunks(self, table: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All ids of a table, some at a time: ids, their rows, and their slots for `erase_slots`. Waits."""
        cells = stash_cells(self._buckets[table])
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

    def clear(self, table: int) -> None:
        """Removes all ids of a table; of the only one: gives memory back, too."""
        if self.tables == 1:
            self.counts.look(wait=True)
            for store in (self.keys, self.rows, self.stash_keys, self.stash_rows, self.free_rows):
                store.shrink()
            tracked = self.arena.tracked
            self.arena.shrink()
            self._start()
            if tracked:
                self.arena.track()
            return
        gone = torch.cat([rows for _, rows, _ in self.chunks(table)])
        rows, counts = self._room_for_free(gone.numel())
        rows[: gone.numel()] = gone
        self.arena.forget_times(gone)
        self._new_index(table, 16 if interpreted() else 1024)
        self._recycle(rows, counts, table, gone.numel())

    def swap(self, other: Storage) -> None:
        """Takes the contents of another storage of the same layout, which gets this one's."""
        if other.layout.words != self.layout.words or other.tables != self.tables:
            raise ConfigError("storages of different layouts cannot be exchanged")
        kept = ("_lock", "serial", "_stream", "stream", "_former", "epoch", "untracked_graph", "captured", "replayed")
        mine = {name: value for name, value in self.__dict__.items() if name not in kept}
        theirs = {name: value for name, value in other.__dict__.items() if name not in kept}
        for storage, old, new in ((self, mine, theirs), (other, theirs, mine)):
            for name in old.keys() - new.keys():
                del storage.__dict__[name]
            storage.__dict__.update(new)
        self.arena.watchers, other.arena.watchers = other.arena.watchers, self.arena.watchers
        self.arena.tell()
        other.arena.tell()

    # --- changes ------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Rows that are written from now on carry the epoch that is returned, or a later one."""
        self.arena.track()
        self.epoch += 1
        self.counts.set(ik.EPOCH.value, self.epoch)
        return self.epoch


def most_slots(tables: int) -> tuple[int, int]:
    """Slots and cells of the stash that each of so many tables may ever have: those of `MAX_ROWS` ids, while addresses
    of a storage take an eighth of the 47 bits that there are."""
    slots = min(4 * MAX_ROWS, max(1 << 26, (1 << 39) >> (tables - 1).bit_length()))
    return slots, slots >> 3


def stash_cells(buckets: int) -> int:
    """Cells of the stash of so many buckets."""
    return max(1024, 1 << (buckets - 1).bit_length())
