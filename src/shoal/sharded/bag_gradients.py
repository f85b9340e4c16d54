"""Gradients of rows and of bags, summed for each distinct row of a route; those of bags are not laid out per id."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal import _core
from shoal.buffers import empty_flat
from shoal.sharded.route import scatter_rows
from shoal.table.pooling import bag_of_ids, row_gradients
from shoal.table.protocol import CPU, MEAN, SQRTN, Features, Part


def sum_gradients(size: int, parts: Sequence[Part], places: Sequence[Tensor], dim: int) -> Tensor:
    """float32 ``[size]``: the sum of the gradients of all ids whose row begins at a place, in the order of parts.

    ``places[p]``, int32, is where the row of each id of part ``p`` begins; -1: the id has none.
    """
    if all(part.offsets is None for part in parts):
        return sum_gradients_reference(size, parts, places, dim)  # there is nothing to lay out
    flat = empty_flat(size).zero_()
    for part, at in zip(parts, places, strict=True):
        _add(flat, part, at, dim)
    return flat


def sum_gradients_reference(size: int, parts: Sequence[Part], places: Sequence[Tensor], dim: int) -> Tensor:
    """The same, with a gradient for every id in between."""
    grads, known = [], []
    for part, at in zip(parts, places, strict=True):
        keep = slice(None) if part.features.padding is None else at >= 0
        grads.append(row_gradients(part, dim).to(CPU)[keep])
        known.append(at[keep])
    return scatter_rows(size, grads, known, [dim] * len(grads))


def _add(flat: Tensor, part: Part, places: Tensor, dim: int) -> None:
    n = places.numel()
    grad = part.grad.detach().to(CPU).contiguous()
    factors = weights = None
    if part.offsets is None:  # every id is a bag
        offsets, columns = torch.arange(n + 1, device=CPU), [0]
    else:
        offsets, columns = part.offsets.to(CPU).contiguous(), list(part.features.columns)
        divisors = bag_divisors(places, part.features, offsets)
        factors = None if divisors is None else 1 / divisors
        weights = None if part.weights is None else part.weights.detach().to(CPU).contiguous()
    _core.add_bag_gradients(
        grad.data_ptr(),
        grad.shape[1],
        grad.shape[0],
        dim,
        columns,
        offsets.data_ptr(),
        0 if factors is None else factors.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        places.data_ptr(),
        n,
        flat.data_ptr(),
        flat.numel(),
    )


def bag_divisors(places: Tensor, features: Features, offsets: Tensor) -> Tensor | None:
    """float32 ``[F * B]``: what the sum of each bag is divided by; None where no feature has a mean or sqrtn."""
    kinds = features.combiners
    if not any(kind in (MEAN, SQRTN) for kind in kinds):
        return None
    count = offsets.diff().float()
    if features.padding is not None:
        kept = (places >= 0).float()
        count = torch.zeros_like(count).index_add_(0, bag_of_ids(offsets, kept.numel()), kept)
    count = count.clamp_(min=1).view(len(kinds), -1)
    for feature, kind in enumerate(kinds):
        if kind == SQRTN:
            count[feature].sqrt_()
        elif kind != MEAN:
            count[feature] = 1
    return count.view(-1)
