"""Predict messages to and from bytes, tensors read and written without message objects in between."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from shoal.errors import DataError
from shoal.proto.serving.tf_serving_pb2 import ModelSpec
from shoal.serving.tensors import MAX_TENSOR_BYTES, decode_tensor, encode_tensor
from shoal.serving.wire import field, read_fields

PREDICT = "/tensorflow.serving.PredictionService/Predict"
GET_MODEL_METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
GET_MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD_CONFIG = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"


@dataclass(slots=True)
class PredictCall:
    """A parsed PredictRequest; its tensors are still encoded, as slices of the message."""

    spec: ModelSpec
    inputs: dict[str, memoryview]
    output_filter: list[str]

    def tensor(self, alias: str, max_bytes: int = MAX_TENSOR_BYTES) -> Any:
        try:
            return decode_tensor(self.inputs[alias], max_bytes)
        except DataError as error:
            raise DataError(f"input {alias!r}: {error}") from None


def model_spec(name: str, signature_name: str = "", version: int | None = None) -> ModelSpec:
    spec = ModelSpec(name=name, signature_name=signature_name)
    if version is not None:
        spec.version.value = version
    return spec


def encode_request(spec: ModelSpec, inputs: Mapping[str, bytes], output_filter: Iterable[str] = ()) -> bytes:
    """A PredictRequest; ``inputs`` are what :func:`encode_tensor` gives."""
    parts = [field(1, spec.SerializeToString())]
    parts += [field(2, field(1, alias.encode()) + field(2, tensor)) for alias, tensor in inputs.items()]
    parts += [field(3, alias.encode()) for alias in output_filter]
    return b"".join(parts)


def decode_request(data: bytes) -> PredictCall:
    """Raises DataError for bytes that are not a PredictRequest."""
    spec, inputs, names = ModelSpec(), {}, []
    for number, wire, value in read_fields(memoryview(data)):
        if wire != 2:
            continue
        if number == 1:
            try:
                spec.MergeFromString(bytes(value))  # pyrefly: ignore
            except DecodeError as error:
                raise DataError(f"model_spec is not a ModelSpec: {error}") from None
        elif number == 2:
            alias, tensor = _map_entry(value)  # pyrefly: ignore
            inputs[alias] = tensor
        elif number == 3:
            names.append(_text(value))  # pyrefly: ignore
    return PredictCall(spec, inputs, names)


def encode_response(spec: ModelSpec, outputs: Mapping[str, Any]) -> bytes:
    """A PredictResponse from tensors."""
    parts = [field(1, field(1, alias.encode()) + field(2, encode_tensor(value))) for alias, value in outputs.items()]
    return b"".join([*parts, field(2, spec.SerializeToString())])


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
