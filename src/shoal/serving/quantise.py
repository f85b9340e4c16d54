"""Pushes in the form that a replica stores: half floats or one byte per weight, when the replica asks for it.

A replica asks in its metadata: the name of a ``T_value`` input is then ``T_value:0|<codec>``. What arrives decodes to
exactly what encoding the full-precision row would have stored.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.errors import DataError
from shoal.proto.serving.tf_serving_pb2 import GetModelMetadataResponse, SignatureDefMap
from shoal.serving.tensors import encode_content

HALF = "half"


def asked(config: Any) -> str:
    """What a serving table asks for: ``half``, ``fixed_r8:<r>``, ``one_bit:<amplitude>``, or "" for plain floats."""
    segments = config.entry_config.segments
    codecs = {_codec(segment.comp_config) for segment in segments}
    return codecs.pop() if len(codecs) == 1 else ""


def _codec(config: Any) -> str:
    kind = config.WhichOneof("type")
    if kind == "fp16":
        return HALF
    if kind == "fixed_r8":
        return f"fixed_r8:{config.fixed_r8.r!r}"
    if kind == "one_bit":
        return f"one_bit:{config.one_bit.amplitude!r}"
    return ""


def wire_dtype(codec: str) -> str:
    """The dtype that values of a codec travel in."""
    return "float" if not codec else HALF if codec == HALF else "int8"


def encoder(codec: str) -> Callable[[np.ndarray], bytes]:
    """float32 ``[k, dim]`` to a serialised TensorProto."""
    kind, _, number = codec.partition(":")

    def encode(values: np.ndarray) -> bytes:
        if kind == HALF:
            with np.errstate(over="ignore"):
                return encode_content(HALF, values.shape, values.astype("<f2").tobytes())
        if kind == "fixed_r8":
            step = np.float32(float(number) / 128)
            moved = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
            moved = np.trunc(np.clip((moved + np.copysign(step / 2, moved)) / step, -128, 127))
            return encode_content("int8", values.shape, moved.astype(np.int8).tobytes())
        return encode_content("int8", values.shape, np.where(values > 0, 1, -1).astype(np.int8).tobytes())

    return encode


def decode(codec: str, values: torch.Tensor) -> torch.Tensor:
    """What arrived, as float32."""
    kind, _, number = codec.partition(":")
    if values.dtype == torch.int8:
        return values.float() * (float(number) / 128 if kind == "fixed_r8" else float(number))
    return values.float()


def asked_by(response: GetModelMetadataResponse, signature: str) -> dict[str, Callable[[np.ndarray], bytes]]:
    """alias -> encoder for the inputs of a signature that a replica wants in another form."""
    found = {}
    signatures = SignatureDefMap()
    if not response.metadata["signature_def"].Unpack(signatures):
        raise DataError("the replica's metadata holds no signatures")
    for alias, info in signatures.signature_def[signature].inputs.items():
        codec = info.name.partition("|")[2]
        if codec.partition(":")[0] in (HALF, "fixed_r8", "one_bit"):
            found[alias] = encoder(codec)
    return found
