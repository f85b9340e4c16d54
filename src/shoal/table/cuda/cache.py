"""`CachedHashTable`: a CPU table with its hot rows in GPU memory, for tables larger than the GPU's memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError, UnsupportedError
from shoal.table.budget.calls import EPOCHS
from shoal.table.budget.evicted import EvictionStats, MissRatioCurve
from shoal.table.budget.policies import Evict, EvictionPolicy
from shoal.table.checkpoint.copies import about_to_change
from shoal.table.cuda import bridge
from shoal.table.cuda.prefetch import Piece, Prefetcher
from shoal.table.cuda.storage import FRESH, ROW, Storage
from shoal.table.cuda.table import CudaHashTable
from shoal.table.cuda.uses import Uses
from shoal.table.table import HashTable

_FETCHERS = 8


class CachedHashTable(CudaHashTable):
    """A `HashTable` on a GPU that caches rows of a larger table on the CPU.

    Every call first copies the batch's rows from the CPU table to GPU memory, then works there like any GPU table. When
    there is no room, the least recently used rows leave; changed rows are written back first. At any time exactly one
    copy of a row is valid, so results equal those of the CPU table alone.

    `prefetch` copies rows in advance, in its own thread and on its own stream::

        for batch, following in pairwise(batches):
            table.prefetch(following)
            rows = table.lookup(batch)
            ...

    While it is cached, write to the CPU table only through the cache; `flush` writes everything back.

    Args:
        table: the CPU table; the cache uses its configuration, filter and seed.
        cache_rows: the number of rows in GPU memory; at least the number of distinct ids in a batch. Raise it if
            ``fetched_rows`` grows by a large part of every batch.
        device: the device of the cache.
        timeout: how long a call waits for a running prefetch of its ids.
        evict: which rows leave the cache: an eviction policy or its name; in a cache, reads count too. `Score` is not
            supported, but a custom object with a method ``scores`` is. The CPU table keeps its own budget, and
            `eviction_stats` and similar calls refer to that.
        deterministic: see `HashTable`.
    """

    grows = False

    def __init__(
        self,
        table: HashTable,
        *,
        cache_rows: int,
        device: Any = "cuda",
        timeout: timedelta = timedelta(minutes=2),
        evict: Evict | EvictionPolicy | str = "lru",
        deterministic: bool = False,
    ) -> None:
        if table.on_gpu or table.serving:
            raise ConfigError(f"table {table.name!r}: a cached table must be a CPU table for training")
        if cache_rows < 1:
            raise ConfigError(f"table {table.name!r}: cache_rows must be at least 1, got {cache_rows}")
        self._uses = Uses(evict, f"table {table.name!r}")
        self.below = table
        self.cache_rows = int(cache_rows)
        self.fetched_rows = 0
        """The number of rows fetched from the CPU table so far."""
        self.written_rows = 0
        """The number of changed rows written back so far."""
        self.lock = threading.RLock()
        self._fetchers: ThreadPoolExecutor | None = None
        self._prefetcher = Prefetcher(self, timeout)
        self._build(
            table.config,
            table.name,
            hash_filter=table.hash_filter,
            saver_parallel=table.saver_parallel,
            on_bad_gradient=table.on_bad_gradient,
            seed=table.seed,
            device=device,
            deterministic=deterministic,
            clocked=table.clocked,
        )
        self._host.raise_max_update_time(table.max_update_time)
        self._host.set_scales(table._native.scales())
        self._host.set_calls(table._native.calls())
        self._storage.reserve([self.cache_rows])
        self._uses.start(self.cache_rows, self.device)
        self._dirty = torch.zeros(self.cache_rows + 1, dtype=torch.bool, device=self.device)

    # --- the cache ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self, ids: Tensor | None = None) -> Iterator[None]:
        """Waits until the prefetcher has fetched ``ids``, then locks it out; the current stream waits for its work."""
        with self.lock:
            if ids is not None:
                self._prefetcher.wait_for(ids)
            self._prefetcher.join()
            with self._storage:
                yield

    @property
    def storage(self) -> Storage:
        """Index and rows of the resident ids."""
        return self._storage

    def _bring(self, ids: Tensor, create: bool) -> None:
        """Fetches the rows of ids that are in the CPU table; with ``create`` also makes room for the others."""
        missing = self.note(ids)
        if missing.numel() == 0:
            return
        asked = missing.cpu()
        known, pieces = self.fetch(asked)
        self.make_room(asked.numel() if create else int(known.sum()))
        self.load(asked[known], pieces)

    def find_rows(self, ids: Tensor) -> Tensor:
        """Rows of ids in the cache, -1 for an id that is not resident."""
        return self._storage.find(ids, 0, "rows")

    def note(self, ids: Tensor) -> Tensor:
        """Marks resident rows as used now; returns the distinct ids that are not resident."""
        rows = self.find_rows(ids)
        self._uses.begin(self.max_update_time)
        self._uses.note(ids, rows, new=False)
        return torch.unique(ids[rows < 0])

    def fetch(self, asked: Tensor) -> tuple[Tensor, list[Piece]]:
        """Which ids are in the CPU table, and the times, weights and states of those, in order, in pieces."""
        layout = self._layout
        pieces = asked.split(max(1024, -(-asked.numel() // _FETCHERS)))
        results = self._in_parallel(
            lambda part: bridge.fetch(
                self.below._native, part.contiguous(), layout.dim, layout.words, self.device.type == "cuda"
            ),
            pieces,
        )
        return torch.cat([result[0] for result in results]), [result[1:] for result in results]

    def _in_parallel(self, work: Any, pieces: Any) -> list[Any]:
        if len(pieces) == 1:
            return [work(pieces[0])]
        if self._fetchers is None:
            threads = min(_FETCHERS, len(os.sched_getaffinity(0)))
            self._fetchers = ThreadPoolExecutor(threads, f"cache-{self.name}")
        return list(self._fetchers.map(work, pieces))

    def load(self, ids: Tensor, pieces: list[Piece], good: Tensor | None = None) -> None:
        """Copies rows of the CPU table that are not resident into the cache; with ``good``, only those."""
        if ids.numel() == 0:
            return
        times, heads, states = (
            torch.cat([p.to(self.device, non_blocking=True) for p in t]) for t in zip(*pieces, strict=True)
        )
        there, words = ids.to(self.device), torch.cat([heads, states], 1)
        if good is not None:
            there, times, words = there[good], times[good], words[good]
        rows = self._storage.insert(there, 0, counts=[there.numel()]) & ROW
        self._storage.arena.scatter(rows, words)
        self._storage.arena.set_times(rows, times)
        self._uses.note(there, rows, new=True)
        self._dirty[rows.long()] = False
        self.fetched_rows += there.numel()

    def make_room(self, need: int) -> None:
        """Removes the rows that the policy ranks lowest until ``need`` more fit; never rows of the current batch."""
        resident = self._storage.counts.sizes()[0]
        excess = resident + need - self.cache_rows
        if excess <= 0:
            return
        ids, rows = self._storage.entries(0)
        order, idle = self._uses.order(rows)
        if excess > idle:
            raise ConfigError(
                f"table {self.name!r}: cache_rows must be at least {resident - idle + need} for this batch, got "
                f"{self.cache_rows}; raise it or use smaller batches"
            )
        leave = min(idle, max(excess, self.cache_rows // 16))  # some extra, so that not every batch has to evict
        chosen = torch.topk(order, leave, largest=False, sorted=False).indices
        self._write_back(ids[chosen], rows[chosen])
        self._storage.erase(ids[chosen], 0)

    def _write_back(self, ids: Tensor, rows: Tensor) -> None:
        """Writes the changed rows among these to the CPU table."""
        changed = self._dirty[rows.long()]
        ids, rows = ids[changed], rows[changed]
        n = ids.numel()
        if n == 0:
            return
        dim, words = self._layout.dim, self._storage.arena.gather(rows, self._layout.words)
        copies = [ids, self._storage.arena.row_times(rows), words[:, :dim].contiguous(), words[:, dim:].contiguous()]
        home, times, heads, states = map(bridge.from_device, copies)
        size = max(1024, -(-n // _FETCHERS))
        parts = [slice(begin, begin + size) for begin in range(0, n, size)]
        self._in_parallel(
            lambda p: bridge.import_parts(self.below._native, home[p], times[p], heads[p], states[p], written=True),
            parts,
        )
        self._dirty[rows.long()] = False
        self.written_rows += n
        self._prefetcher.taint(home)

    def flush(self) -> CachedHashTable:
        """Writes every changed row back to the CPU table; the rows stay in the cache."""
        with self._alone():
            self._judge.check(wait=True)
            self._write_back(*self._storage.entries(0))
            below = self.below._native
            below.raise_max_update_time(self._host.max_update_time())
            below.set_scales(self._host.scales())
            below.set_calls(self._host.calls())
        return self

    def _drop(self) -> None:
        """Drops all rows of the cache, and rows being prefetched."""
        self._prefetcher.taint_all()
        self._storage.clear(0)
        self._storage.reserve([self.cache_rows])
        self._dirty.zero_()
        self._version += 1

    def _report_resident(self) -> None:
        """Reports resident rows, which the CPU table may not have, to trackers before all rows are removed."""
        ids = self._ids_to_report()
        if ids is not None and self._marks is not None:
            self._marks.remove(ids)

    # --- the budget of the CPU table ----------------------------------------------------------------------------------

    def pin(self, ids: Tensor) -> None:
        """`HashTable.pin` on the CPU table."""
        self.below.pin(ids.cpu())

    def unpin(self, ids: Tensor) -> None:
        """`HashTable.unpin` on the CPU table."""
        self.below.unpin(ids.cpu())

    def pinned(self) -> Tensor:
        """`HashTable.pinned` of the CPU table."""
        return self.below.pinned()

    def collect_evicted(self, limit: int = 1 << 20) -> Any:
        """`HashTable.collect_evicted` on the CPU table."""
        return self.below.collect_evicted(limit)

    def eviction_stats(self) -> EvictionStats:
        """`HashTable.eviction_stats` of the CPU table."""
        return self.below.eviction_stats()

    def miss_ratio_curve(self) -> MissRatioCurve:
        """`HashTable.miss_ratio_curve` of the CPU table."""
        return self.below.miss_ratio_curve()

    def next_eviction_epoch(self) -> int:
        """Starts an epoch of the policies of the cache and of the CPU table, if they use epochs; returns its number."""
        if not self._uses.has_epochs:
            return self.below.next_eviction_epoch()
        self._uses.epoch += 1
        if self.has_budget and self.table_config.eviction.policy in EPOCHS:
            return self.below.next_eviction_epoch()
        return self._uses.epoch

    def set_score(self, score: float | None) -> None:
        """`HashTable.set_score` on the CPU table: the score of rows written back from now on."""
        self.below.set_score(score)

    def _scores(self, ids: Tensor, scores: Any, seconds: int) -> Tensor | None:
        if scores is not None:
            raise UnsupportedError(
                f"table {self.name!r}: a cache does not keep scores; call set_score(), which applies when rows are "
                "written back"
            )
        return None

    def _eviction_state(self) -> dict[str, Any]:
        return self.below._eviction_state()

    def _set_eviction_state(self, state: dict[str, Any]) -> None:
        self.below._set_eviction_state(state)

    def prefetch(self, ids: Tensor) -> CachedHashTable:
        """Fetches the rows of ``ids`` in the background; the call with the same tensor waits for it.

        Errors are raised by that call.
        """
        self._prefetcher.submit(self._ids(ids))
        return self

    # --- the table's calls --------------------------------------------------------------------------------------------

    def _insert(self, ids: Tensor, scores: Tensor | None = None, **options: Any) -> Tensor:
        if not self._host.has_filter():  # else `_filtered` has fetched them
            self._bring(ids, create=True)
        rows = super()._insert(ids, scores, **options)
        self._dirty[rows.clamp(min=0).long() & ROW] = True
        new = (rows >= 0) & (rows & FRESH != 0)
        self._uses.note(ids[new], rows[new] & ROW, new=True)
        return rows

    def _filtered(self, ids: Tensor, *, dedup: bool, remember: bool, skip: Tensor | None = None) -> Tensor | None:
        if self._host.has_filter():
            self._bring(ids, create=True)
        return super()._filtered(ids, dedup=dedup, remember=remember, skip=skip)

    def _lookup(self, ids: Tensor, insert_missing: bool, seconds: int) -> Tensor:
        with self._alone(ids):
            if not insert_missing:
                self._bring(ids, create=False)
            return super()._lookup(ids, insert_missing, seconds)

    def _assign(
        self, ids: Any, values: Any, req_time: Any, scores: Any, add: bool, distinct: bool = False
    ) -> HashTable:
        ids = self._ids(ids)
        with self._alone(ids):
            return super()._assign(ids, values, req_time, scores, add, distinct)

    def _apply(self, ids: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._alone(ids):
            super()._apply(ids, *args, **kwargs)

    def reinitialize(self, ids: Tensor) -> tuple[HashTable, Tensor]:
        """As `HashTable.reinitialize`."""
        ids = self._ids(ids)
        with self._alone(ids):
            return super().reinitialize(ids)

    def contains(self, ids: Tensor) -> Tensor:
        """bool ``[n]``: which ids have a row, in the cache or in the CPU table."""
        ids = self._ids(ids)
        with self._alone():
            return super().contains(ids) | self.below.contains(ids.cpu()).to(self.device)

    def lookup_entry(self, ids: Tensor) -> list[bytes]:
        """As `HashTable.lookup_entry`."""
        ids = self._ids(ids)
        return self.flush().below.lookup_entry(ids.cpu())

    def size(self) -> int:
        """The number of rows, in the cache or in the CPU table; writes changed rows back."""
        return self.flush().below.size()

    def erase(self, ids: Tensor) -> int:
        """Removes ids; returns how many of them had a row."""
        ids = self._ids(ids)
        about_to_change(self)
        with self._alone():
            self.flush()
            super().erase(ids)
            home = ids.cpu()
            self._prefetcher.taint(home)
            return self.below.erase(home)

    def evict(self, max_update_time: Any = None) -> int:
        """As `HashTable.evict`; the cache is empty afterwards."""
        about_to_change(self)
        with self._alone():
            self.flush()
            removed = self.below.evict(max_update_time)
            self._drop()
            return removed

    def clear(self) -> HashTable:
        """Removes all rows of the cache and of the CPU table."""
        about_to_change(self)
        with self._alone():
            self._report_resident()
            self._drop()
            self.below.clear()
        return self

    def track(self, tracker: _core.Tracker) -> None:
        """As `HashTable.track`; the CPU table reports only removals, because rows written back are not changes."""
        super().track(tracker)
        self.below._native.track(tracker, False)

    def untrack(self, tracker: _core.Tracker) -> None:
        """As `HashTable.untrack`."""
        super().untrack(tracker)
        self.below._native.untrack(tracker)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `HashTable.find`, from the CPU table after everything is written back; the cache does not change."""
        return self.flush().below.find(ids)

    def all_ids(self) -> Iterator[Tensor]:
        """As `HashTable.all_ids`."""
        return self.flush().below.all_ids()

    def fetch_bytes(self, ids: Tensor, begin: int, end: int) -> tuple[Tensor, int]:
        """As `HashTable.fetch_bytes`."""
        return self.flush().below.fetch_bytes(ids, begin, end)

    def fetch_times(self, ids: Tensor) -> Tensor:
        """As `HashTable.fetch_times`."""
        return self.flush().below.fetch_times(ids)

    def fetch_kept(self, ids: Tensor) -> Tensor:
        """As `HashTable.fetch_kept`."""
        return self.flush().below.fetch_kept(ids)

    def staged(self) -> Any:
        """The CPU table, with everything written back."""
        return self.flush().below

    def staging(self) -> bridge.Staged:
        """An empty table with the budget of the CPU table."""
        return bridge.Staged(self, _core.empty_twin(self.below._native))

    def source(self, since: int = 0, *, stale: bool = False) -> Any:
        """The CPU table's rows for a save, with everything written back."""
        return self.flush().below.source(since, stale=stale)

    @property
    def changes(self) -> Any:
        """The CPU table's record of changes, with everything written back."""
        return self.flush().below.changes

    def adopt(self, native: _core.Table) -> None:
        """Replaces all rows of the CPU table with those of another one; the cache is empty afterwards."""
        about_to_change(self)
        with self._alone():
            self._report_resident()
            self._drop()
            self.below._native.swap_contents(native)
            _core.adopt_eviction(self.below._native, native)
            for table in (self.below._native, self._host):
                table.raise_max_update_time(native.max_update_time())
                table.set_scales(native.scales())

    def save_as_tensor(self, shard_idx: int, num_shards: int, limit: int, offset: int) -> tuple[int, list[bytes]]:
        """As `HashTable.save_as_tensor`."""
        return self.flush().below.save_as_tensor(shard_idx, num_shards, limit, offset)

    def close(self) -> None:
        """Writes everything back and ends the threads."""
        self._prefetcher.close()
        self.flush()
        if self._fetchers is not None:
            self._fetchers.shutdown(wait=True)
            self._fetchers = None
        super().close()
