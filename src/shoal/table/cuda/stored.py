"""`StoredTable`: the parts of a GPU table, its budget and its checkpoints; reads and writes are in `table`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table.arguments import as_ids, as_int, as_part, as_rows
from shoal.table.budget.calls import code_scores
from shoal.table.budget.evicted import EvictionStats, MissRatioCurve
from shoal.table.checkpoint.copies import about_to_change
from shoal.table.cuda import bridge, compiled
from shoal.table.cuda.backend import as_device
from shoal.table.cuda.budgets import evicting
from shoal.table.cuda.budgets.arrivals import Arrivals, Sent
from shoal.table.cuda.budgets.budget import GpuBudget
from shoal.table.cuda.budgets.collected import Collected
from shoal.table.cuda.changes import Changes
from shoal.table.cuda.judge import Judge
from shoal.table.cuda.layout import row_layout
from shoal.table.cuda.marks import Marks
from shoal.table.cuda.storage import Storage
from shoal.table.reference.filters import hash_id
from shoal.table.table import HashTable

_GOLDEN = 0x9E3779B97F4A7C15


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that locks the table's storage while a call enqueues its work."""

    @functools.wraps(method)
    def call(self: StoredTable, *args: Any, **kwargs: Any) -> Any:
        with self._storage:
            return method(self, *args, **kwargs)

    return call


class StoredTable(HashTable):
    """A table whose index and rows are in a `Storage`, its own or one shared with similar tables."""

    # --- building -----------------------------------------------------------------------------------------------------

    def _start(self, layout: _core.Layout, device: Any, deterministic: bool) -> _core.Table:
        self.device = as_device(device, self.name)
        self.deterministic = deterministic
        self._layout = row_layout(self.table_config, self.first_column)
        self._seed = hash_id(self.seed + _GOLDEN)
        self._arrivals = Arrivals()
        self._budget = GpuBudget(self, self._memory_budget) if self.has_budget and self.grows else None
        self._rounds = any(s.native.stochastic_rounding for s in self._layout.segments)
        self._shared: Storage | None = None
        self._making = threading.Lock()
        self._number = 0
        self._host = _core.Table(layout, self.seed)  # holds the filter, the clock and the scales, but no rows
        self._marks: Marks | None = None
        self._judge = Judge(self.name, self.device)
        self._changes = Changes(self)
        self._plans: dict[Any, Any] = {}
        self._version = 0
        self._walked: tuple[tuple[int, int], Tensor, Tensor] | None = None
        self._handle = compiled.register(self)
        self._token = torch.zeros(1, device=self.device)  # keeps calls in order in compiled code
        return self._host

    on_gpu = True
    grows = True
    """Whether a call over several tables makes room for its ids first; a cache makes room itself."""

    @property
    def _storage(self) -> Storage:
        """Index and rows, created when first needed."""
        if self._shared is None:
            with self._making:
                if self._shared is None:
                    self._shared = self._new_storage()
        return self._shared

    def _new_storage(self) -> Storage:
        """An empty storage for this table alone."""
        return Storage(self._layout, self.device) if self._budget is None else self._budget.storage(self)

    def join(self, storage: Storage, number: int) -> None:
        """Makes this table, which has no rows yet and no budget, number ``number`` of a storage."""
        if self._shared is not None:
            raise ConfigError(f"table {self.name!r} must be empty before it joins a shared storage")
        self._shared, self._number = storage, number

    @property
    def _native(self) -> _core.Table:  # type: ignore[bad-override]
        raise UnsupportedError(f"table {self.name!r} is on {self.device}; this operation works only on CPU tables")

    def _set_touched(self, touched: Any, number: int) -> None:
        self._marks = self._marks or Marks(self._arrivals)
        self._marks.set_client(touched, number)

    @in_turn
    def track(self, tracker: _core.Tracker) -> None:
        """As `HashTable.track`; ids are copied from the device without making writers wait."""
        if self._storage.replayed:
            raise UnsupportedError(
                f"table {self.name!r}: a captured CUDA graph writes to it and cannot report which ids; track the table "
                "before any capture, and train without a graph"
            )
        self._marks = self._marks or Marks(self._arrivals)
        self._marks.trackers = [*self._marks.trackers, tracker]

    @in_turn
    def untrack(self, tracker: _core.Tracker) -> None:
        """As `HashTable.untrack`."""
        if self._marks is not None:
            self._marks.settle()
            self._marks.trackers = [one for one in self._marks.trackers if one is not tracker]

    @property
    def replayed(self) -> bool:  # pyrefly: ignore[bad-override]
        """Whether a CUDA graph that changes rows was captured."""
        return bool(self._storage.replayed)

    def settle(self) -> None:
        """Waits until all writes so far have been reported to trackers."""
        self._arrivals.settle()

    @property
    def reports_removed(self) -> bool:
        """Whether a tracker or an incremental checkpoint needs the removed ids."""
        return self._changes.tracked or (self._marks is not None and bool(self._marks.trackers))

    def expect_removed(self, sent: Sent, number: int) -> None:
        """Reports removed ids once ``sent`` has arrived: their number, the ids, and words with the table number of each
        in the upper 32 bits."""
        changes, marks, epoch = self._changes, self._marks, self._storage.epoch

        def receive(count: Tensor, ids: Tensor, packed: Tensor) -> None:
            gone = ids[: int(count)][packed[: int(count)] >> 32 == number]
            if changes.tracked:
                changes.removed(epoch, gone)
            if marks is not None:
                marks.removed(gone)

        self._arrivals.expect(sent, receive)

    @in_turn
    def all_ids(self) -> Iterator[Tensor]:
        """As `HashTable.all_ids`; the ids are listed at the time of the call."""
        self._judge.check(wait=True)
        return iter([ids.cpu() for ids, _, _ in self._storage.chunks(self._number)])

    @in_turn
    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]:
        """As `HashTable.fetch_bytes`."""
        self._judge.check(wait=True)
        rows = self._storage.find(ids.to(self.device), self._number, "rows")
        words = bridge.from_device(self._storage.arena.gather(rows, self._layout.words))
        out = self._layout.to_native(words) if self.serving else words.view(torch.uint8)
        known = (rows >= 0).cpu()
        out = out.view(ids.numel(), -1)[:, begin:end].contiguous()
        return out.mul_(known.view(-1, 1)), int(known.sum())

    @in_turn
    def fetch_times(self, ids: Tensor) -> Tensor:
        """As `HashTable.fetch_times`."""
        rows = self._storage.find(ids.to(self.device), self._number, "rows")
        return torch.where(rows >= 0, self._storage.arena.row_times(rows.clamp(min=0)), 0).cpu()

    @in_turn
    def fetch_kept(self, ids: Tensor) -> Tensor:
        """As `HashTable.fetch_kept`."""
        assert self._budget is not None
        rows = self._storage.find(ids.to(self.device), self._number, "rows")
        return torch.where(rows >= 0, self._budget.lasting(self._storage, rows.clamp(min=0)), 0).cpu()

    def _ids_to_report(self) -> Tensor | None:
        """All ids, before they are removed; None if no tracker needs them."""
        if self._marks is None or not self._marks.trackers:
            return None
        return torch.cat([ids.cpu() for ids, _, _ in self._storage.chunks(self._number)])

    def _replaced(self, previous: Tensor | None) -> None:
        """Reports that all rows were replaced; ``previous`` are the ids that had a row before."""
        if previous is not None and self._marks is not None:
            self._marks.replace(previous)

    def _client_lookup(self, ids: Tensor) -> Tensor:
        return self.lookup(ids.to(self.device)).cpu()

    # --- arguments ----------------------------------------------------------------------------------------------------

    def _ids(self, ids: Any) -> Tensor:
        return as_ids(ids, self.name, device=self.device).view(-1)

    def _write_arguments(
        self, ids: Any, values: Any, req_time: Any, what: str = "values"
    ) -> tuple[Tensor, Tensor, int]:
        ids = self._ids(ids)
        rows = as_rows(values, ids.numel(), self.dim_size, self.name, what, self.device)
        return ids, rows, self._time(req_time)

    def _counts(self, n: int) -> list[int]:
        counts = [0] * self._storage.tables
        counts[self._number] = n
        return counts

    def _insert(self, ids: Tensor, scores: Tensor | None = None, **options: Any) -> Tensor:
        try:
            if self._budget is not None:
                return evicting.insert(self, self._budget, ids, scores=scores, **options)
            return self._storage.insert(ids, self._number, counts=self._counts(ids.numel()), **options)
        except CapacityError as error:
            raise CapacityError(
                f"table {self.name!r}: no room for {ids.numel()} more ids: {error}; nothing was changed. "
                "Evict rows, use an optimizer with less state, or put a CachedHashTable over a CPU table"
            ) from None

    # --- its budget ---------------------------------------------------------------------------------------------------

    def pin(self, ids: Tensor) -> None:
        """As `HashTable.pin`. Waits for the device."""
        self._set_pinned("pin", ids)

    def unpin(self, ids: Tensor) -> None:
        """As `HashTable.unpin`. Waits for the device."""
        self._set_pinned("unpin", ids)

    def _set_pinned(self, call: str, ids: Tensor) -> None:
        self._check_budget(call)
        assert self._budget is not None
        ids = as_ids(ids, self.name, device=self.device)
        with self._storage as storage:
            self._budget.pin(storage, ids, call == "pin")

    def pinned(self) -> Tensor:
        """As `HashTable.pinned`."""
        self._check_budget("pinned")
        assert self._budget is not None
        return self._budget.pinned.sort().values.cpu()

    def _collector(self, limit: int) -> Collected:
        return Collected(self, limit)  # copies rows to host memory

    @in_turn
    def eviction_stats(self) -> EvictionStats:
        """As `HashTable.eviction_stats`; equal ids of one call count once. Waits for the device."""
        self._check_budget("eviction_stats")
        assert self._budget is not None
        return self._budget.stats()

    @in_turn
    def miss_ratio_curve(self) -> MissRatioCurve:
        """As `HashTable.miss_ratio_curve`. Waits for the device."""
        self._check_budget("miss_ratio_curve")
        assert self._budget is not None
        return self._budget.sampled.curve()

    @in_turn
    def next_eviction_epoch(self) -> int:
        """As `HashTable.next_eviction_epoch`."""
        self._check_epochs()
        assert self._budget is not None
        return self._budget.next_epoch()

    @in_turn
    def _set_score(self, score: float, given: bool) -> None:
        assert self._budget is not None
        self._budget.set_score(score, given)

    def _eviction_state(self) -> dict[str, Any]:
        assert self._budget is not None
        return self._budget.state()

    def _set_eviction_state(self, state: dict[str, Any]) -> None:
        assert self._budget is not None
        with self._storage as storage:
            self._budget.set_state(storage, state)

    def _refuse_nan(self, scores: Tensor) -> None:
        """Does nothing: `evicting.insert` checks for NaN without a wait."""

    def _scores_before(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with self._storage as storage:
            rows, kept = storage.find(ids, 0, "rows"), storage.arena.scores
            assert kept is not None
            known = rows >= 0
            code = (kept.tensor[0][rows.clamp(min=0).long()].long() & 0xFFFFFFFF) & ~3  # only the bits of the score
            return torch.where(known, code_scores(code), 0.0), known

    # --- sizes --------------------------------------------------------------------------------------------------------

    @in_turn
    def size(self) -> int:
        """The number of rows. Waits for the device."""
        self._judge.check(wait=True)
        return self._storage.counts.sizes()[self._number]

    def memory_bytes(self) -> int:
        """Bytes of GPU memory for index and rows (of all tables of a `MultiHashTable` that share them)."""
        return self._storage.bytes()

    @property
    def max_update_time(self) -> int:
        """The largest ``req_time`` of any write so far."""
        return self._host.max_update_time()

    def as_op(self, name: str | None = None) -> HashTable:
        """Waits until all calls on this table have been applied, and raises errors from them."""
        self._judge.check(wait=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.settle()
        return self

    @in_turn
    def reserve(self, rows: int) -> HashTable:
        """Allocates memory for ``rows`` ids in total; until that many exist, calls neither wait nor allocate."""
        counts = [0] * self._storage.tables
        counts[self._number] = as_int(rows, self.name, "rows")
        try:
            self._storage.reserve(counts)
        except CapacityError as error:
            raise CapacityError(f"table {self.name!r}: no room for {rows} rows: {error}; nothing was changed") from None
        return self

    def __repr__(self) -> str:
        return f"HashTable({self.name!r}, dim={self.dim_size}, rows={self.size()}, device={str(self.device)!r})"

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @in_turn
    def staged(self) -> bridge.Staged:
        """All rows in a CPU table: a snapshot in host memory."""
        self._judge.check(wait=True)
        native = self._empty_native()
        bridge.to_host(self._storage, *self._storage.entries(self._number), native, self._lasting())
        return bridge.Staged(self, native)

    def staging(self) -> bridge.Staged:
        """An empty CPU table to read files into."""
        return bridge.Staged(self, self._empty_native())

    def _empty_native(self) -> _core.Table:
        """An empty CPU table for this table's rows, with its policy but without its limits."""
        if self._budget is None:
            return _core.Table(self._layout.native, 0)
        policy = self.table_config.eviction.policy
        return _core.Table(self._layout.native, 0, 1, _core.EvictOptions(policy, 0, None, 0, 0, False))

    def _lasting(self) -> Callable[[Tensor], Tensor] | None:
        """The function that returns the eviction policy's state of rows; None without a budget."""
        budget = self._budget
        return None if budget is None else lambda rows: budget.lasting(self._storage, rows)

    def source(self, since: int = 0, *, stale: bool = False) -> Any:
        """The rows for a save: ids are listed now and rows copied in parts, so that little host memory is used."""
        self._judge.check(wait=True)
        rows = bridge.RowSource(self, since)
        return self._host, None if stale else self._expiry, 0, rows.take, rows.parts

    @property
    def changes(self) -> Any:
        """The record of changes, for incremental checkpoints."""
        return self._changes

    @in_turn
    def adopt(self, native: _core.Table) -> None:
        """Replaces all rows with those of a CPU table, and takes its clock and scales."""
        about_to_change(self)
        storage, previous = self._storage, self._ids_to_report()
        try:
            if storage.tables == 1:
                fresh, budget = self._new_storage(), self._budget
                restored = None if budget is None else budget.restoring(native)
                bridge.to_device(fresh, 0, native, restored)
                storage.swap(fresh)
                if budget is not None and restored is not None:
                    budget.restored(storage, restored)
            else:
                storage.make_room(self._counts(native.size()))
                storage.clear(self._number)
                bridge.to_device(storage, self._number, native)
        except CapacityError as error:
            raise CapacityError(
                f"table {self.name!r}: no room for {native.size()} rows in addition to the current ones: {error}; "
                "nothing was changed. Restore into an empty table, or put a CachedHashTable over a CPU table"
            ) from None
        self._version += 1
        if storage.epoch:
            storage.begin_epoch()  # the storage's other tables share the epoch
        self._changes.start_over()
        self._replaced(previous)
        self._host.raise_max_update_time(native.max_update_time())
        self._host.set_scales(native.scales())

    @in_turn
    def save_as_tensor(self, shard_idx: int, num_shards: int, limit: int, offset: int) -> tuple[int, list[bytes]]:
        """As `HashTable.save_as_tensor`."""
        self.check_trains("save_as_tensor")
        shard_idx, num_shards, limit, offset = as_part(self.name, shard_idx, num_shards, limit, offset)
        version = self._version, self._storage.turn.writes
        if self._walked is None or self._walked[0] != version:
            self._walked = version, *self._storage.entries(self._number)
        _, ids, rows = self._walked
        begin = ids.numel() * shard_idx // num_shards + offset
        end = min(begin + limit, ids.numel() * (shard_idx + 1) // num_shards)
        if begin >= end:
            return offset, []
        native = self._empty_native()
        bridge.to_host(self._storage, ids[begin:end], rows[begin:end], native, self._lasting())
        entries: list[bytes] = []
        for stripe in range(_core.Table.num_stripes):
            entries += _core.walk_entries(native, stripe, 0, end - begin)[0]
        return offset + len(entries), entries
