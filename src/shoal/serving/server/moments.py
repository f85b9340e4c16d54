"""What a batch sees: one net and one state of the rows, from its first lookup to its answer, without a lock.

A round of pushes is switched to by a reference. Its rows lie over the tables until they are written there; a batch that
began before sees neither: nothing is written while it looks rows up.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

WAIT_SECS = 30.0


class Fresh:
    """Rows of one table that lie over it: distinct ids and their values; a row that is gone is zeros."""

    __slots__ = ("_copies", "_ids", "_values")

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        self._ids, order = ids.sort()
        self._values = values[order]
        self._copies: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids, and their values ``[n, dim]``."""
        return self._ids, self._values.contiguous()

    def onto(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes the fresh ones among ``rows``, which were looked up for ``ids``."""
        own, values = self._on(ids.device)
        at = torch.searchsorted(own, ids).clamp_(max=len(own) - 1)
        hits = (own[at] == ids).nonzero().squeeze(1)
        if len(hits):
            rows[hits] = values[at[hits]]

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device == self._ids.device:
            return self._ids, self._values
        if device not in self._copies:
            self._copies[device] = self._ids.to(device), self._values.to(device)
        return self._copies[device]


class Moment:
    """A net and the rows that lie over the tables, by table and number of the sub-table."""

    __slots__ = ("fresh", "net", "readers")

    def __init__(self, net: Callable[..., Any], fresh: Mapping[tuple[str, int], Fresh]) -> None:
        self.net, self.fresh = net, fresh
        self.readers: list[None] = []  # one entry for each that looks rows up now; appending and popping are atomic


Follower = Callable[[Callable[..., Any] | None], Callable[[Mapping[tuple[str, int], Fresh]], None]]
"""Is given the net (None = the one that there is), and gives what switches to it and to fresh rows."""


class Moments:
    """The moment that batches begin in now."""

    def __init__(self, net: Callable[..., Any]) -> None:
        self._now = Moment(net, {})
        self.followers: list[Follower] = []
        """Are switched, too, before a switch returns: those who answer without the interpreter."""

    @property
    def net(self) -> Callable[..., Any]:
        return self._now.net

    def enter(self) -> Moment:
        """Call ``moment.readers.pop()`` when its rows have been looked up; until then tables are not written to."""
        while True:
            moment = self._now
            moment.readers.append(None)
            if moment is self._now:
                return moment
            moment.readers.pop()  # it was switched in between: whoever did so may have seen no reader

    def switch(self, net: Callable[..., Any] | None, fresh: Mapping[tuple[str, int], Fresh]) -> None:
        """Batches begin with ``net`` (None = the one that there is) and ``fresh`` from now on.

        Returns when no batch looks rows up in the moment before. One caller at a time.
        """
        before = self._now
        switches = [prepare(net) for prepare in self.followers]
        self._now = Moment(before.net if net is None else net, fresh)
        for switch in switches:
            switch(fresh)
        end = time.monotonic() + WAIT_SECS
        while before.readers:
            if time.monotonic() > end:
                raise TimeoutError(f"a batch has looked rows up for more than {WAIT_SECS:.0f} s")
            time.sleep(0.0002)
