"""Converts Predict messages to and from bytes without intermediate message objects for tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from shoal import _core
from shoal.errors import DataError
from shoal.proto.serving.tensor_pb2 import SignatureDef
from shoal.proto.serving.tf_serving_pb2 import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    ModelSpec,
    SignatureDefMap,
)
from shoal.serving.tensors import MAX_TENSOR_BYTES, decode_tensor_at, extent, shared_tensor, tensor_chunks, tensor_head
from shoal.serving.wire import field, read_fields, varint

Encoded = bytes | list[Any]
"""A serialised tensor, as bytes or as a list of chunks."""

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
BY_ROW = "by_row"
"""Suffix of an output's name in the metadata: each of its rows depends only on the same input row."""


@dataclass(slots=True)
class PredictCall:
    """A parsed PredictRequest; its tensors are still encoded, as slices of the message."""

    spec: ModelSpec
    inputs: dict[str, tuple[int, int]]
    """alias -> (begin, size) in ``data``"""
    output_filter: list[str]
    data: bytes

    def tensor(self, alias: str, max_bytes: int = MAX_TENSOR_BYTES) -> Any:
        try:
            return decode_tensor_at(self.data, *self.inputs[alias], max_bytes)
        except DataError as error:
            raise DataError(f"input {alias!r}: {error}") from None

    def tensors(self, check: Callable[[dict[str, Any]], None], max_bytes: int = MAX_TENSOR_BYTES) -> dict[str, Any]:
        """All inputs, decoded after ``check`` has seen their declared dtypes and shapes.

        Raises:
            DataError: one cannot be decoded, or together they would take more than ``max_bytes``.
        """
        heads = {}
        for alias, (begin, size) in self.inputs.items():
            try:
                heads[alias] = tensor_head(self.data, begin, size, max_bytes)
            except DataError as error:
                raise DataError(f"input {alias!r}: {error}") from None
        check(heads)
        total = sum(head.nbytes for head in heads.values())
        if total > max_bytes:
            raise DataError(f"the inputs must take at most {max_bytes} bytes when they are decoded, got {total}")
        return {alias: self.tensor(alias, max_bytes) for alias in self.inputs}


@dataclass(slots=True)
class Asked:
    """One request: the model it asks for, how to read its inputs, and how to encode its outputs.

    ``read`` receives ``check`` and calls it with the inputs' names and forms before decoding them.
    """

    spec: ModelSpec
    read: Callable[[Callable[[dict[str, Any]], None]], dict[str, Any]]
    output_filter: list[str]
    identity: str = ""
    finish: Callable[[bytes, dict[str, Any]], Any] = lambda spec, outputs: (spec, outputs)
    call: PredictCall | None = None
    """The serialised request, if it came as bytes; ``finish`` then encodes the answer."""
    one_version: bool = False
    """Whether it is part of a prediction of the version that it names, which must stay loaded meanwhile."""


def model_spec(name: str, signature_name: str = "", version: int | None = None) -> ModelSpec:
    spec = ModelSpec(name=name, signature_name=signature_name)
    if version is not None:
        spec.version.value = version
    return spec


def fetch_signatures(
    channel: Any, spec: ModelSpec, timeout: float, **options: Any
) -> tuple[ModelSpec, Mapping[str, SignatureDef]]:
    """(the spec with the version that the server resolved, the signatures of that version).

    ``options`` are gRPC's. Raises ``grpc.RpcError`` when the call fails.
    """
    call = channel.unary_unary(
        GET_MODEL_METADATA, GetModelMetadataRequest.SerializeToString, GetModelMetadataResponse.FromString
    )
    answer = call(
        GetModelMetadataRequest(model_spec=spec, metadata_field=["signature_def"]), timeout=timeout, **options
    )
    signatures = SignatureDefMap()
    answer.metadata["signature_def"].Unpack(signatures)  # without signatures, the map stays empty
    return answer.model_spec, signatures.signature_def


def encode_request(spec: ModelSpec, inputs: Mapping[str, Encoded], output_filter: Iterable[str] = ()) -> bytes:
    """A PredictRequest; ``inputs`` come from :func:`encode_tensor` or :func:`tensor_chunks`."""
    chunks = [field(1, spec.SerializeToString())]
    for alias, tensor in inputs.items():
        _add_entry(chunks, 2, alias, tensor)
    chunks += [field(3, alias.encode()) for alias in output_filter]
    return b"".join(chunks)


def _add_entry(chunks: list, number: int, alias: str, tensor: Encoded) -> None:
    """One entry of a map of tensors; the tensor's bytes are not copied yet."""
    parts = tensor if isinstance(tensor, list) else [tensor]
    size = sum(map(len, parts))
    key = field(1, alias.encode())
    head = b"\x12" + varint(size)
    chunks += [varint(number << 3 | 2), varint(len(key) + len(head) + size), key, head, *parts]


def decode_request(data: bytes) -> PredictCall:
    """Parse a request; raises DataError for bytes that are not a PredictRequest."""
    try:
        specs, tensors, filters = _core.predict_parts(data)
        spec = ModelSpec()
        for begin, size in specs:
            spec.MergeFromString(data[begin : begin + size])
        inputs = {data[key : key + size].decode(): span for (key, size), span in tensors}
        names = [data[begin : begin + size].decode() for begin, size in filters]
    except (ValueError, DecodeError) as error:
        raise DataError(f"it is not a PredictRequest: {error}") from None
    return PredictCall(spec, inputs, names, data)


def encode_response(spec: ModelSpec | bytes, outputs: Mapping[str, Any]) -> bytes:
    """A PredictResponse from tensors; the spec may be serialised already."""
    chunks: list = []
    for alias, value in outputs.items():
        _add_entry(chunks, 1, alias, tensor_chunks(value))
    chunks.append(field(2, spec if isinstance(spec, bytes) else spec.SerializeToString()))
    return b"".join(chunks)


def decode_response(data: bytes) -> tuple[ModelSpec, dict[str, memoryview]]:
    """(model_spec, outputs still encoded); raises DataError for bytes that are not a PredictResponse."""
    spec, outputs = ModelSpec(), {}
    for number, wire, value in read_fields(memoryview(data)):
        if wire == 2 and number == 1:
            alias, tensor = _map_entry(value)  # pyrefly: ignore
            outputs[alias] = tensor
        elif wire == 2 and number == 2:
            try:
                spec.MergeFromString(bytes(value))  # pyrefly: ignore
            except DecodeError as error:
                raise DataError(f"it is not a PredictResponse: {error}") from None
    return spec, outputs


def _map_entry(data: memoryview) -> tuple[str, memoryview]:
    alias, tensor = "", memoryview(b"")
    for number, wire, value in read_fields(data):
        if wire == 2 and number == 1:
            alias = _text(value)  # pyrefly: ignore
        elif wire == 2 and number == 2:
            tensor = value
    return alias, tensor  # pyrefly: ignore


def _text(value: memoryview) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise DataError("an alias is not UTF-8") from None


_KINDS = {
    torch.float32: (1, np.dtype("<f4")),
    torch.float64: (2, np.dtype("<f8")),
    torch.int32: (3, np.dtype("<i4")),
    torch.int64: (9, np.dtype("<i8")),
    torch.bool: (10, np.dtype("?")),
}
_NUMPY = dict(_KINDS.values())
_TORCH = {code: dtype for dtype, (code, _) in _KINDS.items()}


def join_calls(calls: Sequence[PredictCall]) -> tuple[dict[str, Any], list[int]] | None:
    """({alias: all calls' tensors, one after another}, rows of each call).

    None if they cannot be joined: their inputs, dtypes or shapes differ, a call's inputs have different numbers of
    rows, or a tensor is malformed. Read them one by one then; that reports what is wrong.
    """
    aliases = calls[0].inputs.keys()
    if not aliases or any(call.inputs.keys() != aliases for call in calls):
        return None
    joined: dict[str, Any] = {}
    rows: list[int] | None = None
    for alias in aliases:
        parts = [(call.data, *call.inputs[alias]) for call in calls]
        dtype = _dtype_of(*parts[0])
        if dtype not in _NUMPY:
            return None
        try:
            found = _core.join_tensors(parts, dtype)
        except ValueError:
            return None
        if found is None or (rows is not None and found[1] != rows):
            return None
        values, rows, tail = found
        if extent(tail) > MAX_TENSOR_BYTES // _NUMPY[dtype].itemsize:  # empty, and too large for strides
            return None
        joined[alias] = shared_tensor(np.frombuffer(values, _NUMPY[dtype]).reshape(sum(rows), *tail))
    return (joined, rows) if rows is not None else None


def _dtype_of(data: bytes, begin: int, size: int) -> int:
    """The dtype at the start of a serialised tensor, where writers put it; -1 if it is not there."""
    return data[begin + 1] if size >= 2 and data[begin] == 0x08 and data[begin + 1] < 0x80 else -1


def plain_dtype(code: int) -> torch.dtype:
    """The torch dtype of a DataType that is read and written natively."""
    return _TORCH[code]


def plain_outputs(outputs: Mapping[str, Any], rows: int) -> tuple[list[tuple], list[torch.Tensor]] | None:
    """Outputs of ``rows`` rows in the native writer's form, and the objects to keep alive until it is done.

    None where an output is not of a plain dtype or shape.
    """
    given, kept = [], []
    for alias, value in outputs.items():
        kind = _KINDS.get(value.dtype) if isinstance(value, torch.Tensor) else None
        if kind is None or not value.ndim or len(value) != rows or value.device.type != "cpu":
            return None
        value = value.contiguous()
        kept.append(value)
        given.append((alias, kind[0], list(value.shape[1:]), value.data_ptr()))
    return given, kept


def split_answers(spec: bytes, outputs: Mapping[str, Any], rows: list[int]) -> list[bytes] | None:
    """A serialised PredictResponse for each number of rows; None if an output lacks a plain dtype or shape."""
    found = plain_outputs(outputs, sum(rows))
    return None if found is None else _core.split_responses(spec, found[0], rows)
