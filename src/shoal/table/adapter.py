"""`AdapterGroup`: any table with ``lookup`` and ``apply_gradients`` as a group; the reference for all other groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError, UnsupportedError
from shoal.table.pooling import joined, pool_columns
from shoal.table.protocol import CPU, EVERY, Features, Found, Missing, Part, Step, Traits


class AdapterGroup:
    """One table, used only through its public methods. The row of a missing id is what the table's ``lookup`` returns.

    The table's attribute ``accepts`` lists the keywords that its ``apply_gradients`` takes besides ``ids``, ``grads``
    and ``global_step``: ``req_time`` (seconds), ``enable_dedup``, or both. A table without ``enable_dedup`` gets
    distinct ids.
    """

    def __init__(self, tables: tuple[Any, ...]) -> None:
        (self._table,) = self.tables = tables
        self.dim = int(self._table.dim_size)
        self._accepts = frozenset(getattr(self._table, "accepts", ()))
        self.traits = Traits(device=torch.device(getattr(self._table, "device", None) or CPU), pools=EVERY)

    def find(self, ids: Tensor, counts: Tensor, features: Features, *, missing: Missing) -> Found:
        return Found(ids, counts, ids.new_empty(0), ids.new_empty(0))

    def rows(self, found: Found, features: Features, *, missing: Missing) -> Tensor:
        if features.padding is None:
            return self._table.lookup(found.ids)
        keep = found.ids != features.padding
        out = torch.zeros(found.ids.numel(), self.dim, device=found.ids.device)
        out[keep] = self._table.lookup(found.ids[keep])
        return out

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
        pool_columns(self.rows(found, features, missing=missing), found, features, offsets, weights, out, marks)

    def update(self, parts: Sequence[Part], *, step: Step, each: Literal["sum", "occurrence"] = "sum") -> None:
        ids, grads = joined(parts, self.dim)
        if step.lr_scale is not None and float(step.lr_scale[0]) != 1.0:
            raise UnsupportedError(
                f"table {self._table.name!r} ({type(self._table).__name__}) sets its own learning rate; "
                "give it a schedule instead of changing lr here"
            )
        extra: dict[str, Any] = {}
        if step.time_s is not None and "req_time" in self._accepts:
            extra["req_time"] = step.time_s
        if each == "occurrence":
            if "enable_dedup" not in self._accepts:
                raise ConfigError(
                    f"table {self._table.name!r} cannot make one step per occurrence: its apply_gradients does not "
                    "accept enable_dedup"
                )
            extra["enable_dedup"] = False
        elif "enable_dedup" in self._accepts:
            extra["enable_dedup"] = True
        else:
            ids, place = torch.unique(ids, return_inverse=True)
            grads = grads.new_zeros(ids.numel(), self.dim).index_add_(0, place, grads)
        self._table.apply_gradients(ids, grads, int(step.number), **extra)
