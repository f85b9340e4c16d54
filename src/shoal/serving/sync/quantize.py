"""Pushes in the form that a replica stores: half floats or one byte per weight, if the replica requests it.

A replica requests it in its metadata: the name of a ``T_value`` input is then ``T_value:0|<codec>``. The values decode
to exactly what the replica would have stored from the full-precision row.

A push identifies its codecs by a :func:`fingerprint`; a replica whose codecs have changed refuses it.

A multi-table's ``flat_value`` names a codec for each sub-table, ``flat_value:0|<codec>;<codec>;...`` (empty = plain
floats). Its values are then sent as ``uint8``: the bytes of each sub-table's values in its own form, one after another.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shoal.errors import DataError
from shoal.proto.serving.tensor_pb2 import SignatureDef
from shoal.serving.status import Code, StatusError
from shoal.serving.tensors import encode_content

HALF = "half"


def asked(config: Any) -> str:
    """A serving table's codec: ``half``, ``fixed_r8:<r>``, ``one_bit:<amplitude>``, or "" for plain floats."""
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
    """The dtype in which a codec's values are sent."""
    return "float" if not codec else HALF if codec == HALF else "int8"


def _content(codec: str, values: np.ndarray) -> bytes:
    """Encode float32 values, little-endian."""
    kind, _, number = codec.partition(":")
    if not kind:
        return values.astype("<f4", copy=False).tobytes()
    if kind == HALF:
        with np.errstate(over="ignore"):
            return values.astype("<f2").tobytes()
    if kind == "fixed_r8":
        step = np.float32(float(number) / 128)
        moved = np.nan_to_num(values, nan=0.0, posinf=np.inf, neginf=-np.inf)
        moved = np.trunc(np.clip((moved + np.copysign(step / 2, moved)) / step, -128, 127))
        return moved.astype(np.int8).tobytes()
    return np.where(values > 0, 1, -1).astype(np.int8).tobytes()


def encoder(codec: str) -> Callable[[np.ndarray], bytes]:
    """The function that encodes float32 values ``[k, dim]`` as a serialised TensorProto."""
    return lambda values: encode_content(wire_dtype(codec), values.shape, _content(codec, values))


def asked_multi(configs: Sequence[Any]) -> str:
    """The codecs of a serving multi-table's sub-tables, in order; "" if all use plain floats."""
    codecs = [asked(config) for config in configs]
    return ";".join(codecs) if any(codecs) else ""


def multi_encoder(codecs: str) -> Callable[[Sequence[np.ndarray]], bytes]:
    """The function that encodes the float32 values of each sub-table as one serialised TensorProto of bytes."""
    kinds = codecs.split(";")

    def encode(tables: Sequence[np.ndarray]) -> bytes:
        if len(tables) != len(kinds):
            raise DataError(f"the replica has {len(kinds)} sub-tables, but the push has {len(tables)}")
        content = b"".join(_content(codec, values) for codec, values in zip(kinds, tables, strict=True))
        return encode_content("uint8", (len(content),), content)

    return encode


def multi_bytes(codecs: str, counts: Sequence[int]) -> list[int]:
    """The encoded size of each sub-table's values in bytes, given how many values each has."""
    return [_WIDTH[wire_dtype(codec)] * count for codec, count in zip(codecs.split(";"), counts, strict=True)]


def decode_multi(codecs: str, counts: Sequence[int], packed: torch.Tensor) -> torch.Tensor:
    """Decode received bytes to consecutive float32 values."""
    parts = packed.split(multi_bytes(codecs, counts))
    return torch.cat(
        [
            decode(codec, part.clone().view(_DTYPE[wire_dtype(codec)]))  # cloned: a part may begin at any byte
            for codec, part in zip(codecs.split(";"), parts, strict=True)
        ]
    )


_DTYPE = {"float": torch.float32, HALF: torch.float16, "int8": torch.int8}
_WIDTH = {name: dtype.itemsize for name, dtype in _DTYPE.items()}


def decode(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Decode received values to float32."""
    kind, _, number = codec.partition(":")
    if values.dtype == torch.int8:
        return values.float() * (float(number) / 128 if kind == "fixed_r8" else float(number))
    return values.float()


def known(codec: str) -> bool:
    """Whether this process has a codec, or all codecs of a multi-table."""
    return all(_known(each) for each in codec.split(";"))


def _known(codec: str) -> bool:
    kind, colon, number = codec.partition(":")
    if kind in ("", HALF):
        return not colon
    try:
        return kind in ("fixed_r8", "one_bit") and float(number) > 0
    except ValueError:
        return False


def asked_by(signature: SignatureDef) -> dict[str, str]:
    """Alias -> codec of the inputs of a signature that a replica does not want as plain floats."""
    asked_for = {alias: info.name.partition("|")[2] for alias, info in signature.inputs.items()}
    return {alias: codec for alias, codec in asked_for.items() if codec and known(codec)}


def encoders(codecs: Mapping[str, str]) -> dict[str, Callable[[Any], bytes]]:
    """alias -> encoder of its float32 values."""
    return {alias: multi_encoder(codec) if alias == "flat_value" else encoder(codec) for alias, codec in codecs.items()}


def fingerprint(codecs: Mapping[str, str]) -> str:
    """A push's fingerprint of its codecs (alias -> codec, without plain floats): 16 hex digits.

    >>> fingerprint({"T_value": "half"}) == fingerprint({"T_value": "fixed_r8:1.0"})
    False
    """
    if not codecs:
        return ""
    text = "\n".join(f"{alias}={codec}" for alias, codec in sorted(codecs.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_codecs(codecs: Mapping[str, str], inputs: Mapping[str, torch.Tensor], used: str) -> None:
    """Raise FAILED_PRECONDITION if the values of a push are encoded with codecs other than this replica's ``codecs``.

    ``used``: the push's fingerprint of its codecs. Half floats need none: they decode the same everywhere.
    """
    encoded = {alias: codec for alias, codec in codecs.items() if inputs[alias].dtype != torch.float32}
    if not encoded or used == fingerprint(encoded) or (not used and set(encoded.values()) == {HALF}):
        return
    theirs = f"other codecs (fingerprint {used})" if used else "codecs that the push does not name"
    wanted = ", ".join(f"{alias} in {codec}" for alias, codec in sorted(encoded.items()))
    raise StatusError(
        Code.FAILED_PRECONDITION,
        f"the values are encoded in {theirs}; this version accepts {wanted} (fingerprint {fingerprint(encoded)}), "
        "or float; fetch its metadata again",
    )
