"""This rank's shard: rows that other ranks request, read and updated through the groups of the local tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.buffers import empty_flat
from shoal.table.protocol import Features, Found, Group, Missing, Part, Step, groups_of


class Local:
    """The local tables of a group. Ids come in W x K blocks: those of rank 0 by table, then those of rank 1, ..."""

    def __init__(self, tables: Sequence[Any], ranks: int) -> None:
        self._groups = groups_of(tables)
        self._features = [Features(tuple(range(len(places))) * ranks) for _, places in self._groups]
        self._count, self._ranks = len(tables), ranks
        self.dim: int = self._groups[0][0].dim
        self.device = self._groups[0][0].traits.device
        self.trains = all(group.traits.trains for group, _ in self._groups)

    def find(self, ids: Tensor, counts: Sequence[int], *, missing: Missing) -> list[Tensor]:
        """Find these ids; returns the tensors that the groups keep for reading and updating them."""
        kept: list[Tensor] = []
        for (group, places), features in zip(self._groups, self._features, strict=True):
            own, sizes = self._blocks(ids, counts, places)
            found = group.find(own, sizes, features, missing=missing)
            kept += [found.where, found.came]
        return kept

    def rows(self, ids: Tensor, counts: Sequence[int], kept: Sequence[Tensor], *, missing: Missing) -> Tensor:
        """The rows of the blocks, in order, as a flat float32 tensor."""
        parts = [
            (places, group.rows(found, features, missing=missing))
            for group, places, features, found in self._founds(ids, counts, kept)
        ]
        if len(parts) == 1:
            return parts[0][1].reshape(-1)
        size = ids.numel() * self.dim
        out = empty_flat(size) if self.device.type == "cpu" else torch.empty(size, device=self.device)
        for places, rows in parts:
            for to, part in zip(self._views(out, counts, places), self._split(rows, counts, places), strict=True):
                to.copy_(part.reshape(-1))
        return out

    def update(self, ids: Tensor, counts: Sequence[int], kept: Sequence[Tensor], flat: Tensor, step: Step) -> None:
        """Make one step per id and block: an id of several ranks gets several steps, in the order of the ranks."""
        for group, places, features, found in self._founds(ids, counts, kept):
            grads = flat if len(self._groups) == 1 else torch.cat(self._views(flat, counts, places))
            part = Part(found, features, grads.view(-1, self.dim))
            group.update([part], step=step_of(step, places), each="occurrence")

    def update_sums(self, finds: Sequence[tuple[Tensor, Sequence[int], Tensor]], step: Step) -> None:
        """Make one step per distinct id of one rank in several finds, on the tables of this process."""
        update_sums(self._groups, finds, step)

    def _founds(
        self, ids: Tensor, counts: Sequence[int], kept: Sequence[Tensor]
    ) -> list[tuple[Group, list[int], Features, Found]]:
        return [
            (group, places, self._features[g], Found(*self._blocks(ids, counts, places), *kept[2 * g : 2 * g + 2]))
            for g, (group, places) in enumerate(self._groups)
        ]

    def _blocks(self, ids: Tensor, counts: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The ids of the tables at ``places``, and their number in each block."""
        sizes = [counts[r * self._count + k] for r in range(self._ranks) for k in places]
        own = ids if len(self._groups) == 1 else torch.cat(self._views(ids, counts, places, width=1))
        return own, torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def _views(self, flat: Tensor, counts: Sequence[int], places: Sequence[int], width: int = 0) -> list[Tensor]:
        """The blocks of the tables at ``places``, as views of a buffer of all blocks."""
        width = width or self.dim
        begins = [0, *itertools.accumulate(counts)]
        blocks = (r * self._count + k for r in range(self._ranks) for k in places)
        return [flat[begins[b] * width : begins[b + 1] * width] for b in blocks]

    def _split(self, rows: Tensor, counts: Sequence[int], places: Sequence[int]) -> tuple[Tensor, ...]:
        return rows.split([counts[r * self._count + k] for r in range(self._ranks) for k in places])


def update_sums(
    groups: Sequence[tuple[Group, list[int]]], finds: Sequence[tuple[Tensor, Sequence[int], Tensor]], step: Step
) -> None:
    """Make one step per distinct id of one rank in several finds, given as ids, counts ``[K]`` and gradients."""
    for group, places in groups:
        features = Features(tuple(range(len(places))))
        parts = []
        for ids, counts, flat in finds:
            grads = flat.view(-1, group.dim)
            if len(groups) > 1:
                begins = [0, *itertools.accumulate(counts)]
                spans = [slice(begins[k], begins[k + 1]) for k in places]
                ids, grads = (torch.cat([values[span] for span in spans]) for values in (ids, grads))
            sizes = torch.tensor([counts[k] for k in places], dtype=torch.int64, device="cpu")
            parts.append(Part(group.find(ids, sizes, features, missing="initial"), features, grads))
        group.update(parts, step=step_of(step, places))


def step_of(step: Step, places: Sequence[int]) -> Step:
    """The step settings of the tables at ``places``."""
    if step.lr_scale is None:
        return step
    return Step(step.number, step.time_s, [float(step.lr_scale[k]) for k in places])
