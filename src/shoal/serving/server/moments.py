"""Consistent views for batches: one net and one state of the rows from first lookup to answer, without a lock.

Switching to a round of pushes replaces one reference. The round's rows overlay the tables until they are written there.
A batch that began earlier is not affected: nothing is written to the tables while it looks rows up.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

WAIT_SECS = 30.0


class Fresh:
    """Rows that overlay one table: distinct ids and their values; a deleted row is zeros."""

    __slots__ = ("_copies", "_ids", "_values")

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self._ids, order = ids.sort()
        self._values = values[order]
        self._copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids, and their values ``[n, dim]``."""
        return self._ids, self._values.contiguous()

    def onto(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite the rows looked up for ``ids`` with their fresh values."""
        fresh_ids, values = self._on(ids.device)
        at = torch.searchsorted(fresh_ids, ids).clamp_(max=len(fresh_ids) - 1)
        hits = (fresh_ids[at] == ids).nonzero().squeeze(1)
        if len(hits):
            rows[hits] = values[at[hits]]

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device == self._ids.device:
            return self._ids, self._values
        if device not in self._copies:
            self._copies[device] = self._ids.to(device), self._values.to(device)
        return self._copies[device]


class Moment:
    """A net and the rows that overlay the tables, by table and sub-table number."""

    __slots__ = ("fresh", "net", "readers")

    def __init__(self, net: Callable[..., Any], fresh: Mapping[tuple[str, int], Fresh]) -> None:
        self.net, self.fresh = net, fresh
        self.readers: list[None] = []  # one entry per batch that is looking rows up; appending and popping are atomic


Follower = Callable[[Callable[..., Any] | None], Callable[[Mapping[tuple[str, int], Fresh]], None]]
"""Takes the net (None = the current one) and returns a function that switches to it and to fresh rows."""


class Moments:
    """The current moment, in which new batches begin."""

    def __init__(self, net: Callable[..., Any]) -> None:
        self._now = Moment(net, {})
        self.followers: list[Follower] = []
        """Switched together with this: the predictors that answer without the interpreter."""

    @property
    def net(self) -> Callable[..., Any]:
        return self._now.net

    def enter(self) -> Moment:
        """Enter the current moment. Call ``moment.readers.pop()`` after the lookups; until then no table is written."""
        while True:
            moment = self._now
            moment.readers.append(None)
            if moment is self._now:
                return moment
            moment.readers.pop()  # it was switched in between, and the switch may not have seen this reader

    def switch(self, net: Callable[..., Any] | None, fresh: Mapping[tuple[str, int], Fresh]) -> None:
        """Make new batches use ``net`` (None = the current one) and ``fresh``.

        Returns when no batch is looking rows up in the previous moment. One caller at a time.
        """
        before = self._now
        switches = [prepare(net) for prepare in self.followers]
        self._now = Moment(before.net if net is None else net, fresh)
        for switch in switches:
            switch(fresh)
        end = time.monotonic() + WAIT_SECS
        while before.readers:
            if time.monotonic() > end:
                raise TimeoutError(f"a batch has been looking up rows for more than {WAIT_SECS:.0f} s")
            time.sleep(0.0002)
