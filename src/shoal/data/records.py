"""Files of TFRecord frames: a resumable cursor that does not depend on the contents of the records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from shoal import _core
from shoal.data.samples import Samples
from shoal.data.source import DAMAGED, BadRow, OnBad, Unit, file_size, open_bytes, open_error, refuse_other_kinds

_BLOCK = 1 << 21
_MAX_RECORD = 1 << 30


class RecordFormat(ABC):
    """Base of formats whose files are frames. A file is one unit: frame borders cannot be found from the middle."""

    ragged = True
    rows_per_record = False
    """Whether a record holds many samples."""

    def units(self, path: str) -> list[Unit]:
        size = file_size(path)
        if not size:
            return []
        refuse_other_kinds(path, "records")
        return [Unit(path=path, size=size)]

    def open(self, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> RecordCursor:
        return RecordCursor(self, unit, state, bad)

    @abstractmethod
    def decode(self, payloads: Sequence[bytes]) -> tuple[Samples, list[tuple[int, str]]]:
        """Decode records; return the samples, and (number, reason) of the records that cannot be read."""


class RecordCursor:
    """The records of one file, plain or gzip."""

    def __init__(self, form: RecordFormat, unit: Unit, state: Mapping[str, Any] | None, bad: OnBad) -> None:
        self._form, self._path, self._bad = form, unit.path, bad
        self._buffer, self._at, self._final = b"", 0, False
        self._offset, self._number, self._skip = 0, 0, 0
        self._left: Samples | None = None
        """The samples of the current record, of which `_skip` were taken."""
        with open_error(unit.path):
            self._file = open_bytes(unit.path)
        if state is not None:
            self._offset, self._number = int(state["offset"]), int(state["records"])
            try:
                self._file.seek(self._offset)
            except DAMAGED as error:
                self._damaged(str(error))
            if skip := int(state["skip"]):
                self._left = self._next(1)
                self._skip = 0
                if self._left is not None:
                    self._take(skip)

    def read(self, rows: int) -> Samples | None:
        if self._form.rows_per_record:
            while self._left is None or self._skip >= len(self._left):
                self._skip, self._left = 0, self._next(1)
                if self._left is None:
                    return None
            return self._take(rows)
        return self._next(rows)

    def state(self) -> dict[str, Any]:
        if self._left is not None and self._skip < len(self._left):
            return {"offset": self._before[0], "records": self._before[1], "skip": self._skip}
        return {"offset": self._offset, "records": self._number, "skip": 0}

    def close(self) -> None:
        self._file.close()

    def _take(self, rows: int) -> Samples:
        assert self._left is not None
        end = min(len(self._left), self._skip + rows)
        part = self._left.part(self._skip, end)
        self._skip = end
        return part

    def _next(self, records: int) -> Samples | None:
        """Return the samples of at most ``records`` records, skipping runs of bad ones; None at the end."""
        while True:
            try:
                payloads, offsets, consumed = _core.read_frames(self._buffer, self._at, records)
            except ValueError as error:
                self._damaged(str(error))
                return None
            if not payloads:
                if self._final:
                    if len(self._buffer) > self._at:
                        self._damaged("the file ends inside a record")
                    return None
                self._refill()
                continue
            number, offset = self._number, self._offset
            self._before = offset, number
            self._at += consumed
            self._offset += consumed
            self._number += len(payloads)
            good = [i for i, payload in enumerate(payloads) if payload is not None]
            for i in sorted(set(range(len(payloads))) - set(good)):
                self._report(number + i, offset + offsets[i], "the record's checksum does not match")
            samples, bad = self._form.decode([payloads[i] for i in good])
            for i, why in bad:
                self._report(number + good[i], offset + offsets[good[i]], why)
            if len(samples):
                return samples

    def _refill(self) -> None:
        rest = self._buffer[self._at :]
        if len(rest) > _MAX_RECORD:
            self._damaged(f"a record has more than {_MAX_RECORD} bytes")
            rest, self._final = b"", True
        try:
            more = self._file.read(max(_BLOCK, len(rest))) if not self._final else b""
        except DAMAGED as error:
            self._damaged(str(error))
            rest = more = b""
        self._final = not more
        self._buffer, self._at = rest + more, 0

    def _report(self, number: int, offset: int, why: str, *, rest: bool = False) -> None:
        self._bad(BadRow(path=self._path, why=why, line=number + 1, offset=offset, rest=rest, noun="record"))

    def _damaged(self, why: str) -> None:
        self._report(self._number, self._offset, f"the file is damaged ({why})", rest=True)
        self._buffer, self._at, self._final = b"", 0, True
