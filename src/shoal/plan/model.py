"""What a step costs on W hosts, part by part: a pure function of a plan and of costs.

Every host trains ``batch`` samples a step. Parts of a step follow each other; nothing is taken to overlap, so that a
pipeline can only be better. Work of several cores is divided by their number.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.plan.config import Plan, TablePlan
from shoal.sharded.placement.costs import Costs
from shoal.sharded.placement.model import PEER_SHARE, state_bytes
from shoal.sharded.placement.model import row_bytes as bytes_of_row
from shoal.table.config.durations import bytes_of

__all__ = ["LAYOUTS", "Estimate", "estimate", "estimates", "row_bytes", "state_bytes"]


LAYOUTS = ("all_to_all", "parameter_server")


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


def estimate(plan: Plan, costs: Costs, hosts: int, layout: str) -> Estimate:
    """What a step on ``hosts`` workers takes."""
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
        cpu["route"] += n * costs.rows("route", table.dim) if hosts > 1 or servers else 0.0
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
    seconds["table"] = share * (cpu["lookup"] + cpu["update"]) * 1e-9 / cores
    # A host sends rows that others ask for as well as ids and gradients: the fuller direction counts.
    moved = away * max(out_bytes, in_bytes) if servers else away * (out_bytes + in_bytes)
    software = costs.ps_gb_per_s if servers else costs.link_gb_per_s
    link = min(host.bytes_per_second, software * 1e9 * max(1, cores // 2))
    exchanges = 1 if model.fused else sum(table.count for table in plan.tables)
    if servers:
        seconds["routing"] = cpu["route"] * 1e-9 / cores
        seconds["network"] = share * moved / link if share > 1 else moved / link
        request = costs.ps_latency_us * (1 + PEER_SHARE * (servers - 1)) + 2 * host.latency_us
        seconds["latency"] = 2 * exchanges * request * 1e-6  # rows, gradients
    elif hosts > 1:
        seconds["routing"] = cpu["route"] * 1e-9 / cores
        seconds["network"] = moved / link
        call = costs.link_latency_us * (1 + PEER_SHARE * (hosts - 2)) + host.latency_us
        seconds["latency"] = 4 * exchanges * call * 1e-6  # sizes, ids, rows, gradients
    if hosts > 1:
        reduce_bytes = 2 * (hosts - 1) / hosts * 4 * model.dense_parameters
        rounds = 2 * math.ceil(math.log2(hosts))
        latency = rounds * (costs.reduce_latency_us / 2 + host.latency_us) * 1e-6
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


def estimates(plan: Plan, costs: Costs) -> list[Estimate]:
    """Both layouts on every number of hosts."""
    return [estimate(plan, costs, hosts, layout) for layout in LAYOUTS for hosts in plan.host.hosts]
