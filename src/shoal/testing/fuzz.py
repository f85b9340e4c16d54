"""Fuzzing of readers with damaged input: a reader must return a result or raise one of its documented errors.

>>> import json
>>> target = Target("json", [b'{"a": [1, 2]}'], json.loads, (ValueError, RecursionError))
>>> fuzz(target, runs=200, seed=1).runs
200
"""

from __future__ import annotations

import random
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.errors import ShoalError

NUMBERS = (
    0, 1, 2, 7, 8, 127, 128, 255, 256, 1023, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1,
)  # fmt: skip
WORDS = (
    b"\x00", b"\xff" * 8, b"\n", b"\r\n", b"\t", b",", b'"', b"\\", b"{}", b"[]", b"null", b"NaN", b"-1", b"1e999",
    b"\xc3\x28",
)  # fmt: skip
GROWTH_BYTES = 1 << 16


@dataclass(frozen=True)
class Target:
    """One reader.

    Args:
        seeds: valid inputs, to be damaged.
        read: called with the damaged bytes.
        refuses: the exceptions it may raise; any other, or a read that exceeds the time limit, is a finding.
        mend: repairs parts that would make the reader refuse every damage at once, such as a checksum over all bytes.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    refuses: tuple[type[BaseException], ...] = (ShoalError,)
    mend: Callable[[bytes], bytes] | None = None


@dataclass
class Tally:
    """How many inputs were read and how many were refused, by the name of the exception."""

    runs: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class FuzzFinding(AssertionError):
    """A reader failed in an undocumented way; ``data`` is its input."""

    def __init__(self, target: str, data: bytes, why: str) -> None:
        super().__init__(f"{target}: {why}; the input has {len(data)} bytes: {data[:120]!r}")
        self.target, self.data = target, data


def fuzz(
    target: Target, *, seed: int, runs: int | None = None, seconds: float | None = None, limit_s: float = 10.0
) -> Tally:
    """Damage the seeds and read them until ``runs`` inputs or ``seconds`` have passed; the same seed gives the same
    inputs. Must be called from the main thread, where a read that hangs can be stopped.

    Raises:
        FuzzFinding: an input broke the reader.
    """
    chance, tally, end = random.Random(f"{target.name} {seed}"), Tally(), None
    if seconds is not None:
        end = time.monotonic() + seconds
    for data in target.seeds:
        try_one(target, data, tally, limit_s)
    while (runs is None or tally.runs < runs) and (end is None or time.monotonic() < end):
        data = damaged(target.seeds, chance)
        if target.mend is not None and chance.random() < 0.8:
            data = target.mend(data)
        try_one(target, data, tally, limit_s)
    return tally


def try_one(target: Target, data: bytes, tally: Tally | None = None, limit_s: float = 10.0) -> None:
    """Read one input; raise `FuzzFinding` if the reader neither accepts nor refuses it."""
    tally = Tally() if tally is None else tally
    tally.runs += 1
    try:
        try:
            with _stopped_after(limit_s):
                target.read(data)
        except _Hung:  # or the machine had no time for this process
            with _stopped_after(limit_s):
                target.read(data)
    except target.refuses as refusal:
        name = type(refusal).__name__
        tally.refused[name] = tally.refused.get(name, 0) + 1
    except _Hung:
        raise FuzzFinding(target.name, data, f"it was not read within {limit_s:g} s") from None
    except Exception as error:
        raise FuzzFinding(target.name, data, f"{type(error).__name__}: {error}") from error


def kept_inputs(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files of a corpus."""
    for path in sorted(folder.glob("*")):
        yield path.name, path.read_bytes()


def damaged(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a seed with one to four changes."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        chance.choice(_CHANGES)(data, seeds, chance)
        del data[max(map(len, seeds)) + GROWTH_BYTES :]
    return bytes(data)


def _place(data: bytearray, chance: random.Random) -> int:
    """Choose a random position, more often near the beginning, where headers are."""
    return min(int(len(data) * chance.random() ** chance.choice((1, 3))), max(0, len(data) - 1))


def _range(data: bytearray, chance: random.Random) -> slice:
    begin = _place(data, chance)
    return slice(begin, begin + min(chance.choice((1, 2, 4, 8, 16, 64)), len(data) - begin))


def _flip(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[_place(data, chance)] ^= 1 << chance.randrange(8)


def _byte(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    if data:
        data[_place(data, chance)] = chance.randrange(256)


def _number(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    size, form = chance.choice(((1, "B"), (2, "H"), (4, "I"), (8, "Q")))
    at = _place(data, chance)
    if at + size <= len(data):
        value = chance.choice(NUMBERS) & (1 << 8 * size) - 1
        data[at : at + size] = struct.pack(chance.choice("<>") + form, value)


def _nudge(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    """Change a length or a count by a little."""
    if data:
        at = _place(data, chance)
        data[at] = data[at] + chance.choice((-2, -1, 1, 2)) & 255


def _cut(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    del data[_place(data, chance) :]


def _remove(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    del data[_range(data, chance)]


def _repeat(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    part = _range(data, chance)
    data[part.start : part.start] = data[part] * chance.choice((1, 1, 2, 50))


def _insert(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    at = _place(data, chance)
    data[at:at] = chance.choice((*WORDS, chance.randbytes(chance.randrange(1, 12))))


def _splice(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    other = chance.choice(seeds)
    data[_place(data, chance) :] = other[_place(bytearray(other), chance) :]


def _digits(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    """Replace a number in a text."""
    places = [at for at, byte in enumerate(data[:4096]) if 48 <= byte <= 57]
    if places:
        at = chance.choice(places)
        data[at : at + 1] = str(chance.choice(NUMBERS) * chance.choice((1, -1))).encode()


_CHANGES = (_flip, _byte, _number, _nudge, _cut, _remove, _repeat, _insert, _splice, _digits)


class _Hung(BaseException):
    pass


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
