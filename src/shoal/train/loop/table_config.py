"""``[table]`` and ``[table.features.NAME]``: the tables of a run, and the features that each of them serves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from shoal.errors import ConfigError, did_you_mean
from shoal.sharded.all_to_all.ways import Way
from shoal.table.config.durations import bytes_of
from shoal.table.config.optim import ROW_OPTIMIZERS

Combiner = Literal["sum", "mean", "sqrtn", "max", "firstn"]
Initializer = Literal["uniform", "zeros", "ones"]


def at_least(section: str, values: object, **limits: float) -> None:
    """Check the numbers in a section (an object or a dict) against lower limits; None means not set."""
    for name, least in limits.items():
        value = values[name] if isinstance(values, dict) else getattr(values, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"[{section}] {name} must be at least {least:g}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """``[table.features.NAME]``: settings of one feature that differ from ``[table]``.

    With any setting other than ``combiner``, ``max_length`` and ``table`` the feature has its own table.
    """

    dim: int | None = None
    combiner: Combiner | None = None
    max_length: int | None = None
    optimizer: str | None = None
    """If it differs from that of ``[table]``, the ``optimizer_options`` there do not apply."""
    lr: float | None = None
    optimizer_options: dict[str, Any] | None = None
    initializer: Initializer | None = None
    init_scale: float | None = None
    expire_after: str | None = None
    """Use ``"never"`` if ``[table]`` has an expiry and this feature should have none."""
    max_rows: int | None = None
    max_bytes: int | str | None = None
    evict: str | None = None
    admit_after: int | None = None
    admit_capacity: int | None = None
    shard: str | None = None
    """As in ``[table]``."""
    table: str | None = None
    """Another feature whose rows this one uses; equal categories of the two features share a row."""

    def of_table(self) -> dict[str, Any]:
        """The given settings that require a separate table."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _OF_FEATURES}
        return {name: value for name, value in own.items() if value is not None}


_OF_FEATURES = ("combiner", "max_length", "table")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """``[table]``: the table of all features that have no separate one."""

    name: str = "features"
    dim: int = 16
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the rows. ``"cuda"`` keeps index, weights and optimizer state in GPU memory."""
    optimizer: str = "adagrad"
    """Any row optimizer: adagrad, adam, sgd, ftrl, rowwise_adagrad, …"""
    lr: float = 0.05
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    """Further settings of the optimizer, such as ``betas``."""
    initializer: Initializer = "uniform"
    init_scale: float = 0.01
    """With ``uniform``, new rows are drawn from [-init_scale, init_scale)."""
    combiner: Combiner = "sum"
    """How the rows of a feature with many ids become one; ``firstn`` concatenates the first ``max_length`` rows."""
    max_length: int | None = None
    """Number of rows that ``firstn`` concatenates."""
    expire_after: str | None = None
    """Text such as 30d or 12h: rows that were not updated for this long are removed at checkpoints."""
    max_rows: int | None = None
    """Maximum number of rows of each table, on each rank and server; at the limit ``evict`` chooses rows to remove."""
    max_bytes: int | str | None = None
    """Maximum size of each table, index and rows, on each rank and server: a number of bytes or text such as 8GiB."""
    evict: str | None = None
    """lru (the default), slru, lfu, epoch_lru or epoch_lfu: which rows are removed from a full table. An epoch is a
    day."""
    admit_after: int = 0
    """An id gets a row once it was seen in training more often than this (at most 14); until then its row is zeros.
    Raise it when ids that occur once fill the memory."""
    admit_capacity: int = 10_000_000
    """The number of ids whose occurrences are counted, approximately, in 2.8 bytes each, on each rank and server; the
    oldest are forgotten."""
    shard: str = "row"
    """How rows are distributed over the ranks of ``torchrun`` or ``shoal launch``: ``"row"``, ``"table"`` or
    ``"table:3"`` (all on one rank), ``"column"``, ``"data"`` (all rows on every rank, for small tables), ``"auto"``."""
    features: dict[str, FeatureConfig] = field(default_factory=dict)
    """Settings that differ for some features."""

    def __post_init__(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        _check("table", given)
        for name in self.features:
            _check(f"table.features.{name}", {**given, **self._changes(name)})

    def of_feature(self, name: str) -> TableConfig:
        """The settings of one feature: its own, and those of ``[table]`` for the rest."""
        return replace(self, features={}, **self._changes(name))

    def _changes(self, name: str) -> dict[str, Any]:
        """The settings of a feature that differ from ``[table]``."""
        given = self.features.get(name, FeatureConfig())
        changes = given.of_table()
        if given.combiner not in (None, "firstn"):
            changes["max_length"] = None
        changes |= {key: value for key in ("combiner", "max_length") if (value := getattr(given, key)) is not None}
        if given.optimizer not in (None, self.optimizer):
            changes.setdefault("optimizer_options", {})
        if changes.get("expire_after") == "never":
            changes["expire_after"] = None
        return changes

    @property
    def length(self) -> int:
        """The number of rows that a feature concatenates: ``max_length`` with firstn, else 1."""
        return self.max_length or 1

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `shoal.HashTable`, and of tables over ranks and on servers."""
        from shoal.table.config.initializers import OnesInitializer, RandomUniformInitializer, ZerosInitializer

        scale = self.init_scale
        initializer: Any = OnesInitializer() if self.initializer == "ones" else ZerosInitializer()
        if self.initializer == "uniform" and scale:
            initializer = RandomUniformInitializer(-scale, scale)
        return {
            "optimizer": _row_optimizer("table", self.optimizer, self.optimizer_options, self.lr),
            "initializer": initializer,
            "expire_after": self.expire_after,
            "name": self.name,
            **self.budget(),
        }

    def budget(self) -> dict[str, Any]:
        """The keyword arguments of `shoal.HashTable` that limit its size; empty for no limit."""
        if self.max_rows is None and self.max_bytes is None:
            return {}
        from shoal.table.budget.policies import EpochLfu, EpochLru

        epochs = {"epoch_lru": EpochLru(every="1d"), "epoch_lfu": EpochLfu(every="1d")}
        return {
            "max_rows": self.max_rows, "max_bytes": self.max_bytes,
            "evict": epochs.get(self.evict or "lru", self.evict or "lru"),
        }  # fmt: skip

    def filter(self) -> dict[str, Any] | None:
        """The admission filter, as `shoal.sharded.ps_table` takes it."""
        if not self.admit_after:
            return None
        from shoal.table.config.messages import SlotOccurrenceThresholdConfig

        thresholds = SlotOccurrenceThresholdConfig(default_occurrence_threshold=self.admit_after)
        return {
            "type": "sliding_hash_filter", "capacity": self.admit_capacity, "split_num": 7,
            "config": thresholds.SerializeToString().hex(),
        }  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """The settings that a checkpoint's rows depend on; those newer than version 0.1 only if they are set."""
        free = ["features", "device", "lr", "expire_after", "max_rows", "max_bytes", "evict", "shard"]
        if not self.admit_after:
            free += ["admit_after", "admit_capacity"]
        if self.initializer == "uniform":
            free += ["initializer"]
        if self.max_length is None:
            free += ["max_length"]
        return {name: value for name, value in asdict(self).items() if name not in free}


def _check_budget(section: str, given: dict[str, Any]) -> None:
    at_least(section, given, max_rows=1)
    if given["max_bytes"] is not None:
        bytes_of(given["max_bytes"], f"[{section}] max_bytes")
    if given["evict"] is None:
        return
    policies = ["lru", "slru", "lfu", "epoch_lru", "epoch_lfu"]
    if given["evict"] not in policies:
        raise ConfigError(f"[{section}] evict must be one of {policies}, got {given['evict']!r}")
    if given["max_rows"] is None and given["max_bytes"] is None:
        raise ConfigError(f"[{section}] evict must be used with max_rows or max_bytes, which are not set")


def _check(section: str, given: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for invalid settings of a table, naming their section."""
    at_least(section, given, dim=1, lr=0, init_scale=0, admit_after=0, admit_capacity=1000, max_length=1)
    _check_budget(section, given)
    if given["admit_after"] > 14:
        raise ConfigError(f"[{section}] admit_after must be at most 14, got {given['admit_after']}")
    if given["combiner"] == "firstn" and given["max_length"] is None:
        raise ConfigError(
            f'[{section}] max_length must be set with combiner = "firstn", to the number of rows to concatenate'
        )
    if given["combiner"] != "firstn" and given["max_length"] is not None:
        raise ConfigError(f'[{section}] max_length must be used with combiner = "firstn", got {given["combiner"]!r}')
    _row_optimizer(section, given["optimizer"], given["optimizer_options"], given["lr"])
    if given["shard"] != "auto":
        try:
            Way.parse(given["shard"])
        except ConfigError as error:
            raise ConfigError(f'[{section}] shard must be "auto" or a valid way: {error}') from None


def _row_optimizer(section: str, name: str, options: dict[str, Any], lr: float) -> Any:
    if name not in ROW_OPTIMIZERS:
        known = ", ".join(sorted(ROW_OPTIMIZERS))
        raise ConfigError(
            f"[{section}] optimizer must be one of {known}, got {name!r}{did_you_mean(name, ROW_OPTIMIZERS)}"
        )
    make = ROW_OPTIMIZERS[name]
    takes = [one.name for one in fields(make) if one.name != "lr"]
    unknown = next((option for option in options if option not in takes), None)
    if unknown is not None:
        raise ConfigError(
            f"[{section}] optimizer_options: {name} has no setting {unknown!r}{did_you_mean(unknown, takes)}; it has "
            f"{', '.join(takes)}"
        )
    try:
        return make(lr=lr, **options)
    except TypeError as error:
        raise ConfigError(f"[{section}] optimizer_options {options}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """One table of a run."""

    config: TableConfig
    """The table's settings under its own name, with ``features`` empty."""
    features: tuple[str, ...]
    """The features that it serves, in the order of the data."""


def plan_tables(table: TableConfig, sparse: Sequence[str]) -> list[PlannedTable]:
    """The tables of a configuration: that of ``[table]`` first, then those of features in the order of the data.

    >>> given = TableConfig(features={"user": FeatureConfig(dim=32), "friends": FeatureConfig(table="user")})
    >>> [(one.config.name, one.config.dim, one.features) for one in plan_tables(given, ["user", "item", "friends"])]
    [('features', 16, ('item',)), ('features.user', 32, ('user', 'friends'))]
    """
    served: dict[str | None, list[str]] = {None: []}
    for name in sparse:
        served.setdefault(owner(table, name), []).append(name)
    made = []
    for own, features in served.items():
        if features or (own is None and len(served) == 1):
            config = replace(table, features={}) if own is None else table.of_feature(own)
            config = config if own is None else replace(config, name=f"{table.name}.{own}")
            made.append(PlannedTable(config=config, features=tuple(features)))
    return made


def lender(table: TableConfig, feature: str) -> str:
    """The feature whose rows a feature uses: itself, or the one that ``table = "…"`` names, directly or not."""
    seen = [feature]
    while (given := table.features.get(seen[-1])) is not None and given.table is not None:
        if given.table in seen:
            raise ConfigError(
                f"[table.features.{feature}] table must not form a cycle, got {' -> '.join([*seen, given.table])}"
            )
        seen.append(given.table)
    return seen[-1]


def owner(table: TableConfig, feature: str) -> str | None:
    """The feature whose own table contains a feature's rows; None for the table of ``[table]``."""
    last = lender(table, feature)
    return last if last in table.features and table.features[last].of_table() else None


def check_features(table: TableConfig, sparse: Sequence[str], slots: Mapping[str, int], raw: bool) -> None:
    """Raise ``ConfigError`` for ``[table.features]`` with unknown features or conflicts, also with ``[data] slots``."""
    for name, given in table.features.items():
        section = f"[table.features.{name}]"
        if name not in sparse:
            raise ConfigError(
                f"{section}: there is no feature {name!r}{did_you_mean(name, sparse)}; features are {_listed(sparse)}"
            )
        if given.table is None:
            continue
        if given.table not in sparse:
            raise ConfigError(
                f"{section} table must be another feature whose rows this one uses, got {given.table!r}"
                f"{did_you_mean(given.table, sparse)}; features are {_listed(sparse)}"
            )
        if own := given.of_table():
            raise ConfigError(
                f"{section} uses the rows of {given.table!r}, so {', '.join(own)} cannot be set here; set it in "
                f"[table.features.{lender(table, name)}]"
            )
        lender(table, name)
    for name in slots if not raw else ():
        twins = [
            other for other in sparse if other != name and slots.get(other, sparse.index(other) + 1) == slots[name]
        ]
        for other in twins:
            if name in sparse and owner(table, name) != owner(table, other):
                raise ConfigError(
                    f"[data] slots: {name!r} and {other!r} have the same slot, so they must share a table, but they "
                    f'do not; add [table.features.{name}] table = "{other}", or give {name!r} another slot'
                )


def shared_slots(table: TableConfig, sparse: Sequence[str], slots: Mapping[str, int]) -> dict[str, int]:
    """``slots``, completed for features that use another feature's rows, so that equal categories have equal ids."""
    lent = {name: lender(table, name) for name in table.features if table.features[name].table is not None}
    found = {name: slots.get(other, sparse.index(other) + 1) for name, other in lent.items()}
    return {**found, **slots}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:50]) + (", …" if len(names) > 50 else "")
