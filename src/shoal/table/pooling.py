"""Bags of rows pooled into one vector each: natively on a CPU, in plain torch elsewhere and where autograd looks on.

The torch code is the meaning of what groups pool while they read, on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import _core
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM, Features, Found, Part


def pool(
    rows: Tensor,
    ids: Tensor,
    offsets: Tensor,
    kind: int,
    *,
    length: int = 0,
    weights: Tensor | None = None,
    padding: int | None = None,
) -> Tensor:
    """``[B, D]`` of rows ``[N, D]``, or ``[B, length, D]`` for firstn; the gradient is autograd's, weights included.

    An empty bag is zeros. A weight multiplies its row; mean and sqrtn divide by the number of ids, or its root. Where
    several rows share a maximum, each gets an equal share of its gradient. ``offsets`` rise from 0 to N.
    """
    if _can_be_native(rows, ids, offsets, weights):
        return _pool_natively(rows, ids, offsets, kind, length, weights, padding)
    n = ids.shape[0]
    if weights is not None:
        rows = rows * weights[:, None]
    bag = torch.searchsorted(offsets, torch.arange(n, device=offsets.device), right=True) - 1
    keep = None if padding is None else ids != padding
    bags = offsets.shape[0] - 1
    if kind == FIRSTN:
        return _first(rows, offsets, bag, keep, bags, length)
    if kind == MAX:
        # Padding goes to a bag of its own.
        bag = bag if keep is None else torch.where(keep, bag, bags)
        start = rows.new_zeros(bags + 1, rows.shape[1])
        return start.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax", include_self=False)[:bags]
    if kind != SUM:
        ones = rows.new_ones(n) if keep is None else keep.to(rows.dtype)
        count = rows.new_zeros(bags).index_add(0, bag, ones).clamp(min=1)
        rows = rows / (count if kind == MEAN else count.sqrt())[bag][:, None]
    return add_bags(rows if keep is None else rows * keep[:, None], bag, offsets)


def pool_equal(rows: Tensor, ids: Tensor, kind: int, *, padding: int | None = None) -> Tensor:
    """`pool` of ids ``[B, L]``: bags of one length."""
    batch, length = ids.shape
    if length == 1 and padding is None:
        return rows
    offsets = torch.arange(batch + 1, device=ids.device) * length
    return pool(rows, ids.reshape(-1), offsets, kind, padding=padding)


def _can_be_native(rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> bool:
    given = (rows, ids, offsets) if weights is None else (rows, ids, offsets, weights)
    if torch.compiler.is_compiling() or not all(tensor.is_cpu for tensor in given):
        return False
    watched = torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad))
    return not watched and rows.dtype == torch.float32 and ids.dtype == offsets.dtype == torch.int64


def _pool_natively(
    rows: Tensor, ids: Tensor, offsets: Tensor, kind: int, length: int, weights: Tensor | None, padding: int | None
) -> Tensor:
    dim, bags = rows.shape[1], offsets.shape[0] - 1
    rows, ids, offsets = rows.contiguous(), ids.contiguous(), offsets.contiguous()
    shape = [bags, length, dim] if kind == FIRSTN else [bags, dim]
    out = torch.empty(shape, device="cpu")
    weights = None if weights is None else weights.float().contiguous()
    _core.pool_rows(
        rows.data_ptr(), ids.numel(), dim, ids.data_ptr(), padding, offsets.data_ptr(), bags, kind, length,
        0 if weights is None else weights.data_ptr(), out.data_ptr(), max(1, length) * dim if kind == FIRSTN else dim,
    )  # fmt: skip
    return out


def _first(rows: Tensor, offsets: Tensor, bag: Tensor, keep: Tensor | None, bags: int, length: int) -> Tensor:
    ones = torch.ones_like(bag) if keep is None else keep.long()
    before = ones.cumsum(0) - ones  # ids that count, before each
    start = torch.cat([before, ones.sum().view(1)])[offsets[:-1]]
    place = before - start[bag]
    fits = place < length if keep is None else keep & (place < length)
    target = torch.where(fits, bag * length + place, bags * length)  # the rest go to a row that is cut off
    out = rows.new_zeros(bags * length + 1, rows.shape[1]).index_add(0, target, rows)
    return out[: bags * length].view(bags, length, rows.shape[1])


def add_bags(rows: Tensor, bag: Tensor, offsets: Tensor) -> Tensor:
    """``[B, D]``: the sum of the rows of each bag."""
    return rows.new_zeros(offsets.shape[0] - 1, rows.shape[1]).index_add(0, bag, rows)


# --- several features in one call, as groups have them ----------------------------------------------------------------


def bag_of_ids(offsets: Tensor, n: int) -> Tensor:
    """int64 ``[n]``: the bag of each id."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=n)


def bag_factors(found: Found, features: Features, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """float32 ``[N]``: what each row is multiplied by in the sum that is its bag: 0 for padding."""
    n = found.ids.numel()
    bags = offsets.numel() - 1
    each = max(1, bags // max(1, len(features.tables)))
    keep = torch.ones(n, device=offsets.device) if features.padding is None else (found.ids != features.padding).float()
    bag = bag_of_ids(offsets, n)
    count = torch.zeros(bags, device=offsets.device).index_add_(0, bag, keep).clamp(min=1)
    kinds = torch.tensor(features.combiners, device=offsets.device)[torch.arange(bags, device=offsets.device) // each]
    divisor = torch.where(kinds == MEAN, count, torch.where(kinds == SQRTN, count.sqrt(), torch.ones_like(count)))
    factors = keep / divisor[bag]
    return factors if weights is None else factors * weights


def pool_columns(
    rows: Tensor, found: Found, features: Features, offsets: Tensor, weights: Tensor | None, out: Tensor
) -> None:
    """Pools rows ``[N, dim]`` into the features' columns of ``out``."""
    n, dim = rows.shape
    sums = add_bags(rows * bag_factors(found, features, offsets, weights)[:, None], bag_of_ids(offsets, n), offsets)
    for column, part in zip(features.columns, sums.view(len(features.columns), -1, dim), strict=True):
        out[:, column : column + dim] = part


def row_gradients(part: Part, dim: int) -> Tensor:
    """``[N, dim]``: the gradient of each row of a part; zeros for padding."""
    if part.offsets is None:
        return part.grad
    features, found = part.features, part.found
    of_bags = torch.cat([part.grad[:, column : column + dim] for column in features.columns])
    factors = bag_factors(found, features, part.offsets, part.weights)
    return of_bags[bag_of_ids(part.offsets, found.ids.numel())] * factors[:, None]


def joined(parts: Sequence[Part], dim: int) -> tuple[Tensor, Tensor]:
    """The ids of all parts and the gradients of their rows, without padding."""
    ids, grads = [], []
    for part in parts:
        own, grad = part.found.ids, row_gradients(part, dim)
        if part.features.padding is not None:
            keep = own != part.features.padding
            own, grad = own[keep], grad[keep]
        ids.append(own)
        grads.append(grad)
    return torch.cat(ids), torch.cat(grads)


# --- the meaning, bag by bag ------------------------------------------------------------------------------------------


def pool_reference(rows: Tensor, offsets: Tensor, weights: Tensor | None, kind: int, length: int = 0) -> Tensor:
    """What `pool` means."""
    out = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        bag = rows[begin:end] if weights is None else rows[begin:end] * weights[begin:end, None]
        if kind == FIRSTN:
            bag = bag[:length]
            out.append(torch.cat([bag, bag.new_zeros(length - len(bag), rows.shape[1])]))
        elif kind == MAX:
            out.append(bag.amax(0) if len(bag) else bag.sum(0))
        else:
            count = max(end - begin, 1)
            out.append(bag.sum(0) / {SUM: 1, MEAN: count, SQRTN: count**0.5}[kind])
    if out:
        return torch.stack(out)
    return rows.new_zeros([0, length, rows.shape[1]] if kind == FIRSTN else [0, rows.shape[1]])
