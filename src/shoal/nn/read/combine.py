"""What a combiner does to the rows of bags: its name, its number, and the torch code for what groups do not pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.nn.read.plan import Feature
from shoal.ragged import Ragged
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM

CUSTOM = 5  # what the combiner itself does, in torch
_KINDS = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN, "max": MAX, "firstn": FIRSTN}
_COMBINERS = {ReduceSum: SUM, ReduceMean: MEAN, FirstN: FIRSTN}


def features_of(who: str, tables: Mapping[str, int], combiner: Any, max_length: int | None) -> dict[str, Feature]:
    """By name: a feature for each name of ``tables``, which says the number of its table."""
    each = combiner if isinstance(combiner, Mapping) else dict.fromkeys(tables, combiner)
    each = {str(name): one for name, one in each.items()}
    if each.keys() != tables.keys():
        raise ConfigError(f"{who}: combiner must have an entry for each of {list(tables)}, got {list(each)}")
    kinds = {name: _kind_of(who, one) for name, one in each.items()}
    if max_length is not None and FIRSTN not in kinds.values():
        raise ConfigError(f"{who}: max_length must come with combiner='firstn', got it with {combiner!r}")
    features = {}
    for name, table in tables.items():
        kind, length = kinds[name], 0
        if kind == FIRSTN:
            own = getattr(each[name], "max_seq_length", None)
            length = max_length if own is None or max_length is not None else own
            if length is None or length < 1:
                raise ConfigError(f"{who}: max_length of firstn must be at least 1, got {length}")
        features[name] = Feature(table, kind, length, each[name] if kind == CUSTOM else None)
    return features


def _kind_of(who: str, combiner: Any) -> int:
    if isinstance(combiner, Combiner):
        # One derived from the library's that combines in the same way means the same.
        for known, kind in _COMBINERS.items():
            if isinstance(combiner, known) and type(combiner).combine is known.combine:
                return kind
        return CUSTOM
    if not isinstance(combiner, str) or combiner not in _KINDS:
        raise ConfigError(
            f"{who}: combiner must be one of {', '.join(map(repr, _KINDS))}, or a Combiner, got {combiner!r}"
        )
    return _KINDS[combiner]


def combine(
    of: Feature, rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, padding: int | None
) -> Tensor:
    """``[B, D]`` of rows ``[N, D]``, or ``[B, length, D]`` for firstn; the gradient is autograd's, weights included.

    An empty bag is zeros. A weight multiplies its row; mean and sqrtn divide by the number of ids, or its root. Where
    several rows share a maximum, each gets an equal share of its gradient.
    """
    bags, n = offsets.shape[0] - 1, ids.shape[0]
    if weights is not None:
        rows = rows * weights[:, None]
    if of.kind == CUSTOM:
        return _combine_by(of.combiner, rows, ids, offsets, padding)
    bag = torch.searchsorted(offsets, torch.arange(n, device=offsets.device), right=True) - 1
    keep = None if padding is None else ids != padding
    if of.kind == FIRSTN:
        return _first(rows, offsets, bag, keep, bags, of.length)
    if of.kind == MAX:
        # Padding goes to a bag of its own.
        bag = bag if keep is None else torch.where(keep, bag, bags)
        start = rows.new_zeros(bags + 1, rows.shape[1])
        return start.scatter_reduce(0, bag[:, None].expand_as(rows), rows, "amax", include_self=False)[:bags]
    if of.kind != SUM:
        ones = rows.new_ones(n) if keep is None else keep.to(rows.dtype)
        count = rows.new_zeros(bags).index_add(0, bag, ones).clamp(min=1)
        rows = rows / (count if of.kind == MEAN else count.sqrt())[bag][:, None]
    return rows.new_zeros(bags, rows.shape[1]).index_add(0, bag, rows)  # padding has zeros


def _first(rows: Tensor, offsets: Tensor, bag: Tensor, keep: Tensor | None, bags: int, length: int) -> Tensor:
    ones = torch.ones_like(bag) if keep is None else keep.long()
    before = ones.cumsum(0) - ones  # ids that count, before each
    start = torch.cat([before, ones.sum().view(1)])[offsets[:-1]]
    place = before - start[bag]
    fits = place < length if keep is None else keep & (place < length)
    target = torch.where(fits, bag * length + place, bags * length)  # the rest go to a row that is cut off
    out = rows.new_zeros(bags * length + 1, rows.shape[1]).index_add(0, target, rows)
    return out[: bags * length].view(bags, length, rows.shape[1])


def _combine_by(combiner: Combiner, rows: Tensor, ids: Tensor, offsets: Tensor, padding: int | None) -> Tensor:
    if padding is None:
        return combiner.combine(Ragged.trusted(ids, offsets), rows)
    keep = ids != padding
    left = torch.nn.functional.pad(keep.cumsum(0), (1, 0))[offsets]
    return combiner.combine(Ragged.trusted(ids[keep], left), rows[keep])


def combine_reference(rows: Tensor, offsets: Tensor, weights: Tensor | None, kind: int, length: int = 0) -> Tensor:
    """What `combine` means, bag by bag."""
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
