"""`AdapterGroup`: any table with ``lookup`` and ``apply_gradients`` as a group, and the judge of all other groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError, UnsupportedError
from shoal.table.protocol import CPU, MEAN, SQRTN, Features, Found, Missing, Part, Step, Traits


class AdapterGroup:
    """One table, reached through its public methods alone. An id that it lacks is what its ``lookup`` gives.

    ``accepts``, an attribute of the table, names the keywords that its ``apply_gradients`` takes beside ``ids``,
    ``grads`` and ``global_step``: of ``req_time`` (seconds) and ``enable_dedup`` (without which it gets distinct ids).
    """

    def __init__(self, tables: tuple[Any, ...]) -> None:
        (self._table,) = self.tables = tables
        self.dim = int(self._table.dim_size)
        self._accepts = frozenset(getattr(self._table, "accepts", ()))
        self.traits = Traits(device=torch.device(getattr(self._table, "device", None) or CPU))

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
    ) -> None:
        pool_columns(self.rows(found, features, missing=missing), found, features, offsets, weights, out)

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
                    f"table {self._table.name!r} makes one step per distinct id; it accepts no enable_dedup"
                )
            extra["enable_dedup"] = False
        elif "enable_dedup" in self._accepts:
            extra["enable_dedup"] = True
        else:
            ids, place = torch.unique(ids, return_inverse=True)
            grads = grads.new_zeros(ids.numel(), self.dim).index_add_(0, place, grads)
        self._table.apply_gradients(ids, grads, int(step.number), **extra)


# --- references: what the fused calls of other groups mean, in plain torch -------------------------------------------


def bag_of_ids(offsets: Tensor, n: int) -> Tensor:
    """int64 ``[n]``: the bag of each id."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=n)


def bag_factors(found: Found, features: Features, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """float32 ``[N]``: what each row is multiplied by in the sum that is its bag: 0 for padding."""
    n = found.ids.numel()
    bags = offsets.numel() - 1
    each = max(1, bags // max(1, len(features.tables)))
    keep = torch.ones(n, device=offsets.device) if features.padding is None else (found.ids != features.padding).float()
    bag = bag_of_ids(offsets, n)
    count = torch.zeros(bags, device=offsets.device).index_add_(0, bag, keep).clamp(min=1)
    kinds = torch.tensor(features.combiners, device=offsets.device)[torch.arange(bags, device=offsets.device) // each]
    divisor = torch.where(kinds == MEAN, count, torch.where(kinds == SQRTN, count.sqrt(), torch.ones_like(count)))
    factors = keep / divisor[bag]
    return factors if weights is None else factors * weights


def pool_columns(
    rows: Tensor, found: Found, features: Features, offsets: Tensor, weights: Tensor | None, out: Tensor
) -> None:
    """Pools rows ``[N, dim]`` into the features' columns of ``out``."""
    n, dim = rows.shape
    bags = offsets.numel() - 1
    sums = rows.new_zeros(bags, dim)
    sums.index_add_(0, bag_of_ids(offsets, n), rows * bag_factors(found, features, offsets, weights)[:, None])
    for column, part in zip(features.columns, sums.view(len(features.columns), -1, dim), strict=True):
        out[:, column : column + dim] = part


def row_gradients(part: Part, dim: int) -> Tensor:
    """``[N, dim]``: the gradient of each row of a part; zeros for padding."""
    if part.offsets is None:
        return part.grad
    features, found = part.features, part.found
    of_bags = torch.cat([part.grad[:, column : column + dim] for column in features.columns])
    factors = bag_factors(found, features, part.offsets, part.weights)
    return of_bags[bag_of_ids(part.offsets, found.ids.numel())] * factors[:, None]


def joined(parts: Sequence[Part], dim: int) -> tuple[Tensor, Tensor]:
    """The ids of all parts and the gradients of their rows, without padding."""
    ids, grads = [], []
    for part in parts:
        own, grad = part.found.ids, row_gradients(part, dim)
        if part.features.padding is not None:
            keep = own != part.features.padding
            own, grad = own[keep], grad[keep]
        ids.append(own)
        grads.append(grad)
    return torch.cat(ids), torch.cat(grads)
