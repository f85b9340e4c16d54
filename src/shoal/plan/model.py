"""What a step costs on W hosts, part by part: a pure function of a plan and of costs.

Every host trains ``batch`` samples a step. Parts of a step follow each other; nothing is taken to overlap, so that a
pipeline can only be better. Work of several cores is divided by their number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.plan.config import Plan, TablePlan
from shoal.sharded.placement.costs import Costs
from shoal.sharded.placement.model import Links, TableLoad, state_bytes
from shoal.sharded.placement.model import row_bytes as bytes_of_row
from shoal.sharded.placement.plan import Plan as Sharding
from shoal.sharded.placement.planner import PlanError
from shoal.sharded.placement.planner import plan as make_sharding
from shoal.table.config.durations import bytes_of

__all__ = ["LAYOUTS", "Estimate", "estimate", "estimates", "row_bytes", "sharding_of", "state_bytes"]


LAYOUTS = ("all_to_all", "planned", "parameter_server")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One layout on one number of hosts."""

    layout: str
    hosts: int
    """Workers; parameter servers come on top."""
    servers: int
    seconds: dict[str, float]
    """Part of a step -> seconds of the slowest host."""
    step_s: float
    samples_per_s: float
    network_bytes: float
    """What a host sends in a step."""
    memory_bytes: float
    """Of the host that holds rows."""
    memory_share: float
    """Of what such a host has; above 1 it does not fit."""
    bottleneck: str
    """The part that takes longest."""
    days_per_day: float | None = None
    """Days of the stream that a day of training gets through; below 1 it falls behind."""
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
    """Memory of all ``count`` tables; a budget's where that is less than what they would grow to."""
    grown = table.rows * row_bytes(table, costs)
    return min(grown, table.count * bytes_of(table.max_bytes, "max_bytes")) if table.max_bytes else grown


def loads_of_plan(plan: Plan, costs: Costs) -> list[TableLoad]:
    """What one host asks of each table in a step."""
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
    """The best way to spread each table over hosts.

    Raises:
        PlanError: they do not fit.
    """
    host = plan.host
    links = Links(gb_per_s=host.bytes_per_second / 1e9, latency_us=host.latency_us)
    memory_gb = host.memory_gb - 16e-9 * plan.model.dense_parameters
    return make_sharding(
        loads_of_plan(plan, costs), hosts, costs, memory_gb=max(1e-9, memory_gb), cores=host.cores, links=links
    )  # fmt: skip


def _planned(plan: Plan, costs: Costs, hosts: int) -> Estimate:
    """All-to-all, with each table spread in the best way; by row where nothing fits."""
    by_row = estimate(plan, costs, hosts, "all_to_all")
    try:
        made = sharding_of(plan, costs, hosts)
    except PlanError:
        return replace(by_row, layout="planned", notes=["by row: nothing fits"])
    seconds = {name: by_row.seconds[name] for name in ("step", "dense", "all-reduce") if name in by_row.seconds}
    step = made.step
    seconds["table"] = step.compute_s
    if hosts > 1:
        seconds |= {"network": step.network_s, "latency": step.latency_s, "calls": step.calls_s + step.merging_s}
    model = plan.model
    step_s, memory = sum(seconds.values()), float(made.total.memory.max()) + 16 * model.dense_parameters
    rate = hosts * model.batch / step_s
    kinds = Counter(placed.way.kind for placed in made.tables)
    reduced = 2 * (hosts - 1) / hosts * 4 * model.dense_parameters
    return replace(
        by_row, layout="planned", seconds=seconds, step_s=step_s, samples_per_s=rate, memory_bytes=memory,
        network_bytes=float(made.total.sent.max()) + reduced, memory_share=memory / (plan.host.memory_gb * 1e9),
        bottleneck=max(seconds, key=seconds.__getitem__), notes=[", ".join(f"{n} {kind}" for kind, n in kinds.items())],
        days_per_day=rate * 86400 / model.samples_per_day if model.samples_per_day else None,
    )  # fmt: skip


def estimate(plan: Plan, costs: Costs, hosts: int, layout: str) -> Estimate:
    """What a step on ``hosts`` workers takes."""
    if layout == "planned":
        return _planned(plan, costs, hosts)
    host, model = plan.host, plan.model
    servers = max(1, round(hosts * host.servers_per_worker)) if layout == "parameter_server" else 0
    holders = servers or hosts
    away = (hosts - 1) / hosts if layout == "all_to_all" else 1.0  # the share of rows that others hold
    ids = unique = out_bytes = in_bytes = held = 0.0
    cpu = dict.fromkeys(("route", "pool", "lookup", "update"), 0.0)
    for table in plan.tables:
        n = model.batch * table.ids_per_sample * table.count
        u = n * table.unique_share
        ids, unique = ids + n, unique + u
        if servers:
            cpu["route"] += n * costs.ps_fixed
        elif hosts > 1:
            cpu["route"] += n * costs.rows("route", table.dim)
        cpu["pool"] += n * costs.rows("pool", table.dim)
        cpu["lookup"] += u * costs.rows("lookup", table.dim)
        cpu["update"] += u * costs.rows("update", table.dim)
        out_bytes += u * (8 + 8 + 4 * table.dim)  # ids to look up; ids and gradients to apply
        in_bytes += u * 4 * table.dim
        held += held_bytes(table, costs)
    if layout == "all_to_all":  # the ids of a lookup are used again for the gradients
        out_bytes -= 8 * unique
    cores = host.cores
    seconds: dict[str, float] = {"step": costs.step_us * 1e-6}
    seconds["pooling"] = cpu["pool"] * 1e-9 / cores
    dense_flops = host.dense_tflops * 1e12 or costs.dense_gflops * 1e9 * cores
    seconds["dense"] = model.flops / dense_flops + model.dense_parameters * costs.dense_update * 1e-9
    share = hosts / servers if servers else 1.0  # workers that one holder of rows serves
    seconds["table"] = (cpu["lookup"] + cpu["update"]) * 1e-9 / cores
    _fit_to_model(seconds, model.step_ms / 1e3)
    seconds["table"] *= share
    # A host sends rows that others ask for as well as ids and gradients: the fuller direction counts.
    moved = away * max(out_bytes, in_bytes) if servers else away * (out_bytes + in_bytes)
    software = costs.ps_gb_per_s if servers else costs.link_gb_per_s
    link = min(host.bytes_per_second, software * 1e9 * max(1, cores // 2))
    exchanges = 1 if model.fused else sum(table.count for table in plan.tables)
    groups = len({table.dim for table in plan.tables}) if model.fused else exchanges
    if servers:
        seconds["routing"] = cpu["route"] * 1e-9 / cores
        seconds["network"] = share * moved / link if share > 1 else moved / link
        requests = 2 * groups * (costs.ps_latency_us + 2 * host.latency_us)  # rows, gradients
        seconds["latency"] = requests * 1e-6
    elif hosts > 1:
        seconds["routing"] = cpu["route"] * 1e-9 / cores
        seconds["network"] = moved / link
        seconds["latency"] = 4 * exchanges * (costs.link_latency_us + host.latency_us) * 1e-6
        merged = 2 * moved / (costs.merge_gb_per_s * 1e9) if model.fused and groups > 1 else 0.0
        tables = sum(table.count for table in plan.tables)
        calls_us = exchanges * costs.ranks_us + groups * (costs.group_us + costs.peer_us * (hosts - 2))
        seconds["calls"] = (calls_us + tables * costs.table_us) * 1e-6 + merged
    if hosts > 1:
        reduce_bytes = 2 * (hosts - 1) / hosts * 4 * model.dense_parameters
        peers = hosts - 1  # gloo sums in a ring
        latency = (costs.reduce_latency_us + costs.reduce_peer_us * (hosts - 2) + peers * host.latency_us) * 1e-6
        seconds["all-reduce"] = reduce_bytes / min(host.bytes_per_second, costs.reduce_gb_per_s * 1e9) + latency
        moved += reduce_bytes
    step_s = sum(seconds.values())
    memory = held / holders + (0 if servers else 16 * model.dense_parameters)
    rate = hosts * model.batch / step_s
    days = rate * 86400 / model.samples_per_day if model.samples_per_day else None
    return Estimate(
        layout=layout, hosts=hosts, servers=servers, seconds=seconds, step_s=step_s, samples_per_s=rate,
        network_bytes=moved, memory_bytes=memory, memory_share=memory / (host.memory_gb * 1e9),
        bottleneck=max(seconds, key=seconds.__getitem__), days_per_day=days,
    )  # fmt: skip


def _fit_to_model(seconds: dict[str, float], measured: float) -> None:
    """Makes the parts of a step in one process add up to what a step of the real model took, where that is known."""
    predicted = sum(seconds.values())
    if measured > predicted:
        seconds["step"] += measured - predicted
    elif measured:
        for part in seconds:
            seconds[part] *= measured / predicted


def estimates(plan: Plan, costs: Costs) -> list[Estimate]:
    """All layouts on every number of hosts."""
    return [estimate(plan, costs, hosts, layout) for layout in LAYOUTS for hosts in plan.host.hosts]
