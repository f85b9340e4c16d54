"""Pooled rows of several tables side by side: batches by feature, and the module that looks them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.samples import Samples
from shoal.nn import HashEmbeddingBag
from shoal.nn.combiners import Combiner
from shoal.ops.ragged_ops import fused_value_rowids
from shoal.ragged import Ragged


@dataclass(frozen=True, slots=True)
class Keyed:
    """Ids by feature, as a KeyedJaggedTensor has them: the bags of the first feature, then those of the second, …"""

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor

    @staticmethod
    def of(samples: Samples, features: tuple[str, ...]) -> Keyed:
        """The ids of samples, which have them sample by sample."""
        n, count = len(samples), len(features)
        if samples.offsets is None:
            ids = samples.ids.t().reshape(-1)
            return Keyed(features, ids, torch.arange(ids.numel() + 1, device="cpu"))
        lengths = samples.offsets.diff().view(n, count).t().reshape(-1)
        starts = samples.offsets[:-1].view(n, count).t().reshape(-1)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(lengths, 0, out=offsets[1:])
        places = torch.repeat_interleave(starts - offsets[:-1], lengths)
        places += torch.arange(places.numel(), device="cpu")
        return Keyed(features, samples.ids[places], offsets)

    def only(self, keys: tuple[str, ...]) -> Keyed:
        """Some features of it."""
        if keys == self.keys:
            return self
        bags = (self.offsets.numel() - 1) // len(self.keys)
        values, offsets, end = [], [self.offsets.new_zeros(1)], 0
        for place in map(self.keys.index, keys):
            own = self.offsets[place * bags : (place + 1) * bags + 1]
            begin, stop = int(own[0]), int(own[-1])
            values.append(self.values[begin:stop])
            offsets.append(own[1:] + (end - begin))
            end += stop - begin
        return Keyed(keys, torch.cat(values), torch.cat(offsets))


class Collection(nn.Module):
    """Pooled rows ``[B, sum of widths]`` of features in several tables, side by side in the order of ``features``."""

    def __init__(
        self,
        tables: Mapping[str, Any],
        features: Mapping[str, str],
        *,
        combiner: Mapping[str, str],
        max_length: Mapping[str, int | None],
        fused: bool,
    ) -> None:
        super().__init__()
        self._features = tuple(features)
        self._parts: list[tuple[str, ...]] = []
        kinds: dict[tuple[str, str, int | None], list[str]] = {}
        for feature, table in features.items():
            kinds.setdefault((table, combiner[feature], max_length[feature]), []).append(feature)
        self._bags = nn.ModuleList()
        for (table, kind, length), own in sorted(kinds.items(), key=lambda one: list(tables).index(one[0][0])):
            self._parts.append(tuple(own))
            bag = HashEmbeddingBag(tables[table], combiner=pooling(kind), max_length=length, output="dict", fused=fused)
            self._bags.append(bag)

    def forward(self, batch: Keyed) -> Tensor:
        out: dict[str, Tensor] = {}
        for own, bag in zip(self._parts, self._bags, strict=True):
            part = batch.only(own)
            empty = part.offsets.numel() == 1  # of a rank that has no samples while others have
            out |= dict.fromkeys(own, bag(part.values, part.offsets)) if empty else bag(part)
        return torch.cat([out[feature].flatten(1) for feature in self._features], 1)


def pooling(name: str) -> Any:
    """A combiner by its name, as `HashEmbeddingBag` takes it."""
    return {"sqrtn": _Sqrtn(0), "max": _Max(0)}.get(name, name)


class _Sqrtn(Combiner):
    """The sum over the root of the number of rows."""

    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        counts = key.row_splits.diff().clamp(min=1).to(embedding.dtype)
        out = embedding.new_zeros(key.nrows(), embedding.shape[1])
        return out.index_add(0, fused_value_rowids(key), embedding) / counts.sqrt()[:, None]


class _Max(Combiner):
    """The largest value of each column; zeros where there is no row."""

    def combine(self, key: Ragged, embedding: Tensor, name: str | None = None) -> Tensor:
        rows = fused_value_rowids(key)[:, None].expand_as(embedding)
        out = embedding.new_zeros(key.nrows(), embedding.shape[1])
        return out.scatter_reduce(0, rows, embedding, "amax", include_self=False)
