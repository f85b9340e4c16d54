"""`loads_of`: the load of a model's steps on its tables, measured in a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.sharded.all_to_all.ways import uncuttable
from shoal.sharded.placement.model import TableLoad
from shoal.table.protocol import READS, Features, Group

GUESSED_BATCH = 1024
GUESSED_ROWS = 1_000_000


@dataclass
class _Counted:
    ids: int = 0
    distinct: int = 0
    bags: int = 0


def keepers_of(model: nn.Module) -> list[Any]:
    """The keepers of the model's tables. This layer cannot import `shoal.nn`, so any module with ``keepers`` counts."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "keepers")]
    return [keeper for module in modules for keeper in module.keepers()]


def tables_of(model: nn.Module) -> dict[str, Any]:
    """The tables of a model's modules, by name.

    Raises:
        ConfigError: two tables have the same name; a plan identifies tables by name.
    """
    found: dict[str, Any] = {}
    for keeper in keepers_of(model):
        if found.setdefault(keeper.name, keeper.table) is not keeper.table:
            raise ConfigError(
                f"tables of the model must have different names, got {keeper.name!r} twice; set them as in "
                "HashTable(dim, name='item')"
            )
    if not found:
        raise ConfigError("the model has no tables: none of its modules is a HashEmbedding, HashEmbeddingBag or "
                          "EmbeddingBagCollection")  # fmt: skip
    return found


def loads_of(model: nn.Module, step: Callable[[], Any] | None = None, *, steps: int = 10) -> list[TableLoad]:
    """The load of one rank's step on each table.

    ``step`` trains or evaluates the model on a batch; it is called ``steps`` times, by all ranks together if tables
    are spread over ranks. Without it, a batch of 1,024 samples with one id per table is assumed.
    """
    tables = tables_of(model)
    counted = {id(table): _Counted() for table in tables.values()}

    def watch(group: Group, ids: Tensor, sizes: list[int], features: Features, bags: int) -> None:
        for number, own in zip(features.tables, ids.split(sizes), strict=True):
            count = counted.get(id(group.tables[number]))
            if count is not None:
                count.ids += own.numel()
                count.distinct += torch.unique(own).numel()
                count.bags += bags or own.numel()

    if step is not None:
        READS.append(watch)
        try:
            for _ in range(steps):
                step()
        finally:
            READS.remove(watch)
        if not any(count.ids for count in counted.values()):
            raise ConfigError("step must run the model on a batch, but no table was read")
    found = []
    for name, table in tables.items():
        count = counted[id(table)]
        shape = getattr(table, "shape", table)
        rows = float(table.size()) if hasattr(table, "size") else 0.0
        if step is None:
            rows = rows or GUESSED_ROWS
            count, steps = _Counted(GUESSED_BATCH, math.ceil(min(rows, 0.8 * GUESSED_BATCH)), GUESSED_BATCH), 1
        found.append(
            TableLoad(
                name=name, dim=table.dim_size, rows=rows or count.distinct / steps, ids=count.ids / steps,
                distinct=count.distinct / steps, bags=count.bags / steps, optimizer=_optimizer(shape),
                cut=hasattr(shape, "table_config") and uncuttable(shape) is None,
                max_rows=getattr(shape, "max_rows", None) or 0.0, max_bytes=getattr(shape, "max_bytes", None) or 0.0,
            )
        )  # fmt: skip
    return found


def _optimizer(table: Any) -> str:
    config = getattr(table, "table_config", None)
    kind = config.entry_config.segments[0].opt_config.WhichOneof("type") if config is not None else None
    return kind or "sgd"
