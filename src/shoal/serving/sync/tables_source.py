"""`TablesSource`: the changes in this process's tables and weights, for a `Publisher`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shoal.fid import shard_of
from shoal.serving.sync.publication import Changes
from shoal.stamps import Stamp
from shoal.table.table import HashTable
from shoal.table.tracking import TableTracker

Weights = Callable[[], Mapping[str, Tensor]]


class TablesSource:
    """Tables of this process: on the CPU, on a GPU or cached there; those of a rank, or of a parameter server's shard.

    Args:
        tables: the tables by their names in the export; or a function that returns them, if tables are added or
            replaced.
        stamp: returns the current stamp of rows and weights. While it does not increase, changes are kept for later.
        base: the stamp of the checkpoint that the tables were loaded from; None: they started empty.
        name: this source's name.
        weights: returns the current dense weights, which are copied; None if another source sends them.
        part: (index, number): the ids trained here are those with ``id mod number == index``.
        complete: whether the tables equal the checkpoint ``base``; if not, all rows are sent at first.
    """

    def __init__(
        self,
        tables: Mapping[str, HashTable] | Callable[[], Mapping[str, HashTable]],
        stamp: Callable[[], Stamp],
        *,
        base: Stamp | None = None,
        name: str = "trainer",
        weights: Weights | None = None,
        part: tuple[int, int] = (0, 1),
        complete: bool = True,
    ) -> None:
        self.name = name
        self.base = base
        self.part = part
        self._now: Callable[[], Mapping[str, HashTable]] = tables if callable(tables) else lambda: tables
        self._stamp = stamp
        self._weights = weights
        self.between_steps: Callable[[Callable[[], dict[str, Tensor]]], dict[str, Tensor]] = lambda copy: copy()
        """Runs a copy of the weights while no step changes them."""
        self._lost = not complete
        self._last_stamp: Stamp | None = None
        self._sent: dict[str, Tensor] | None = None
        self._since = time.time()
        self._lock = threading.Lock()
        self._trackers = {name: TableTracker(table) for name, table in self._now().items()}

    @property
    def tables(self) -> dict[str, int]:
        """Name of each table -> dim."""
        return {name: table.dim_size for name, table in list(self._now().items())}

    def take(self) -> Changes:
        """The changes since the last call. Call it between two updates if rows and weights must be of one step."""
        with self._lock:
            since, self._since = self._since, time.time()
            stamp = self._stamp()
            if self._last_stamp is not None and stamp <= self._last_stamp:
                self._since = since
                return Changes(stamp=self._last_stamp)
            self._last_stamp = stamp  # later changes are newer
            ids, lost, self._lost = {}, self._lost, False
            for name, table in list(self._now().items()):
                changed, everything = self._changed(name, table)
                lost |= everything
                if changed.numel():
                    ids[name] = changed
            weights = self._changed_weights()
            something = bool(ids) or lost or weights is not None
            return Changes(stamp=stamp, ids=ids, since=since if something else 0.0, weights=weights, lost=lost)

    def pending(self) -> tuple[int, int]:
        """(number of ids that changed since the last `take`, number of rows), in all tables."""
        with self._lock:
            now = dict(self._now())
            followed = {name: tracker for name, tracker in self._trackers.items() if tracker.table is now.get(name)}
            new = sum(table.size() for name, table in now.items() if name not in followed)
            return new + sum(map(len, followed.values())), sum(table.size() for table in now.values())

    def _changed(self, name: str, table: HashTable) -> tuple[Tensor, bool]:
        """The ids that were written or removed, and whether other ids may have been written, too."""
        tracker = self._trackers.get(name)
        if tracker is not None and tracker.table is table:
            changed = tracker.take()
            return changed.ids, changed.everything
        self._trackers[name] = TableTracker(table)
        parts = list(table.all_ids())  # it is tracked already, so no change is missed
        if tracker is not None:
            tracker.close()
            for former in tracker.table.all_ids():
                parts.append(former[~table.find(former)[1]])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu"), False

    def _changed_weights(self) -> dict[str, Tensor] | None:
        if self._weights is None:
            return None
        weights = self._weights
        now = self.between_steps(lambda: {name: one.detach().to("cpu", copy=True) for name, one in weights().items()})
        if self._sent is not None and _equal(self._sent, now):
            return None
        self._sent = now
        return now

    def read(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids, and which of them exist."""
        return self._now()[table].find(ids)

    def scan(self, table: str) -> Iterator[Tensor]:
        """All ids that have rows here now."""
        return self._now()[table].all_ids()

    def owns(self, table: str, ids: Tensor) -> Tensor:
        """Which ids are trained here."""
        index, number = self.part
        return torch.as_tensor(shard_of(ids, number) == index, device="cpu")

    def close(self) -> None:
        """Stop tracking the tables."""
        with self._lock:
            for tracker in self._trackers.values():
                tracker.close()


def dense_weights(net: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a net's ``state_dict`` has, by name, without rows of tables."""
    found: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    for prefix, module in net.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _equal(former: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bool:
    return former.keys() == now.keys() and all(torch.equal(former[name], tensor) for name, tensor in now.items())
