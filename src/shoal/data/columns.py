"""Features given column by column, rearranged sample by sample."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def interleave(columns: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge each feature's ``(values, offsets [n + 1])`` into ids and offsets ``[n * F + 1]``, ordered by sample.

    >>> user, tags = (torch.tensor([1, 2]), torch.tensor([0, 1, 2])), (torch.tensor([7, 8]), torch.tensor([0, 2, 2]))
    >>> interleave([user, tags])
    (tensor([1, 7, 8, 2]), tensor([0, 1, 3, 4, 4]))
    """
    lengths = torch.stack([offsets.diff() for _, offsets in columns], 1).reshape(-1)
    base, starts = 0, []
    for values, offsets in columns:
        starts.append(offsets[:-1] + base)
        base += values.shape[0]
    out = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(lengths, 0, out=out[1:])
    shift = torch.repeat_interleave(torch.stack(starts, 1).reshape(-1) - out[:-1], lengths)
    return torch.cat([values for values, _ in columns])[torch.arange(shift.shape[0], device="cpu") + shift], out


def from_address(address: int, size: int) -> Tensor:
    """Copy ``size`` int64 values from memory that native code owns."""
    if not size:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(address)).copy())
