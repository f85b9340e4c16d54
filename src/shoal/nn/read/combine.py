"""Combiners by name and number, and the combination of rows that groups do not pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.combiners import Combiner, FirstN, ReduceMean, ReduceSum
from shoal.nn.read.plan import Feature
from shoal.ragged import Ragged
from shoal.table.pooling import pool
from shoal.table.protocol import FIRSTN, MAX, MEAN, SQRTN, SUM

CUSTOM = 5  # a `Combiner` with its own ``combine``, in torch
KINDS = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN, "max": MAX, "firstn": FIRSTN}
_COMBINERS = {ReduceSum: SUM, ReduceMean: MEAN, FirstN: FIRSTN}


def features_of(who: str, tables: Mapping[str, int], combiner: Any, max_length: int | None) -> dict[str, Feature]:
    """Return features by name; ``tables`` maps each feature's name to the number of its table."""
    each = combiner if isinstance(combiner, Mapping) else dict.fromkeys(tables, combiner)
    each = {str(name): one for name, one in each.items()}
    if each.keys() != tables.keys():
        raise ConfigError(f"{who}: combiner must have an entry for each of {list(tables)}, got {list(each)}")
    kinds = {name: _kind_of(who, one) for name, one in each.items()}
    if max_length is not None and FIRSTN not in kinds.values():
        raise ConfigError(f"{who}: max_length must be given with combiner='firstn' only, got combiner={combiner!r}")
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
        # A subclass that does not override ``combine`` is equivalent to its base.
        for known, kind in _COMBINERS.items():
            if isinstance(combiner, known) and type(combiner).combine is known.combine:
                return kind
        return CUSTOM
    if not isinstance(combiner, str) or combiner not in KINDS:
        raise ConfigError(
            f"{who}: combiner must be one of {', '.join(map(repr, KINDS))}, or a Combiner, got {combiner!r}"
        )
    return KINDS[combiner]


def combine(
    of: Feature, rows: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, padding: int | None
) -> Tensor:
    """Combine rows ``[N, D]`` with `pool` or with the user's combiner."""
    if of.kind != CUSTOM:
        return pool(rows, ids, offsets, of.kind, length=of.length, weights=weights, padding=padding)
    if weights is not None:
        rows = rows * weights[:, None]
    return _combine_by(of.combiner, rows, ids, offsets, padding)


def _combine_by(combiner: Combiner, rows: Tensor, ids: Tensor, offsets: Tensor, padding: int | None) -> Tensor:
    if padding is None:
        return combiner.combine(Ragged.trusted(ids, offsets), rows)
    keep = ids != padding
    left = torch.nn.functional.pad(keep.cumsum(0), (1, 0))[offsets]
    return combiner.combine(Ragged.trusted(ids[keep], left), rows[keep])
