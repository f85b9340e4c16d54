"""`SingleGroup`: GPU tables used through their own calls, for rows that the fused kernels do not support."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal.table.arguments import as_int
from shoal.table.cuda.judge import refuse_if
from shoal.table.pooling import pool_columns, row_gradients
from shoal.table.protocol import EVERY, Features, Found, Missing, Part, Step, Traits

if TYPE_CHECKING:
    from shoal.table.cuda.table import CudaHashTable


class SingleGroup:
    """Caches, and tables with an admission filter or with rounded, quantized or served rows. Waits for the device."""

    def __init__(self, tables: tuple[Any, ...]) -> None:
        self.tables: tuple[CudaHashTable, ...] = tables
        self.dim = tables[0].dim_size
        self._turn = threading.RLock()
        self.traits = Traits(
            device=tables[0].device, trains=not tables[0].serving, local_state=True, pools=EVERY,
            prefetches=all(hasattr(table, "prefetch") for table in tables),
        )  # fmt: skip

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        """Returns the ids themselves; rows are looked up when they are read."""
        return Found(ids, counts, ids.new_empty(0), ids.new_empty(0))

    def prefetch(self, ids: Tensor, counts: Tensor, features: Features) -> None:
        """Makes caches fetch the rows of ids."""
        if features.padding is not None:  # reads use other tensors, without padding
            return
        sizes = Found(ids, counts, ids, ids).sizes(features)
        for number, own in zip(features.tables, ids.split(sizes), strict=True):
            table: Any = self.tables[number]
            table.prefetch(own)

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        """As `Group.rows`."""
        sizes = found.sizes(features)
        out = []
        for number, ids in zip(features.tables, found.ids.split(sizes), strict=True):
            keep = None if features.padding is None else ids != features.padding
            table = self.tables[number]
            own = ids if keep is None else ids[keep]
            with self._turn:
                got = table.read(own, initial=missing == "initial")
            if keep is not None:
                rows = torch.zeros(ids.numel(), self.dim, device=ids.device)
                rows[keep] = got
                got = rows
            out.append(got)
        return torch.cat(out)

    def pooled(
        self,
        found: Found,
        features: Features,
        offsets: Tensor,
        weights: Tensor | None,
        out: Tensor,
        *,
        missing: Missing,
        marks: Tensor | None = None,
    ) -> None:
        """As `Group.pooled`."""
        pool_columns(self.rows(found, features, missing=missing), found, features, offsets, weights, out, marks)

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        """As `Group.update`."""
        self.tables[0].check_trains("update")
        ids: list[list[Tensor]] = [[] for _ in self.tables]
        grads: list[list[Tensor]] = [[] for _ in self.tables]
        for part in parts:
            sizes = part.found.sizes(part.features)
            rows = row_gradients(part, self.dim)
            for number, own, grad in zip(
                part.features.tables, part.found.ids.split(sizes), rows.split(sizes), strict=True
            ):
                if part.features.padding is not None:
                    keep = own != part.features.padding
                    own, grad = own[keep], grad[keep]
                ids[number].append(own)
                grads[number].append(grad)
        self._check(grads)
        scales = [1.0] * len(self.tables) if step.lr_scale is None else [float(x) for x in step.lr_scale]
        checked = []  # all of them first, because any table can refuse its step
        for table, own, grad, scale in zip(self.tables, ids, grads, scales, strict=True):
            if own:
                number = as_int(step.number, table.name, "step.number")
                table._check_step(number)
                rates = [scale * rate for rate in table.rates(number)]
                checked.append((table, own, grad, rates, number, table._time(step.time_s)))
        for table, own, grad, rates, number, seconds in checked:
            with self._turn:
                ids_of = torch.cat(own)
                scores = table._scores(ids_of, None, seconds)
                table._apply(ids_of, torch.cat(grad), rates, number, each == "sum", seconds, scores)

    def _check(self, grads: list[list[Tensor]]) -> None:
        """Raises for bad gradients of any table before the first of several is written."""
        if len(self.tables) > 1 and self.tables[0].on_bad_gradient == "raise":
            bad = sum(int((~torch.isfinite(grad)).any(1).sum()) for of in grads for grad in of)
            refuse_if(bad, f"tables {', '.join(table.name for table in self.tables[:3])}", "gradients")
