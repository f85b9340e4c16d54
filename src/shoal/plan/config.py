"""The input of `shoal plan`: tables, model and hosts, from a TOML file."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, did_you_mean
from shoal.table.config.durations import bytes_of

HOSTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """One table, or several identical ones."""

    name: str
    dim: int
    """Width of a row."""
    ids_per_sample: float
    """Ids that one sample looks up, on average."""
    ids_per_day: float
    """New ids per day, never seen before."""
    expire_days: float = 30.0
    """Days after which an id that was not seen again is removed."""
    optimizer: str = "adagrad"
    unique_share: float = 0.7
    """Distinct ids of a host's batch as a share of its ids; the rest are repeats."""
    count: int = 1
    """Number of such tables."""
    max_rows: float = 0.0
    """Maximum number of rows of each such table, over all hosts; 0 for no limit."""
    max_bytes: str = ""
    """Maximum size of each such table, over all hosts, such as 8GiB; empty for no limit."""

    def __post_init__(self) -> None:
        where = f"table {self.name!r}"
        _check(self, where, ("dim", "count"), 1)
        _check(self, where, ("ids_per_sample", "ids_per_day", "expire_days", "max_rows"), 0)
        if self.max_bytes:
            bytes_of(self.max_bytes, f"{where}: max_bytes")
        if not 0 < self.unique_share <= 1:
            raise ConfigError(f"{where}: unique_share must be above 0 and at most 1, got {self.unique_share:g}")

    @property
    def limited(self) -> bool:
        return bool(self.max_rows or self.max_bytes)

    @property
    def rows(self) -> float:
        """Rows of all ``count`` tables once ids expire as fast as new ones come, or the tables are full."""
        grown = self.ids_per_day * max(1.0, self.expire_days)
        return self.count * (min(grown, self.max_rows) if self.max_rows else grown)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The dense part and the stream."""

    batch: int = 4096
    """Samples per step on each host."""
    dense_parameters: float = 1_000_000
    flops_per_sample: float = 0.0
    """Operations of the dense part, forward and backward; by default 6 per parameter."""
    fused: bool = True
    """Whether all tables share one exchange per step, as the fused layouts do, instead of one exchange each."""
    step_ms: float = 0.0
    """Measured step time of the real model in one process on one host, the median of at least ten; estimates are
    scaled to it. 0 if unknown."""
    samples_per_day: float = 0.0
    """Samples that the stream brings; 0 if unknown."""

    def __post_init__(self) -> None:
        _check(self, "model", ("batch",), 1)
        _check(self, "model", ("dense_parameters", "flops_per_sample", "step_ms", "samples_per_day"), 0)

    @property
    def flops(self) -> float:
        return self.batch * (self.flops_per_sample or 6 * self.dense_parameters)


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host, and the network between hosts. These values are assumed, not measured."""

    cores: int = 16
    memory_gb: float = 128.0
    network_gbps: float = 25.0
    """Gigabits per second, each way."""
    latency_us: float = 30.0
    """One way, between two hosts."""
    dense_tflops: float = 0.0
    """TFLOP/s of a host's accelerators for the dense part; 0 if the cores compute it."""
    servers_per_worker: float = 0.5
    """Parameter servers per worker; each is a separate host."""
    hosts: tuple[int, ...] = HOSTS

    def __post_init__(self) -> None:
        _check(self, "host", ("cores",), 1)
        _check(self, "host", ("latency_us", "dense_tflops"), 0)
        for name in ("memory_gb", "network_gbps", "servers_per_worker"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"host: {name} must be above 0, got {getattr(self, name):g}")
        if not self.hosts or any(not 1 <= n <= 100_000 for n in self.hosts):
            raise ConfigError(f"host: hosts must be numbers from 1 to 100000, got {list(self.hosts)}")

    @property
    def bytes_per_second(self) -> float:
        return self.network_gbps * 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tables, model and hosts."""

    tables: tuple[TablePlan, ...]
    model: ModelPlan = field(default_factory=ModelPlan)
    host: HostPlan = field(default_factory=HostPlan)

    def __post_init__(self) -> None:
        if not self.tables:
            raise ConfigError("a plan must have at least one [[table]]")


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: the file cannot be read, or a setting in it is unknown, missing or invalid.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if unknown := sorted(set(content) - {"table", "model", "host"}):
        hint = did_you_mean(unknown[0], ("table", "model", "host"))
        raise ConfigError(f"{path}: there is no section [{unknown[0]}]{hint}; use [[table]], [model] and [host]")
    tables = content.get("table", [])
    if not isinstance(tables, list):
        raise ConfigError(f"{path}: write [[table]] with two brackets, because there can be several")
    try:
        return Plan(
            tables=tuple(_build(TablePlan, each, f"[[table]] {i + 1}") for i, each in enumerate(tables)),
            model=_build(ModelPlan, content.get("model", {}), "[model]"),
            host=_build(HostPlan, content.get("host", {}), "[host]"),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _build(kind: type, values: Any, where: str) -> Any:
    known = {each.name: each for each in fields(kind)}
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a table of settings, got {values!r:.40}")
    if unknown := sorted(set(values) - set(known)):
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"{where} has no setting {unknown[0]!r}{hint}; it has {', '.join(known)}")
    required = {"name", "dim", "ids_per_sample", "ids_per_day"} if kind is TablePlan else set()
    if missing := sorted(required - set(values)):
        raise ConfigError(f"{where}: {missing[0]} is missing")
    given = {}
    for name, value in values.items():
        wanted = str(known[name].type)
        if wanted in ("str", "bool"):
            good = isinstance(value, str if wanted == "str" else bool)
        elif wanted.startswith("tuple"):
            good = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value)
            value = tuple(value) if good else value
        else:
            good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            good = good and (wanted != "int" or value == int(value))
        if not good:
            raise ConfigError(f"{where}: {name} must be of type {wanted}, got {value!r:.40}")
        given[name] = int(value) if wanted == "int" else value
    return kind(**given)


def _check(config: Any, where: str, names: tuple[str, ...], least: float) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            raise ConfigError(f"{where}: {name} must be at least {least:g}, got {getattr(config, name):g}")
