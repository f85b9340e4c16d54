"""Protobuf's wire format without message objects, for messages that are mostly one long array."""

from collections.abc import Iterator

import numpy as np

from shoal import _core
from shoal.errors import DataError


def varint(value: int) -> bytes:
    """One varint; a negative value is its 64-bit two's complement."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, payload: bytes | memoryview) -> bytes:
    """A length-delimited field."""
    return b"".join((varint(number << 3 | 2), varint(len(payload)), payload))


def read_varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    """(value, position after it); an unsigned 64-bit value."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise DataError(f"the message is cut off or not protobuf: a varint does not end by byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7


def read_fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """(number, wire type, value) of each field: an int for type 0, a slice of ``data`` for types 1, 2 and 5."""
    at, end = 0, len(data)
    while at < end:
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 2:
            size, at = read_varint(data, at)
        elif kind == 0:
            value, at = read_varint(data, at)
            yield number, kind, value
            continue
        elif kind == 5:
            size = 4
        elif kind == 1:
            size = 8
        else:
            raise DataError(f"the message is not protobuf: wire type {kind} of field {number} at byte {at}")
        if number == 0 or size > end - at:
            raise DataError(
                f"the message is cut off: field {number} at byte {at} needs {size} bytes, but {end - at} are left"
            )
        yield number, kind, data[at : at + size]
        at += size


def signed(value: int) -> int:
    """A varint's value read as int64."""
    return value - (1 << 64) if value >> 63 else value


def encode_varints(values: np.ndarray) -> memoryview:
    """Encode an int64 array as packed varints."""
    values = np.ascontiguousarray(values, dtype=np.int64)
    out = np.empty(_core.varint_size(values.ctypes.data, values.size), np.uint8)
    _core.varint_encode(values.ctypes.data, values.size, out.ctypes.data)
    return out.data


def decode_varints(data: memoryview, limit: int) -> np.ndarray:
    """Decode packed varints to an int64 array; more than ``limit`` is an error, raised before allocating memory."""
    raw = np.frombuffer(data, np.uint8)
    count = _core.varint_count(raw.ctypes.data, raw.size)
    if count < 0:
        raise DataError("a packed list of integers is cut off")
    if count > limit:
        raise DataError(f"a list holds {count} values; the shape allows {limit}")
    out = np.empty(count, np.int64)
    _core.varint_decode(raw.ctypes.data, raw.size, out.ctypes.data, count)
    return out
