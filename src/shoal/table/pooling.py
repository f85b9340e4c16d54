"""Pooling of bags of rows into one vector each, with gradients: natively on a CPU, in plain torch elsewhere.

The torch code defines the result of the pooling that groups do while they read, on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal import _core
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM, SUMS, Features, Found, Part, marks_shape

_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device="cpu")


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
    """Pools rows ``[N, D]`` to ``[B, D]``, or ``[B, length, D]`` for firstn; rows and weights get gradients.

    An empty bag gives zeros. A weight multiplies its row; mean divides by the number of ids, sqrtn by its square root.
    If several rows share a maximum, each gets an equal share of its gradient. ``offsets`` rise from 0 to N.
    """
    if not _can_be_native(rows, ids, offsets, weights):
        return pool_plainly(rows, ids, offsets, kind, length=length, weights=weights, padding=padding)
    bags = _NativeBags(ids.contiguous(), offsets.contiguous(), kind, length, padding)
    weights = None if weights is None else weights.float().contiguous()
    if torch.is_grad_enabled() and (rows.requires_grad or (weights is not None and weights.requires_grad)):
        return _PoolWithGradient.apply(rows.contiguous(), weights, bags)
    return bags.pool(rows.contiguous(), weights, None)


def pool_plainly(
    rows: Tensor,
    ids: Tensor,
    offsets: Tensor,
    kind: int,
    *,
    length: int = 0,
    weights: Tensor | None = None,
    padding: int | None = None,
) -> Tensor:
    """`pool` in plain torch, on any device; the gradient is autograd's."""
    n = ids.shape[0]
    if weights is not None:
        rows = rows * weights[:, None]
    bag = torch.searchsorted(offsets, torch.arange(n, device=offsets.device), right=True) - 1
    keep = None if padding is None else ids != padding
    bags = offsets.shape[0] - 1
    if kind == FIRSTN:
        return _first(rows, offsets, bag, keep, bags, length)
    if kind == MAX:
        return largest(rows, bag, keep, bags)
    if kind != SUM:
        ones = rows.new_ones(n) if keep is None else keep.to(rows.dtype)
        count = rows.new_zeros(bags).index_add(0, bag, ones).clamp(min=1)
        rows = rows / (count if kind == MEAN else count.sqrt())[bag][:, None]
    return add_bags(rows if keep is None else rows * keep[:, None], bag, offsets)


def pool_equal(rows: Tensor, ids: Tensor, kind: int, *, padding: int | None = None) -> Tensor:
    """`pool` for ids ``[B, L]``, bags of equal length, without firstn."""
    batch, each = ids.shape
    if each == 1 and padding is None:
        return rows
    offsets = torch.arange(batch + 1, device=ids.device) * each
    return pool(rows, ids.reshape(-1), offsets, kind, padding=padding)


def _can_be_native(rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> bool:
    given = (rows, ids, offsets) if weights is None else (rows, ids, offsets, weights)
    if torch.compiler.is_compiling() or not all(tensor.is_cpu for tensor in given):
        return False
    plain = rows.dtype == torch.float32 and ids.dtype == offsets.dtype == torch.int64
    return plain and not torch._C._are_functorch_transforms_active()


class _NativeBags:
    """Bags of consecutive rows, pooled natively."""

    def __init__(self, ids: Tensor, offsets: Tensor, kind: int, length: int, padding: int | None) -> None:
        self.ids, self.offsets, self.kind, self.length, self.padding = ids, offsets, kind, length, padding

    def _numbers(self, rows: Tensor, weights: Tensor | None, marks: Tensor | None) -> tuple[Any, ...]:
        return (
            rows.data_ptr(), self.ids.numel(), rows.shape[1], self.ids.data_ptr(), self.padding,
            self.offsets.data_ptr(), self.offsets.shape[0] - 1, self.kind, self.length,
            0 if weights is None else weights.data_ptr(), 0 if marks is None else marks.data_ptr(),
        )  # fmt: skip

    def pool(self, rows: Tensor, weights: Tensor | None, marks: Tensor | None) -> Tensor:
        bags, dim = self.offsets.shape[0] - 1, rows.shape[1]
        out = torch.empty([bags, self.length, dim] if self.kind == FIRSTN else [bags, dim], device="cpu")
        _core.pool_rows(*self._numbers(rows, weights, marks), out.data_ptr())
        return out

    def gradient(
        self, rows: Tensor, weights: Tensor | None, marks: Tensor | None, grad: Tensor, of_rows: bool, of_weights: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of rows and weights, if they are needed."""
        rows_grad = torch.zeros_like(rows) if of_rows else None
        weights_grad = torch.empty_like(weights) if of_weights and weights is not None else None
        grad = grad.float().contiguous()
        out = (0 if one is None else one.data_ptr() for one in (rows_grad, weights_grad))
        _core.pool_rows_gradient(*self._numbers(rows, weights, marks), grad.data_ptr(), *out)
        return rows_grad, weights_grad


class _PoolWithGradient(torch.autograd.Function):
    """`_NativeBags.pool` with its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, bags: _NativeBags) -> Tensor:  # pyrefly: ignore[bad-override]
        marks = None
        if bags.kind == MAX:
            marks = torch.empty(marks_shape(*rows.shape), dtype=torch.uint8, device="cpu")
        ctx.bags = bags
        ctx.save_for_backward(rows, weights, marks, bags.ids, bags.offsets)
        return bags.pool(rows, weights, marks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyrefly: ignore[bad-override]
        rows, weights, marks, *_ = ctx.saved_tensors
        return *ctx.bags.gradient(rows, weights, marks, grad, *ctx.needs_input_grad[:2]), None


def largest(rows: Tensor, bag: Tensor, keep: Tensor | None, bags: int) -> Tensor:
    """``[bags, D]``: the maximum of each column over the rows of each bag."""
    bag = bag if keep is None else torch.where(keep, bag, bags)  # padding goes to an extra bag
    start = rows.new_zeros(bags + 1, rows.shape[1])
    return start.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax", include_self=False)[:bags]


def _places(offsets: Tensor, bag: Tensor, keep: Tensor | None) -> Tensor:
    """int64 ``[n]``: the position of each id in its bag, not counting padding."""
    ones = torch.ones_like(bag) if keep is None else keep.long()
    before = ones.cumsum(0) - ones
    start = torch.cat([before, ones.sum().view(1)])[offsets[:-1]]
    return before - start[bag]


def _first(rows: Tensor, offsets: Tensor, bag: Tensor, keep: Tensor | None, bags: int, length: int) -> Tensor:
    place = _places(offsets, bag, keep)
    fits = place < length if keep is None else keep & (place < length)
    target = torch.where(fits, bag * length + place, bags * length)  # the rest go to an extra row that is dropped
    out = rows.new_zeros(bags * length + 1, rows.shape[1]).index_add(0, target, rows)
    return out[: bags * length].view(bags, length, rows.shape[1])


def add_bags(rows: Tensor, bag: Tensor, offsets: Tensor) -> Tensor:
    """``[B, D]``: the sum of the rows of each bag."""
    return rows.new_zeros(offsets.shape[0] - 1, rows.shape[1]).index_add(0, bag, rows)


# --- several features in one call, as in groups -----------------------------------------------------------------------


def bag_of_ids(offsets: Tensor, n: int) -> Tensor:
    """int64 ``[n]``: the bag of each id."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=n)


def bag_factors(found: Found, features: Features, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """float32 ``[N]``: the factor of each row in the sum of its bag; 0 for padding."""
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
    rows: Tensor,
    found: Found,
    features: Features,
    offsets: Tensor,
    weights: Tensor | None,
    out: Tensor,
    marks: Tensor | None = None,
) -> None:
    """Pools rows ``[N, dim]`` into the features' columns of ``out``, and writes the marks for max."""
    n, dim = rows.shape
    bag, kinds = bag_of_ids(offsets, n), set(features.combiners)
    shape = (len(features.columns), -1 if out.shape[0] else 0, dim)
    keep = None if features.padding is None else found.ids != features.padding
    values = rows if weights is None else rows * weights[:, None]
    pooled: dict[int, Tensor] = {}
    if kinds & SUMS:
        sums = add_bags(rows * bag_factors(found, features, offsets, weights)[:, None], bag, offsets).view(shape)
        pooled = dict.fromkeys(SUMS, sums)
    if MAX in kinds:
        best = largest(values, bag, keep, offsets.numel() - 1)
        if marks is not None:
            marks.copy_(_packed((values == best[bag]) & (True if keep is None else keep[:, None])))
        pooled[MAX] = best.view(shape)
    for feature, (kind, column) in enumerate(zip(features.combiners, features.columns, strict=True)):
        length = features.length(feature)
        if kind == FIRSTN:
            every = _first(values, offsets, bag, keep, offsets.numel() - 1, length)
            part = every.view(shape[0], shape[1], length * dim)[feature]
        else:
            part = pooled[kind][feature]
        out[:, column : column + length * dim] = part


def row_gradients(part: Part, dim: int) -> Tensor:
    """``[N, dim]``: the gradient of each row of a part; zeros for padding."""
    if part.offsets is None:
        return part.grad
    features, found, offsets = part.features, part.found, part.offsets
    device, bags = offsets.device, offsets.numel() - 1
    each = max(1, bags // max(1, len(features.tables)))
    bag = bag_of_ids(offsets, found.ids.numel())
    keep = None if features.padding is None else found.ids != features.padding
    feature = torch.div(bag, each, rounding_mode="floor")
    source = (bag % each) * part.grad.shape[1] + torch.tensor(features.columns, device=device)[feature]
    kinds = torch.tensor(features.combiners, device=device)[feature]
    fits = None
    if FIRSTN in features.combiners:
        lengths = torch.tensor([features.length(f) for f in range(len(features.tables))], device=device)[feature]
        place = torch.where(kinds == FIRSTN, _places(offsets, bag, keep), 0)
        fits = place < lengths
        source += torch.where(fits, place, 0) * dim
    grads = part.grad.reshape(-1)[source[:, None] + torch.arange(dim, device=device)]
    if fits is not None:
        grads = torch.where(fits[:, None], grads, 0.0)
    if MAX in features.combiners:
        assert part.marks is not None, "the gradient of max needs the marks of its forward"
        marked = unpacked(part.marks, dim) & (True if keep is None else keep[:, None])
        equal = torch.zeros(bags, dim, device=device).index_add_(0, bag, marked.float())[bag]
        of_max = (kinds == MAX)[:, None]
        grads = torch.where(of_max, torch.where(marked, grads / equal, 0.0), grads)
    return grads * bag_factors(found, features, offsets, part.weights)[:, None]


def _packed(bits: Tensor) -> Tensor:
    """Booleans ``[N, dim]`` packed into marks."""
    n, dim = bits.shape
    wide = torch.nn.functional.pad(bits, (0, -dim % 8)).view(n, (dim + 7) // 8, 8)
    return (wide * _BITS.to(bits.device)).sum(2, dtype=torch.uint8)


def unpacked(marks: Tensor, dim: int) -> Tensor:
    """Marks unpacked into booleans ``[N, dim]``."""
    return ((marks[:, :, None] & _BITS.to(marks.device)) != 0).flatten(1)[:, :dim]


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


# --- the definition, bag by bag ---------------------------------------------------------------------------------------


def pool_reference(rows: Tensor, offsets: Tensor, weights: Tensor | None, kind: int, length: int = 0) -> Tensor:
    """The definition of `pool`, bag by bag."""
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
