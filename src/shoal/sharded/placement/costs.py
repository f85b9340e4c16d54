"""`Costs`: what the pieces of a step cost on a machine, kept as JSON. `shoal plan --measure` measures them."""

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
    """An id in a bag, forward and backward, beyond the look-up and the update of its row."""
    pool_per_dim: float
    route_fixed: float
    """An id on its way to the rank that owns its row and back, beyond what it costs in one process: de-duplication,
    order, scatter and gather. This and the costs of other ways come from steps of small models over ranks."""
    route_per_dim: float
    row_overhead_bytes: float
    """Of a row, beyond weights and optimizer state."""
    dense_gflops: float
    dense_update: float
    """One parameter in the dense optimizer's step."""
    step_us: float
    """What a step costs however small it is."""
    link_gb_per_s: float
    """What the all-to-all's software moves, one process."""
    link_latency_us: float
    """One all-to-all of nothing."""
    reduce_gb_per_s: float
    """Gradients that an all-reduce of two processes sums."""
    reduce_latency_us: float
    """An all-reduce of a few thousand values by two processes."""
    ps_gb_per_s: float
    """What a parameter server's connection moves."""
    ps_latency_us: float
    """One request, however few rows it is about."""
    bag_fixed: float = 20.0
    """An id on its way to the rank that has the whole table, or a slice of it."""
    bag_per_dim: float = 8.0
    """A column of a bag that comes back from that rank, and of its gradient."""
    held_share: float = 1.3
    """The work on ids that other ranks ask for, over what it would be in their own process."""
    held_us: float = 60.0
    """Each rank that asks for a table, or for a slice of it."""
    copy_fixed: float = 40.0
    """An id of a table that every rank has: de-duplication for the update that is sent to all."""
    copied_share: float = 1.3
    """The update of other ranks' rows in such a table, over that of its own."""
    copied_us: float = 60.0
    """Each other rank whose update such a group of tables makes."""
    ranks_us: float = 800.0
    """A step over ranks, however few ids and tables there are."""
    peer_us: float = 20.0
    """Each further rank, beyond two, in the calls of one group."""
    group_us: float = 120.0
    """The calls of one group of tables over ranks in a step, however few ids there are."""
    table_us: float = 40.0
    """The calls of one table over ranks."""
    reduce_peer_us: float = 150.0
    """Each further process of an all-reduce, beyond two."""
    ps_fixed: float = 60.0
    """An id on its way to a parameter server and back."""
    merge_gb_per_s: float = 8.0
    """What is put together and taken apart where several groups share an exchange."""
    crowd: float = 0.05
    """How much slower each further rank makes the others on its machine, which share memory and caches: 0.05 is 5 %."""
    load: float = 0.0
    """How busy each CPU was with other work, as processes that wanted it; above some tenths, measure again later."""
    machine: str = ""
    measured: str = ""

    def rows(self, what: str, dim: float) -> float:
        return getattr(self, f"{what}_fixed") + getattr(self, f"{what}_per_dim") * dim

    def rows_times(self, share: float) -> Costs:
        """The costs with other ones of the rows of a table: looked up, pooled, updated."""
        names = [f"{what}_{part}" for what in ("lookup", "update", "pool") for part in ("fixed", "per_dim")]
        values: dict[str, Any] = {name: share * getattr(self, name) for name in names}
        return replace(self, **values)

    def beside(self, ranks: int) -> Costs:
        """The costs of each of several ranks on one machine."""
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
"""What is assumed where nothing was measured; good for comparing ways, not for predicting seconds."""


def known_costs() -> Costs:
    """The costs that `shoal plan --measure` left in the user's cache, or `USUAL`."""
    try:
        return load_costs(cache_path())
    except DataError:
        return USUAL


def cache_path() -> Path:
    """Where costs are kept between calls."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "plan-costs.json"


def load_costs(path: Path) -> Costs:
    """Raises `DataError` for a file that was not written by `save_costs`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("costs"), dict):
        raise DataError(f"{path} holds no costs, version {VERSION}; measure them with: shoal plan --measure")
    values = content["costs"]
    for each in fields(Costs):
        good = isinstance(values.get(each.name), str if str(each.type) == "str" else int | float)
        if not good and (each.name in values or each.default is MISSING):
            raise DataError(f"{path}: {each.name} is missing or no number; measure again with: shoal plan --measure")
    return Costs(**{each.name: values[each.name] for each in fields(Costs) if each.name in values})


def prepare(path: Path) -> None:
    """Makes the folder that costs will be written to; raises ``OSError`` where they cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def save_costs(costs: Costs, path: Path) -> None:
    from shoal.durable import write_whole

    prepare(path)
    write_whole(path, json.dumps({"format": "shoal.plan-costs", "version": VERSION, "costs": asdict(costs)}, indent=1))
