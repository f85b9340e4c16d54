"""Reads payload files of untrusted peers, safetensors or ``.pt``, without running code or decompressing anything."""

import io
import itertools
import json
import math
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.durable import appearing
from shoal.errors import ConfigError
from shoal.gather.errors import PayloadRejected
from shoal.gather.payload.codec import DTYPE_NAMES, dtype_of
from shoal.gather.payload.spec import GradientSpec, canonical_json

SUFFIXES = ("idxs", "vals", "quant_params")
MAX_HEADER_BYTES = 16 << 20
ZIP_MAGIC = b"PK\x03\x04"
Source = str | os.PathLike[str] | bytes | bytearray | memoryview

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# The globals in a pickle of plain containers and strided tensors. torch's own list allows unlimited allocations.
_SAFE_GLOBALS = re.compile(
    r"torch(\.storage)? \w*Storage|torch._utils _rebuild_(tensor(_v2|_v3)?|parameter)|collections OrderedDict"
    r"|torch (float|bfloat|uint|int|bool|Size|device)\w*|_codecs encode"
)
_GLOBAL_OPCODES = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"})


def load_payload(data_or_path: Source, spec: GradientSpec, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Load a payload from a file or bytes, as ``{"state_dict": ..., "global_step": ...}``; nothing is checked against
    the spec except the number of members of a ``.pt``.

    Tensors in a file are mapped, not read. Raises PayloadRejected with ``corrupt_container``, ``unsafe_container``,
    ``not_a_mapping``, ``empty_payload`` or, past ``max_bytes``, ``oversize``.
    """
    in_memory = isinstance(data_or_path, bytes | bytearray | memoryview)
    size = len(data_or_path) if in_memory else os.stat(data_or_path).st_size
    if max_bytes is not None and size > max_bytes:
        raise PayloadRejected("oversize", f"{size} bytes, at most {max_bytes} are allowed")
    if size == 0:
        raise PayloadRejected("corrupt_container", "the file is empty")
    try:
        if _head(data_or_path) == ZIP_MAGIC:
            payload = _load_pt(data_or_path, size, spec)
        else:
            payload = _load_safetensors(data_or_path, size)
    except (PayloadRejected, MemoryError):
        raise
    except Exception as error:  # a hostile file can make a reader fail in any way, which must not fail this rank
        raise _corrupt(f"the container cannot be read ({type(error).__name__})") from None
    state_of(payload)
    return dict(payload)


def state_of(payload: Any) -> Mapping[str, Any]:
    """Return the state dict of a payload, which must be a mapping with at least one entry."""
    if not isinstance(payload, Mapping):
        raise PayloadRejected("not_a_mapping", f"the payload is a {type(payload).__name__}")
    state = payload.get("state_dict")
    if state is not None and not isinstance(state, Mapping):
        raise PayloadRejected("not_a_mapping", f"state_dict is a {type(state).__name__}")
    if not state:
        raise PayloadRejected("empty_payload", "the state dict is absent or empty")
    return state


def map_file(path: str | os.PathLike[str]) -> Tensor:
    """Map a file's bytes privately, without keeping a descriptor; the file must not be empty."""
    size = os.stat(path).st_size
    storage: Any = torch.UntypedStorage.from_file(os.fspath(path), shared=False, nbytes=size)
    return torch.tensor([], dtype=torch.uint8, device="cpu").set_(storage)


def _head(data: Any) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data[:4])
    with open(data, "rb") as file:
        return file.read(4)


def _corrupt(detail: str) -> PayloadRejected:
    return PayloadRejected("corrupt_container", detail)


def _unsafe(detail: str) -> PayloadRejected:
    return PayloadRejected("unsafe_container", detail)


# ---- safetensors


def _load_safetensors(data: Any, size: int) -> dict[str, Any]:
    if size < 8:
        raise _corrupt(f"{size} bytes are too few for a container")
    if isinstance(data, bytes | memoryview):
        data = bytearray(data)  # torch wraps writable buffers only
    raw = torch.frombuffer(data, dtype=torch.uint8) if isinstance(data, bytearray) else map_file(data)
    (length,) = struct.unpack("<Q", raw[:8].numpy().tobytes())
    if length > size - 8:
        raise _corrupt(f"a header of {length} bytes does not fit a file of {size}")
    if length > MAX_HEADER_BYTES:
        raise _unsafe(f"a header must have at most {MAX_HEADER_BYTES} bytes, got {length}")
    try:
        header = json.loads(raw[8 : 8 + length].numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"the header is not JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise _corrupt("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _corrupt("__metadata__ is not a JSON object")
    body = raw[8 + length :]
    spans = {name: _span(entry, body.numel()) for name, entry in header.items()}
    _refuse_overlaps([(begin, end) for _, _, begin, end in spans.values() if end > begin])
    state: dict[str, Any] = {}
    for name, (dtype, shape, begin, end) in spans.items():
        data_bytes = body[begin:end]
        if data_bytes.storage_offset() % dtype.itemsize:
            data_bytes = data_bytes.clone()
        state[name] = data_bytes.view(dtype).view(shape)
    for name in [n for n in metadata if n.endswith("quant_params")]:
        base = name.removesuffix("quant_params")
        state[name] = _parse_quant_params(metadata[name], state.pop(base + "lookup", None))
    payload: dict[str, Any] = {"state_dict": state}
    if "global_step" in metadata:
        payload["global_step"] = _decimal(metadata["global_step"])
    if "window" in metadata:
        payload["metadata"] = {"window": _decimal(metadata["window"])}
    return payload


def _span(entry: Any, body_bytes: int) -> tuple[torch.dtype, list[int], int, int]:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _corrupt("a header entry is incomplete") from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise _corrupt("a header entry has sizes or offsets that are not counts")
    if not begin <= end <= body_bytes:
        raise _corrupt(f"a tensor at bytes {begin}..{end} is outside the file's {body_bytes}")
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise _corrupt("a tensor's bytes do not fit its shape")
    return dtype, shape, begin, end


def _refuse_overlaps(spans: list[tuple[int, int]]) -> None:
    spans.sort()
    for (_, end), (begin, _) in itertools.pairwise(spans):
        if begin < end:
            raise _unsafe("two tensors overlap")


def _decimal(text: Any) -> Any:
    """Parse a decimal string; return anything else unchanged, for validation to refuse."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"-?[0-9]{1,19}", text, re.ASCII) else text


def _parse_quant_params(text: Any, lookup: Tensor | None) -> Any:
    try:
        shift, scale, offset, dtype = text.split()
        return float(shift), float(scale), int(offset), lookup, dtype_of(dtype) or dtype
    except (AttributeError, ValueError):
        return text


# ---- .pt


def _load_pt(data: Any, size: int, spec: GradientSpec) -> Any:
    in_memory = isinstance(data, bytes | bytearray | memoryview)
    with zipfile.ZipFile(io.BytesIO(data) if in_memory else data) as archive:
        _check_members(archive, size, 16 + 8 * len(spec.params))
        pickles = [m for m in archive.infolist() if m.filename.split("/", 1)[-1] == "data.pkl"]
        if not pickles:
            raise _corrupt("no pickle in the archive")
        for member in pickles:
            _refuse_globals(archive.read(member))
    try:
        if in_memory:
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        return torch.load(os.fspath(data), weights_only=True, mmap=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        if re.search(r"global|unsupported class|call reduce|instantiate", str(error), re.IGNORECASE):
            raise _unsafe("the pickle names something that may not be loaded") from None
        raise _corrupt("the pickle cannot be read") from None


def _check_members(archive: zipfile.ZipFile, size: int, limit: int) -> None:
    members = archive.infolist()
    if len(members) > limit:
        raise _unsafe(f"a container must have at most {limit} members, got {len(members)}")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise _unsafe("a member is compressed or encrypted")
        name = member.filename.replace("\\", "/")
        if name.startswith("/") or ".." in name.split("/") or re.match(r"[A-Za-z]:", name):
            raise _unsafe("a member's name leaves the archive")
    if sum(member.file_size for member in members) > size:
        raise _unsafe("the members are larger than the file")


def _refuse_globals(pickled: bytes) -> None:
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _GLOBAL_OPCODES or (opcode.name == "GLOBAL" and not _SAFE_GLOBALS.fullmatch(str(argument))):
            raise _unsafe("the pickle names something that may not be loaded")


# ---- writing


def dump_payload(payload: Mapping[str, Any], *, format: str = "safetensors") -> bytes:
    """Return a payload's bytes for a store: ``"safetensors"`` (preferred) or ``"pt"``."""
    if format == "pt":
        buffer = io.BytesIO()
        torch.save(dict(payload), buffer)
        return buffer.getvalue()
    if format != "safetensors":
        raise ConfigError(f"dump_payload: format must be 'safetensors' or 'pt', got {format!r}")
    tensors: dict[str, Tensor] = {}
    metadata = {"global_step": str(int(payload.get("global_step", 0)))}
    if (window := (payload.get("metadata") or {}).get("window")) is not None:
        metadata["window"] = str(int(window))
    for name, value in payload["state_dict"].items():
        if name.endswith("quant_params") and isinstance(value, tuple):
            shift, scale, offset, lookup, dtype = value
            dtype = DTYPE_NAMES.get(dtype, dtype)
            metadata[name] = f"{float(shift)!r} {float(scale)!r} {int(offset)} {dtype}"
            tensors[name.removesuffix("quant_params") + "lookup"] = lookup
        elif isinstance(value, Tensor):
            tensors[name] = value
    # Widest first, so that every tensor is aligned without gaps, which other readers refuse.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": metadata}
    blobs, offset = [], 0
    for name in order:
        tensor = tensors[name].detach().cpu().contiguous()
        blob = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = canonical_json(header).encode()
    text += b" " * (-(8 + len(text)) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *blobs])


def save_payload(payload: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write ``dump_payload`` atomically, in the format of the path's suffix (``.pt``, otherwise safetensors)."""
    data = dump_payload(payload, format="pt" if Path(path).suffix == ".pt" else "safetensors")
    with appearing(path) as temporary:
        Path(temporary).write_bytes(data)
