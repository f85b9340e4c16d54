"""`SampleLog`: joined samples in numbered files, kept until the reader has them in a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from shoal.durable import sync_folder
from shoal.errors import DataError

_FILE_BYTES = 1 << 24
_BLOCK = 1 << 20
_NAME = re.compile(r"samples-(\d{20})\.txt")


class SampleLog:
    """Lines in files ``samples-<number of the first>.txt``. Only one process writes and reads."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        self._firsts = sorted(int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))
        if not self._firsts:
            self._firsts = [0]
        self._file = open(self._path(self._firsts[-1]), "a+b")  # noqa: SIM115  closed by `close`
        self.count = self._firsts[-1] + self._complete_lines()
        """The number of samples ever written."""
        self._reading: tuple[int, int] | None = None  # the number of a sample, and its offset in its file

    @property
    def first(self) -> int:
        """The number of the oldest sample still kept."""
        return self._firsts[0]

    def append(self, first: int, samples: Sequence[bytes]) -> None:
        """Write the samples that were not written yet."""
        if first > self.count:
            raise DataError(f"{self.folder}: the number of the next sample must be <= {self.count}, got {first}")
        samples = samples[self.count - first :]
        if not samples:
            return
        if self._file.tell() > _FILE_BYTES:
            self.flush()
            self._file.close()
            self._firsts.append(self.count)
            self._file = open(self._path(self.count), "a+b")  # noqa: SIM115
            sync_folder(self.folder)
        self._file.write(b"\n".join(samples) + b"\n")
        self._file.flush()
        self.count += len(samples)

    def flush(self) -> None:
        """Flush appended samples to disk."""
        os.fsync(self._file.fileno())

    def read(self, number: int, most: int) -> list[bytes]:
        """At most ``most`` samples, starting with ``number``.

        Raises:
            DataError: the samples were deleted, or never written.
        """
        if not self.first <= number <= self.count:
            raise DataError(f"{self.folder}: the sample must be {self.first}..{self.count}, got {number}")
        begin = max(one for one in self._firsts if one <= number)
        end = min((one for one in self._firsts if one > number), default=self.count)
        most = min(most, end - number)
        if most == 0:
            return []
        at = self._reading[1] if self._reading is not None and self._reading[0] == number > begin else None
        with open(self._path(begin), "rb") as file:
            if at is not None:
                file.seek(at)
            else:
                for _ in range(number - begin):
                    file.readline()
            lines = [file.readline() for _ in range(most)]
            self._reading = number + most, file.tell()
        if not lines[-1].endswith(b"\n"):
            raise DataError(f"{self._path(begin)} ends before sample {number + most}")
        return [line[:-1] for line in lines]

    def forget(self, before: int) -> None:
        """Remove files whose samples all have numbers below ``before``."""
        while len(self._firsts) > 1 and self._firsts[1] <= before:
            os.unlink(self._path(self._firsts.pop(0)))

    def close(self) -> None:
        self._file.close()

    def _path(self, first: int) -> str:
        return os.path.join(self.folder, f"samples-{first:020d}.txt")

    def _complete_lines(self) -> int:
        """Count the lines of the newest file; remove an unterminated line that a crash left."""
        self._file.seek(0)
        lines = keep = at = 0
        while block := self._file.read(_BLOCK):
            lines += block.count(b"\n")
            keep = at + block.rfind(b"\n") + 1 if b"\n" in block else keep
            at += len(block)
        if keep < at:
            self._file.truncate(keep)
        self._file.seek(keep)
        return lines
