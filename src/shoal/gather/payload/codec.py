"""12-bit index packing and uint8 quantization of payloads, with plain-torch references."""

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.errors import ConfigError
from shoal.host import as_tensor

QuantParams = tuple[Any, float, int, Tensor, Any]
"""(shift, scale, offset, lookup, dtype): shift a float or 0-d tensor, dtype a torch.dtype or its name."""

VALUE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in VALUE_DTYPES.items()}
VALUE_KINDS = {torch.uint8: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # csrc/gather/codec.h


def pack12(indices: Tensor) -> Tensor:
    """Pack an even number of indices 0..4095, two in three bytes, into uint8 of length ``1.5 * n``.

    Example:
        >>> pack12(torch.tensor([1, 4095, 256, 7])).tolist()
        [1, 240, 255, 0, 113, 0]
    """
    indices = as_tensor(indices)
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ValueError(f"pack12: indices must be integers, got {indices.dtype}")
    n = indices.numel()
    if n % 2:
        raise ValueError(f"pack12: the number of indices must be even, got {n}")
    flat = indices.reshape(-1).to(torch.int64).contiguous()
    if not flat.is_cpu:
        return pack12_reference(flat)
    out = torch.empty(n // 2 * 3, dtype=torch.uint8, device="cpu")
    if not _core.gather_pack12(flat.data_ptr(), n, out.data_ptr()):
        raise ValueError(f"pack12: indices must be in 0..4095, got {int(flat.min())}..{int(flat.max())}")
    return out


def pack12_reference(indices: Tensor) -> Tensor:
    """`pack12` in plain torch, on any device."""
    a, b = indices.reshape(-1, 2).to(torch.int64).unbind(1)
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) > 4095):
        raise ValueError(f"pack12: indices must be in 0..4095, got {int(indices.min())}..{int(indices.max())}")
    return torch.stack([a & 255, a >> 8 | (b & 15) << 4, b >> 4], 1).to(torch.uint8).reshape(-1)


def unpack12(packed: Tensor, shape: Any) -> Tensor:
    """Return the packed indices as int64 of ``shape``.

    Example:
        >>> unpack12(torch.tensor([1, 240, 255, 0, 113, 0], dtype=torch.uint8), (2, 2)).tolist()
        [[1, 4095], [256, 7]]
    """
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8:
        raise ValueError(f"unpack12: packed must be a uint8 tensor, got {getattr(packed, 'dtype', type(packed))}")
    shape = (int(shape),) if isinstance(shape, int) else tuple(int(n) for n in shape)
    n = math.prod(shape)
    if n % 2 or packed.numel() != n // 2 * 3 or min(shape, default=0) < 0:
        raise ValueError(f"unpack12: packed must hold the {n} indices of shape {shape}, got {packed.numel()} bytes")
    if not packed.is_cpu:
        return unpack12_device(packed).reshape(shape)
    packed = packed.reshape(-1).contiguous()
    out = empty_flat(2 * n).view(torch.int64).view(shape)
    _core.gather_unpack12(packed.data_ptr(), n, out.data_ptr())
    return out


def unpack12_device(packed: Tensor) -> Tensor:
    """`unpack12` with a flat result, on the device of the bytes."""
    if packed.is_cuda and find_spec("triton"):
        from shoal.ops.cuda import codec

        return codec.unpack12(packed, packed.numel() // 3 * 2)
    return unpack12_reference(packed)


def unpack12_reference(packed: Tensor) -> Tensor:
    """`unpack12` in plain torch with a flat result, on any device."""
    b0, b1, b2 = packed.reshape(-1, 3).to(torch.int64).unbind(1)
    return torch.stack([b0 | (b1 & 15) << 8, b1 >> 4 | b2 << 4], 1).reshape(-1)


def quantize(values: Tensor, bins: int = 4, range_sigmas: float = 6) -> tuple[Tensor, QuantParams]:
    """Convert values to uint8 bin numbers of the same shape; return these and the parameters for `dequantize`.

    `dequantize` restores the dtype of ``values``, or float32 if that dtype cannot be sent, such as float64.
    """
    if not 1 <= bins <= 256:
        raise ConfigError(f"quantize: bins must be in 1..256, got {bins}")
    v = values.detach().to(torch.float32)
    n, offset = v.numel(), bins // 2
    if n == 0:
        raise ConfigError("quantize: values must have at least one element, got none")
    shift = v.mean()
    z = v - shift
    std = torch.linalg.vector_norm(z) / math.sqrt(n - 1) if n > 1 else z.new_tensor(math.nan)
    scale = float(range_sigmas * std / bins)
    if scale == 0 or not math.isfinite(scale):
        scale = 1.0
    q, sums, counts = (_bin if z.is_cpu else _bin_reference)(z, scale, offset, bins)
    lookup = (sums / counts.clamp(min=1)).to(torch.float32)
    return q, (float(shift), scale, offset, lookup, dtype_of(values.dtype) or torch.float32)


def _bin(z: Tensor, scale: float, offset: int, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    z = z.contiguous()
    q = torch.empty(z.shape, dtype=torch.uint8, device="cpu")
    sums = torch.zeros(bins, dtype=torch.float64, device="cpu")
    counts = torch.zeros(bins, dtype=torch.int64, device="cpu")
    _core.gather_quantize(
        z.data_ptr(), z.numel(), scale, offset, bins, q.data_ptr(), sums.data_ptr(), counts.data_ptr()
    )
    return q, sums, counts


def _bin_reference(z: Tensor, scale: float, offset: int, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bin numbers, and each bin's sum of ``z`` and members, in plain torch."""
    q = torch.round(z / scale + offset).clamp_(0, bins - 1).to(torch.uint8)
    flat = q.reshape(-1).long()
    sums = torch.bincount(flat, weights=z.reshape(-1).double(), minlength=bins)
    return q, sums.cpu(), torch.bincount(flat, minlength=bins).cpu()


def dtype_of(name: Any) -> torch.dtype | None:
    """The value dtype that a peer named, or None if it is not one of the three allowed."""
    if isinstance(name, torch.dtype):
        return name if name in DTYPE_NAMES else None
    return VALUE_DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def value_table(quant_params: QuantParams) -> Tensor:
    """float32 [256]: the value of each uint8 code, rounded to the peer's dtype; zeros past the bins."""
    shift, _, _, lookup, name = quant_params
    dtype = dtype_of(name)
    assert dtype is not None
    table = torch.zeros(256, device="cpu")
    shift32 = torch.as_tensor(shift, dtype=torch.float64, device="cpu").to(torch.float32)
    table[: lookup.numel()] = (lookup.cpu() + shift32).to(dtype).to(torch.float32)
    return table


def dequantize(q: Tensor, quant_params: QuantParams) -> Tensor:
    """Return ``lookup[q] + shift``, computed in float32 and cast to the peer's dtype.

    Example:
        >>> q, params = quantize(torch.tensor([-1.0, 0.5, 2.0, 0.1, 0.9, -0.3]))
        >>> q.tolist(), [round(v, 4) for v in dequantize(q, params).tolist()]
        ([1, 2, 3, 2, 2, 2], [-1.0, 0.3, 2.0, 0.3, 0.3, 0.3])
    """
    if q.dtype != torch.uint8:
        raise ValueError(f"dequantize: q must be uint8, got {q.dtype}")
    dtype = dtype_of(quant_params[4])
    if dtype is None:
        raise ValueError(f"dequantize: dtype must be one of {sorted(VALUE_DTYPES)}, got {quant_params[4]!r}")
    bins = quant_params[3].numel()
    if q.numel() and int(q.max()) >= bins:
        raise ValueError(f"dequantize: values must be below {bins}, got {int(q.max())}")
    table = value_table(quant_params)
    if not q.is_cpu:
        if q.is_cuda and find_spec("triton"):
            from shoal.ops.cuda import codec

            return codec.dequantize(q, table, dtype)
        return table.to(q.device)[q.long()].to(dtype)
    q = q.contiguous()
    out = empty_flat(q.numel()).view(q.shape)
    _core.gather_dequantize(q.data_ptr(), q.numel(), table.data_ptr(), bins, out.data_ptr())
    return out.to(dtype)
