"""`TablesSource`: what changed in the tables of this process, and in the weights beside them, for a `Publisher`."""

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
        tables: by the names that the export has; a function, where tables come, or are replaced by others.
        stamp: the stamp of rows and weights now. While it does not rise, changes wait for the next call.
        base: of the checkpoint that the tables were loaded from; None: they began empty.
        name: of this source.
        weights: the dense weights of now, which are copied; None where another source tells them.
        part: (index, number) of the part of all ids that is learnt here: those with ``id mod number == index``.
        complete: whether the tables are as the checkpoint ``base`` has them; else every row is told at first.
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
        self.whole: Callable[[Callable[[], dict[str, Tensor]]], dict[str, Tensor]] = lambda copy: copy()
        """How weights are copied: so that they are of one step, where others may write meanwhile."""
        self._lost = not complete
        self._told: Stamp | None = None
        self._sent: dict[str, Tensor] | None = None
        self._since = time.time()
        self._lock = threading.Lock()
        self._trackers = {name: TableTracker(table) for name, table in self._now().items()}

    @property
    def tables(self) -> dict[str, int]:
        """Name of each table -> dim."""
        return {name: table.dim_size for name, table in list(self._now().items())}

    def take(self) -> Changes:
        """What changed since the last call: between two updates, where rows and weights are to be of one step."""
        with self._lock:
            since, self._since = self._since, time.time()
            stamp = self._stamp()
            if self._told is not None and stamp <= self._told:
                self._since = since
                return Changes(stamp=self._told)
            self._told = stamp  # what changes from now on is newer
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
        """(ids that changed since the last `take`, rows there are now), of all tables."""
        with self._lock:
            now = dict(self._now())
            followed = {name: tracker for name, tracker in self._trackers.items() if tracker.table is now.get(name)}
            new = sum(table.size() for name, table in now.items() if name not in followed)
            return new + sum(map(len, followed.values())), sum(table.size() for table in now.values())

    def _changed(self, name: str, table: HashTable) -> tuple[Tensor, bool]:
        """Ids that were written or removed, and whether any other may have been written, too."""
        tracker = self._trackers.get(name)
        if tracker is not None and tracker.table is table:
            changed = tracker.take()
            return changed.ids, changed.everything
        self._trackers[name] = TableTracker(table)
        parts = list(table.all_ids())  # after that it is followed: nothing is missed
        if tracker is not None:
            tracker.close()
            for former in tracker.table.all_ids():
                parts.append(former[~table.find(former)[1]])
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu"), False

    def _changed_weights(self) -> dict[str, Tensor] | None:
        if self._weights is None:
            return None
        weights = self._weights
        now = self.whole(lambda: {name: one.detach().to("cpu", copy=True) for name, one in weights().items()})
        if self._sent is not None and _equal(self._sent, now):
            return None
        self._sent = now
        return now

    def read(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids, and which of them are there."""
        return self._now()[table].find(ids)

    def scan(self, table: str) -> Iterator[Tensor]:
        """All ids that have rows here now."""
        return self._now()[table].all_ids()

    def owns(self, table: str, ids: Tensor) -> Tensor:
        """Which ids are learnt here."""
        index, number = self.part
        return torch.as_tensor(shard_of(ids, number) == index, device="cpu")

    def close(self) -> None:
        """Follows the tables no longer."""
        with self._lock:
            for tracker in self._trackers.values():
                tracker.close()


def dense_weights(net: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that a net's ``state_dict`` has, by name; rows of tables are none of them."""
    found: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    for prefix, module in net.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _equal(former: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bool:
    return former.keys() == now.keys() and all(torch.equal(former[name], tensor) for name, tensor in now.items())
