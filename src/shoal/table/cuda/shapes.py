"""How much of a batch one program of a kernel takes, and its warps: of large programs, when they are interpreted."""

from __future__ import annotations

from shoal._gpu import chosen
from shoal.table.cuda.backend import interpreted


def find_shape(width: int) -> tuple[int, int]:
    """Ids of one program, and its warps."""
    if interpreted():
        return 256, 1
    if width >= 64:
        return max(1, 4096 // width), 4
    return chosen.find_ids, chosen.find_warps


def insert_shape() -> tuple[int, int]:
    """Ids of one program, and its warps."""
    return (256, 1) if interpreted() else (chosen.insert_ids, chosen.insert_warps)


def claim_shape() -> tuple[int, int]:
    """Ids of one program of `claim`, and its warps."""
    return (256, 1) if interpreted() else (chosen.claim_ids, chosen.claim_warps)


def row_shape(width: int) -> tuple[int, int]:
    """Rows of one program, and its warps."""
    if interpreted():
        return max(1, min(256, 16384 // width)), 1
    return max(1, min(128, 2048 // width)), 4


def distinct_shape(width: int) -> tuple[int, int]:
    """Rows of one program of `update_distinct`, and its warps."""
    if interpreted():
        return max(1, min(64, 8192 // width)), 1
    return max(1, min(64, 1024 // width)), 4


def each_shape(width: int) -> tuple[int, int]:
    """Rows of one program of `update_each`, and its warps."""
    if interpreted():
        return 16, 1
    return max(1, 256 // width), 1 if width <= 256 else 4


def summed_shape(width: int) -> tuple[int, int]:
    """Rows of one program of `update_summed`, and its warps."""
    if interpreted():
        return 8, 1
    return max(2, min(32, chosen.summed_rows // width)), chosen.summed_warps


def crossing_shape(width: int) -> tuple[int, int]:
    """Blocks whose sums `update_crossing` takes at once, and its warps."""
    return (4 if interpreted() else max(2, min(64, 4096 // width))), 4 if width > 32 else 1
