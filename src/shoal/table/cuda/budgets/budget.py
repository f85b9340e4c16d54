"""`GpuBudget`: the budget of a table in GPU memory: its limits, its policy's clocks, pinned ids and counters.

All data that kernels need is in device memory. They decide which rows leave and which new ids are rejected; the host
does not wait for that. It allocates memory while the table can grow, and reads counters on request.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import CapacityError, ConfigError
from shoal.table.budget.evicted import EvictionStats
from shoal.table.budget.limits import MemoryBudget
from shoal.table.cuda.budgets.collected import Collected
from shoal.table.cuda.budgets.restored import Restored, lasting_of
from shoal.table.cuda.budgets.sampled import Sampled
from shoal.table.cuda.described import Described
from shoal.table.cuda.kernels import policy as pk
from shoal.table.cuda.storage import Storage
from shoal.table.cuda.storage.allowance import Allowance

if TYPE_CHECKING:
    from shoal.table.cuda.stored import StoredTable

LEAST_BYTES = 64 << 20
"""The minimum for a table in GPU memory, each of whose arrays takes at least 2 MiB."""
_COUNTERS = (pk.CREATED, pk.WRITTEN, pk.EVICTED, pk.REFUSED, pk.AGE_SUM, pk.AGE_MIN, pk.AGE_MAX)
_NEVER = 1 << 40  # AGE_MIN before the first eviction


class GpuBudget:
    """The budget of one table. Methods must be called in the turn of its storage."""

    def __init__(self, table: StoredTable, shared: MemoryBudget | None) -> None:
        config = table.table_config.eviction
        self._shared, self._max_bytes, self._max_rows = shared, config.max_bytes, config.max_rows
        self.device = table.device
        if shared is not None:
            shared.use_on(table.device, table.name)
        if config.max_bytes and table.device.type == "cuda" and config.max_bytes < LEAST_BYTES:
            raise ConfigError(
                f"table {table.name!r}: max_bytes of a GPU table must be at least {LEAST_BYTES >> 20} MiB, got "
                f"{config.max_bytes}"
            )
        words = [0] * pk.BUDGET_WORDS.value
        words[pk.POLICY.value], words[pk.EPOCH_S.value] = config.policy, config.epoch_s
        words[pk.MIN_AGE_S.value], words[pk.IF_BETTER.value] = config.min_age_s, int(config.if_better)
        words[pk.COARSE.value], words[pk.EPOCH.value], words[pk.AGE_MAX.value] = 2, 1, -1
        words[pk.TYPICAL.value] = -1
        words[pk.AGE_MIN.value], words[pk.SCORE_OF_ALL.value] = _NEVER, code_of(0.0)
        words[pk.COARSE_ROWS.value] = (config.max_rows or 1 << 20) // 1024
        self.small = self.allowance().small
        words[pk.SMALL.value] = int(self.small)
        words_and_ring = torch.tensor(words + [0] * pk.RING.value, dtype=torch.int64, device=table.device)
        self.words = words_and_ring[: pk.BUDGET_WORDS.value]
        """The words that kernels read and their counters (kernels/policy.py)."""
        rows = config.max_rows or config.max_bytes // (4 * table._layout.stride)
        self.sampled = Sampled(words_and_ring, table._arrivals, rows)
        self.pinned = torch.empty(1, dtype=torch.int64, device=table.device)[:0]
        """The pinned ids, sorted."""
        self.zero = torch.zeros(1, dtype=torch.int32, device=table.device)
        """The number of the only table."""
        self.collected: Collected | None = None
        self.chooses = bool(config.if_better)
        self.lru, self.aged = config.policy == pk.LRU.value, config.min_age_s > 0
        self._described: Described | None = None

    # --- memory -------------------------------------------------------------------------------------------------------

    def allowance(self) -> Allowance:
        """The memory that a storage can take; other tables may share it."""
        if self._shared is not None:
            return Allowance(self._max_rows, self._shared.native)
        return Allowance(self._max_rows, _core.Budget(self._max_bytes) if self._max_bytes else None)

    def storage(self, table: StoredTable) -> Storage:
        """An empty storage.

        Raises:
            CapacityError: other tables have used up the shared budget.
        """
        try:
            return Storage(table._layout, table.device, allowance=self.allowance())
        except CapacityError as error:
            raise CapacityError(f"table {table.name!r}: {error}") from None

    def described(self, table: StoredTable, capturing: bool) -> Described:
        """Where kernels find the table."""
        if self._described is None:
            self._described = Described((weakref.proxy(table),))  # a proxy, because the table holds this budget
        described = self._described
        if described.stale:
            described.refresh()
        described.captured |= capturing
        return described

    # --- settings -----------------------------------------------------------------------------------------------------

    def _set(self, word: Any, value: int) -> None:
        self.words[word.value].fill_(value)

    def next_epoch(self) -> int:
        """Starts an epoch. Waits for the device."""
        self.words[pk.EPOCH.value] += 1
        if int(self.words[pk.POLICY.value]) == pk.EPOCH_LRU.value:
            self._set(pk.COARSE, 0)
        return int(self.words[pk.EPOCH.value])

    def set_score(self, score: float, given: bool) -> None:
        self._set(pk.SCORED, int(given))
        self._set(pk.SCORE_OF_ALL, code_of(score))

    def pin(self, storage: Storage, ids: Tensor, stays: bool) -> None:
        """Pins ids, or unpins them, whether or not they have a row."""
        if stays:
            self.pinned = torch.unique(torch.cat([self.pinned, ids]))
        else:
            self.pinned = self.pinned[~torch.isin(self.pinned, ids)]
        if not self.pinned.numel():
            self.pinned = torch.empty(1, dtype=torch.int64, device=self.device)[:0]  # empty, but with an address
        self._set(pk.PINS, self.pinned.numel())
        self.mark_pinned(storage, ids, stays)
        storage.arena.notify()

    def mark_pinned(self, storage: Storage, ids: Tensor, stays: bool) -> None:
        """Marks the rows of ids that have one."""
        assert storage.arena.scores is not None
        rows = storage.find(ids, 0, "rows")
        at, kept = rows[rows >= 0].long(), storage.arena.scores.tensor[0]
        kept[at] = kept[at] | pk.PINNED.value if stays else kept[at] & ~pk.PINNED.value

    def lasting(self, storage: Storage, rows: Tensor) -> Tensor:
        """The policy's state of rows as in checkpoints, int64. Waits for the device."""
        assert storage.arena.scores is not None
        kept = storage.arena.scores.tensor[0][rows.long()].long() & 0xFFFFFFFF
        return lasting_of(kept >> pk.SHIFT.value, self.words.tolist())

    def restoring(self, native: _core.Table) -> Restored:
        """The rows of a CPU table with the same policy, to be restored."""
        return Restored(native, self.words.tolist())

    def restored(self, storage: Storage, rows: Restored) -> None:
        """Called when the restored rows are in the storage."""
        rows.words[pk.REFUSED.value] += rows.refused
        self.words.copy_(torch.tensor(rows.words, dtype=torch.int64, device="cpu"))
        self.mark_pinned(storage, self.pinned, True)

    # --- counters -----------------------------------------------------------------------------------------------------

    def counters(self) -> list[int]:
        """Created, hits, evicted, refused, the sum of ages, the lowest and the highest age (-1: none).

        Waits for the device.
        """
        words = self.words.tolist()
        counted = [words[word.value] for word in _COUNTERS]
        counted[1] -= counted[0]
        if counted[5] == _NEVER:
            counted[5] = -1
        return counted

    def stats(self) -> EvictionStats:
        """The counters as `EvictionStats`. Waits for the device."""
        return EvictionStats.of_counters(tuple(self.counters()))

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values. Waits for the device."""
        return {
            "counters": self.counters(), "epoch": int(self.words[pk.EPOCH.value]), "pinned": self.pinned.tolist(),
        }  # fmt: skip

    def set_state(self, storage: Storage, state: dict[str, Any]) -> None:
        counters = list(state["counters"])
        counters[1] += counters[0]
        self.sampled.start_at(counters[1])
        for word, value in zip(_COUNTERS, counters, strict=True):
            self._set(word, _NEVER if word is pk.AGE_MIN and value < 0 else value)
        self._set(pk.EPOCH, state["epoch"])
        self.pin(storage, torch.tensor(state["pinned"], dtype=torch.int64, device=self.device), True)


def code_of(score: float) -> int:
    """The stored code of a score."""
    return int(score_codes(torch.tensor([score], dtype=torch.float32, device="cpu"))) >> pk.SHIFT.value


def score_codes(scores: Tensor) -> Tensor:
    """int64 codes with the order of the floats; `shoal.table.budget.calls.code_scores` is the inverse."""
    bits = scores.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, ~bits & 0xFFFFFFFF, bits | 1 << 31)
