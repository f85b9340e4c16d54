"""`StoredTable`: what a GPU table is made of and how its rows come and go as a whole; its calls are in `table`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table.arguments import as_ids, as_int, as_rows
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
from shoal.table.table import HashTable

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def hash_id(x: int) -> int:
    """The hash of csrc/core/hash.h."""
    x &= _MASK
    for _ in range(2):
        x ^= x >> 32
        x = x * 0xD6E8FEB86659FD93 & _MASK
    return x ^ x >> 32


def in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps other threads out of the table's storage while a call enqueues its work."""

    @functools.wraps(method)
    def call(self: StoredTable, *args: Any, **kwargs: Any) -> Any:
        with self._storage:
            return method(self, *args, **kwargs)

    return call


class StoredTable(HashTable):
    """A table whose index and rows are in a `Storage`, of its own or shared with tables like it."""

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
        self._host = _core.Table(layout, self.seed)  # has no rows: the filter, the clock and the scales
        self._marks: Marks | None = None
        self._judge = Judge(self.name, self.device)
        self._changes = Changes(self)
        self._plans: dict[Any, Any] = {}
        self._version = 0
        self._walked: tuple[tuple[int, int], Tensor, Tensor] | None = None
        self._handle = compiled.register(self)
        self._token = torch.zeros(1, device=self.device)  # what orders calls inside compiled code
        return self._host

    on_gpu = True
    grows = True
    """Whether a call of several tables makes room for its ids first; a cache makes its own."""

    @property
    def _storage(self) -> Storage:
        """Index and rows, made when they are first needed."""
        if self._shared is None:
            with self._making:
                if self._shared is None:
                    self._shared = self._new_storage()
        return self._shared

    def _new_storage(self) -> Storage:
        """An empty one, for this table alone."""
        return Storage(self._layout, self.device) if self._budget is None else self._budget.storage(self)

    def join(self, storage: Storage, number: int) -> None:
        """Makes this table, which has no rows yet and no budget, number ``number`` of a storage."""
        if self._shared is not None:
            raise ConfigError(f"table {self.name!r} must have no rows of its own")
        self._shared, self._number = storage, number

    @property
    def _native(self) -> _core.Table:  # type: ignore[bad-override]
        raise UnsupportedError(f"table {self.name!r} is on {self.device}; this operation works on CPU tables")

    def _set_touched(self, touched: Any, number: int) -> None:
        self._marks = self._marks or Marks(self._arrivals)
        self._marks.set_client(touched, number)

    @in_turn
    def track(self, tracker: _core.Tracker) -> None:
        """As `HashTable.track`; ids come home from the device without a wait of their writers."""
        if self._storage.replayed:
            raise UnsupportedError(
                f"table {self.name!r}: a CUDA graph was captured that writes it and cannot tell which ids; follow the "
                "table before, and train without one"
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
        """Whether a CUDA graph was captured that changes rows."""
        return bool(self._storage.replayed)

    def settle(self) -> None:
        """Waits until trackers have been told of all writes so far."""
        self._arrivals.settle()

    @property
    def tells_removed(self) -> bool:
        """Whether somebody wants to know which ids are removed."""
        return self._changes.tracked or (self._marks is not None and bool(self._marks.trackers))

    def expect_removed(self, sent: Sent, number: int) -> None:
        """Rows of ids left: how many, the ids, and the number of each one's table above 32 bits. Who wants to know is
        told when they have arrived."""
        changes, marks, epoch = self._changes, self._marks, self._storage.epoch

        def told(count: Tensor, ids: Tensor, packed: Tensor) -> None:
            gone = ids[: int(count)][packed[: int(count)] >> 32 == number]
            if changes.tracked:
                changes.removed(epoch, gone)
            if marks is not None:
                marks.removed(gone)

        self._arrivals.expect(sent, told)

    @in_turn
    def all_ids(self) -> Iterator[Tensor]:
        """As `HashTable.all_ids`; they are listed now."""
        self._judge.check(wait=True)
        return iter([ids.cpu() for ids, _, _ in self._storage.chunks(self._number)])

    @in_turn
    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]:
        """As `HashTable.fetch_bytes`."""
        self._judge.check(wait=True)
        rows = self._storage.find(ids.to(self.device), self._number, "rows")
        words = bridge.from_device(self._storage.arena.gather(rows, self._layout.words))
        whole = self._layout.to_native(words) if self.serving else words.view(torch.uint8)
        there = (rows >= 0).cpu()
        whole = whole.view(ids.numel(), -1)[:, begin:end].contiguous()
        return whole.mul_(there.view(-1, 1)), int(there.sum())

    @in_turn
    def fetch_times(self, ids: Tensor) -> Tensor:
        """As `HashTable.fetch_times`."""
        rows = self._storage.find(ids.to(self.device), self._number, "rows")
        return torch.where(rows >= 0, self._storage.arena.row_times(rows.clamp(min=0)), 0).cpu()

    def fetch_kept(self, ids: Tensor) -> Tensor:
        """As `HashTable.fetch_kept`."""
        assert self._budget is not None
        rows = self._storage.find(ids.to(self.device), self._number, "rows")
        return torch.where(rows >= 0, self._budget.lasting(self._storage, rows.clamp(min=0)), 0).cpu()

    def _former_ids(self) -> Tensor | None:
        """All ids, if somebody wants to know which are removed."""
        if self._marks is None or not self._marks.trackers:
            return None
        return torch.cat([ids.cpu() for ids, _, _ in self._storage.chunks(self._number)])

    def _replaced(self, former: Tensor | None) -> None:
        """All rows are others now; these ids had one before."""
        if former is not None and self._marks is not None:
            self._marks.replace(former)

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
                f"table {self.name!r}: no room for {ids.numel()} ids more: {error}; nothing was changed. "
                "Evict rows, use a narrower optimizer state, or put a CachedHashTable over a CPU table"
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

    def collect_evicted(self, limit: int = 1 << 20) -> Collected:  # type: ignore[bad-override]
        """As `HashTable.collect_evicted`; the rows are copied to host memory."""
        self._check_budget("collect_evicted")
        return Collected(self, limit)

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

    def set_score(self, score: float | None) -> None:
        """As `HashTable.set_score`."""
        self._check_scores()
        assert self._budget is not None
        self._budget.set_score(score)

    def _eviction_state(self) -> dict[str, Any]:
        assert self._budget is not None
        return self._budget.state()

    def _set_eviction_state(self, state: dict[str, Any]) -> None:
        assert self._budget is not None
        with self._storage as storage:
            self._budget.set_state(storage, state)

    def _refuse_nan(self, scores: Tensor) -> None:
        """`evicting.insert` does, without a wait."""

    def _scores_before(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        with self._storage as storage:
            rows, kept = storage.find(ids, 0, "rows"), storage.arena.scores
            assert kept is not None
            known = rows >= 0
            code = (kept.tensor[0][rows.clamp(min=0).long()].long() & 0xFFFFFFFF) & ~3  # without what is not the score
            return torch.where(known, code_scores(code), 0.0), known

    # --- what there is ------------------------------------------------------------------------------------------------

    @in_turn
    def size(self) -> int:
        """How many ids have a row. Waits for the device."""
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
        """Waits until everything asked of this table has been applied, and raises what went wrong meanwhile."""
        self._judge.check(wait=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.settle()
        return self

    @in_turn
    def reserve(self, rows: int) -> HashTable:
        """Takes memory for so many ids in all, so that no call waits or takes memory before there are as many."""
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
        """A CPU table for rows of this one: with its policy, and without its limits."""
        if self._budget is None:
            return _core.Table(self._layout.native, 0)
        policy = self.table_config.eviction.policy
        return _core.Table(self._layout.native, 0, 1, _core.EvictOptions(policy, 0, None, False, 0, 0, False))

    def _lasting(self) -> Callable[[Tensor], Tensor] | None:
        """What tells what the policy keeps of rows."""
        budget = self._budget
        return None if budget is None else lambda rows: budget.lasting(self._storage, rows)

    def source(self, since: int = 0, *, stale: bool = False) -> Any:
        """What a save takes: a list of ids now, and their rows by parts, so that little host memory is enough."""
        self._judge.check(wait=True)
        rows = bridge.RowSource(self, since)
        return self._host, None if stale else self._expiry, 0, rows.take, rows.parts

    @property
    def changes(self) -> Any:
        """What is known of changes, for incremental checkpoints."""
        return self._changes

    @in_turn
    def adopt(self, native: _core.Table) -> None:
        """Replaces all rows with those of a CPU table, and takes its clock and scales."""
        about_to_change(self)
        storage, former = self._storage, self._former_ids()
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
                f"table {self.name!r}: no room for {native.size()} rows beside those it has: {error}; nothing was "
                "changed. Restore into an empty table, or put a CachedHashTable over a CPU table"
            ) from None
        self._version += 1
        if storage.epoch:
            storage.begin_epoch()  # of other tables' changes, too
        self._changes.start_over()
        self._replaced(former)
        self._host.raise_max_update_time(native.max_update_time())
        self._host.set_scales(native.scales())

    @in_turn
    def save_as_tensor(self, shard_idx: int, num_shards: int, limit: int, offset: int) -> tuple[int, list[bytes]]:
        """As `HashTable.save_as_tensor`."""
        self.check_trains("save_as_tensor")
        shard_idx, num_shards, limit, offset = map(int, (shard_idx, num_shards, limit, offset))
        if not 0 <= shard_idx < num_shards:
            raise ConfigError(
                f"table {self.name!r}: shard_idx must be 0..num_shards - 1, got {shard_idx} of {num_shards}"
            )
        if limit < 1:
            raise ConfigError(f"table {self.name!r}: limit must be at least 1, got {limit}")
        if offset < 0:
            raise ConfigError(f"table {self.name!r}: offset must be 0 or what the call before returned, got {offset}")
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
