"""`GpuBudget`: the budget of a table in GPU memory: its limits, its policy's clocks, pinned ids and counters.

All of it that kernels need is in device memory, and so is what they decide: which rows leave, and which new ids are
refused. The host neither asks nor waits; it takes memory while the table may grow, and reads counters when asked.
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
"""Of a table on a card: each of its arrays takes 2 MiB at least."""
_COUNTERS = (pk.CREATED, pk.WRITTEN, pk.EVICTED, pk.REFUSED, pk.AGE_SUM, pk.AGE_MIN, pk.AGE_MAX)
_NEVER = 1 << 40  # the youngest age of none


class GpuBudget:
    """The budget of one table. Methods are called in the turn of its storage."""

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
        whole = torch.tensor(words + [0] * pk.RING.value, dtype=torch.int64, device=table.device)
        self.words = whole[: pk.BUDGET_WORDS.value]
        """What kernels read and count (kernels/policy.py)."""
        rows = config.max_rows or config.max_bytes // (4 * table._layout.stride)
        self.sampled = Sampled(whole, table._arrivals, rows)
        self.pinned = torch.empty(1, dtype=torch.int64, device=table.device)[:0]
        """Ids that stay, sorted."""
        self.zero = torch.zeros(1, dtype=torch.int32, device=table.device)
        """The number of the only table."""
        self.collected: Collected | None = None
        self.chooses = bool(config.if_better)
        self.lru, self.aged = config.policy == pk.LRU.value, config.min_age_s > 0
        self._described: Described | None = None

    # --- memory -------------------------------------------------------------------------------------------------------

    def allowance(self) -> Allowance:
        """What a storage may take; of its own unless other tables share it."""
        if self._shared is not None:
            return Allowance(self._max_rows, self._shared.native)
        return Allowance(self._max_rows, _core.Budget(self._max_bytes) if self._max_bytes else None)

    def storage(self, table: StoredTable) -> Storage:
        """An empty one.

        Raises:
            CapacityError: other tables have taken what they share.
        """
        try:
            return Storage(table._layout, table.device, allowance=self.allowance())
        except CapacityError as error:
            raise CapacityError(f"table {table.name!r}: {error}") from None

    def described(self, table: StoredTable, capturing: bool) -> Described:
        """Where kernels find the table."""
        if self._described is None:
            self._described = Described((weakref.proxy(table),))  # which holds the budget
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

    def set_score(self, score: float | None) -> None:
        self._set(pk.SCORED, int(score is not None))
        self._set(pk.SCORE_OF_ALL, code_of(score or 0.0))

    def pin(self, storage: Storage, ids: Tensor, stays: bool) -> None:
        """Ids that stay from now on, or no longer do, whether or not they have a row."""
        if stays:
            self.pinned = torch.unique(torch.cat([self.pinned, ids]))
        else:
            self.pinned = self.pinned[~torch.isin(self.pinned, ids)]
        if not self.pinned.numel():
            self.pinned = torch.empty(1, dtype=torch.int64, device=self.device)[:0]  # which has an address
        self._set(pk.PINS, self.pinned.numel())
        self.mark_pinned(storage, ids, stays)
        storage.arena.tell()

    def mark_pinned(self, storage: Storage, ids: Tensor, stays: bool) -> None:
        """Marks the rows of ids that have one."""
        assert storage.arena.scores is not None
        rows = storage.find(ids, 0, "rows")
        at, kept = rows[rows >= 0].long(), storage.arena.scores.tensor[0]
        kept[at] = kept[at] | pk.PINNED.value if stays else kept[at] & ~pk.PINNED.value

    def lasting(self, storage: Storage, rows: Tensor) -> Tensor:
        """What checkpoints have of rows, int64. Waits for the device."""
        assert storage.arena.scores is not None
        kept = storage.arena.scores.tensor[0][rows.long()].long() & 0xFFFFFFFF
        return lasting_of(kept >> pk.SHIFT.value, self.words.tolist())

    def restoring(self, native: _core.Table) -> Restored:
        """The rows of a CPU table with the same policy, on their way here."""
        return Restored(native, self.words.tolist())

    def restored(self, storage: Storage, rows: Restored) -> None:
        """They are in the storage."""
        rows.words[pk.REFUSED.value] += rows.refused
        self.words.copy_(torch.tensor(rows.words, dtype=torch.int64, device="cpu"))
        self.mark_pinned(storage, self.pinned, True)

    # --- what happened ------------------------------------------------------------------------------------------------

    def counters(self) -> list[int]:
        """Created, hits, evicted, refused, the sum of ages, the youngest and the oldest (-1: none). Waits."""
        words = self.words.tolist()
        counted = [words[word.value] for word in _COUNTERS]
        counted[1] -= counted[0]
        if counted[5] == _NEVER:
            counted[5] = -1
        return counted

    def stats(self) -> EvictionStats:
        """Waits for the device."""
        return EvictionStats.of_counters(tuple(self.counters()))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON. Waits for the device."""
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
    """What is kept of a score."""
    return int(score_codes(torch.tensor([score], dtype=torch.float32, device="cpu"))) >> pk.SHIFT.value


def score_codes(scores: Tensor) -> Tensor:
    """int64 integers that have the order of floats; the other way is `shoal.table.budget.calls.code_scores`."""
    bits = scores.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, ~bits & 0xFFFFFFFF, bits | 1 << 31)
