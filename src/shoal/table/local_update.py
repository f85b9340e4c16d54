"""The update of a group of CPU tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.table.adapter import row_gradients
from shoal.table.arguments import as_time
from shoal.table.protocol import Part, Step

if TYPE_CHECKING:
    from shoal.table.local import LocalGroup


def update(group: LocalGroup, parts: Sequence[Part], step: Step, each: Literal["sum", "occurrence"]) -> None:
    """`shoal.table.protocol.Group.update`, table by table."""
    ids: list[list[Tensor]] = [[] for _ in group.tables]
    grads: list[list[Tensor]] = [[] for _ in group.tables]
    for part in parts:
        sizes = part.found.counts.tolist()
        rows = row_gradients(part, group.dim)
        for table, own, grad in zip(part.features.tables, part.found.ids.split(sizes), rows.split(sizes), strict=True):
            if part.features.padding is not None:
                keep = own != part.features.padding
                own, grad = own[keep], grad[keep]
            ids[table].append(own)
            grads[table].append(grad)
    for table, of_table in zip(group.tables, grads, strict=True):
        if table.on_bad_gradient == "raise" and not all(bool(torch.isfinite(grad).all()) for grad in of_table):
            raise ConfigError(f"table {table.name!r}: a gradient holds NaN or infinity; nothing was applied")
    for place, table in enumerate(group.tables):
        if not ids[place]:
            continue
        number = int(step.number)
        scale = 1.0 if step.lr_scale is None else float(step.lr_scale[place])
        rates = [rate * scale for rate in table.rates(number)]
        time = as_time(step.time_s, table.name, clocked=table.clocked)
        own, grad = torch.cat(ids[place]), torch.cat(grads[place]).contiguous()
        table._apply(own, grad, rates, number, each == "sum", time)
