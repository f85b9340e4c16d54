"""How much of a batch one program of a kernel takes, and its warps: of large programs, when they are interpreted."""

from __future__ import annotations

from shoal.table.cuda.backend import interpreted


def find_shape(width: int) -> tuple[int, int]:
    """Ids of one program, and its warps."""
    if interpreted():
        return 256, 1
    if width >= 64:
        return max(1, 4096 // width), 4
    return 64, 2


def insert_shape() -> tuple[int, int, int | None]:
    """Ids of one program, its warps, and registers of a thread: with more of them fewer programs run at once."""
    return (256, 1, None) if interpreted() else (128, 4, 64)


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
    return max(2, min(32, 2048 // width)), 4


def crossing_shape(width: int) -> tuple[int, int, int]:
    """Blocks that a program of `update_crossing` looks at, those whose sums it takes at once, and its warps."""
    if interpreted():
        return 4, 4, 1
    warps = 4 if width > 32 else 1
    return max(1, min(32, 256 * warps // width)), max(2, min(64, 4096 // width)), warps


def pool_shape(width: int) -> tuple[int, int]:
    """Bags of one program of `pool`, and its warps."""
    if interpreted():
        return max(1, min(64, 8192 // width)), 1
    return max(1, min(64, 1024 // width)), 4


def claim_shape() -> tuple[int, int, int | None]:
    """Ids of one program of `claim`, its warps, and registers of a thread."""
    return insert_shape()


def start_shape(width: int) -> tuple[int, int, int]:
    """Rows that a program of `start` makes at once, its warps, and the most programs there are."""
    if interpreted():
        return 64, 1, 2
    return max(1, min(64, 2048 // width)), 4, 1056
