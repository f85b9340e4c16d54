"""`InProcessRanks`: ranks as threads of one process, for tests and for trying out algorithms on a laptop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.ranks.ranks import Heads, Ranks, one_call, padded
from shoal.comm.ranks.transport import Deadline
from shoal.errors import ConfigError, DeadlineError, PeerError


class _Round:
    """One exchange: the data that each rank sent, and how many ranks have received their part."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Tensor, list[int], list[int]]] = {}
        self.taken = 0


class _Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.rounds: dict[int, _Round] = {}
        self.closed: set[int] = set()
        self.aside: _Shared | None = None


class InProcessRanks(Ranks):
    """One rank of a group that ``create_group`` makes; only one thread at a time may use it.

    >>> from threading import Thread
    >>> a, b = InProcessRanks.create_group(2)
    >>> other = Thread(target=b.gather_ints, args=([7],))
    >>> other.start()
    >>> a.gather_ints([5])
    [[5], [7]]
    >>> other.join()
    """

    def __init__(self, shared: Any, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self._shared: _Shared = shared
        self.key = ("in process", id(shared), rank)
        self.exchanges = 0
        """The number of exchanges this rank has made."""

    @classmethod
    def create_group(cls, n: int, *, timeout_s: float = 60.0) -> list[InProcessRanks]:
        """Make ``n`` ranks; the index is the rank."""
        if n < 1:
            raise ConfigError(f"InProcessRanks.create_group: n must be at least 1, got {n}")
        shared = _Shared()
        return [cls(shared, rank, n, timeout_s) for rank in range(n)]

    def _make_aside(self) -> InProcessRanks:
        with self._shared.changed:
            if self._shared.aside is None:
                self._shared.aside = _Shared()
        return InProcessRanks(self._shared.aside, self.rank, self.world_size, self.timeout_s)

    def close(self) -> None:
        """End this rank's calls; ranks that wait for it get an error."""
        if self.aside is not None:
            self.aside.close()
        with self._shared.changed:
            self._shared.closed.add(self.rank)
            self._shared.changed.notify_all()

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        recv: Sequence[int],
        head: Sequence[int] | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, Heads]:
        self._check_counts(flat, send, recv)
        self.called("exchange")
        shared = self._shared
        with self.turn, shared.changed:
            number, self.exchanges = self.exchanges, self.exchanges + 1
            this = shared.rounds.setdefault(number, _Round())
            this.given[self.rank] = flat.clone(), list(send), padded(head or [])
            shared.changed.notify_all()
            self._wait(this, Deadline(self.timeout_s))
            this.taken += 1
            if this.taken == self.world_size:
                del shared.rounds[number]
        given = [this.given[rank] for rank in range(self.world_size)]
        heads = [words for _, _, words in given]
        if not one_call(heads) or [sizes[self.rank] for _, sizes, _ in given] != list(recv):
            return None, heads
        came = torch.cat([data.split(sizes)[self.rank].to(flat.device) for data, sizes, _ in given])
        return came if out is None else out.copy_(came), heads

    def _wait(self, this: _Round, deadline: Deadline) -> None:
        while len(this.given) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in this.given]
            gone = sorted(self._shared.closed.intersection(missing))
            if gone:
                raise PeerError(f"rank {self.rank} waits for rank(s) {gone}, which have closed", ranks=gone)
            if not self._shared.changed.wait(deadline.left()) and deadline.over():
                raise DeadlineError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for rank(s) {missing} in an exchange", ranks=missing
                )
