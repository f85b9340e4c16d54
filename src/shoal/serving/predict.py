"""Predict messages to and from bytes, tensors read and written without message objects in between."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from shoal import _core
from shoal.errors import DataError
from shoal.proto.serving.tf_serving_pb2 import ModelSpec
from shoal.serving.tensors import MAX_TENSOR_BYTES, decode_tensor_at, tensor_chunks, tensor_head
from shoal.serving.wire import field, read_fields, varint

Encoded = bytes | list[Any]
"""A tensor as bytes, or as the chunks that make them up."""

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD_CONFIG = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"


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
        """All inputs, decoded after ``check`` has seen what they say they are.

        Raises:
            DataError: one cannot be decoded, or all of them together would take more than ``max_bytes``.
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
            raise DataError(f"the inputs take {total} bytes when they are decoded; a request may take {max_bytes}")
        return {alias: self.tensor(alias, max_bytes) for alias in self.inputs}


@dataclass(slots=True)
class Asked:
    """One request: what it is for, how to read its inputs, and what its outputs become.

    ``read`` is given ``check``, which it calls with the names and forms of the inputs before it decodes them.
    """

    spec: ModelSpec
    read: Callable[[Callable[[dict[str, Any]], None]], dict[str, Any]]
    output_filter: list[str]
    identity: str = ""
    finish: Callable[[bytes, dict[str, Any]], Any] = lambda spec, outputs: (spec, outputs)
    call: PredictCall | None = None
    """The message that it came as; then ``finish`` is what encodes the answer."""
    one_version: bool = False
    """Whether it is part of a prediction of the version that it names, which must not go away meanwhile."""


def model_spec(name: str, signature_name: str = "", version: int | None = None) -> ModelSpec:
    spec = ModelSpec(name=name, signature_name=signature_name)
    if version is not None:
        spec.version.value = version
    return spec


def encode_request(spec: ModelSpec, inputs: Mapping[str, Encoded], output_filter: Iterable[str] = ()) -> bytes:
    """A PredictRequest; ``inputs`` are what :func:`encode_tensor` or :func:`tensor_chunks` gives."""
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
    """Raises DataError for bytes that are not a PredictRequest."""
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
    """(model_spec, outputs still encoded)."""
    spec, outputs = ModelSpec(), {}
    for number, wire, value in read_fields(memoryview(data)):
        if wire == 2 and number == 1:
            alias, tensor = _map_entry(value)  # pyrefly: ignore
            outputs[alias] = tensor
        elif wire == 2 and number == 2:
            spec.MergeFromString(bytes(value))  # pyrefly: ignore
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
