"""Reads and updates the lists of ids that a sharded batch has for each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sharded.export import predict_raw, predict_slots
from shoal.sharded.parts import Lists, Parts


def lookup(
    parts: Parts, lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], dims: Mapping[str, int],
    float16: bool,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """Per part ``{table: flat rows}``; native tables have one list over all features."""
    asked = [_lists(work, native, features) for work in lists]
    result = []
    for one, work, rows in zip(asked, lists, parts.lookup(asked, float16=float16), strict=True):
        if native:
            result.append(dict.fromkeys(work["ids"], rows))
        else:
            sizes = [n * dims[name] for n, name in zip(one.counts, one.names, strict=True)]
            result.append(dict(zip(one.names, torch.split(rows, sizes), strict=True)))
    return result


def exported_lookup(
    lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], dims: Mapping[str, int], deadline: int
) -> list[dict[str, Tensor]]:
    """`lookup` in an exported model, from the parts' serving processes."""
    result = []
    for ps, wanted in enumerate(lists):
        if native:
            [(table, ids)] = wanted["ids"].items()
            splits = wanted["splits"][table]
            floats = sum(n * dims[f] for n, f in zip(splits.diff().tolist(), features, strict=True))
            result.append({table: predict_raw(ps, ids, splits, floats, deadline)})
        else:
            result.append(predict_slots(ps, wanted["ids"], dims, deadline))
    return result


def apply(
    parts: Parts, lists: Sequence[dict[str, Any]], native: bool, features: Sequence[str], step: int, seconds: int,
    float16: bool,
) -> None:  # fmt: skip
    asked = [_lists(work, native, features) for work in lists]
    flats = []
    for one, work in zip(asked, lists, strict=True):
        grads = work["grads"]
        flats.append(next(iter(grads.values())) if native else torch.cat([grads[name] for name in one.names]))
    parts.apply(asked, flats, step, seconds, float16=float16)


def _lists(work: dict[str, Any], native: bool, features: Sequence[str]) -> Lists:
    if native:
        [(table, ids)] = work["ids"].items()
        return Lists(list(features), work["splits"][table].diff().tolist(), ids)
    names = sorted(work["ids"])
    return Lists(names, [work["ids"][name].numel() for name in names], torch.cat([work["ids"][name] for name in names]))
