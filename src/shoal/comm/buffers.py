"""Memory for messages: bytes that are written once, in place."""

import ctypes
from typing import Any

import numpy as np

from shoal import _core


def writable_bytes(n: int) -> tuple[bytes, np.ndarray]:
    """A new ``bytes`` of length ``n`` and a view to fill it through, before anybody else sees it."""
    if n == 0:
        return b"", np.empty(0, np.uint8)
    data = _core.new_bytes(n)
    raw: Any = (ctypes.c_uint8 * n).from_address(_core.bytes_address(data))
    return data, np.frombuffer(raw, np.uint8)


def crc32(raw: np.ndarray) -> int:
    """zlib's CRC-32 of a contiguous array."""
    return _core.crc32(raw.ctypes.data, raw.nbytes)
