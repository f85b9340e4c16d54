"""The fifteen checks of a payload, in their fixed order; the first that fails gives the reason."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal import _core
from shoal.gather.errors import PayloadRejected
from shoal.gather.payload.codec import DTYPE_NAMES, VALUE_KINDS, QuantParams, dtype_of, value_table
from shoal.gather.payload.container import SUFFIXES, state_of
from shoal.gather.payload.spec import CODECS, GradientSpec, ParamSpec

MAX_GLOBAL_STEP = 2**63 - 1


@dataclass(frozen=True)
class PayloadInfo:
    """Results of validation: ``norms`` is float32 [n_params], ``download_bytes`` the raw bytes of idxs and vals."""

    global_step: int
    digest: str
    norms: Tensor
    download_bytes: int


def validate_payload(
    payload: Any, spec: GradientSpec, *, window: int | None = None, max_abs_value: float = 1e4
) -> PayloadInfo:
    """Check a complete loaded payload; raise PayloadRejected with the reason of the first check that fails.

    Cost: one pass over the bytes plus their BLAKE2b. Memory: scratch space of one parameter. Any thread can call it.
    """
    state = state_of(payload)
    step = _global_step(payload)
    _check_window(payload, window)
    _check_leftovers(state, spec)
    digest = blake2b(digest_size=32)
    norms: list[float] = []
    size = 0
    for param in spec.params:
        idxs, vals, quant = checked_param(state, param, spec)
        norms.append(_check_data(param, idxs, vals, quant, spec, max_abs_value))
        for part in digest_parts(param.name, idxs, vals, quant):
            digest.update(part)
        size += nbytes(idxs) + nbytes(vals)
    return PayloadInfo(
        step, digest.hexdigest(), torch.tensor(norms, dtype=torch.float64, device="cpu").to(torch.float32), size
    )


def payload_digest(payload: Mapping[str, Any], spec: GradientSpec) -> str:
    """Return the hex BLAKE2b-256 of a complete payload's contents, the same for both containers."""
    digest, state = blake2b(digest_size=32), payload["state_dict"]
    for param in spec.params:
        idxs, vals, quant = checked_param(state, param, spec)
        for part in digest_parts(param.name, idxs, vals, quant):
            digest.update(part)
    return digest.hexdigest()


def checked_state(state: Mapping[str, Any], spec: GradientSpec) -> dict[str, Any]:
    """Return the entries of a validated state dict that the spec names, contiguous, without anything else."""
    clean: dict[str, Any] = {}
    for param in spec.params:
        for suffix, value in zip(SUFFIXES, checked_param(state, param, spec), strict=True):
            if value is not None:
                clean[param.name + suffix] = value
    return clean


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def raw_bytes(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def quant_block(quant: QuantParams) -> bytes:
    """Encode quantization parameters for digests and artifacts."""
    shift, scale, offset, lookup, dtype = quant
    name = DTYPE_NAMES[dtype_of(dtype)]  # pyrefly: ignore
    shift32 = np.array(float(shift), dtype="<f4").tobytes()
    numbers = struct.pack("<di", float(scale), int(offset))
    return shift32 + numbers + lookup.numpy().astype("<f4").tobytes() + name.encode() + b"\0"


def digest_parts(name: str, idxs: Tensor, vals: Tensor, quant: QuantParams | None) -> Iterator[Any]:
    yield name.encode() + b"\0"
    yield raw_bytes(idxs)
    yield raw_bytes(vals)
    if quant is not None:
        yield quant_block(quant)


def _global_step(payload: Mapping[str, Any]) -> int:
    step = payload.get("global_step", 0)
    if type(step) is not int or not 0 <= step <= MAX_GLOBAL_STEP:
        found = f"a {type(step).__name__}" if type(step) is not int else "one outside"
        raise PayloadRejected("bad_global_step", f"global_step must be an int in 0..2**63 - 1, got {found}")
    return step


def _check_window(payload: Mapping[str, Any], window: int | None) -> None:
    metadata = payload.get("metadata")
    if window is None or not isinstance(metadata, Mapping) or "window" not in metadata:
        return
    declared = metadata["window"]
    if type(declared) is not int or declared != window:
        raise PayloadRejected("window_mismatch", f"the payload is not for window {window}")


def _check_leftovers(state: Mapping[str, Any], spec: GradientSpec) -> None:
    for key in state:
        if not isinstance(key, str):
            continue
        suffix = next((s for s in SUFFIXES if key.endswith(s)), None)
        if suffix is not None and key.removesuffix(suffix) not in spec.index:
            raise PayloadRejected("unknown_param", "a key belongs to no parameter of the spec")


def checked_param(
    state: Mapping[str, Any], param: ParamSpec, spec: GradientSpec
) -> tuple[Tensor, Tensor, QuantParams | None]:
    """Return contiguous idxs and vals of one parameter, after every check that does not read their data."""
    keys = [param.name + suffix for suffix in SUFFIXES]
    where = f"parameter {param.name!r}"
    if not any(key in state for key in keys):
        raise PayloadRejected("missing_param", where)
    idxs, vals, quant = (state.get(key) for key in keys)
    if idxs is None or vals is None:
        raise PayloadRejected("incomplete_param", where)
    _check_values(vals, param, spec, where)
    if vals.dtype != torch.uint8:
        quant = None
    elif quant is None:
        raise PayloadRejected("missing_quant_params", where)
    else:
        quant = _checked_quant(quant, spec, where)
    if not _strided(idxs) or idxs.dtype != (torch.uint8 if param.codec == "packed12" else torch.int32):
        # The check of quant_params includes the range of the values, and comes before those of the indices.
        _check_bins(vals, quant, where)
        raise PayloadRejected("bad_index_dtype", where)
    wrong = idxs.numel() != param.chunks * param.index_bytes if param.codec == "packed12" else idxs.shape != vals.shape
    if wrong:
        _check_bins(vals, quant, where)
        raise PayloadRejected("bad_index_length", where)
    return idxs.detach().contiguous(), vals.detach().contiguous(), quant


def _strided(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"


def _check_values(vals: Any, param: ParamSpec, spec: GradientSpec, where: str) -> None:
    allowed = VALUE_KINDS if spec.quant is not None else DTYPE_NAMES
    if not _strided(vals) or vals.dtype not in allowed:
        raise PayloadRejected("bad_value_dtype", where)
    if vals.numel() == 0:
        raise PayloadRejected("empty_values", where)
    if vals.ndim != len(param.grid) + 1 or tuple(vals.shape[:-1]) != param.grid:
        raise PayloadRejected("bad_value_shape", f"{where}: {tuple(vals.shape)}, but the grid is {param.grid}")
    if vals.shape[-1] != param.k:
        raise PayloadRejected("bad_topk", f"{where}: {vals.shape[-1]} values per chunk, but the spec has {param.k}")


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return (
            float(value.detach())
            if value.ndim == 0 and value.is_floating_point() and value.layout == torch.strided
            else None
        )
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _checked_quant(quant: Any, spec: GradientSpec, where: str) -> QuantParams:
    def bad(what: str) -> PayloadRejected:
        return PayloadRejected("bad_quant_params", f"{where}: {what}")

    assert spec.quant is not None
    if not isinstance(quant, tuple) or len(quant) != 5:
        raise bad("not a tuple of five")
    try:
        shift, scale = _number(quant[0]), _number(quant[1])
    except OverflowError:
        raise bad("shift or scale is too large a number") from None
    offset, lookup, dtype = quant[2:]
    if shift is None or not math.isfinite(shift):
        raise bad("shift is not finite")
    if scale is None or not 1e-12 <= abs(scale) <= 1e4:
        raise bad("scale is outside 1e-12..1e4")
    if type(offset) is not int or not -(2**31) <= offset < 2**31:
        raise bad("offset is not a 32-bit int")
    if not _strided(lookup) or lookup.dtype != torch.float32 or tuple(lookup.shape) != (spec.quant.bins,):
        raise bad(f"lookup is not float32 of length {spec.quant.bins}")
    if not bool(torch.isfinite(lookup).all()):
        raise bad("lookup is not finite")
    known = dtype_of(dtype)
    if known is None:
        raise bad("dtype is not float32, float16 or bfloat16")
    return shift, scale, offset, lookup.detach().contiguous(), known


def _check_bins(vals: Tensor, quant: QuantParams | None, where: str) -> None:
    if quant is not None and int(vals.max()) >= quant[3].numel():
        raise PayloadRejected("bad_quant_params", f"{where}: a value is not below the number of bins")


def _check_data(
    param: ParamSpec, idxs: Tensor, vals: Tensor, quant: QuantParams | None, spec: GradientSpec, max_abs: float
) -> float:
    """Make the checks that read indices and values, in one native pass; return the L2 norm of the values."""
    table = torch.zeros(256, device="cpu") if quant is None else value_table(quant)
    found = _core.gather_inspect(
        idxs.data_ptr(), vals.data_ptr(), table.data_ptr(), VALUE_KINDS[vals.dtype], CODECS.index(param.codec),
        param.chunks, param.k, param.totalk, 256 if spec.quant is None else spec.quant.bins, max_abs,
    )  # fmt: skip
    where = f"parameter {param.name!r}"
    if found.value_over_bins:
        raise PayloadRejected("bad_quant_params", f"{where}: a value is not below the number of bins")
    if found.index_out_of_range:
        raise PayloadRejected("index_out_of_range", f"{where}: indices must be in 0..{param.totalk - 1}")
    if found.duplicate_index:
        raise PayloadRejected("duplicate_index", where)
    if found.nonfinite:
        raise PayloadRejected("nonfinite_values", where)
    if found.too_large:
        raise PayloadRejected("value_too_large", f"{where}: |v| must be at most {max_abs:g}")
    return math.sqrt(found.sum_of_squares)
