"""Feature interactions: the factorisation machine's pairs, and dot products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_rows


def fm_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``rows`` ``[B, F, D]`` as ``[B, F * D]``, and ``[B]``: linear weights plus the dot products of all pairs.

    Column 0 holds the linear weights, the others the factors.
    """
    linear, factors = rows[..., 0].sum(1), rows[..., 1:]
    pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
    return rows.flatten(1), linear + pairs


def fm(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`fm_reference`, faster for float32 on the CPU: forward and backward each take one pass over the rows.

    One function returns both results, so that their gradients are added in the same pass.
    """
    native = rows.is_cpu and rows.dtype == torch.float32 and not torch.compiler.is_compiling()
    if not native or rows.dim() != 3 or not rows.shape[1] or not rows.shape[2]:
        return fm_reference(rows)
    return _Fm.apply(rows)


class _Fm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        rows = rows.contiguous()
        n, features, dim = rows.shape
        sums, out = rows.new_empty(n, dim), rows.new_empty(n)
        _core.fm(rows.data_ptr(), n, features, dim, sums.data_ptr(), out.data_ptr())
        ctx.save_for_backward(rows, sums)
        ctx.set_materialize_grads(False)
        return rows.view(n, features * dim), out

    @staticmethod
    def backward(ctx: Any, grad_flat: Tensor | None, grad: Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        rows, sums = ctx.saved_tensors
        n, features, dim = rows.shape
        if grad is None:
            return None if grad_flat is None else grad_flat.view(n, features, dim)
        grad = grad.contiguous()
        grad_flat = None if grad_flat is None else grad_flat.contiguous()
        flat_at = 0 if grad_flat is None else grad_flat.data_ptr()
        out = empty_rows(n * features, dim)
        _core.fm_gradient(rows.data_ptr(), sums.data_ptr(), grad.data_ptr(), flat_at, n, features, dim, out.data_ptr())
        return out.view(n, features, dim)


def pair_dots(rows: Tensor) -> Tensor:
    """``[B, F, D]`` to ``[B, F * (F - 1) / 2]``: the dot products of all pairs, (1, 0), (2, 0), (2, 1), ….

    >>> pair_dots(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]))
    tensor([[11., 17., 39.]])
    """
    features = rows.shape[1]
    dots = torch.bmm(rows, rows.transpose(1, 2)).flatten(1)
    first, second = torch.tril_indices(features, features, offset=-1, device=rows.device)
    return dots.index_select(1, first * features + second)
