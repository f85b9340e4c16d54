"""Tensors as bytes in the ``TPK1`` format; every field is checked before anything is allocated."""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.comm.ranks.buffers import crc32, flat_bytes, writable_bytes
from shoal.errors import SerializationError

MAGIC = b"TPK1"
HEAD = struct.Struct("<4sIQQII")  # magic, count, descriptor bytes, payload bytes, crc32, 0
FIXED = struct.Struct("<BBHI")  # dtype code, ndim, 0, crc32 of the payload
ALIGN = 64
MAX_NDIM = 8
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _raw(tensor: Tensor) -> np.ndarray:
    """The tensor's bytes, without a copy when it is contiguous on the CPU."""
    return flat_bytes(tensor.detach().cpu()).numpy()


def serialize_tensors(tensors: Sequence[Tensor]) -> bytes:
    """Serialize tensors into one message; the payload is copied once.

    Accepts up to 8 dimensions and the dtypes in ``DTYPES``; CUDA tensors are copied to the host. NaN payloads and -0.0
    are preserved bit for bit.

    Example:
        >>> len(serialize_tensors([torch.tensor([[1.0, -2.0]]), torch.tensor(3.0)]))
        196
    """
    raws, descriptors, offset = [], [], 0
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise SerializationError(f"serialize_tensors: item {i} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise SerializationError(f"serialize_tensors: tensor {i} must be dense, got {tensor.layout}")
        if tensor.is_meta:
            raise SerializationError(f"serialize_tensors: tensor {i} is on the meta device and has no data")
        if tensor.dtype not in CODES:
            names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise SerializationError(
                f"serialize_tensors: the dtype of tensor {i} must be one of {names}, got {tensor.dtype}"
            )
        if tensor.ndim > MAX_NDIM:
            raise SerializationError(
                f"serialize_tensors: tensor {i} must have at most {MAX_NDIM} dimensions, got {tensor.ndim}"
            )
        raw = _raw(tensor)
        offset = _aligned(offset)
        descriptors.append(
            FIXED.pack(CODES[tensor.dtype], tensor.ndim, 0, crc32(raw))
            + struct.pack(f"<{tensor.ndim + 2}Q", *tensor.shape, offset, raw.nbytes)
        )
        raws.append((offset, raw))
        offset += raw.nbytes
    table = b"".join(descriptors)
    head = HEAD.pack(MAGIC, len(raws), len(table), offset, 0, 0)[:24]
    head += struct.pack("<II", zlib.crc32(table, zlib.crc32(head)), 0)
    start = _aligned(len(head) + len(table))
    data, view = writable_bytes(start + offset)
    header = np.frombuffer(head + table, np.uint8)
    view[: len(header)] = header
    at = len(header)
    for offset, raw in raws:
        view[at : start + offset] = 0
        at = start + offset + raw.nbytes
        view[start + offset : at] = raw
    view[at:] = 0
    return data


def deserialize_tensors(data: Any, *, max_bytes: int | None = None) -> list[Tensor]:
    """The tensors in one message, on the CPU, in new memory; the payload is copied once.

    Raises:
        SerializationError: the bytes are not exactly one well-formed message, or its payload exceeds ``max_bytes``.
            Sizes in a message are checked against its length before anything is allocated.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        view = memoryview(view.tobytes())
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if len(view) < HEAD.size:
        raise SerializationError(f"message of {len(view)} bytes is shorter than its {HEAD.size}-byte head")
    magic, count, table_bytes, payload_bytes, crc, zero = HEAD.unpack_from(view)
    if magic != MAGIC or zero:
        raise SerializationError(f"message does not start with {MAGIC!r}; these are not serialized tensors")
    if max_bytes is not None and payload_bytes > max_bytes:
        raise SerializationError(f"message announces {payload_bytes} payload bytes, more than max_bytes={max_bytes}")
    start = _aligned(HEAD.size + table_bytes)
    if start + payload_bytes != len(view):
        raise SerializationError(
            f"message has {len(view)} bytes, but its head says {start + payload_bytes}; it is truncated or too long"
        )
    table = view[HEAD.size : HEAD.size + table_bytes]
    if zlib.crc32(table, zlib.crc32(view[:24])) != crc:
        raise SerializationError("message head does not match its crc32; it was damaged on the way")
    if any(view[HEAD.size + table_bytes : start]):
        raise SerializationError("message has bytes other than zero in its padding")
    plan, end = _read_table(table, count, payload_bytes)
    if end != payload_bytes:
        raise SerializationError(f"message has {payload_bytes - end} payload bytes after its last tensor")
    payload = view[start:]
    at = 0
    for i, (_, _, offset, nbytes, crc) in enumerate(plan):
        if any(payload[at:offset]):
            raise SerializationError(f"message has bytes other than zero between tensors {i - 1} and {i}")
        if crc32(np.frombuffer(payload[offset : offset + nbytes], np.uint8)) != crc:
            raise SerializationError(f"tensor {i} does not match its crc32; it was damaged on the way")
        at = offset + nbytes
    return [_tensor(dtype, shape, payload[offset : offset + nbytes]) for dtype, shape, offset, nbytes, _ in plan]


def _read_table(
    table: memoryview, count: int, payload_bytes: int
) -> tuple[list[tuple[torch.dtype, tuple[int, ...], int, int, int]], int]:
    plan, at, end = [], 0, 0
    for i in range(count):
        if at + FIXED.size > len(table):
            raise SerializationError(f"message says {count} tensors but describes only {i}")
        code, ndim, zero, crc = FIXED.unpack_from(table, at)
        at += FIXED.size
        if code >= len(DTYPES) or ndim > MAX_NDIM or zero:
            raise SerializationError(f"tensor {i} has an invalid description: dtype code {code}, {ndim} dimensions")
        if at + 8 * (ndim + 2) > len(table):
            raise SerializationError(f"the description of tensor {i} is cut off")
        *shape, offset, nbytes = struct.unpack_from(f"<{ndim + 2}Q", table, at)
        at += 8 * (ndim + 2)
        if math.prod(shape) * DTYPES[code].itemsize != nbytes or math.prod(n or 1 for n in shape) >> 60:
            raise SerializationError(f"tensor {i} of shape {tuple(shape)} cannot have {nbytes} bytes")
        if offset != _aligned(end) or offset + nbytes > payload_bytes:
            raise SerializationError(
                f"tensor {i} must start at byte {_aligned(end)} and end by byte {payload_bytes}, got bytes "
                f"{offset}..{offset + nbytes}"
            )
        end = offset + nbytes
        plan.append((DTYPES[code], tuple(shape), offset, nbytes, crc))
    if at != len(table):
        raise SerializationError(f"message has {len(table) - at} bytes of description after its {count} tensors")
    return plan, end


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(dtype).reshape(shape)
