"""`GpuBudget`: how a table in GPU memory keeps its budget. Rows leave many at a time, before the ids that need room.

What the policy keeps of a row (csrc/table/budget/policy.h) is 4 bytes in an array by row number. It is written by
operations on the device, so that writers do not wait; they do when rows must leave, which is once for many calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import CapacityError, ConfigError, UnsupportedError
from shoal.table.budget.evicted import EvictedRows, EvictionStats
from shoal.table.config.messages import EvictionConfig
from shoal.table.cuda.arena import MAX_ROWS, ROW
from shoal.table.cuda.backend import capturing
from shoal.table.cuda.kernels.index import FULL
from shoal.table.cuda.memory import make_store

_LOW, _CLOCK, _WORD = (1 << 20) - 1, (1 << 12) - 1, (1 << 32) - 1
_SPARE_BYTES = 32 << 20  # the last pages of all arrays
_INDEX_BYTES = 12 * 8 // FULL.value + 4  # of an id: slots at their fullest, and the stash


class GpuBudget:
    """The budget of one table. Methods are called in the turn of its storage."""

    def __init__(self, table: Any) -> None:
        config = table.table_config.eviction
        if config.if_better:
            raise UnsupportedError(f"table {table.name!r}: admit='if_better' works on CPU tables so far")
        self._config, self._name, self.device = config, table.name, table.device
        self.rows = min(config.max_rows or MAX_ROWS - 1, MAX_ROWS - 1)
        if config.max_bytes:
            spare = _SPARE_BYTES if table.device.type == "cuda" else 0
            fit = (config.max_bytes - spare) // (4 * table._layout.stride + _INDEX_BYTES + 16)
            if fit < 1024:
                raise ConfigError(
                    f"table {table.name!r}: max_bytes of a GPU table must be at least 64 MiB, got {config.max_bytes}"
                )
            self.rows = min(self.rows, fit)
        self.buckets = -(-self.rows // FULL.value) + 1
        self.kept = make_store(1, torch.int32, table.device, MAX_ROWS)
        self._clock = torch.zeros((), dtype=torch.int64, device=table.device)
        self._epoch = torch.tensor([1, 0], device=table.device)  # its number, and the clock when it began
        self._epoch_began_s = 0
        self._score: float | None = None
        self.pinned = torch.empty(0, dtype=torch.int64, device=table.device)
        self._created = torch.zeros(2, dtype=torch.int64, device=table.device)  # rows made, writes to rows
        self.counters = [0, 0, 0, -1, -1]  # evicted, refused, sum of ages, youngest, oldest
        self.collected: Collected | None = None

    def limit(self, storage: Any) -> None:
        """Has a storage never take more than it may."""
        storage.arena.limit = self.rows + 1
        storage.most_buckets = self.buckets

    # --- what the policy keeps ----------------------------------------------------------------------------------------

    def written(self, rows: Tensor, fresh: int, *, scores: Tensor | None, only_new: bool, room: int) -> None:
        """These rows, -1 for none, were written; ``fresh`` marks new ones. Does not wait."""
        if self.kept.size(0) < room:
            had = self.kept.size(0) if self.kept.bytes() > 4 else 0
            self.kept.grow(0, room)
            self.kept.tensor[0, had:room].zero_()
        kept = self.kept.tensor[0]
        at = torch.where(rows >= 0, rows & ROW, 0).long()
        had = kept[at].long() & _WORD
        self._clock.add_(1)
        now = self._after(had, scores)
        if only_new:
            now = torch.where(had != 0, had, now)
        kept[at] = torch.where(now >= 1 << 31, now - (1 << 32), now).int()
        made = ((rows >= 0) & (rows & fresh != 0)).sum()
        self._created[0] += made
        self._created[1] += (rows >= 0).sum()

    def _after(self, had: Tensor, scores: Tensor | None) -> Tensor:
        policy, clock = self._config.policy, self._clock
        if policy == EvictionConfig.LRU:
            return (clock & _WORD).expand_as(had)
        if policy == EvictionConfig.LFU:
            return ((had >> 12) + 1).clamp(max=_LOW) << 12 | (clock & _CLOCK)
        if policy == EvictionConfig.SCORE:
            if scores is not None:
                return score_codes(scores)
            if self._score is not None:
                return score_codes(torch.full_like(had, self._score, dtype=torch.float32))
            return torch.where(had != 0, had, 1 << 31)
        epoch = (self._epoch[0] & _CLOCK) << 20
        if policy == EvictionConfig.EPOCH_LFU:
            return epoch | ((had & _LOW) + 1).clamp(max=_LOW)
        return (epoch | (clock - self._epoch[1]).clamp(1, _LOW)).expand_as(had)

    def keys(self, rows: Tensor) -> Tensor:
        """int64: the lowest leaves first."""
        kept, clock = self.kept.tensor[0][rows.long()].long() & _WORD, self._clock
        policy = self._config.policy
        if policy == EvictionConfig.LRU:
            return (kept - clock - 1) & _WORD
        if policy == EvictionConfig.LFU:
            return (kept & ~_CLOCK) | ((kept - clock - 1) & _CLOCK)
        if policy == EvictionConfig.SCORE:
            return kept
        return (kept - ((self._epoch[0] + 1) << 20)) & _WORD

    def next_epoch(self) -> int:
        self._epoch[0] += 1
        self._epoch[1] = self._clock
        return int(self._epoch[0])

    def set_score(self, score: float | None) -> None:
        self._score = score

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_space(self, table: Any, ids: Tensor, seconds: int) -> None:
        """Lets rows go unless these ids fit, whatever they are. Waits only where they might not.

        Raises:
            CapacityError: the budget cannot hold them; nothing has changed.
        """
        storage, n = table._storage, ids.numel()
        if self._config.epoch_s and seconds:
            if self._epoch_began_s and seconds - self._epoch_began_s >= self._config.epoch_s:
                self.next_epoch()
                self._epoch_began_s = seconds
            self._epoch_began_s = self._epoch_began_s or seconds
        if capturing(self.device):
            return
        if n > self.rows // 2:
            raise CapacityError(
                f"a call may bring {self.rows // 2} ids, half of what the budget holds, got {n}; raise max_rows or "
                "max_bytes, or use smaller batches"
            )
        wanted = [0] * storage.tables
        wanted[table._number] = n
        counts = storage.counts
        for account in storage.turn.accounts():
            account.settle()
        if storage.replayed:
            counts.look_anew()
        counts.look()
        while counts.rows_needed(wanted) > self.rows + 1:
            if not counts.wait_for_one():
                break
        else:
            return
        counts.look(wait=True)
        over = counts.rows_needed(wanted) - self.rows - 1
        if over <= 0:
            return
        self._evict(table, ids, max(over, self.rows // 16))
        over = counts.rows_needed(wanted) - self.rows - 1
        if over > 0:
            raise CapacityError(f"the budget has no room for {over} of {n} ids: the rows are pinned or too young")

    def _evict(self, table: Any, coming: Tensor, wanted: int) -> None:
        storage, number = table._storage, table._number
        stays = torch.zeros(storage.arena.room + 1, dtype=torch.bool, device=self.device)
        stays[storage.find(coming, number, "rows").long()] = True  # -1 is the last, nobody's
        size = max(1, storage.counts.sure_sizes()[number])
        threshold, left, gone = None, wanted, []
        for ids, rows, slots in storage.chunks(number):
            keys = torch.where(self._may_leave(table, ids, rows, stays), self.keys(rows), 1 << 40)
            if threshold is None:  # ids are where their hashes say: the first chunk is like the others
                share = min(len(keys), -(-wanted * len(keys) // size))
                threshold = int(keys.kthvalue(share).values) if share else 0
            leaving = (keys <= threshold) & (keys < 1 << 40)
            some = leaving.nonzero().view(-1)[:left]
            left -= some.numel()
            gone.append((ids[some], rows[some], slots[some]))
        ids, rows, slots = (torch.cat(part) for part in zip(*gone, strict=True))
        self._note(table, ids, rows)
        table._changes.remove(ids)
        table._version += 1
        self.kept.tensor[0][rows.long()] = 0
        storage.erase_slots(slots, number)
        if table._marks is not None:
            table._marks.remove(ids)

    def _may_leave(self, table: Any, ids: Tensor, rows: Tensor, stays: Tensor) -> Tensor:
        may = ~stays[rows.long()]
        if self.pinned.numel():
            may &= ~torch.isin(ids, self.pinned)
        if self._config.min_age_s:
            may &= table.max_update_time - table._storage.arena.row_times(rows) >= self._config.min_age_s
        return may

    def _note(self, table: Any, ids: Tensor, rows: Tensor) -> None:
        if not ids.numel():
            return
        times = table._storage.arena.row_times(rows)
        ages = (table.max_update_time - times).clamp(min=0)
        low, high = int(ages.min()), int(ages.max())
        evicted, refused, total, youngest, oldest = self.counters
        self.counters = [
            evicted + ids.numel(), refused, total + int(ages.sum()),
            low if youngest < 0 else min(youngest, low), max(oldest, high),
        ]  # fmt: skip
        if self.collected is not None:
            words = table._storage.arena.gather(rows, table._layout.words)
            self.collected.add(ids, words, times)

    def stats(self) -> EvictionStats:
        """Waits for the device."""
        made, written = self._created.tolist()
        evicted, refused, ages, youngest, oldest = self.counters
        return EvictionStats.of_counters((made, written - made, evicted, refused, ages, youngest, oldest))

    def state(self) -> dict[str, Any]:
        made, written = self._created.tolist()
        evicted, refused, ages, youngest, oldest = self.counters
        return {
            "counters": [made, written - made, evicted, refused, ages, youngest, oldest],
            "epoch": int(self._epoch[0]), "pinned": self.pinned.tolist(),
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        made, hits, *counters = state["counters"]
        self.counters = list(counters)
        self._created.copy_(torch.tensor([made, made + hits], device="cpu"))
        self._epoch[0] = state["epoch"]
        self.pinned = torch.tensor(state["pinned"], dtype=torch.int64, device=self.device)


class Collected:
    """Rows that leave a GPU table while it is open, in host memory."""

    def __init__(self, table: Any, limit: int) -> None:
        self._table, self._limit, self._lost, self._size = table, limit, 0, 0
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def __enter__(self) -> Collected:
        self._table._budget.collected = self
        return self

    def __exit__(self, *_: object) -> None:
        self._table._budget.collected = None

    def __len__(self) -> int:
        return self._size

    def add(self, ids: Tensor, words: Tensor, times: Tensor) -> None:
        fit = min(ids.numel(), self._limit - self._size)
        self._lost += ids.numel() - fit
        self._size += fit
        self._parts.append((ids[:fit].cpu(), words[:fit].cpu(), times[:fit].cpu()))

    def take(self) -> EvictedRows:
        """Those that have left since the last call."""
        dim, words = self._table.dim_size, self._table._layout.words
        empty = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, words, device="cpu"),
            torch.empty(0, dtype=torch.int64, device="cpu"),
        )
        ids, rows, times = (torch.cat(part) for part in zip(empty, *self._parts, strict=True))
        lost, self._lost, self._size, self._parts = self._lost, 0, 0, []
        return EvictedRows(ids, rows[:, :dim].contiguous(), rows[:, dim:].contiguous(), times, lost)


def score_codes(scores: Tensor) -> Tensor:
    """int64 integers that have the order of floats; the other way is `shoal.table.budget.calls.code_scores`."""
    bits = scores.contiguous().view(torch.int32).long() & _WORD
    return torch.where(bits >= 1 << 31, ~bits & _WORD, bits | 1 << 31)
