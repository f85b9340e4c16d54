"""The work of one program of each kernel, and its warps. In Triton's interpreter, programs are few and large."""

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
    """Ids of one program, its warps, and registers per thread; with more of these, fewer programs run at once."""
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
    """Blocks of one program of `update_crossing`, blocks whose sums it reads at once, and its warps."""
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
    """Ids of one program of `claim`, its warps, and registers per thread."""
    return insert_shape()


def start_shape(width: int) -> tuple[int, int, int]:
    """Rows that a program of `start` creates at once, its warps, and the most programs."""
    if interpreted():
        return 64, 1, 2
    return max(1, min(64, 2048 // width)), 4, 1056


def prepare_shape() -> tuple[int, int]:
    """Words that a program of `prepare` clears, and its warps."""
    return (1 << 16, 1) if interpreted() else (2048, 8)


def hold_shape() -> tuple[int, int, int | None]:
    """Ids of one program of `hold`, its warps, and registers per thread."""
    return (1024, 1, None) if interpreted() else insert_shape()


def replace_shape() -> tuple[int, int, int, int | None]:
    """Ids that a program of `replace` takes at once, its warps, the most programs, and registers per thread."""
    return (1024, 1, 2, None) if interpreted() else (128, 4, 2112, None)


def place_shape() -> tuple[int, int, int]:
    """Ids that a program of `place` takes at once, its warps, and the most programs."""
    return (1024, 1, 2) if interpreted() else (64, 4, 1056)


def settle_shape() -> tuple[int, int]:
    """Ids of one program of `settle`, and its warps."""
    return (1024, 1) if interpreted() else (1024, 8)


def weigh_shape() -> tuple[int, int, int]:
    """Buckets that a program of `weigh` takes at once, programs per table, and warps."""
    return (1024, 1, 1) if interpreted() else (64, 32, 4)


def let_go_shape() -> tuple[int, int, int, int]:
    """Rows that a program of `let_go` takes at once, rows it compares them with, programs per table, and warps."""
    return (256, 1024, 1, 1) if interpreted() else (64, 128, 128, 4)
