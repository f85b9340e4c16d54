"""Synthetic peers with faults, latencies and copycats, gathered by real processes: scaling, memory, a projection."""

import math
import multiprocessing
import queue
import random
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.ranks import collectives
from shoal.errors import ConfigError, DeadlineError
from shoal.gather.payload.compress import compress
from shoal.gather.payload.container import dump_payload
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.protocol.plan import GatherConfig, GatherPlan
from shoal.gather.protocol.window import run_window
from shoal.gather.stores.memory import MemoryObject, MemoryStore

WINDOW = 1
TIME_MAX_US = 1_000_000
FAULTS = ("absent", "late", "truncated", "poisoned", "index")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulation. ``faults`` is the share of peers that are absent, late, truncated, poisoned or out of range."""

    peers: int = 16
    rows: int = 1024
    columns: int = 1024
    faults: float = 0.2
    copycats: int = 1
    latency_s: float = 0.05
    concurrent: int = 4
    budget_bytes: int = 64 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        if self.peers < 1 or self.rows < 1 or self.columns < 1:
            raise ConfigError(
                "simulate: peers, rows and columns must be at least 1, got "
                f"{self.peers}, {self.rows} and {self.columns}"
            )
        if not 0 <= self.faults <= 1 or self.copycats < 0 or self.latency_s < 0:
            raise ConfigError(
                "simulate: faults must be in 0..1, copycats and latency_s must be >= 0, got "
                f"{self.faults:g}, {self.copycats} and {self.latency_s:g}"
            )


@dataclass
class Measured:
    """The results of one run, and the slowest rank's seconds by phase."""

    world: int
    peers: int
    seconds: float
    phases: dict[str, float]
    peak_bytes: int
    summary: dict[str, Any] = field(default_factory=dict)


def model_of(scenario: Scenario) -> torch.nn.Module:
    return torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(scenario.rows, scenario.columns, device="cpu"))})


def store_of(scenario: Scenario, spec: GradientSpec) -> MemoryStore:
    """A store with every peer's object; peer 0 is honest, and the last ``copycats`` honest ones copy it later."""
    rng = random.Random(scenario.seed)
    broken = rng.sample(range(1, scenario.peers), min(scenario.peers - 1, round(scenario.faults * scenario.peers)))
    fault_of = {uid: FAULTS[i % len(FAULTS)] for i, uid in enumerate(sorted(broken))}
    honest = [uid for uid in range(1, scenario.peers) if uid not in fault_of]
    copies = set(honest[len(honest) - scenario.copycats :]) if scenario.copycats else set()
    objects: dict[tuple[int, int], MemoryObject] = {}
    for uid in range(scenario.peers):
        fault = fault_of.get(uid)
        if fault == "absent":
            continue
        generator = torch.Generator().manual_seed(scenario.seed * 100_003 + (0 if uid in copies else uid))
        gradient = torch.randn(scenario.rows, scenario.columns, generator=generator, device="cpu")
        payload = compress({"w": gradient}, spec, window=WINDOW)
        state = payload["state_dict"]
        if fault == "poisoned":
            state["wquant_params"] = (math.nan, *state["wquant_params"][1:])
        if fault == "index":
            state["widxs"][:] = 255
        data = dump_payload(payload)
        if fault == "truncated":
            data = data[: len(data) // 2]
        late = fault == "late"
        objects[WINDOW, uid] = MemoryObject(data, TIME_MAX_US + 1 if late else 1000 + uid)
    return MemoryStore(objects, latency_s=scenario.latency_s)


def _rank(rank: int, world: int, folder: str, scenario: Scenario, out: Any) -> None:
    try:
        torch.set_num_threads(1)
        group = None
        if world > 1:
            collectives.start("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
            group = collectives.group_of()
        model = model_of(scenario)
        spec = GradientSpec.from_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        store = store_of(scenario, spec)
        if group is not None:
            collectives.barrier()
        plan = GatherPlan(WINDOW, range(scenario.peers), time_max=TIME_MAX_US)
        config = GatherConfig(retry_interval_s=0.05, max_concurrent_fetches=scenario.concurrent, spill="disk")
        begin = time.perf_counter()
        report = run_window(
            model, optimizer, plan, spec=spec, store=store, group=group, config=config,
            budget_bytes=scenario.budget_bytes,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        assert report.result is not None
        assert report.update is not None
        phases = {k: v for k, v in report.record.items() if k.endswith("_s")}
        summary = {
            "accepted": len(report.result.uids),
            "skipped": dict(report.record["global"]["skipped"]) if rank == 0 else {},
            "flagged": report.overlap.uids_over_thresh if report.overlap is not None else {},
            "decision": report.decision,
            "update_hash": report.update.update_hash,
            "artifact": report.artifact_sha256,
        }
        out.put((rank, seconds, phases, report.update.peak_bytes, summary, ""))
        if group is not None:
            collectives.stop()
    except BaseException as error:
        out.put((rank, 0.0, {}, 0, {}, repr(error)))
        raise


def run(scenario: Scenario, world: int, *, timeout_s: float = 300.0) -> Measured:
    """Run one window on ``world`` processes of this machine."""
    if world < 1:
        raise ConfigError(f"simulate: world must be at least 1, got {world}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="shoal-simulate-") as folder:
        out = context.Queue()
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, scenario, out), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            rows = [out.get(timeout=timeout_s) for _ in range(world)]
        except queue.Empty:
            raise DeadlineError(f"simulate: {world} ranks did not finish in {timeout_s:.0f} s") from None
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
    if failed := [row[5] for row in rows if row[5]]:
        raise ConfigError(f"simulate: a rank failed: {failed[0]}")
    first = min(rows)
    phases = {name: max(row[2][name] for row in rows) for name in first[2]}
    return Measured(world, scenario.peers, max(row[1] for row in rows), phases, max(row[3] for row in rows), first[4])


def project(measured: Measured, scenario: Scenario, peers: int, world: int) -> dict[str, float]:
    """Project seconds and bytes for another size from one run's costs per peer. Assumes that fetches and validations
    are split over ranks, that every rank sums all peers, and that the update's memory depends on neither."""
    accepted = max(1, measured.summary["accepted"])
    own = accepted / measured.world
    share = math.ceil(peers / world)
    requests = math.ceil(share / scenario.concurrent) * 2 * scenario.latency_s
    validate = measured.phases["validate_s"] / max(own, 1) * share
    moving = (
        measured.phases["exchange_s"] / accepted if measured.world > 1 else measured.phases["accumulate_s"] / accepted
    )
    update = (measured.phases["accumulate_s"] / accepted + (moving if world > 1 else 0)) * peers
    pairs = (peers / accepted) ** 2 * measured.phases["overlap_s"] * measured.world / world
    return {
        "fetch_s": requests,
        "validate_s": validate,
        "overlap_s": pairs,
        "update_s": update + measured.phases["step_s"],
        "total_s": requests + validate + pairs + update + measured.phases["step_s"],
        "peak_bytes": float(measured.peak_bytes),
    }
