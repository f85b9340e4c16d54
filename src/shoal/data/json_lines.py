"""JSON objects, one per line of a file or per message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import _core
from shoal.data.samples import Samples, from_block
from shoal.data.schema import Schema
from shoal.data.source import DAMAGED, LineCursor, OnBad, Unit, file_size, is_gzip, refuse_other_kinds

_BLOCK = 1 << 21


@dataclass(frozen=True, kw_only=True)
class JsonFormat:
    """Columns by name: texts, numbers, booleans, or lists of these. A null or an absent name is a missing value.

    Args:
        lists: features without a definition hold any number of values, as lists.
        part_bytes: the size of the pieces that are divided over ranks.
        threads: parse on all threads of the native pool; for reading that does not happen during training.
    """

    schema: Schema
    lists: bool = False
    part_bytes: int = 1 << 26
    threads: bool = False

    @property
    def ragged(self) -> bool:
        return self._set().listed

    def units(self, path: str) -> list[Unit]:
        size = file_size(path)
        if not size:
            return []
        refuse_other_kinds(path, "lines of JSON")
        step = size if is_gzip(path) else max(1, self.part_bytes)
        return [
            Unit(path=path, begin=begin, end=None if step == size else begin + step, size=min(step, size - begin))
            for begin in range(0, size, step)
        ]

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> JsonCursor:
        return JsonCursor(self, unit, state, bad)

    def decode(self, payloads: Sequence[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        """Decode objects; return the samples, and (number, reason) of the objects that cannot be read."""
        schema = self.schema
        block = _core.parse_json_objects(
            list(payloads),
            schema.label,
            schema.time or "",
            [schema.column(name) for name in schema.dense],
            [schema.column(name) for name in schema.sparse],
            self._set(),
            self.threads,
        )
        timed = schema.time is not None
        samples = from_block(block, len(schema.dense), len(schema.sparse), ragged=self.ragged, timed=timed)
        return samples, [(line, why) for line, _, why in block.bad]

    def _set(self) -> _core.FeatureSet:
        return self.schema.native(lists=self.lists)


class JsonCursor(LineCursor):
    """The objects of the lines that begin in a unit."""

    def __init__(self, form: JsonFormat, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> None:
        super().__init__(unit, bad)
        self._form = form
        self._rest, self._final = b"", False
        self._ready: list[bytes] = []
        if state is not None:
            self._offset, self._lines = int(state["offset"]), int(state["lines"])
        try:
            self._file.seek(self._offset)
            if state is None and unit.begin:
                self._file.seek(unit.begin - 1)  # a line that crosses the border belongs to the previous unit
                self._offset = unit.begin - 1 + len(self._file.readline())
        except DAMAGED as error:
            self._damaged(error)

    def read(self, rows: int) -> Samples | None:
        while True:
            if not self._ready and not self._refill():
                return None
            taken = self._taken(rows)
            samples, bad = self._form.decode([line for line, _, _ in taken])
            for index, why in bad:
                self._report(taken[index][1], taken[index][2], why)
            if len(samples):
                return samples

    def _taken(self, rows: int) -> list[tuple[bytes, int, int]]:
        """Take at most ``rows`` non-empty lines, each with its number and its offset."""
        taken: list[tuple[bytes, int, int]] = []
        used = 0
        for line in self._ready:
            if len(taken) == rows or (self._unit.end is not None and self._offset >= self._unit.end):
                break
            if line.strip():
                taken.append((line, self._lines + used, self._offset))
            self._offset += len(line) + 1
            used += 1
        if used < len(self._ready) and len(taken) < rows:  # the unit has ended
            self._final, self._rest, self._ready = True, b"", []
        else:
            del self._ready[:used]
        self._lines += used
        return taken

    def _refill(self) -> bool:
        """Read more; return whether there are further lines."""
        while not self._ready:
            if self._final or (self._unit.end is not None and self._offset >= self._unit.end):
                return False
            try:
                block = self._file.read(_BLOCK)
            except DAMAGED as error:
                self._damaged(error)
                return False
            if not block:
                self._final = True
                self._ready = [self._rest] if self._rest else []
                return bool(self._ready)
            complete, newline, self._rest = (self._rest + block).rpartition(b"\n")
            self._ready = complete.split(b"\n") if newline else []
        return True

    def _damaged(self, error: BaseException) -> None:
        self._final = True
        self._report_damage(error)
