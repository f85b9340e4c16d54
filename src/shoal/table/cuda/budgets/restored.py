"""`Restored`: an eviction policy's state from a checkpoint for GPU memory, and the rows that a smaller budget keeps.

In a checkpoint, the state of a row is a number with the same meaning in every table with that policy
(csrc/table/budget/policy.h, ``lasting``): 3 bits for the policy, 20 bits for writes or the coarse clock, 32 bits for a
call, a clock, an epoch or a score. The words in GPU memory (kernels/policy.py) are shorter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.table.cuda.bridge import copy_with_scores
from shoal.table.cuda.kernels import policy as pk

LRU, LFU, EPOCH_LRU, SCORE, SLRU = (x.value for x in (pk.LRU, pk.LFU, pk.EPOCH_LRU, pk.SCORE, pk.SLRU))
_CALLS = pk.CALLS.value
_LOW, _HIGH = (1 << 20) - 1, (1 << 32) - 1
_CLOCK, _VALUE = pk.CLOCK.value, pk.VALUE.value


def lasting_of(values: Tensor, words: list[int]) -> Tensor:
    """Converts values in GPU memory to those of checkpoints, int64; ``words`` are those of the budget."""
    policy, clocks = words[pk.POLICY.value], {pk.LFU.value: pk.COARSE.value}
    low, high = torch.zeros_like(values), values
    if policy == LRU:
        call = words[pk.CALL.value]
        high = call - ((call - values) & _VALUE)
    elif policy == SLRU:
        call = words[pk.CALL.value]
        low, high = values & 1, call - ((call - (values >> 1)) & _CALLS)
    elif policy == SCORE:
        high = values << pk.SHIFT.value
    else:
        clock = words[clocks.get(policy, pk.EPOCH.value)] + 1
        count, of = (values >> 12, values) if policy == LFU else (values & pk.LOW.value, values >> pk.LOW_BITS.value)
        low, high = count, clock - ((clock - of) & _CLOCK)
    return (high & _HIGH) << 23 | low << 3 | (policy + 1)


class Restored:
    """The rows of a CPU table with a budget's policy, to be copied to the device. ``words`` are the budget's."""

    def __init__(self, native: _core.Table, words: list[int]) -> None:
        self.words = words
        self.refused = 0
        self._policy, self._native = words[pk.POLICY.value], native
        times, scores = self._all()
        known = (scores & 7) == self._policy + 1
        self._raise(times, scores[known], bool(known.all()))
        self._least, self._spare = -1, 0

    def _all(self) -> tuple[Tensor, Tensor]:
        parts = [copy_with_scores(self._native, stripe)[1::2] for stripe in range(_core.Table.num_stripes)]
        times, scores = (torch.cat(part) for part in zip(*parts, strict=True))
        return times, scores

    def _raise(self, times: Tensor, scores: Tensor, known: bool) -> None:
        """Advances the clocks so that none is behind the restored rows."""
        words, high, low = self.words, scores >> 23, (scores >> 3) & _LOW
        latest = int(times.max()) if times.numel() else 0
        words[pk.NOW_S.value] = max(words[pk.NOW_S.value], latest)
        clock = {LRU: pk.CALL.value, SLRU: pk.CALL.value, LFU: pk.COARSE.value}.get(self._policy, pk.EPOCH.value)
        if self._policy in (LRU, SLRU) and not known:
            words[clock] = max(words[clock], latest)
        if scores.numel() and self._policy != SCORE:
            newest = int(high.max())
            if self._policy == EPOCH_LRU and newest >= words[clock]:
                words[pk.COARSE.value] = max(0 if newest > words[clock] else words[pk.COARSE.value],
                                             int(low[high == newest].max()))  # fmt: skip
            words[clock] = max(words[clock], newest)

    def values(self, times: Tensor, scores: Tensor) -> Tensor:
        """The values in GPU memory, int64; a row without known state counts as written at its time."""
        high, low = scores >> 23, (scores >> 3) & _LOW
        words, coarse = self.words, self.words[pk.COARSE.value]
        epoch = (words[pk.EPOCH.value] & _CLOCK) << pk.LOW_BITS.value
        if self._policy == LRU:
            values, others = high, times
        elif self._policy == SLRU:
            values, others = high << 1 | low, times << 1
        elif self._policy == LFU:
            values, others = (
                low.clamp(max=pk.LOW.value) << 12 | (high & _CLOCK),
                torch.full_like(low, 1 << 12 | coarse & _CLOCK),
            )
        elif self._policy == SCORE:
            values, others = high >> pk.SHIFT.value, torch.full_like(low, words[pk.SCORE_OF_ALL.value])
        else:
            values = (high & _CLOCK) << pk.LOW_BITS.value | low.clamp(max=pk.LOW.value)
            others = torch.full_like(low, epoch | (min(coarse, pk.LOW.value) if self._policy == EPOCH_LRU else 1))
        return torch.where((scores & 7) == self._policy + 1, values, others) & _VALUE

    def _keys(self, times: Tensor, scores: Tensor) -> Tensor:
        """The keys by which rows are evicted, as computed by `order` of kernels/policy.py."""
        values, words = self.values(times, scores), self.words
        if self._policy == LRU:
            return (values - words[pk.CALL.value] - 1) & _VALUE
        if self._policy == LFU:
            return (values & ~_CLOCK) | ((values - words[pk.COARSE.value] - 1) & _CLOCK)
        if self._policy == SCORE:
            return values
        if self._policy == SLRU:
            age = ((words[pk.CALL.value] - (values >> 1)) & _CALLS).clamp(max=_VALUE // pk.ONCE.value)
            return _VALUE - torch.where((values & 1) != 0, age, age * pk.ONCE.value)
        return (values - ((words[pk.EPOCH.value] + 1) << pk.LOW_BITS.value)) & _VALUE

    def choose(self, room: int) -> None:
        """Chooses the rows that fit into ``room``: those that the policy would evict last."""
        self.refused = max(0, self._native.size() - room)
        if not self.refused:
            return
        keys = self._keys(*self._all())
        if room:
            self._least = int(keys.kthvalue(self.refused + 1).values)
            self._spare = room - int((keys > self._least).sum())
        else:
            self._least = _VALUE + 1

    def stay(self, times: Tensor, scores: Tensor) -> Tensor:
        """bool: which rows of a part stay; among equal ones, the first."""
        keys = self._keys(times, scores)
        stays = keys > self._least
        equal = (keys == self._least).nonzero().view(-1)[: self._spare]
        self._spare -= equal.numel()
        stays[equal] = True
        return stays

    def write(self, storage: Any, rows: Tensor, times: Tensor, scores: Tensor) -> None:
        """Writes the policy's state of rows."""
        words = self.values(times, scores) << pk.SHIFT.value
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
        storage.arena.scores.tensor[0][rows.long()] = words.to(storage.device)
