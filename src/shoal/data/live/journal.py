"""`Journal`: which records made which batch, so that a resumed run makes the same batches as before."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from shoal.durable import write_whole

Run = tuple[str, str, int, Any]
"""Source, partition, number of records, and the position after the last of them."""


class Journal:
    """A file of JSON lines, ``[number of the batch, runs]``. Without a path nothing is recorded.

    A line is written before its batch is learnt, without fsync, so it survives a crash of the process. After a crash of
    the machine the last lines can be missing, and the batches from there on may differ.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._file: int | None = None
        self._lines: dict[int, bytes] = {}
        self._forgettable = 0

    def load(self, after: int) -> list[tuple[int, list[Run]]]:
        """Load the consecutive batches that follow number ``after``; drop everything else in the file."""
        self.close()
        self._lines = {}
        if self.path is None:
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
        assert self.path is not None
        if not os.path.exists(self.path):
            return []
        with open(self.path, "rb") as file:
            return file.read().split(b"\n")[:-1]

    def add(self, number: int, runs: Sequence[Run]) -> None:
        """Record the runs that make batch ``number``."""
        if self.path is None:
            return
        line = json.dumps([number, runs], separators=(",", ":")).encode()
        self._lines[number] = line
        if self._file is None:
            self._open()
        assert self._file is not None
        os.write(self._file, line + b"\n")

    def safe(self, number: int) -> None:
        """Record that a durable checkpoint has everything up to batch ``number``. Batches up to the previous
        checkpoint are dropped; the later ones stay, in case the newest checkpoint is damaged."""
        upto, self._forgettable = self._forgettable, number
        if self.path is not None and any(one <= upto for one in self._lines):
            self._lines = {one: line for one, line in self._lines.items() if one > upto}
            self._rewrite()

    def _rewrite(self) -> None:
        self.close()
        assert self.path is not None
        write_whole(self.path, b"".join(line + b"\n" for line in self._lines.values()))

    def _open(self) -> None:
        assert self.path is not None
        self._file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def remove(self) -> None:
        """Delete the journal."""
        self.close()
        self._lines = {}
        if self.path is not None and os.path.exists(self.path):
            os.unlink(self.path)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
