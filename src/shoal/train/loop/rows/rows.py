"""The tables of a run, and the module that looks up batches in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shoal.comm.ranks.ranks import Ranks
from shoal.data.samples import Samples
from shoal.errors import ConfigError
from shoal.nn.feature_rows import FeatureRows
from shoal.nn.keeper import TableKeeper, keeper_of
from shoal.stamps import Stamp
from shoal.table.table import HashTable
from shoal.train.loop.checkpoint import Target
from shoal.train.loop.config import Config
from shoal.train.loop.progress import Progress
from shoal.train.loop.rows.exported import ExportedRows
from shoal.train.loop.rows.features import pooling_of
from shoal.train.loop.table_config import PlannedTable, TableConfig

if TYPE_CHECKING:
    from shoal.train.loop.rows.writes import NamedWrites


class Rows(nn.Module):
    """Looks up the rows of samples' ids: ``[B, F, D]``, or ``[B, sum of widths]`` if features differ in width.

    The tables are in this process or over all ranks, which look up and update together; `ServerRows` has those on
    parameter servers. Backward updates the rows. Over ranks, a rank without samples must call `join_without_samples`
    instead.
    """

    remote = False
    """Whether rows are in other processes, so that they outlive this one."""

    def __init__(
        self, config: Config, ranks: Ranks, device: str = "cpu", note: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__()
        self.plan = config.tables()
        self.features = config.data.schema().sparse
        self.now_s = 0
        """The time of writes, from which rows expire."""
        self._config, self._ranks, self._note = config, ranks, note
        self._expires = config.expires()
        self._targets: list[Target] = []
        self._ragged = bool(config.data.make_format().ragged)
        self.together = self._over_ranks()
        self.tables = self._make(device)
        clock = lambda: self.now_s  # noqa: E731 (one object, because only tables with the same clock share updates)
        for keeper in self.keepers():
            keeper.clock = clock
        self.pooling = pooling_of(config)
        self.lookup = FeatureRows(self.tables, self.pooling, ragged=self._ragged, fused=not config.train.defers)

    def _over_ranks(self) -> bool:
        """Whether the tables are distributed over ranks."""
        return self._ranks.world_size > 1

    def _make(self, device: str) -> dict[str, Any]:
        """Create the tables in this process, or its shards of them."""
        made: dict[str, Any] = {}
        config = self._config
        ways = ways_of(config, self._ranks) if self.together else {}
        for one in self.plan:
            name = one.config.name
            options: dict[str, Any] = {
                "hash_filter": _filter(one.config), "seed": config.train.seed, "device": device,
                **one.config.arguments(),
            }  # fmt: skip
            if not self.together:
                made[name] = HashTable(one.config.dim, **options)
                continue
            from shoal.sharded import AllToAllHashTable

            made[name] = AllToAllHashTable(one.config.dim, way=ways[name], **options)
        return made

    def forward(self, samples: Samples) -> Tensor:
        return self.lookup(samples)

    def keepers(self) -> list[TableKeeper]:
        """The keepers of the tables, in their order."""
        return [keeper_of(table) for table in self.tables.values()]

    def set_time(self, samples: Samples, started_s: int) -> None:
        """Set the time of the next writes: that of the newest sample, else the current time, or the run's start.

        Args:
            started_s: when the run was started first. Used if neither samples have times nor rows expire, so that
                equal runs write equal rows.
        """
        if not len(samples):
            return
        if samples.time is not None:
            self.now_s = max(self.now_s, int(samples.time.max()))
        else:
            self.now_s = int(time.time()) if self._expires else started_s

    # --- all ranks together -------------------------------------------------------------------------------------------

    def join_without_samples(self, *, learn: bool, samples: Samples | None = None) -> None:
        """Join the other ranks' step without samples; ``samples`` is an empty batch, if there is one."""
        if self.together:
            rows = self(self.no_samples() if samples is None else samples)
            if learn:
                rows.sum().backward()

    def no_samples(self) -> Samples:
        """An empty batch, without dense columns."""
        return Samples.empty(0, len(self.features), ragged=self._ragged)

    # --- rows and sizes -----------------------------------------------------------------------------------------------

    @property
    def local(self) -> list[HashTable]:
        """The tables in this process; empty if rows are on servers."""
        return [table.table if self.together else table for table in self.tables.values()]

    def saved(self) -> list[HashTable]:
        """The complete rows that this rank saves, each row on one rank; all ranks must call it together."""
        return [table.own_rows() if self.together else table for table in self.tables.values()]

    def published(self) -> list[HashTable]:
        """The rows that this rank sends to replicas."""
        if any(way.startswith("column") for way in self.ways()):
            raise ConfigError(
                '[table] shard must be "row" or "table" when rows are pushed, got "column": no rank has complete rows'
            )
        return self.saved()

    def ways(self) -> list[str]:
        """How each table is distributed over ranks; empty if none is."""
        return [str(table.way) for table in self.tables.values()] if self.together else []

    def targets(self) -> list[Target]:
        """The targets for loading a checkpoint's rows, in the tables' order; call `loaded` afterwards."""
        if not self.together:
            return [Target(table) for table in self.local]
        self._targets = [target_of(table) for table in self.tables.values()]
        return self._targets

    def loaded(self) -> None:
        """Distribute the rows that were loaded for tables by column; all ranks must call it together."""
        from shoal.sharded.all_to_all.moving import fill
        from shoal.table.checkpoint.tensors import table_state

        for table, target in zip(self.tables.values(), self._targets, strict=False):
            if target.table is not table.table:
                fill(table, table_state(target.table))
        self._targets = []

    def describe(self) -> list[dict[str, Any]]:
        """Name, features, dim, optimizer and number of rows of every table; all ranks must call it together."""
        sizes = self.sizes()
        return [_about(one) | {"rows": sizes[one.config.name]} for one in self.plan]

    def sizes(self) -> dict[str, int | None]:
        """The number of rows of each table on all ranks or servers; all ranks must call it together."""
        return {name: table.size() if hasattr(table, "size") else None for name, table in self.tables.items()}

    def size(self) -> int | None:
        """The number of rows of all tables."""
        sizes = list(self.sizes().values())
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def bytes(self) -> dict[str, int]:
        """Memory of each table in this process."""
        here = self.local
        return {name: here[place].memory_bytes() if here else 0 for place, name in enumerate(self.tables)}

    def steps(self) -> dict[str, int]:
        """The number of updates of each table so far."""
        return {name: keeper.global_step for name, keeper in zip(self.tables, self.keepers(), strict=True)}

    def set_steps(self, steps: Mapping[str, int]) -> None:
        for name, keeper in zip(self.tables, self.keepers(), strict=True):
            keeper.global_step = steps[name]

    def evict(self) -> bool:
        """Remove expired rows in this process; return whether rows can expire."""
        expire = [
            table for one, table in zip(self.plan, self.local, strict=False) if one.config.expire_after is not None
        ]
        for table in expire:
            table.evict()
        return bool(expire)

    # --- what differs on servers --------------------------------------------------------------------------------------

    @property
    def pushing_ranks(self) -> int:
        """The number of ranks that push rows to replicas, counted from the first."""
        return self._ranks.world_size

    def publications(self, model: str, registry: str, *, every_s: float, paced: bool) -> list[Any]:
        """Start the pushes of rows that are not in this process."""
        return []

    def exported(self) -> list[ExportedRows]:
        """The rows that this rank exports; all ranks must call it together."""
        return [ExportedRows(table) for table in self.saved()]

    def stamps(self, stamp: Stamp) -> dict[str, Stamp]:
        """The stamps of rows and weights by their source, ``stamp`` being that of this run."""
        world = self._ranks.world_size
        return {source_name(rank, world): stamp for rank in range(world)}

    def keep(self, name: str, checkpoints: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
        """Keep the rows that a checkpoint does not hold, under ``name``; all ranks must call it together.

        Args:
            name: a name of its own for each checkpoint.
            checkpoints: the contents of the manifests of all checkpoints, whose rows stay kept.

        Returns:
            What the checkpoint's manifest must hold to restore them.
        """
        return {}

    def can_restore(self, content: Mapping[str, Any]) -> bool:
        """Whether the rows of a checkpoint can be restored, which it does not hold itself."""
        return True

    def restore(self, path: str, content: Mapping[str, Any]) -> None:
        """Restore the rows that the checkpoint does not hold; all ranks must call it together."""

    def name_writes(self, reader: dict[str, Any], at: Progress, *, resumed: bool) -> NamedWrites | None:
        """Name this rank's updates, if other runs may write to the same rows; else None."""
        return None

    def records(self, records: Sequence[Any] | None) -> AbstractContextManager[Any]:
        """Name the updates inside it by their records, if they have any."""
        return nullcontext()

    def close(self) -> None:
        """Close the connections to servers."""


def source_name(rank: int, world: int) -> str:
    """The name of a rank as a source of rows, in exports and pushes. Rank 0 is also the source of the weights."""
    return "trainer" if world == 1 else f"trainer_{rank}"


def target_of(table: Any) -> Target:
    """The loading target of a table over ranks; by column it is a separate table, distributed after loading."""
    from shoal.sharded.all_to_all.moving import like

    way = table.way
    if way.kind == "column":
        return Target(like(table.shape, device="cpu"), str(way))
    holds = table.rank in way.holders(table.world_size)
    return Target(table.table, str(way), every=way.kind != "row", empty=not holds)


def ways_of(config: Config, ranks: Ranks) -> dict[str, str]:
    """How each table is distributed over ranks; rank 0 plans tables with ``shard = "auto"``."""
    tables = config.tables()
    ways = {one.config.name: one.config.shard for one in tables}
    if "auto" not in ways.values():
        return ways
    from shoal.sharded import TableLoad, plan

    batch = config.train.batch_size
    loads = [
        TableLoad(
            name=one.config.name, dim=one.config.dim, rows=1e6, ids=batch * len(one.features),
            distinct=0.7 * batch * len(one.features), bags=batch * len(one.features), optimizer=one.config.optimizer,
        )
        for one in tables
    ]  # fmt: skip
    made = plan(loads, ranks.world_size)
    planned = {name: str(made.way_of(name)) if way == "auto" else way for name, way in ways.items()}
    return ranks.from_first(planned)


def _about(one: PlannedTable) -> dict[str, Any]:
    config = one.config
    return {"name": config.name, "features": list(one.features), "dim": config.dim, "optimizer": config.optimizer}


def _filter(given: TableConfig) -> Any:
    from shoal.sharded.ps.server.table_spec import build_filter

    return build_filter(given.filter(), given.name)
