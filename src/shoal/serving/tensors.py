"""Tensors to and from TensorFlow's ``TensorProto``.

Writers emit the shape and the typed value list. Readers take typed lists or little-endian ``tensor_content``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal import _core
from shoal.errors import DataError
from shoal.proto.serving.tensor_pb2 import TensorProto
from shoal.serving.wire import decode_varints, encode_varints, field, read_varint, varint

MAX_TENSOR_BYTES = 2**31 - 1
"""The largest tensor that is decoded; also gRPC's largest message."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a dtype is encoded: ``list_field`` holds ``wire`` elements; ``bits`` is tensor_content's numpy dtype."""

    code: int
    name: str
    torch: torch.dtype | None
    list_field: int
    wire: str  # f4, f8, varint, bits (varints of a bit pattern) or bytes
    bits: str  # numpy dtype, little-endian


_KINDS = (
    _Kind(1, "float", torch.float32, 5, "f4", "<f4"),
    _Kind(2, "double", torch.float64, 6, "f8", "<f8"),
    _Kind(3, "int32", torch.int32, 7, "varint", "<i4"),
    _Kind(4, "uint8", torch.uint8, 7, "varint", "<u1"),
    _Kind(5, "int16", torch.int16, 7, "varint", "<i2"),
    _Kind(6, "int8", torch.int8, 7, "varint", "<i1"),
    _Kind(7, "string", None, 8, "bytes", "O"),
    _Kind(9, "int64", torch.int64, 10, "varint", "<i8"),
    _Kind(10, "bool", torch.bool, 11, "varint", "?"),
    _Kind(14, "bfloat16", torch.bfloat16, 13, "bits", "<u2"),
    _Kind(17, "uint16", torch.uint16, 7, "varint", "<u2"),
    _Kind(19, "half", torch.float16, 13, "bits", "<u2"),
    _Kind(22, "uint32", torch.uint32, 16, "varint", "<u4"),
    _Kind(23, "uint64", torch.uint64, 17, "varint", "<u8"),
)
_BY_CODE = {kind.code: kind for kind in _KINDS}
_BY_TORCH = {kind.torch: kind for kind in _KINDS}
_STRING = _BY_CODE[7]
NAME_OF_DTYPE = {kind.torch: kind.name for kind in _KINDS if kind.torch is not None}


def dtype_code(dtype: Any) -> int:
    """The DataType of a torch dtype, of ``bytes``/``str``, or of a name such as ``int64``."""
    if dtype in (bytes, str):
        return _STRING.code
    if isinstance(dtype, str):
        for kind in _KINDS:
            if kind.name == dtype:
                return kind.code
    if dtype not in _BY_TORCH:
        raise DataError(f"dtype {dtype} cannot be sent; use one of {', '.join(kind.name for kind in _KINDS)}")
    return _BY_TORCH[dtype].code


def torch_dtype(code: int) -> torch.dtype | None:
    """The torch dtype of a DataType, None for STRING."""
    if code not in _BY_CODE:
        raise DataError(f"tensor dtype {code} is not supported; known are {sorted(_BY_CODE)}")
    return _BY_CODE[code].torch


def tensor_to_proto(tensor: Any) -> TensorProto:
    """The ``TensorProto`` of a torch tensor, a numpy array (object arrays of bytes or str are STRING) or nested lists.

    Python floats become FLOAT and ints INT64. The tensor is copied.
    """
    return TensorProto.FromString(encode_tensor(tensor))


def tensor_from_proto(proto: TensorProto) -> Any:
    """The torch tensor of a ``TensorProto``; a STRING tensor is a numpy object array of ``bytes``.

    A typed list shorter than the shape is extended with its last value, an empty one means zeros.

    Raises:
        DataError: unknown dtype or rank, a list longer than the shape, or content of the wrong length.
    """
    return decode_tensor(memoryview(proto.SerializeToString()))


def encode_tensor(tensor: Any) -> bytes:
    """The serialised ``TensorProto`` of what :func:`tensor_to_proto` takes, without building the message."""
    return b"".join(tensor_chunks(tensor))


def tensor_chunks(tensor: Any) -> list[Any]:
    """Like :func:`encode_tensor`, as a list of chunks; a float tensor's memory is one of them and is not copied."""
    kind, shape, array = _as_array(tensor)
    dims = b"".join(field(2, b"\x08" + varint(size) if size else b"") for size in shape)
    head = b"\x08" + varint(kind.code) + field(2, dims)
    if kind is _STRING:
        return [head, *(field(8, _as_bytes(value)) for value in array)]
    if not array.size:
        return [head]
    if kind.wire in ("f4", "f8"):
        body = memoryview(array).cast("B")  # pyrefly: ignore
    elif array.dtype == np.bool_:
        body = memoryview(array.view(np.uint8))  # pyrefly: ignore
    else:
        body = encode_varints(array.astype(np.int64, copy=False))
    return [head + varint(kind.list_field << 3 | 2) + varint(len(body)), body]


def encode_content(dtype: str, shape: tuple[int, ...], content: bytes) -> bytes:
    """A serialised ``TensorProto`` with ``tensor_content``, little-endian, for receivers that asked for it."""
    dims = b"".join(field(2, b"\x08" + varint(size) if size else b"") for size in shape)
    return b"\x08" + varint(dtype_code(dtype)) + field(2, dims) + (field(4, content) if content else b"")


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview | np.bytes_):
        return bytes(value)
    raise DataError(f"the elements of a string tensor must be bytes or str, got {type(value).__name__}")


def _first_leaf(value: Any) -> Any:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def native_dtype(array: np.ndarray) -> np.dtype:
    """The dtype in this machine's byte order; by its size, because torch does not know ``ulonglong``."""
    return np.dtype(array.dtype.newbyteorder("=").str)


def _as_array(tensor: Any) -> tuple[_Kind, tuple[int, ...], np.ndarray]:
    if not isinstance(tensor, torch.Tensor):
        array = np.array(tensor, object) if isinstance(_first_leaf(tensor), str | bytes) else np.asarray(tensor)
        if array.dtype.kind in "OSU":
            return _STRING, array.shape, array.reshape(-1)
        if not isinstance(tensor, np.ndarray | np.generic) and array.dtype == np.float64:
            array = array.astype(np.float32)
        tensor = torch.from_numpy(np.array(array, dtype=native_dtype(array), copy=None, order="C"))
    kind = _BY_TORCH.get(tensor.dtype)
    if kind is None:
        raise DataError(f"a tensor of {tensor.dtype} has no TensorProto form; convert it, for example with .float()")
    shape = tuple(tensor.shape)
    tensor = tensor.detach().cpu().contiguous().reshape(-1)
    if kind.wire == "bits":
        tensor = tensor.view(torch.uint16)
    return kind, shape, tensor.numpy()


def decode_tensor(data: memoryview | bytes, max_bytes: int = MAX_TENSOR_BYTES) -> Any:
    """The tensor of a serialised ``TensorProto``; see :func:`decode_tensor_at`."""
    data = data if isinstance(data, bytes) else bytes(data)
    return decode_tensor_at(data, 0, len(data), max_bytes)


@dataclass(frozen=True, slots=True)
class TensorHead:
    """The declared dtype and shape of a serialised tensor, read before allocating memory for it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Size in bytes once decoded."""


def tensor_head(data: bytes, begin: int, size: int, max_bytes: int = MAX_TENSOR_BYTES) -> TensorHead:
    """The head of a serialised ``TensorProto``; raises DataError if :func:`decode_tensor_at` would refuse it."""
    kind, shape, count, _ = _parsed(data, begin, size, max_bytes)
    return TensorHead(kind.name, tuple(shape), count * np.dtype(kind.bits).itemsize)


def _parsed(data: bytes, begin: int, size: int, max_bytes: int) -> tuple[_Kind, list[int], int, Any]:
    """(kind, shape, number of values, where they are)."""
    try:
        code, shape, unknown_rank, *values = _core.tensor_parts(data, begin, size)
    except ValueError as error:
        raise DataError(str(error)) from None
    kind = _BY_CODE.get(code)
    if kind is None:
        raise DataError(f"tensor dtype {code} is not supported; known are {sorted(_BY_CODE)}")
    if unknown_rank:
        raise DataError("a tensor's shape must be known, got unknown rank")
    if (least := min(shape, default=0)) < 0:
        raise DataError(f"sizes of a tensor's shape must be >= 0, got {least}")
    width = np.dtype(kind.bits).itemsize
    if extent(shape) * width > max_bytes:
        count = math.prod(shape)
        raise DataError(
            f"a {kind.name} tensor must have at most {max_bytes} bytes, got {count * width} of shape {list(shape)}"
            if count
            else f"a {kind.name} tensor of shape {list(shape)} is empty, but its other sizes are too large; the bytes "
            f"of shape {[length or 1 for length in shape]} must be at most {max_bytes}"
        )
    return kind, shape, math.prod(shape), values


def extent(shape: Iterable[int]) -> int:
    """The number of values in a shape, counting empty dimensions as size 1.

    A shape whose extent does not fit into memory is unusable even if it is empty: its strides overflow.
    """
    return math.prod(length or 1 for length in shape)


def decode_tensor_at(data: bytes, begin: int, size: int, max_bytes: int = MAX_TENSOR_BYTES) -> Any:
    """The tensor of a serialised ``TensorProto``. Float lists are read in place: it may share ``data``'s memory.

    ``max_bytes`` limits the tensor's size; it is checked against the shape before memory is allocated.
    """
    kind, shape, count, (content_at, spans, fields, unpacked) = _parsed(data, begin, size, max_bytes)
    content = memoryview(data)[content_at[0] : content_at[0] + content_at[1]] if content_at[1] else b""
    try:
        if kind is _STRING:
            values = (
                _split_strings(content, count) if len(content) else _core.tensor_strings(data, begin, size, 8, count)
            )
            return _string_array(tuple(shape), count, values)
        if len(content):
            array = _from_content(kind, content, shape, count)
        elif unpacked:
            array = _gathered(kind, data, begin, size, count)
        else:
            view, wanted = memoryview(data), zip(spans, fields, strict=True)
            lists = [view[at : at + length] for (at, length), number in wanted if number == kind.list_field]
            array = _decode_lists(kind, lists, count)
    except DataError:
        raise
    except ValueError as error:  # of the native reader
        raise DataError(str(error)) from None
    if array.size > count:
        raise DataError(f"a list of {array.size} values does not fit shape {list(shape)}, which holds {count}")
    if array.size < count:
        full = np.zeros(count, array.dtype)
        if array.size:
            full[: array.size], full[array.size :] = array, array[-1]
        array = full
    tensor = shared_tensor(array)
    if kind.wire == "bits":
        tensor = tensor.view(kind.torch)  # pyrefly: ignore
    return tensor.reshape(shape)


class _Shared:
    """An array's memory, exposed as writable: received bytes are read-only, which torch cannot express."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def shared_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over an array's memory, or over a copy if that is not aligned. It must not be written to."""
    if not array.flags.writeable:
        array = np.asarray(_Shared(array)) if array.size and array.flags.aligned else array.copy()
    return torch.from_numpy(array)


def _from_content(kind: _Kind, content: memoryview | bytes, shape: list[int], count: int) -> np.ndarray:
    need = count * np.dtype(kind.bits).itemsize
    if len(content) != need:
        raise DataError(f"tensor_content has {len(content)} bytes; shape {list(shape)} of {kind.name} needs {need}")
    if kind.bits == "?":
        return np.frombuffer(content, np.uint8) != 0  # any other byte than 0 is true, but only 1 is a bool
    return np.frombuffer(content, kind.bits)


def _decode_lists(kind: _Kind, lists: list[memoryview], count: int) -> np.ndarray:
    """The values of a few packed lists; one list of floats is not copied."""
    parts = []
    for value in lists:
        if kind.wire in ("f4", "f8"):
            width = int(kind.wire[1])
            if len(value) % width:
                raise DataError(f"a {kind.name} list has {len(value)} bytes, not a multiple of {width}")
            parts.append(np.frombuffer(value, kind.bits))
        else:
            parts.append(decode_varints(value, count))
    if not parts:
        return np.empty(0, kind.bits)
    return _narrowed(kind, parts[0] if len(parts) == 1 else np.concatenate(parts))


def _gathered(kind: _Kind, data: bytes, begin: int, size: int, count: int) -> np.ndarray:
    """The values of a list whose elements are unpacked or spread over very many packed lists."""
    floats = kind.wire in ("f4", "f8")
    width = int(kind.wire[1]) if floats else 0
    raw = _core.tensor_values(data, begin, size, kind.list_field, width, count)
    return _narrowed(kind, np.frombuffer(raw, kind.bits if floats else np.int64))


def _narrowed(kind: _Kind, array: np.ndarray) -> np.ndarray:
    """Integers decoded from varints, converted to their own dtype."""
    if kind.wire == "varint" and array.dtype != np.dtype(kind.bits):
        return array != 0 if kind.bits == "?" else array.astype(kind.bits)
    return array.astype(np.uint16) if kind.wire == "bits" else array


def _string_array(shape: tuple, count: int, values: list[bytes]) -> np.ndarray:
    array = np.empty(count, object)
    array[:] = values[-1] if values else b""
    array[: len(values)] = values
    return array.reshape(shape)


def _split_strings(content: memoryview | bytes, count: int) -> list[bytes]:
    """TensorFlow's packed form of strings: all lengths as varints, then all bytes."""
    at, sizes = 0, []
    for _ in range(count):
        size, at = read_varint(content, at)
        sizes.append(size)
    if at + sum(sizes) != len(content):
        raise DataError(f"tensor_content of strings has {len(content)} bytes; its lengths ask for {at + sum(sizes)}")
    values = []
    for size in sizes:
        values.append(bytes(content[at : at + size]))
        at += size
    return values
