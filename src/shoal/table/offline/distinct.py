"""Detection of duplicate ids in bounded memory: beyond a limit, ids are split by hash into temporary files."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import IO

import numpy as np

from shoal.table.offline.scan import Ints

_PARTS = 64


def parts_of(ids: Ints, parts: int) -> np.ndarray:
    """The part of each id, 0 to ``parts - 1``; evenly distributed even if ids share their low or high bits."""
    with np.errstate(over="ignore"):
        mixed = ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(parts)).astype(np.int64)


class Distinct:
    """Collects ids and counts the duplicates. At most ``limit`` ids are held in memory, 8 bytes each."""

    def __init__(self, limit: int = 1 << 25) -> None:
        self.limit = limit
        self.total = 0
        self._held: list[Ints] = []
        self._count = 0
        self._files: list[IO[bytes]] = []
        self._stack = ExitStack()

    def add(self, ids: Ints) -> None:
        self.total += len(ids)
        self._held.append(ids.copy())
        self._count += len(ids)
        if self._count > self.limit:
            self._spill()

    def repeated(self, show: int = 5) -> tuple[int, list[int]]:
        """The number of surplus occurrences, and some of the ids that occur more than once. Ends the collection."""
        total, examples = 0, []
        with self._stack:
            if self._files:
                self._spill()
            for ids in self._groups():
                ids.sort()
                again = ids[1:][ids[1:] == ids[:-1]]
                total += len(again)
                if len(examples) < show and len(again):
                    examples += np.unique(again)[: show - len(examples)].tolist()
        self._held = []
        return total, examples

    def _groups(self):
        if not self._files:
            yield np.concatenate(self._held) if self._held else np.empty(0, np.int64)
            return
        for file in self._files:
            file.seek(0)
            yield np.fromfile(file, np.int64)

    def _spill(self) -> None:
        if not self._files:
            self._files = [
                self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
                for _ in range(_PARTS)
            ]
        if not self._held:
            return
        ids = np.concatenate(self._held)
        parts = parts_of(ids, _PARTS)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=_PARTS))
        for file, chunk in zip(self._files, np.split(ids[order], ends[:-1]), strict=True):
            file.write(chunk.tobytes())
        self._held, self._count = [], 0
