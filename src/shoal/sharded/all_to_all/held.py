"""The whole tables and column slices that one rank holds, read and updated on behalf of every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.sharded.all_to_all.local import step_of
from shoal.table.protocol import Features, Found, Group, Missing, Part, Step, groups_of


class Bucket(NamedTuple):
    """The slices of one width that a rank holds; other ranks request them together."""

    width: int
    tables: tuple[int, ...]
    """The tables' numbers in the group."""
    begins: tuple[int, ...]
    """The first column of each table's slice."""


class Wired(NamedTuple):
    """The features of a batch that a bucket serves."""

    order: list[int]
    """The features of its tables, table after table."""
    pooled: Features
    """Those features, pooled into adjacent columns."""
    rows: Features
    """The tables as features without pooling: one row per id."""

    @staticmethod
    def of(bucket: Bucket, features: Features) -> Wired:
        order = [f for k in bucket.tables for f, table in enumerate(features.tables) if table == k]
        columns = tuple(i * bucket.width for i in range(len(order)))
        tables = tuple(bucket.tables.index(features.tables[f]) for f in order)
        kinds = tuple(features.combiners[f] for f in order) if features.combiners else ()
        pooled = Features(tables, kinds, columns if kinds else (), len(order) * bucket.width)
        return Wired(order, pooled, Features(tuple(range(len(bucket.tables)))))


class Asked(NamedTuple):
    """One rank's request to one bucket: ids by table, and the offsets of their bags if it wants bags."""

    ids: Tensor
    counts: list[int]
    """The number of ids per table."""
    bags: int
    """The number of bags per feature; -1 if rows are requested."""
    offsets: Tensor | None
    """int64 ``[F * B + 1]``."""


class _GroupShare(NamedTuple):
    """The part of a bucket that one local group serves."""

    group: Group
    places: list[int]
    whole: bool
    """Whether that is the whole bucket."""


class Held:
    """One bucket of this rank. Local tables that differ in kind form several groups; usually there is one."""

    def __init__(self, bucket: Bucket, tables: Sequence[Any]) -> None:
        self.bucket = bucket
        found = groups_of([tables[k].table for k in bucket.tables])
        self._parts = [_GroupShare(group, places, len(found) == 1) for group, places in found]
        self.device = found[0][0].traits.device
        self.trains = all(group.traits.trains for group, _ in found)
        self.kept = 2 * len(found)
        """The number of tensors that a find keeps per requesting rank."""

    def find(self, wired: Wired, asked: Asked, *, missing: Missing) -> list[Tensor]:
        kept: list[Tensor] = []
        for part in self._parts:
            ids, counts, _, features = self._own(part, wired, asked)
            found = part.group.find(ids, counts, features, missing=missing)
            kept += [found.where, found.came]
        return kept

    def pooled(self, wired: Wired, asked: Asked, kept: Sequence[Tensor], out: Tensor, *, missing: Missing) -> None:
        """Write bags to ``out``, which must be contiguous, ``[B, F * width]``."""
        for part, found, offsets, features in self._founds(wired, asked, kept):
            assert offsets is not None
            part.group.pooled(found, features, offsets, None, out, missing=missing)

    def rows(self, wired: Wired, asked: Asked, kept: Sequence[Tensor], out: Tensor, *, missing: Missing) -> None:
        """Write rows to ``out`` ``[n, width]``."""
        for part, found, _, features in self._founds(wired, asked, kept):
            rows = part.group.rows(found, features, missing=missing)
            if part.whole:
                out.copy_(rows)
                continue
            for to, own in zip(self._spans(out, asked, part), rows.split(self._counts(part, asked)), strict=True):
                to.copy_(own)

    def update(self, given: Sequence[tuple[Wired, Asked, Sequence[Tensor], Tensor, bool]], step: Step) -> None:
        """Make one step for every distinct id of one rank in several finds.

        Args:
            given: for each find its features, request, kept tensors, gradients, and whether these are of bags.
        """
        for number, part in enumerate(self._parts):
            parts = []
            for wired, asked, kept, grad, bags in given:
                if asked.ids.numel() == 0:
                    continue
                _, found, offsets, features = list(self._founds(wired, asked, kept))[number]
                if bags:
                    parts.append(Part(found, features, grad, offsets))
                else:
                    own = grad if part.whole else torch.cat(list(self._spans(grad, asked, part)))
                    parts.append(Part(found, features, own))
            if parts:
                own_step = step_of(step, [self.bucket.tables[place] for place in part.places])
                part.group.update(parts, step=own_step)

    def _founds(
        self, wired: Wired, asked: Asked, kept: Sequence[Tensor]
    ) -> Iterator[tuple[_GroupShare, Found, Tensor | None, Features]]:
        for number, part in enumerate(self._parts):
            ids, counts, offsets, features = self._own(part, wired, asked)
            yield part, Found(ids, counts, *kept[2 * number : 2 * number + 2]), offsets, features

    def _own(self, part: _GroupShare, wired: Wired, asked: Asked) -> tuple[Tensor, Tensor, Tensor | None, Features]:
        """The ids, counts, offsets and features of the part of a request that one local group serves."""
        if asked.offsets is None or asked.bags <= 0:
            counts = torch.tensor(self._counts(part, asked), dtype=torch.int64, device="cpu")
            ids = asked.ids if part.whole else torch.cat(list(self._spans(asked.ids, asked, part)))
            return ids, counts, asked.offsets, wired.rows if part.whole else Features(tuple(range(len(part.places))))
        counts = asked.offsets[:: asked.bags].diff()
        if part.whole:
            return asked.ids, counts, asked.offsets, wired.pooled
        own = [i for i, place in enumerate(wired.pooled.tables) if place in part.places]
        lengths = asked.offsets.diff().view(len(wired.order), asked.bags)[own]
        offsets = torch.cat([lengths.new_zeros(1), lengths.view(-1).cumsum(0)])
        features = Features(
            tuple(part.places.index(wired.pooled.tables[i]) for i in own),
            tuple(wired.pooled.combiners[i] for i in own), tuple(wired.pooled.columns[i] for i in own),
            wired.pooled.width,
        )  # fmt: skip
        return torch.cat(list(self._spans(asked.ids, asked, part))), counts[own], offsets, features

    def _counts(self, part: _GroupShare, asked: Asked) -> list[int]:
        return [asked.counts[place] for place in part.places]

    def _spans(self, flat: Tensor, asked: Asked, part: _GroupShare) -> Iterator[Tensor]:
        """The elements of one local group's tables in a tensor of all tables."""
        begins = [0, *itertools.accumulate(asked.counts)]
        for place in part.places:
            yield flat[begins[place] : begins[place + 1]]
