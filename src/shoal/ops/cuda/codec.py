"""12-bit indices and uint8 values of `shoal.gather` on the GPU: unpacking, and adding a peer's chunks."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.launch import Fast, blocks, on_its_device


@Fast
def _unpack12(packed, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    at = packed + (i // 2) * 3 + (i & 1)
    low = tl.load(at, mask=inside, other=0).to(tl.int64)
    high = tl.load(at + 1, mask=inside, other=0).to(tl.int64)
    tl.store(out + i, tl.where((i & 1) == 0, low | ((high & 15) << 8), (low >> 4) | (high << 4)), mask=inside)


@Fast
def _dequantize(q, table, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(table + tl.load(q + i, mask=inside, other=0).to(tl.int32), mask=inside, other=0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)


@Fast
def _add_peer(
    idxs,
    vals,
    table,
    values,
    counts,
    factor,
    n,
    k,
    totalk,
    PACKED: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``values[chunk, index] += factor * value``; no race, because a peer has each index of a chunk only once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    if PACKED:
        at = idxs + (i // 2) * 3 + (i & 1)
        low = tl.load(at, mask=inside, other=0).to(tl.int64)
        high = tl.load(at + 1, mask=inside, other=0).to(tl.int64)
        index = tl.where((i & 1) == 0, low | ((high & 15) << 8), (low >> 4) | (high << 4))
    else:
        index = tl.load(idxs + i, mask=inside, other=0).to(tl.int64)
    if TABLE:
        value = tl.load(table + tl.load(vals + i, mask=inside, other=0).to(tl.int32), mask=inside, other=0)
    else:
        value = tl.load(vals + i, mask=inside, other=0).to(tl.float32)
    inside = inside & (index >= 0) & (index < totalk)
    place = (i // k) * totalk + index
    total = tl.load(values + place, mask=inside, other=0)
    tl.store(values + place, total + value * tl.load(factor), mask=inside)
    tl.store(counts + place, tl.load(counts + place, mask=inside, other=0) + 1, mask=inside)


@on_its_device
def unpack12(packed: Tensor, n: int) -> Tensor:
    """The ``n`` int64 indices of uint8 ``packed``, flat."""
    out = torch.empty(n, dtype=torch.int64, device=packed.device)
    if n:
        _unpack12[blocks(n, 1024)](packed.reshape(-1).contiguous(), out, n, BLOCK=1024)
    return out


@on_its_device
def dequantize(q: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """``table[q]``: uint8 numbers of any shape, float32 ``[256]``."""
    q = q.contiguous()
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    if q.numel():
        _dequantize[blocks(q.numel(), 2048)](q, table.to(q.device), out, q.numel(), BLOCK=2048)
    return out


@on_its_device
def add_peer(
    values: Tensor,
    counts: Tensor,
    idxs: Tensor,
    vals: Tensor,
    table: Tensor | None,
    factor: Tensor,
    k: int,
    packed: bool,
) -> None:
    """Add one peer's chunks to the sums ``values`` and the int32 ``counts``, both ``[chunks, totalk]``, in place.

    ``idxs`` is uint8 (``packed``) or int32; ``vals`` uint8 with a ``table``, or floats; ``factor`` float32 ``[1]``.
    The product and the sum are rounded separately, for the same bits as on the CPU.
    """
    n = values.shape[0] * k
    if n:
        _add_peer[blocks(n, 1024)](
            idxs, vals, vals if table is None else table, values, counts, factor, n, k, values.shape[1], PACKED=packed,
            TABLE=table is not None, BLOCK=1024, enable_fp_fusion=False,
        )  # fmt: skip
