"""`Sampled`: the miss-ratio curve of a table in GPU memory, from a sample of the ids that were written."""

from __future__ import annotations

from torch import Tensor

from shoal import _core
from shoal.table.budget.evicted import MissRatioCurve
from shoal.table.cuda.budgets.arrivals import Arrivals
from shoal.table.cuda.kernels import policy as pk

_RING = pk.RING.value
_IDS = 4096  # in the sample of a full table; `_core.Curve` halves the share if there are many more
_LARGEST_SHARE = 1 / 8


class Sampled:
    """Kernels write sampled ids to a ring after the budget's words (kernels/policy.py); the host copies it in parts.

    Ids that a captured graph writes are included. When the ring is full, its oldest ids are overwritten.
    """

    def __init__(self, words: Tensor, arrivals: Arrivals, rows: int) -> None:
        self._words, self._arrivals = words, arrivals
        self._share = min(_LARGEST_SHARE, _IDS / max(rows, 1))
        self._below = int(self._share * 2.0**64)
        self._curve = _core.Curve(self._below)
        self._due = 0  # writes since the ring was last sent
        self._taken = 0  # sampled ids that have arrived
        self._written = 0  # writes that they represent
        words[pk.SAMPLE_BELOW.value] = self._below

    def wrote(self, n: int) -> None:
        """Notes that about ``n`` ids are being written, and sends the ring before it overflows. Does not wait."""
        self._due += n
        if self._due * self._share > _RING // 2:
            self._send()

    def _send(self) -> None:
        self._due = 0
        if self._curve.threshold != self._below:
            self._below = self._curve.threshold
            self._share = self._below / 2.0**64
            self._words[pk.SAMPLE_BELOW.value].fill_(self._below)
        self._arrivals.send((self._words,), self._arrived)

    def _arrived(self, words: Tensor) -> None:
        sampled, written = int(words[pk.SAMPLED.value]), int(words[pk.WRITTEN.value])
        first = max(self._taken, sampled - _RING)
        ids = words[pk.BUDGET_WORDS.value :].roll(-(first % _RING))[: sampled - first].contiguous()
        writes, new = written - self._written, sampled - self._taken
        self._curve.sampled(ids.data_ptr(), ids.numel(), writes * ids.numel() // new if new else writes)
        self._taken, self._written = sampled, written

    def start_at(self, written: int) -> None:
        """Sets the number of writes from which the budget continues to count."""
        self.curve()
        self._written = written

    def curve(self) -> MissRatioCurve:
        """As `HashTable.miss_ratio_curve`. Waits for the device."""
        self._send()
        self._arrivals.settle()
        return MissRatioCurve(*self._curve.points())
