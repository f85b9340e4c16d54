"""What features do with each other: the factorization machine's pairs, and dot products."""

from __future__ import annotations

import torch
from torch import Tensor


def fm_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows`` ``[B, F, D]`` as ``[B, F * D]``, and ``[B]``: linear weights plus the dot products of all pairs.

    Column 0 holds the linear weights, the others the factors.
    """
    linear, factors = rows[..., 0].sum(1), rows[..., 1:]
    pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
    return rows.flatten(1), linear + pairs


def fm(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`fm_reference`."""
    return fm_reference(rows)


def pair_dots(rows: Tensor) -> Tensor:
    """``[B, F, D]`` to ``[B, F * (F - 1) / 2]``: the dot products of all pairs, (1, 0), (2, 0), (2, 1), ….

    >>> pair_dots(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))
    tensor([[11., 17., 39.]])
    """
    dots = torch.bmm(rows, rows.transpose(1, 2))
    below = torch.tril_indices(rows.shape[1], rows.shape[1], offset=-1)
    return dots[:, below[0], below[1]]
