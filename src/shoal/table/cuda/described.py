"""`Described`: the locations of each table's index and rows, in device memory, for kernels over several tables."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import CapacityError
from shoal.table.cuda.backend import interpreted
from shoal.table.cuda.kernels import located as lk
from shoal.table.cuda.launch import power_of_2, signed

if TYPE_CHECKING:
    from shoal.table.cuda.table import CudaHashTable

_WORDS = lk.DESCRIBED.value


class Described:
    """Descriptions of tables. Their addresses never change, so that captured graphs see later updates."""

    def __init__(self, tables: tuple[CudaHashTable, ...]) -> None:
        self._tables = tables
        device = tables[0].device
        self.origin = torch.zeros(1 << 16, dtype=torch.int64, device=device)
        """The base of all offsets. Its cells hold 0; idle lanes compare against them."""
        self._count = power_of_2(len(tables))
        self._all = torch.zeros(self._count * _WORDS + self._count, dtype=torch.int64, device=device)
        self.words, self.bases = self._all[: self._count * _WORDS], self._all[self._count * _WORDS :]
        self.wide = False
        """Whether the row numbers of all tables together do not fit int32."""
        self.captured = False
        """Whether a captured graph reads the descriptions."""
        self._stale = True
        self._lock = threading.Lock()
        for table in tables:
            table._storage.arena.watchers.add(self)

    @property
    def stale(self) -> bool:
        """Whether the descriptions are out of date; in the interpreter memory moves whenever it grows."""
        return self._stale or interpreted()

    def changed(self) -> None:
        """Called when a table has changed. A graph can run before the next call of the group."""
        self._stale = True
        if self.captured:
            self.refresh()

    def refresh(self) -> None:
        """Describes the tables as they are now."""
        if not self.stale:
            return
        with self._lock:
            self._stale = False
            words, base = np.zeros((self._count, _WORDS), np.int64), 0
            bases = np.full(self._count, (1 << 62), np.int64)
            for number, table in enumerate(self._tables):
                words[number] = self._of(table, base)
                bases[number] = base
                base += table._storage.arena.room
            words[len(self._tables) :] = words[0]
            if base >= 1 << 31 and not self.wide:
                if self.captured:
                    raise CapacityError(
                        f"the {len(self._tables)} tables of a captured graph now have {base} rows; capture it again"
                    )
                self.wide = True
            flat = np.concatenate([words.reshape(-1), bases])
            home = torch.empty(flat.size, dtype=torch.int64, device="cpu", pin_memory=self._all.is_cuda)
            home.numpy()[:] = flat
            self._all.copy_(home, non_blocking=True)

    def _of(self, table: CudaHashTable, base: int) -> list[int]:
        storage, number = table._storage, table._number
        arena = storage.arena
        stores: list[Any] = [storage.keys, storage.rows, storage.stash_keys, storage.stash_rows]
        places: list[Tensor] = [store.tensor[number] for store in stores]
        places += [storage.counts.of(number), storage.counts.words, storage.free_rows.tensor, arena.tensor]
        places += [arena.times.tensor, arena.times.tensor if arena.epochs is None else arena.epochs.tensor]
        places.append(table._judge.skip_counter())
        budget, none = table._budget, arena.times.tensor
        kept = [none] * 3
        if budget is not None and arena.scores is not None:
            kept = [arena.scores.tensor, budget.words, budget.pinned]
        begin = self.origin.data_ptr()
        units = [(place.data_ptr() - begin) // 16 for place in places + kept]
        evicts = 0 if budget is None else 2 if storage.at_limit else 1
        return [
            *units[: len(places)],
            signed(storage.salt), signed(table._seed), int(arena.timed), int(arena.tracked), base, evicts,
            *units[len(places) :],
        ]  # fmt: skip
