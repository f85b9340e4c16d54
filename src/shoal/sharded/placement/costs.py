"""`Costs`: the cost of each part of a step on a machine, saved as JSON. `shoal plan --measure` measures them."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.errors import DataError

VERSION = 4
_TIMES, _WAITS = ("_fixed", "_per_dim", "_us", "_update"), ("link", "reduce", "ps_latency")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Nanoseconds on one core unless the name says otherwise. ``x_fixed + x_per_dim * dim`` is the cost of a row."""

    lookup_fixed: float
    lookup_per_dim: float
    update_fixed: float
    update_per_dim: float
    pool_fixed: float
    """Per id in a bag, forward and backward, in addition to the lookup and the update of its row."""
    pool_per_dim: float
    route_fixed: float
    """Per id that is sent to the rank that owns its row, in addition to its cost in one process: de-duplication,
    ordering, scatter and gather. This and the costs of other ways are measured in steps of small models over ranks."""
    route_per_dim: float
    row_overhead_bytes: float
    """Per row, in addition to weights and optimizer state."""
    dense_gflops: float
    dense_update: float
    """Per parameter in the dense optimizer's step."""
    step_us: float
    """The fixed cost of a step."""
    link_gb_per_s: float
    """Throughput of the all-to-all's software, per process."""
    link_latency_us: float
    """The time of an empty all-to-all."""
    reduce_gb_per_s: float
    """Throughput of an all-reduce of gradients by two processes."""
    reduce_latency_us: float
    """The time of an all-reduce of a few thousand values by two processes."""
    ps_gb_per_s: float
    """Throughput of a connection to a parameter server."""
    ps_latency_us: float
    """The time of one request, even for a single row."""
    bag_fixed: float = 20.0
    """Per id that is sent to the rank that holds the table, or a slice of it."""
    bag_per_dim: float = 8.0
    """Per column of a bag that this rank returns, and of its gradient."""
    held_share: float = 1.3
    """The cost of work on ids that other ranks request, relative to the same work in their own process."""
    held_us: float = 60.0
    """Per rank that requests rows of a table, or of a slice of it."""
    copy_fixed: float = 40.0
    """Per id of a table that every rank has: de-duplication for the update that is sent to all ranks."""
    copied_share: float = 1.3
    """The cost of applying another rank's update to such a table, relative to this rank's own."""
    copied_us: float = 60.0
    """Per other rank whose update a group of such tables applies."""
    ranks_us: float = 800.0
    """The fixed cost of a step over ranks."""
    peer_us: float = 20.0
    """Per rank beyond two, in the calls of one group."""
    group_us: float = 120.0
    """The fixed cost of a step's calls of one group of tables over ranks."""
    table_us: float = 40.0
    """The fixed cost of a step's calls of one table over ranks."""
    reduce_peer_us: float = 150.0
    """Per process beyond two in an all-reduce."""
    ps_fixed: float = 60.0
    """Per id that is sent to a parameter server."""
    merge_gb_per_s: float = 8.0
    """Throughput of joining and splitting the data of groups that share an exchange."""
    crowd: float = 0.05
    """How much each additional rank on a machine slows the others, which share memory and caches; 0.05 is 5 %."""
    load: float = 0.0
    """Other processes that wanted each CPU during the measurement, on average; above a few tenths, measure again."""
    machine: str = ""
    measured: str = ""

    def rows(self, what: str, dim: float) -> float:
        return getattr(self, f"{what}_fixed") + getattr(self, f"{what}_per_dim") * dim

    def rows_times(self, share: float) -> Costs:
        """These costs, with those of looking up, pooling and updating rows multiplied by ``share``."""
        names = [f"{what}_{part}" for what in ("lookup", "update", "pool") for part in ("fixed", "per_dim")]
        values: dict[str, Any] = {name: share * getattr(self, name) for name in names}
        return replace(self, **values)

    def beside(self, ranks: int) -> Costs:
        """The costs of each rank if ``ranks`` of them share a machine."""
        slower = 1 + self.crowd * (ranks - 1)
        times = [each.name for each in fields(self) if each.name.endswith(_TIMES) and not each.name.startswith(_WAITS)]
        values: dict[str, Any] = {name: getattr(self, name) * slower for name in times}
        return replace(self, **values, dense_gflops=self.dense_gflops / slower, crowd=0.0)


USUAL = Costs(
    lookup_fixed=32, lookup_per_dim=0.35, update_fixed=55, update_per_dim=1.0, pool_fixed=15, pool_per_dim=0.3,
    route_fixed=45, route_per_dim=0.9, row_overhead_bytes=24, dense_gflops=60, dense_update=0.5, step_us=60,
    link_gb_per_s=2.5, link_latency_us=90, reduce_gb_per_s=1.2, reduce_latency_us=200, ps_gb_per_s=1.5,
    ps_latency_us=250, machine="a usual server core", measured="assumed",
)  # fmt: skip
"""The costs that are assumed if none were measured; good for comparing ways, not for predicting seconds."""


def known_costs() -> Costs:
    """The costs that `shoal plan --measure` saved in the user's cache, or `USUAL`."""
    try:
        return load_costs(cache_path())
    except DataError:
        return USUAL


def cache_path() -> Path:
    """The file in which measured costs are saved."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "plan-costs.json"


def load_costs(path: Path) -> Costs:
    """Read the file that `save_costs` wrote; `DataError` if it is damaged or missing."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("costs"), dict):
        raise DataError(f"{path} does not hold costs of version {VERSION}; measure them with: shoal plan --measure")
    values = content["costs"]
    for each in fields(Costs):
        good = isinstance(values.get(each.name), str if str(each.type) == "str" else int | float)
        if not good and (each.name in values or each.default is MISSING):
            raise DataError(f"{path}: {each.name} is missing or not a number; measure again with: shoal plan --measure")
    return Costs(**{each.name: values[each.name] for each in fields(Costs) if each.name in values})


def prepare(path: Path) -> None:
    """Make the folder for a file of costs; ``OSError`` if the file could not be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def save_costs(costs: Costs, path: Path) -> None:
    from shoal.durable import write_whole

    prepare(path)
    write_whole(path, json.dumps({"format": "shoal.plan-costs", "version": VERSION, "costs": asdict(costs)}, indent=1))
