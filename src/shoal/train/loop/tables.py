"""The tables of a run, in this process, over ranks or on servers, and the module that looks up batches in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor, nn

from shoal.comm.ranks.ranks import Ranks
from shoal.data.samples import Samples
from shoal.errors import ConfigError, DeadlineError, UnsupportedError
from shoal.nn.feature_rows import FeatureRows, Pooling
from shoal.nn.keeper import TableKeeper, keeper_of
from shoal.serving.export.features import ServedFeatures
from shoal.table.table import HashTable
from shoal.train.loop.checkpoint import Target
from shoal.train.loop.config import Config
from shoal.train.loop.table_config import PlannedTable, TableConfig

_AT_ONCE = timedelta(seconds=5)


class Rows(nn.Module):
    """Looks up the rows of samples' ids: ``[B, F, D]``, or ``[B, sum of widths]`` if features differ in width.

    The tables are in this process, over all ranks (which look up and update together), or on parameter servers.
    Backward updates the rows. Over ranks, a rank without samples must call `join_without_samples` instead.
    """

    def __init__(
        self, config: Config, ranks: Ranks, device: str = "cpu", note: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__()
        self.plan = config.tables()
        self.features = config.data.schema().sparse
        self.now_s = 0
        """The time of writes, from which rows expire."""
        self.client: Any = None
        self._targets: list[Target] = []
        self._ragged = bool(config.data.make_format().ragged)
        self.together = ranks.world_size > 1 and not config.train.ps
        self.tables = self._on_servers(config, note) if config.train.ps else self._in_process(config, ranks, device)
        clock = lambda: self.now_s  # noqa: E731 (one object, because only tables with the same clock share updates)
        for keeper in self.keepers():
            keeper.clock = clock
        self.pooling = pooling_of(config)
        self.lookup = FeatureRows(self.tables, self.pooling, ragged=self._ragged, fused=not config.train.defers)

    def _in_process(self, config: Config, ranks: Ranks, device: str) -> dict[str, Any]:
        """Create the tables in this process, or its shards of them."""
        made: dict[str, Any] = {}
        ways = ways_of(config, ranks) if self.together else {}
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

    def _on_servers(self, config: Config, note: Callable[[str], None]) -> dict[str, Any]:
        from shoal.sharded import PsClient, ps_table

        deadline = timedelta(seconds=config.train.ps_deadline_s)
        self.client = PsClient(_addresses(config.train.ps, config.train.ps_deadline_s), deadline=deadline)
        try:
            self._contact(note)
            return {
                one.config.name: ps_table(
                    self.client, one.config.dim, filter=one.config.filter(), seed=config.train.seed,
                    **one.config.arguments(),
                )
                for one in self.plan
            }  # fmt: skip
        except BaseException:
            self.client.close()
            raise

    def _contact(self, note: Callable[[str], None]) -> None:
        """Log a note about servers that do not answer at once."""
        try:
            self.client.info(min(_AT_ONCE, self.client.deadline))
        except DeadlineError as error:
            if self.client.deadline > _AT_ONCE:
                note(f"{str(error).partition(';')[0]}; waiting up to {self.client.deadline}")

    def forward(self, samples: Samples) -> Tensor:
        return self.lookup(samples)

    def keepers(self) -> list[TableKeeper]:
        """The keepers of the tables, in their order."""
        return [keeper_of(table) for table in self.tables.values()]

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
        if self.client is not None:
            return []
        return [table.table if self.together else table for table in self.tables.values()]

    def saved(self) -> list[HashTable]:
        """The complete rows that this rank saves, each row on one rank; all ranks must call it together."""
        if self.client is not None:
            return []
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

    # --- servers ------------------------------------------------------------------------------------------------------

    def keep_on_servers(self, name: str, others: list[str]) -> str | None:
        """Make the servers keep the current rows under ``name``, and those under ``others``; None if they cannot."""
        self.client.flush()
        try:
            self.client.checkpoint(keep_as=name, others=others)
        except UnsupportedError:  # a server without a directory
            return None
        return name

    def restore_on_servers(self, name: str) -> None:
        """Restore the rows on the servers that were kept under ``name``."""
        try:
            for table in self.tables:
                self.client.restore(table, name)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; start the servers with the --dir that they had, or continue with their current rows by "
                "--set train.ps_restore=false"
            ) from None
        self.client.checkpoint()  # so that recovery after a crash does not depend on the kept checkpoint

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


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


def pooling_of(config: Config) -> dict[str, Pooling]:
    """How the features of a run are pooled, in the order of the data."""
    where = {feature: one.config for one in config.tables() for feature in one.features}
    made = {}
    for feature in config.data.schema().sparse:
        own = config.table.of_feature(feature)
        table = where[feature]
        made[feature] = Pooling(table=table.name, dim=table.dim, combiner=own.combiner, max_length=own.length)
    return made


def served_features(config: Config) -> ServedFeatures:
    """How servers turn raw values into the model's inputs, as the run's reader does."""
    form, schema = config.data.make_format(), config.data.schema()
    if config.data.format in ("example", "example_batch"):  # their records contain ids
        schema = replace(schema, raw=True)
    separator = str(getattr(form, "separator", "") or "")
    lists = bool(getattr(form, "lists", False)) or (config.data.format == "tfrecord")
    lists = lists or (bool(form.ragged) and not separator and not schema.native().listed)
    return ServedFeatures(schema=schema, pooling=pooling_of(config), lists=lists, separator=separator)


def _about(one: PlannedTable) -> dict[str, Any]:
    config = one.config
    return {"name": config.name, "features": list(one.features), "dim": config.dim, "optimizer": config.optimizer}


def _filter(given: TableConfig) -> Any:
    from shoal.sharded.ps.server.table_spec import build_filter

    return build_filter(given.filter(), given.name)


def _addresses(given: Sequence[str], deadline_s: float) -> Sequence[str]:
    """The addresses of servers; a single ``REGISTRY#GROUP`` such as ``zk://host:2181#ctr`` gives those of the group."""
    registry, _, group = given[0].partition("#")
    if len(given) > 1 or not registry.startswith(("zk://", "dir:")):
        return given
    from shoal.serving.cluster.discovery.leaders import group_addresses

    return group_addresses(registry, group or "ps", deadline_s=deadline_s)
