"""`shard`: replaces a model's tables with tables over ranks, spread according to a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from shoal.comm.ranks.ranks import AllToAll, Ranks, as_ranks
from shoal.errors import ConfigError, UnsupportedError
from shoal.sharded.all_to_all.backend import default_backend
from shoal.sharded.all_to_all.moving import empty_state, fill, like
from shoal.sharded.all_to_all.table import AllToAllHashTable
from shoal.sharded.all_to_all.ways import Way
from shoal.sharded.placement.loads import keepers_of, loads_of, tables_of
from shoal.sharded.placement.plan import Plan
from shoal.sharded.placement.planner import plan as make_plan
from shoal.table.checkpoint.tensors import table_state
from shoal.table.table import HashTable

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    plan: Plan | None = None,
    *,
    step: Callable[[], Any] | None = None,
    memory_gb: float | None = None,
    backend: AllToAll | None = None,
) -> M:
    """Replace the tables of a model with tables over all ranks, and return the model.

    All ranks must call it together, for example under ``torchrun``, with the same model. Rows are moved: those of rank
    0 for a local table, those of all ranks for a table that is already spread. Modules keep their settings; create a
    `SparseOptimizer` afterwards.

    >>> import shoal, torch
    >>> from shoal.nn import HashEmbeddingBag
    >>> from shoal.sharded import shard
    >>> model = torch.nn.Sequential(HashEmbeddingBag(shoal.HashTable(4, name="item")), torch.nn.Linear(4, 1))
    >>> shard(model)[0].table
    AllToAllHashTable('item', dim=4, row, rank 0 of 1)

    Args:
        plan: a result of `shoal.sharded.plan`, the same on all ranks. None: rank 0 makes one.
        step: trains the model on a batch, so that rank 0 can make a plan; called ten times on all ranks, before
            anything is replaced. Without it, one id per sample and table is assumed.
        memory_gb: the most memory for rows per rank in the plan that rank 0 makes.
        backend: the ranks; the default process group unless given.

    Raises:
        ConfigError: the plan is for other tables or another number of ranks, or the ranks have different plans.
        UnsupportedError: a table's rows are on servers, or a `SparseOptimizer` holds it. Nothing was replaced.
    """
    ranks = as_ranks(backend or default_backend())
    tables = tables_of(model)
    ranks.together(lambda: _check(model, tables))
    if plan is None:
        loads = loads_of(model, step)
        mine = [str(placed.way) for placed in make_plan(loads, ranks.world_size, memory_gb=memory_gb).tables]
        ways = dict(zip(tables, ranks.from_first(mine), strict=True))
    else:
        ways = _ways_of(plan, tables, ranks)
    replaced = {}
    for name, table in tables.items():
        replaced[id(table)] = _spread(table, Way.parse(ways[name]), ranks)
    for module in model.modules():
        if hasattr(module, "swap_tables"):
            module.swap_tables(replaced)  # pyrefly: ignore[not-callable]
    return model


def _ways_of(plan: Plan, tables: dict[str, Any], ranks: Ranks) -> dict[str, str]:
    def ways() -> dict[str, str]:
        if plan.ranks != ranks.world_size:
            raise ConfigError(
                f"the plan is for {plan.ranks} ranks, but there are {ranks.world_size}; make one with "
                f"shoal.sharded.plan(tables, {ranks.world_size})"
            )
        for name, table in tables.items():
            plan.way_of(name).check(name, table.dim_size, ranks.world_size, getattr(table, "shape", table))
        return {name: str(plan.way_of(name)) for name in tables}

    every = ranks.together(ways)
    if any(other != every[0] for other in every):
        different = next(rank for rank, other in enumerate(every) if other != every[0])
        raise ConfigError(
            f"ranks 0 and {different} have different plans; make the plan on one rank, save it, and load it on all"
        )
    return every[0]


def _check(model: nn.Module, tables: dict[str, Any]) -> list[str]:
    for name, table in tables.items():
        if not isinstance(table, HashTable | AllToAllHashTable):
            raise UnsupportedError(
                f"table {name!r} is a {type(table).__name__}, whose rows shard cannot move; build the model with "
                "shoal.HashTable"
            )
    for keeper in keepers_of(model):
        if keeper.held or keeper.pending.rows.came or keeper.pending.waiting:
            raise UnsupportedError(
                f"table {keeper.name!r} is held by a SparseOptimizer, which would step the table that shard replaces; "
                "make the optimizer after shard"
            )
    return list(tables)


def _spread(table: Any, way: Way, ranks: Ranks) -> AllToAllHashTable:
    """A table over ranks with the rows of ``table``."""
    shape: HashTable = getattr(table, "shape", table)
    if ranks.world_size == 1:
        return AllToAllHashTable(backend=ranks, way=way, factory=lambda _: table.table if table is not shape else table)
    made = AllToAllHashTable(backend=ranks, way=way, factory=lambda _: like(shape))
    if isinstance(table, AllToAllHashTable):
        state = table_state(table.own_rows())
    else:
        state = table_state(table) if ranks.first else empty_state(shape)
    fill(made, state)
    made.table.set_training_state(ranks.from_first(shape.training_state()))
    return made
