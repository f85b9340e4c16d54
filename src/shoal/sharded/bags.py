"""Reads rows and pools bags from a flat buffer of rows, and sums gradients into one, without a copy per id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.errors import ConfigError
from shoal.sharded.route import gather_rows, scatter_rows
from shoal.table.pooling import pool_columns, row_gradients
from shoal.table.protocol import SUM, Features, Found, Part


def take_rows(flat: Tensor, where: Tensor, dim: int, padding: bool) -> Tensor:
    """``[N, dim]``: the rows that start at ``where``; zeros for padding, which has a negative place."""
    if not padding:
        return gather_rows(flat, where, dim)
    keep = where >= 0
    out = torch.zeros(where.numel(), dim, device=flat.device)
    out[keep] = gather_rows(flat, where[keep], dim)
    return out


def pool_rows(
    flat: Tensor, found: Found, features: Features, offsets: Tensor, weights: Tensor | None, out: Tensor, dim: int,
    marks: Tensor | None = None,
) -> None:  # fmt: skip
    """`Group.pooled` for the rows in ``flat``; writes the results to ``out`` and ``marks``."""
    if not (_on_host(flat, found.where, offsets, weights, out) and out.is_contiguous()):
        rows = take_rows(flat, found.where, dim, features.padding is not None)
        pool_columns(rows, found, features, offsets, weights, out, marks)
        return
    bags, weights = _bags(found, features, offsets, weights)
    flat, offsets = flat.contiguous(), offsets.contiguous()
    _core.pool_at(
        flat.data_ptr(), flat.numel(), found.where.data_ptr(), found.where.numel(), offsets.data_ptr(), bags, dim,
        list(features.combiners), list(features.columns), list(features.lengths), _address(weights), _address(marks),
        out.data_ptr(), out.shape[1],
    )  # fmt: skip


def add_gradients(parts: Sequence[Part], rows: int, dim: int) -> Tensor:
    """A flat buffer with the summed gradient of each of a find's ``rows`` distinct ids."""
    for part in parts:
        shape = [part.found.ids.numel(), dim] if part.offsets is None else [_bag_count(part), part.features.width]
        if part.grad.dtype != torch.float32 or list(part.grad.shape) != shape:
            raise ConfigError(f"grad must be float32 {shape}, got {part.grad.dtype} {list(part.grad.shape)}")
    if not all(_on_host(part.grad, part.found.where, part.offsets, part.weights) for part in parts):
        return _add_gradients_in_torch(parts, rows, dim)
    if all(part.offsets is None for part in parts):  # no bags
        keep = [slice(None) if part.features.padding is None else part.found.where >= 0 for part in parts]
        grads, offsets = zip(*((p.grad[k], p.found.where[k]) for p, k in zip(parts, keep, strict=True)), strict=True)
        return scatter_rows(rows * dim, grads, offsets, [dim] * len(parts))
    flat = empty_flat(rows * dim).zero_()
    for part in parts:
        _add_bags(part, flat, dim)
    return flat


def _add_bags(part: Part, flat: Tensor, dim: int) -> None:
    features, offsets, where = part.features, part.offsets, part.found.where
    if offsets is None:  # every id is a bag
        features, offsets = Features((0,), (SUM,), (0,), dim), torch.arange(where.numel() + 1, device="cpu")
    bags, weights = _bags(part.found, features, offsets, part.weights)
    grad, offsets = part.grad.contiguous(), offsets.contiguous()
    _core.add_pooled_at(
        flat.data_ptr(), flat.numel(), where.data_ptr(), where.numel(), offsets.data_ptr(), bags, dim,
        list(features.combiners), list(features.columns), list(features.lengths), _address(weights),
        _address(part.marks), grad.data_ptr(), grad.shape[1],
    )  # fmt: skip


def _add_gradients_in_torch(parts: Sequence[Part], rows: int, dim: int) -> Tensor:
    """`add_gradients` in plain torch, on any device."""
    device = parts[0].grad.device if parts else torch.device("cpu")
    flat = torch.zeros(rows, dim, device=device)
    for part in parts:
        where = part.found.where.to(device)
        keep = where >= 0
        flat.index_add_(0, torch.div(where[keep], dim, rounding_mode="floor").long(), row_gradients(part, dim)[keep])
    return flat.view(-1)


def _bag_count(part: Part) -> int:
    assert part.offsets is not None
    return (part.offsets.numel() - 1) // max(1, len(part.features.tables))


def _bags(found: Found, features: Features, offsets: Tensor, weights: Tensor | None) -> tuple[int, Tensor | None]:
    """The number of bags per feature, and weights in the form that native code reads."""
    bags, rest = divmod(offsets.numel() - 1, max(1, len(features.tables)))
    if rest or len(features.combiners) != len(features.tables) or len(features.columns) != len(features.tables):
        raise ConfigError(
            f"offsets must be [F * B + 1], with a combiner and a column for each of {len(features.tables)} features, "
            f"got {offsets.numel()} offsets, {len(features.combiners)} combiners and {len(features.columns)} columns"
        )
    if weights is not None and weights.numel() != found.ids.numel():
        raise ConfigError(f"weights must be one per id, {found.ids.numel()}, got {weights.numel()}")
    return bags, None if weights is None else weights.float().contiguous()


def _on_host(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_cpu for tensor in tensors)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
