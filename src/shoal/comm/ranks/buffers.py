"""Memory for messages: bytes objects that are filled in place, once."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core


def writable_bytes(n: int) -> tuple[bytes, np.ndarray]:
    """A new ``bytes`` of length ``n``, and a writable view with which to fill it before it is shared."""
    if n == 0:
        return b"", np.empty(0, np.uint8)
    data = _core.new_bytes(n)
    raw: Any = (ctypes.c_uint8 * n).from_address(_core.bytes_address(data))
    return data, np.frombuffer(raw, np.uint8)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes in row-major order, as a flat uint8 tensor; a view if the tensor is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 1:  # torch calls one element contiguous whatever its stride, but views it only with stride 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def crc32(raw: np.ndarray) -> int:
    """zlib's CRC-32 of a contiguous array."""
    return _core.crc32(raw.ctypes.data, raw.nbytes)
