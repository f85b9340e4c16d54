"""The k largest magnitudes of a flat tensor, ties to the lower index, in one pass without a full sort."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from shoal.ops.cuda.launch import Fast, blocks, on_its_device


@Fast
def _classify(values, least, marks, bad, n, BLOCK: tl.constexpr):
    """Mark a magnitude above the least one with 1, and a tie with 2^32, so that one running sum counts both."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    size = tl.abs(tl.load(values + i, mask=inside, other=0).to(tl.float32))
    edge = tl.load(least)
    mark = tl.where(size > edge, 1, tl.where(size == edge, 4294967296, 0).to(tl.int64))
    tl.store(marks + i, mark, mask=inside)
    finite = (size - size) == 0  # neither NaN nor infinite
    tl.store(bad + i * 0, 1, mask=inside & (finite == 0))


@Fast
def _choose(marks, ends, chosen, n, k, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    above = tl.load(ends + n - 1) & 4294967295
    mark = tl.load(marks + i, mask=inside, other=0)
    end = tl.load(ends + i, mask=inside, other=0)
    ties = tl.minimum(end >> 32, k - above)  # chosen ties up to here
    mine = inside & ((mark == 1) | ((mark > 1) & ((end >> 32) <= k - above)))
    tl.store(chosen + (end & 4294967295) + ties - 1, i, mask=mine)


@on_its_device
def largest(flat: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ascending indices of the ``k`` (1 or more) largest magnitudes, and int32 ``[1]``, not 0 if a value is not finite.

    In that case the indices are meaningless. Does not wait for the device.
    """
    n = flat.shape[0]
    least = torch.topk(flat.abs().float(), k, sorted=False).values.amin().reshape(1)
    marks = torch.empty(n, dtype=torch.int64, device=flat.device)
    bad = torch.zeros(1, dtype=torch.int32, device=flat.device)
    _classify[blocks(n, 1024)](flat, least, marks, bad, n, BLOCK=1024)
    ends = torch.cumsum(marks, 0)
    chosen = torch.zeros(k, dtype=torch.int64, device=flat.device)
    _choose[blocks(n, 1024)](marks, ends, chosen, n, k, BLOCK=1024)
    return chosen, bad
