"""Recommend a number of hosts, name the bottleneck there, and estimate the effect of possible changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.plan.config import Plan
from shoal.plan.costs import Costs
from shoal.plan.model import Estimate, estimate

WHY = {
    "step": "the fixed cost of a step: raise the batch",
    "pooling": "pooling rows into bags on the cores: more cores, or fewer ids per sample",
    "dense": "the dense part's arithmetic: more cores, an accelerator, or a smaller model",
    "table": "looking up and updating rows: more cores or more hosts that hold rows",
    "routing": "de-duplicating ids and sorting them by server: more cores",
    "network": "sending rows and gradients: faster links, narrower rows, or hosts that share fewer ids",
    "latency": "waiting for messages: a larger batch, or tables that share an exchange (fused)",
    "calls": "separate calls for tables of different widths and ways: give all tables the same dim",
    "all-reduce": "summing the dense gradients: a larger batch, a smaller dense part, or faster links",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a plan, and its effect."""

    what: str
    samples_per_s: float
    """Samples per second with the change, relative to without."""
    memory: float
    """Memory with the change, relative to without."""


def recommended(found: Sequence[Estimate]) -> Estimate | None:
    """The estimate with the fewest hosts that fits and keeps up with the stream, the fastest of equals; else None."""
    good = [e for e in found if e.fits and (e.days_per_day is None or e.days_per_day >= 1)]
    return min(good, key=lambda e: (e.hosts + e.servers, -e.samples_per_s), default=None)


def changes(plan: Plan, costs: Costs, at: Estimate) -> list[Change]:
    """The effects of single changes to the plan at ``at``, the best first."""

    def host(**values: Any) -> Plan:
        return replace(plan, host=replace(plan.host, **values))

    def tables(change: Callable[[Any], dict[str, Any]]) -> Plan:
        return replace(plan, tables=tuple(replace(t, **change(t)) for t in plan.tables))

    options: dict[str, Plan] = {
        f"links of {2 * plan.host.network_gbps:g} Gb/s": host(network_gbps=2 * plan.host.network_gbps),
        f"{2 * plan.host.cores} cores per host": host(cores=2 * plan.host.cores),
        f"a batch of {2 * plan.model.batch}": replace(plan, model=replace(plan.model, batch=2 * plan.model.batch)),
        "rows of half the width": tables(lambda t: {"dim": max(1, t.dim // 2)}),
        "rowwise_adagrad (one value of state per row)": tables(lambda t: {"optimizer": "rowwise_adagrad"}),
        "ids that expire after half the time": tables(lambda t: {"expire_days": t.expire_days / 2}),
    }
    if not plan.host.dense_tflops:
        options["an accelerator of 10 TFLOP/s for the dense part"] = host(dense_tflops=10.0)
    if at.servers:
        options["twice as many parameter servers"] = host(servers_per_worker=2 * plan.host.servers_per_worker)
    made = []
    for what, changed in options.items():
        then = estimate(changed, costs, at.hosts, at.layout)
        speed, memory = then.samples_per_s / at.samples_per_s, then.memory_bytes / at.memory_bytes
        made.append(Change(what=what, samples_per_s=speed, memory=memory))
    worth = [c for c in made if c.samples_per_s >= 1.02 or c.memory <= 0.98]
    if at.fits:
        return sorted(worth, key=lambda c: -c.samples_per_s)
    return sorted(worth, key=lambda c: c.memory)
