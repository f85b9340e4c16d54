"""`FeatureRows`: looks up and pools the rows of samples, in the same way in training and in a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.nn.bag import HashEmbeddingBag
from shoal.nn.collection import EmbeddingBagCollection
from shoal.nn.combiners import FirstN
from shoal.nn.embedding import HashEmbedding
from shoal.nn.module import TableModule
from shoal.nn.read.asked import Asked, Located, located
from shoal.nn.read.refusal import notifies_ranks
from shoal.table.protocol import Group, Missing


class SampleIds(Protocol):
    """Ids of n samples with F features: ``ids`` ``[n, F]``, or ``[m]`` with ``offsets`` ``[n * F + 1]``."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor | None: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """A feature's table, and how the rows of several ids are pooled."""

    table: str
    dim: int
    combiner: str = "sum"
    max_length: int = 1
    """Number of rows that ``firstn`` puts side by side."""

    def combine(self) -> Any:
        """The combiner as an argument of modules."""
        return FirstN(self.max_length) if self.combiner == "firstn" else self.combiner


class FeatureRows(nn.Module):
    """Returns the rows of samples: ``[B, F, D]``, or ``[B, sum of widths]`` if features differ in width.

    Args:
        tables: tables by name.
        features: how each feature is pooled, in the order of the data.
        ragged: whether samples have offsets, so that a feature can have any number of ids.
    """

    def __init__(
        self, tables: Mapping[str, Any], features: Mapping[str, Pooling], *, ragged: bool, fused: bool = True
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self.dims = tuple(one.dim for one in features.values())
        self.lengths = tuple(one.max_length for one in features.values())
        self._equal = len(set(self.dims)) <= 1 and set(self.lengths) <= {1}
        kinds = {one.combiner for one in features.values()}
        table = next(iter(tables.values()))
        alike = len(tables) == 1 and self._equal
        self.single = HashEmbedding(table, fused=fused) if alike and not ragged else None
        self.bags = self.many = None
        if self.single is not None:
            return
        if alike and len(kinds) <= 1:
            self.bags = HashEmbeddingBag(table, combiner=next(iter(kinds), "sum"), fused=fused)
        else:
            self.many = EmbeddingBagCollection(
                dict(tables),
                {feature: one.table for feature, one in features.items()},
                combiner={feature: one.combine() for feature, one in features.items()},
                output="concat" if set(self.lengths) <= {1} else "dict",
                fused=fused,
            )

    @property
    def module(self) -> TableModule:
        """The module that reads the rows."""
        module = self.single or self.bags or self.many
        assert module is not None
        return module

    def missing(self) -> Missing:
        """Return how ids without a row are answered now: with zeros, or with their initial row."""
        return self.module.missing()

    def groups(self) -> list[Group]:
        """The groups of the tables."""
        return self.module.groups()

    @notifies_ranks
    def forward(self, samples: SampleIds | Located) -> Tensor:
        """Return the rows of samples, or of the result of `locate`."""
        if isinstance(samples, Located):
            return samples.result(self)
        return self._shaped(self.module(*self._arguments(samples)), len(samples))

    def locate(self, samples: SampleIds) -> Located:
        """Locate the ids of samples before their forward, which takes the result instead of the samples."""
        return located(self, lambda: self.ask(samples))

    def ask(self, samples: SampleIds) -> Asked:
        """Split a forward into its request and the computation of its result."""
        inner, n = self.module.ask(*self._arguments(samples)), len(samples)
        return Asked(inner.request, lambda outputs: self._shaped(inner.finish(outputs), n))

    def _arguments(self, samples: SampleIds) -> tuple[Any, ...]:
        if self.single is not None:
            return (samples.ids,)
        return (samples.ids, samples.offsets) if self.bags is not None else (Keyed.of(samples, self.features),)

    def _shaped(self, rows: Any, n: int) -> Tensor:
        count = len(self.features)
        if self.single is not None:
            return rows
        if self.bags is not None:
            return rows.view(n, count, self.dims[0] if self.dims else -1)
        if isinstance(rows, dict):
            rows = torch.cat([rows[feature].flatten(1) for feature in self.features], 1)
        return rows.view(n, count, self.dims[0]) if self._equal else rows


@dataclass(frozen=True, slots=True)
class Keyed:
    """Ids by feature in the order of a KeyedJaggedTensor: the bags of the first feature, then of the second, …"""

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor

    @staticmethod
    def of(samples: SampleIds, features: tuple[str, ...]) -> Keyed:
        """Reorder the ids of samples, which come sample by sample."""
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
