"""`Storage`: the index and the rows of tables, with the order of calls and the growth of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table.cuda.backend import capturing, interpreted
from shoal.table.cuda.kernels import index as ik
from shoal.table.cuda.launch import cdiv, launch
from shoal.table.cuda.layout import RowLayout
from shoal.table.cuda.storage import counts as c
from shoal.table.cuda.storage.allowance import IDS_OF_BUCKET, Allowance
from shoal.table.cuda.storage.index import Index, stash_cells
from shoal.table.cuda.storage.turn import Turn

ROW = ik.ROW.value
FRESH = ik.FRESH.value


class Storage(Index):
    """An `Index` that several threads and streams can use in turn."""

    max_load = ik.FULL.value / 8

    def __init__(
        self, layout: RowLayout, device: torch.device, tables: int = 1, allowance: Allowance | None = None
    ) -> None:
        super().__init__(layout, device, tables)
        self.allowance = allowance
        """The memory that it can take, if its only table has a budget."""
        if allowance is not None:
            self.max_load = IDS_OF_BUCKET / 8
            self.arena.keep_scores()
        self.kept: dict[Any, Any] = {}
        """Objects that callers reuse for many batches, such as learning rates on the device."""
        self.epoch = 0
        """The epoch stored with rows written now; 0: changes are not tracked."""
        self.untracked_graph = False
        """Whether a captured CUDA graph writes rows without their epoch."""
        self.captured: list[Any] = []
        """Objects that captured graphs read, in addition to the storage itself."""
        self.replayed = False
        """Whether a captured graph inserts ids, which the host does not count."""
        self.turn = Turn(device)
        """The turn that this storage shares with those that are used together with it."""
        self.turn.storages.add(self)
        self._start()

    def __enter__(self) -> Storage:
        """One call at a time; see `Turn`."""
        turn = self.turn
        turn.enter()
        while turn is not self.turn:  # `share_turn` has replaced it
            turn.leave()
            turn = self.turn
            turn.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.turn.leave()

    @property
    def stream(self) -> int | None:
        """The CUDA handle of the last call's stream."""
        return self.turn.stream

    def keep(self, key: Any, make: Any, limit: int = 64) -> Any:
        """The cached result of ``make()`` for ``key``; at most ``limit`` results are kept."""
        found = self.kept.get(key)
        if found is None and capturing(self.device):  # not cached: it is empty until the graph runs
            return make()
        if found is None:
            if len(self.kept) >= limit:
                self.kept.clear()
            found = self.kept[key] = make()
        return self.hold(found)

    def hold(self, thing: Any) -> Any:
        """Keeps ``thing`` alive for as long as a graph that is being captured can read it."""
        if capturing(self.device) and not any(held is thing for held in self.captured):
            self.captured.append(thing)
        return thing

    # --- growth -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Makes the storage empty."""
        self._recall()
        self.counts.start()
        self.counts.set(c.ROOM, self.arena.room)
        least = 16 if interpreted() else 1024
        if self.allowance is not None:
            least = min(least, self.allowance.buckets(self.allowance.rows))
        for table in range(self.tables):
            self._new_index(table, least)
        if self.allowance is not None:
            self.allowance.full = False
            if not self.allowance.settle(self):
                raise CapacityError(f"an empty table needs {self.bytes() >> 10} KiB, more than its budget has left")
            if self.allowance.small:
                self._grow([self.allowance.rows])

    @property
    def at_limit(self) -> bool:
        """Whether the budget's memory is used up, so that rows leave for new ids."""
        return self.allowance is not None and self.allowance.full

    def cells(self, buckets: int) -> int:
        """The number of cells in the stash; with a budget, few ids are there."""
        return stash_cells(buckets if self.allowance is None else -(-buckets // 8))

    def make_room(self, counts: list[int]) -> None:
        """Makes sure that ``counts`` new ids of each table fit. Waits for the device only when they might not.

        Ids beyond a budget are not counted: rows leave for them.

        Raises:
            CapacityError: the GPU is full; the storage is unchanged.
        """
        if capturing(self.device) or self.at_limit:
            return
        for account in self.turn.accounts():
            account.settle()
        if self.replayed:
            self.counts.look_anew()
        self.counts.look()
        while not self._fits(counts):  # wait for as few pending copies as possible
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

    def look(self) -> None:
        """Updates the host's count of ids. Waits for the device."""
        for account in self.turn.accounts():
            account.settle()
        self.counts.look(wait=True)

    def expect_replays(self) -> None:
        """Notes that a graph that inserts ids is being captured."""
        self.replayed = True
        if not self.arena.tracked or self.allowance is not None:  # rows evicted by a replay are not reported
            self.untracked_graph = True

    def _recall(self) -> None:
        for account in self.turn.accounts():
            account.recall()

    def sure(self) -> int:
        """The number of ids that certainly fit."""
        if self.at_limit:
            return 1 << 30
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
        if self.allowance is not None:
            return self._grow_within(self.allowance, counts)
        rows = self.counts.rows_needed(counts)
        if rows > self.arena.room:
            self._grow_rows(rows)
        for table, size in enumerate(self.counts.sizes_needed(counts)):
            buckets = self._buckets[table]
            while self._capacity(buckets) < size:
                buckets *= 2 if buckets >= 1 << 20 else 4
            if buckets > self._buckets[table]:
                self._grow_index(table, buckets, empty=size == counts[table])
        return None

    def _grow_within(self, allowance: Allowance, counts: list[int]) -> None:
        """Grows rows and index together, as far as a budget allows."""
        have = self.arena.room - 1
        needed = max(self.counts.rows_needed(counts) - 1, self.counts.sizes_needed(counts)[0])
        rows = allowance.grow(self, have, needed)
        if rows > have:
            self.arena.set_room(rows + 1)
            buckets = allowance.buckets(rows)
            if buckets > self._buckets[0]:
                self._grow_index(0, buckets, empty=self.counts.is_empty(0))
            self.counts.set(c.ROOM, rows + 1)
        self.arena.notify()

    def _grow_rows(self, rows: int) -> None:
        self.counts.set(c.ROOM, self.arena.grow(rows))

    def reserve(self, counts: list[int]) -> None:
        """Allocates memory for ``counts`` ids of each table in total, so that later calls allocate none until then."""
        self.look()
        self._recall()
        self.make_room([max(0, count - size) for count, size in zip(counts, self.counts.sure_sizes(), strict=True)])

    # --- ids ----------------------------------------------------------------------------------------------------------

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

        ``drop`` (uint8) skips ids, which get -1; ``gate`` (int64) skips all of them unless it is 0. ``time`` and the
        epoch are written to the rows (with ``only_new``, only to new ones). If ``time`` is a `Now`, a row with a later
        time keeps it.

        Raises:
            CapacityError: the GPU is full; the storage is unchanged.
        """
        if time and not self.arena.timed:
            if capturing(self.device):  # each replay would forget the times
                raise UnsupportedError(
                    "the first write with a time cannot be captured; run the step once before the capture"
                )
            self.arena.keep_times()
        self.make_room(counts)
        out = self._insert(ids, table, time=time, only_new=only_new, drop=drop, gate=gate)
        if not capturing(self.device):
            self.counts.add(counts, self.arena.room)
            for account in self.turn.accounts():
                account.spend(sum(counts))
            return out
        self.expect_replays()
        return out

    def erase(self, ids: Tensor, table: int) -> int:
        """Removes ids; returns how many of them had a row. Waits for the device."""
        slots = torch.unique(self.find(ids, table, "slots"))
        return self.erase_slots(slots[slots != -1], table)

    def erase_slots(self, slots: Tensor, table: int) -> int:
        """Removes the ids of distinct slots from `find` or `chunks`; returns their number. Waits for the device."""
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
        """int32: space for ``n`` rows about to be freed, followed by the free rows; and the counters.

        All memory needed to free rows is allocated here, so that freeing cannot fail halfway. Waits for the device.
        """
        counts = self.counts.now()
        begin, end = min(counts[c.TAKEN], counts[c.FREE]), counts[c.FREE]
        rows = torch.empty(n + end - begin, dtype=torch.int32, device=self.device)
        self.free_rows.grow(0, max(1, rows.numel()))
        rows[n:] = self.free_rows.tensor[0, begin:end]
        return rows, counts

    def _recycle(self, rows: Tensor, counts: list[int], table: int, removed: int) -> None:
        """Makes ``rows`` the list of free rows, and subtracts ``removed`` ids from a table's count."""
        if counts[c.LOST]:
            rows = rows[rows > 0]  # ids for which there was no room have row 0, which is never used
        self.free_rows.tensor[0, : rows.numel()] = rows
        self.arena.forget_scores(rows)
        self.counts.set(c.NEXT, counts[c.NEXT] + max(0, counts[c.TAKEN] - counts[c.FREE]))
        self.counts.set(c.FREE, rows.numel())
        self.counts.set(c.TAKEN, 0)
        self.counts.of(table)[ik.SIZE.value].sub_(removed)
        self.counts.rows_freed()
        self.counts.look_anew()

    def clear(self, table: int) -> None:
        """Removes all ids of a table; frees memory if it is the only table."""
        if self.tables == 1:
            self.look()
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
        self._recall()
        self._new_index(table, 16 if interpreted() else 1024)
        self._recycle(rows, counts, table, gone.numel())

    def swap(self, other: Storage) -> None:
        """Swaps the contents with another storage of the same layout."""
        if other.layout.words != self.layout.words or other.tables != self.tables:
            raise ConfigError("storages must have the same layout to swap their contents")
        kept = ("turn", "epoch", "untracked_graph", "captured", "replayed")
        mine = {name: value for name, value in self.__dict__.items() if name not in kept}
        theirs = {name: value for name, value in other.__dict__.items() if name not in kept}
        for storage, old, new in ((self, mine, theirs), (other, theirs, mine)):
            for name in old.keys() - new.keys():
                del storage.__dict__[name]
            storage.__dict__.update(new)
        self.arena.watchers, other.arena.watchers = other.arena.watchers, self.arena.watchers
        self._recall()
        self.arena.notify()
        other.arena.notify()

    # --- changes ------------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Starts and returns a new epoch; rows written from now on have it or a later one."""
        self.arena.track()
        self.epoch += 1
        self.counts.set(ik.EPOCH.value, self.epoch)
        return self.epoch
