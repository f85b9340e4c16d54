"""`Journal`: which records made which batch, so that a run that was killed cuts a stream as it did before."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from shoal.durable import write_whole

Run = tuple[str, str, int, Any]
"""Source, partition, how many records, and the position behind the last of them."""


class Journal:
    """A file of JSON lines, ``[number of the batch, runs]``. Without a path it remembers nothing.

    A line is handed to the system before its batch is learnt, so it survives the process; after a crash of the machine
    the last ones may be missing, and the batches from there on are cut anew.
    """

    def __init__(self, path: str | None) -> None:
        self.path = self._path = path
        self._file: int | None = None
        self._lines: dict[int, bytes] = {}
        self._forgettable = 0

    def load(self, after: int) -> list[tuple[int, list[Run]]]:
        """The batches behind number ``after``, without a gap; whatever else is in the file is dropped."""
        self.close()
        self._lines = {}
        if self._path is None:
            return []
        entries: list[tuple[int, list[Run]]] = []
        kept: dict[int, bytes] = {}
        for line in self._read():
            try:
                number, runs = json.loads(line)
                made = [(str(source), str(partition), int(count), last) for source, partition, count, last in runs]
            except (ValueError, TypeError):
                break  # the line was being written when the process died
            kept[number] = line
            if number == after + len(entries) + 1:
                entries.append((number, made))
        self._lines = {number: line for number, line in kept.items() if number <= after + len(entries)}
        self._rewrite()
        return entries

    def _read(self) -> list[bytes]:
        assert self._path is not None
        if not os.path.exists(self._path):
            return []
        with open(self._path, "rb") as file:
            return file.read().split(b"\n")[:-1]

    def add(self, number: int, runs: Sequence[Run]) -> None:
        """Batch ``number`` is made of these."""
        if self._path is None:
            return
        line = json.dumps([number, runs], separators=(",", ":")).encode()
        self._lines[number] = line
        if self._file is None:
            self._open()
        assert self._file is not None
        os.write(self._file, line + b"\n")

    def safe(self, number: int) -> None:
        """A durable checkpoint has everything up to a batch. What the one before it had is forgotten: it may be needed
        where the newest is damaged."""
        upto, self._forgettable = self._forgettable, number
        if self._path is not None and any(one <= upto for one in self._lines):
            self._lines = {one: line for one, line in self._lines.items() if one > upto}
            self._rewrite()

    def _rewrite(self) -> None:
        self.close()
        assert self._path is not None
        write_whole(self._path, b"".join(line + b"\n" for line in self._lines.values()))

    def _open(self) -> None:
        assert self._path is not None
        self._file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def remove(self) -> None:
        """Forgets everything."""
        self.close()
        self._lines = {}
        if self._path is not None and os.path.exists(self._path):
            os.unlink(self._path)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
