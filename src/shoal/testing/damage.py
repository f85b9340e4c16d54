"""Damage to files, as caused by disks and crashes: flipped bits and truncation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def damages(path: Path, flips: int = 6) -> Iterator[str]:
    """Damage a file in one way after another and restore it; yields a description of each damage.

    One bit is flipped in the first byte, in the last and in ``flips`` others, the same on every run; then the file is
    cut off at several lengths, and removed.
    """
    whole = path.read_bytes()
    chosen = random.Random(len(whole))
    places = {0, len(whole) - 1, *(chosen.randrange(len(whole)) for _ in range(flips))} if whole else set()
    for place in sorted(places):
        bit = 1 << chosen.randrange(8)
        with _as(path, whole, whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]):
            yield f"bit {bit} of byte {place} of {len(whole)} flipped in {path.name}"
    for length in sorted({0, len(whole) // 2, len(whole) - 1} - {len(whole), -1}):
        with _as(path, whole, whole[:length]):
            yield f"{path.name} cut off after {length} of {len(whole)} bytes"
    with _as(path, whole, None):
        yield f"{path.name} removed"


@contextmanager
def _as(path: Path, whole: bytes, changed: bytes | None) -> Iterator[None]:
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(whole)
