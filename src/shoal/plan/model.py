"""Estimate the parts of a step on W hosts: a pure function of a plan and of costs.

Every host trains on ``batch`` samples per step. The parts of a step are assumed not to overlap, so a pipeline can only
be faster. Work on several cores is divided by their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.plan.config import Plan, TablePlan
from shoal.sharded.all_to_all.ways import Way
from shoal.sharded.placement.costs import Costs
from shoal.sharded.placement.model import FLOAT_BYTES, ID_BYTES, Links, Step, TableLoad, state_bytes
from shoal.sharded.placement.model import row_bytes as bytes_of_row
from shoal.sharded.placement.plan import Placement
from shoal.sharded.placement.plan import Plan as Sharding
from shoal.sharded.placement.planner import PlanError
from shoal.sharded.placement.planner import plan as make_sharding
from shoal.table.config.durations import bytes_of

__all__ = ["LAYOUTS", "Estimate", "estimate", "estimates", "row_bytes", "sharding_of", "state_bytes"]


LAYOUTS = ("all_to_all", "planned", "parameter_server")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate for one layout on one number of hosts."""

    layout: str
    hosts: int
    """Number of workers, without parameter servers."""
    servers: int
    seconds: dict[str, float]
    """Part of a step -> seconds on the slowest host."""
    step_s: float
    samples_per_s: float
    network_bytes: float
    """Bytes that a host sends per step."""
    memory_bytes: float
    """Memory used on a host that holds rows."""
    memory_share: float
    """Share of that host's memory; above 1 it does not fit."""
    bottleneck: str
    """The part that takes longest."""
    days_per_day: float | None = None
    """Days of the stream per day of training; below 1, training falls behind."""
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.memory_share <= 1.0

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


def row_bytes(table: TablePlan, costs: Costs) -> float:
    """Memory of a row."""
    return bytes_of_row(table.dim, table.optimizer, costs)


def held_bytes(table: TablePlan, costs: Costs) -> float:
    """Memory of all ``count`` tables, limited by their budgets."""
    grown = table.rows * row_bytes(table, costs)
    return min(grown, table.count * bytes_of(table.max_bytes, "max_bytes")) if table.max_bytes else grown


def loads_of_plan(plan: Plan, costs: Costs) -> list[TableLoad]:
    """The load that one host puts on each table in a step."""
    batch, found = plan.model.batch, []
    for table in plan.tables:
        ids = batch * table.ids_per_sample
        rows = held_bytes(table, costs) / row_bytes(table, costs) / table.count
        for number in range(table.count):
            found.append(
                TableLoad(
                    name=table.name if table.count == 1 else f"{table.name}_{number + 1}", dim=table.dim,
                    rows=rows, ids=ids, distinct=ids * table.unique_share, bags=min(ids, batch),
                    optimizer=table.optimizer, cut=not table.limited, copies=not table.limited,
                )
            )  # fmt: skip
    return found


def sharding_of(plan: Plan, costs: Costs, hosts: int) -> Sharding:
    """The best way to distribute each table over hosts.

    Raises:
        PlanError: the tables do not fit.
    """
    memory_gb = max(1e-9, plan.host.memory_gb - 16e-9 * plan.model.dense_parameters)
    loads, cores = loads_of_plan(plan, costs), plan.host.cores
    return make_sharding(loads, hosts, costs, memory_gb=memory_gb, cores=cores, links=_links(plan))


def _links(plan: Plan) -> Links:
    return Links(gb_per_s=plan.host.bytes_per_second / 1e9, latency_us=plan.host.latency_us)


def estimate(plan: Plan, costs: Costs, hosts: int, layout: str) -> Estimate:
    """Estimate a step on ``hosts`` workers."""
    host, model = plan.host, plan.model
    own, costs = alone(plan, costs)
    notes: list[str] = []
    servers = max(1, round(hosts * host.servers_per_worker)) if layout == "parameter_server" else 0
    if servers:
        seconds, sent = _with_servers(plan, costs, own, hosts / servers)
        memory = sum(held_bytes(table, costs) for table in plan.tables) / servers
    else:
        spread = [_by_row(plan, costs, hosts)]
        if layout == "planned":
            try:
                spread = [sharding_of(plan, costs, hosts)]
                kinds = Counter(placed.way.kind for placed in spread[0].tables)
                notes = [", ".join(f"{n} {kind}" for kind, n in kinds.items())]
            except PlanError:
                notes = ["by row: nothing fits"]
        elif not model.fused:  # each table has separate exchanges
            spread = [replace(spread[0], tables=(placed,)) for placed in spread[0].tables]
        seconds, sent = own, 0.0
        if hosts > 1:
            seconds = {name: own[name] for name in ("step", "dense")} | _over_hosts([one.step for one in spread])
            sent = sum(float(one.total.sent.max()) for one in spread)
        memory = sum(float(one.total.memory.max()) for one in spread) + 16 * model.dense_parameters
    if hosts > 1:
        reduce_bytes = 2 * (hosts - 1) / hosts * 4 * model.dense_parameters
        peers = hosts - 1  # gloo sums in a ring
        latency = (costs.reduce_latency_us + costs.reduce_peer_us * (hosts - 2) + peers * host.latency_us) * 1e-6
        seconds["all-reduce"] = reduce_bytes / min(host.bytes_per_second, costs.reduce_gb_per_s * 1e9) + latency
        sent += reduce_bytes
    step_s = sum(seconds.values())
    rate = hosts * model.batch / step_s
    return Estimate(
        layout=layout, hosts=hosts, servers=servers, seconds=seconds, step_s=step_s, samples_per_s=rate,
        network_bytes=sent, memory_bytes=memory, memory_share=memory / (host.memory_gb * 1e9),
        bottleneck=max(seconds, key=seconds.__getitem__), notes=notes,
        days_per_day=rate * 86400 / model.samples_per_day if model.samples_per_day else None,
    )  # fmt: skip


def alone(plan: Plan, costs: Costs) -> tuple[dict[str, float], Costs]:
    """The parts of a step in one process, and ``costs`` scaled to it.

    If the plan has a measured step time, the parts add up to it.
    """
    host, model, cores = plan.host, plan.model, plan.host.cores
    loads = loads_of_plan(plan, costs)
    dense_flops = host.dense_tflops * 1e12 or costs.dense_gflops * 1e9 * cores
    seconds = {
        "step": costs.step_us * 1e-6,
        "pooling": sum(load.ids * costs.rows("pool", load.dim) for load in loads) * 1e-9 / cores,
        "dense": model.flops / dense_flops + model.dense_parameters * costs.dense_update * 1e-9,
        "table": sum(load.distinct * (costs.rows("lookup", load.dim) + costs.rows("update", load.dim))
                     for load in loads) * 1e-9 / cores,
    }  # fmt: skip
    predicted, measured = sum(seconds.values()), model.step_ms / 1e3
    if measured > predicted:  # the difference counts as a fixed cost
        seconds["step"] += measured - predicted
        return seconds, costs
    share = measured / predicted if measured else 1.0
    return {part: share * value for part, value in seconds.items()}, costs.rows_times(share)


def _by_row(plan: Plan, costs: Costs, hosts: int) -> Sharding:
    tables = tuple(Placement(load=load, way=Way()) for load in loads_of_plan(plan, costs))
    return Sharding(tables=tables, ranks=hosts, costs=costs, cores=plan.host.cores, links=_links(plan))


def _over_hosts(steps: Sequence[Step]) -> dict[str, float]:
    parts = {"table": "compute_s", "network": "network_s", "latency": "latency_s"}
    found = {name: sum(getattr(step, value) for step in steps) for name, value in parts.items()}
    return found | {"calls": sum(step.calls_s + step.merging_s for step in steps)}


def _with_servers(plan: Plan, costs: Costs, own: dict[str, float], share: float) -> tuple[dict[str, float], float]:
    """The parts of a step with rows on servers, for ``share`` workers per server, and the bytes that a worker sends."""
    loads, host = loads_of_plan(plan, costs), plan.host
    # A worker sends ids for the lookup, then ids and gradients, which is more than the rows that it receives.
    sent = sum(load.distinct * (2 * ID_BYTES + FLOAT_BYTES * load.dim) for load in loads)
    link = min(host.bytes_per_second, costs.ps_gb_per_s * 1e9 * max(1, host.cores // 2))
    groups = len({load.dim for load in loads}) if plan.model.fused else len(loads)
    requests = 2 * groups * (costs.ps_latency_us + 2 * host.latency_us)  # rows, gradients
    parts = {
        "table": share * own["table"],
        "routing": sum(load.ids for load in loads) * costs.ps_fixed * 1e-9 / host.cores,
        "network": max(1.0, share) * sent / link,
        "latency": requests * 1e-6,
    }
    return own | parts, sent


def estimates(plan: Plan, costs: Costs) -> list[Estimate]:
    """Estimates of all layouts on all numbers of hosts."""
    return [estimate(plan, costs, hosts, layout) for layout in LAYOUTS for hosts in plan.host.hosts]
