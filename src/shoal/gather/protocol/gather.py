"""The gather itself: agree on a plan, fetch shares, exchange reports, back-fill, merge, decide."""

import asyncio
import json
import logging
import math
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.gather.errors import GatherDivergence, PlanMismatch
from shoal.gather.payload.spec import GradientSpec, canonical_json
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.fetch import Accepted, Fetcher
from shoal.gather.protocol.merge import APPLY, SKIP, GatherResult, Manifest, merge_reports
from shoal.gather.protocol.partial import PartialGatherResult, RankReport
from shoal.gather.protocol.plan import GatherConfig, GatherPlan, assign, select_reserves
from shoal.gather.stores.base import PayloadStore

log = logging.getLogger("shoal.gather")

ATTEND_S = 0.5
_SHARED = ("reserve_rounds", "repair_rounds", "min_peers", "fetch_ranks")  # settings that must not differ by rank


def gather(
    plan: GatherPlan | None,
    spec: GradientSpec,
    store: PayloadStore,
    *,
    group: Any = None,
    config: GatherConfig | None = None,
) -> GatherResult:
    """Fetch, check and merge one window's payloads; blocks. Rank 0's plan is used; others can pass None.

    ``group=None`` is this process alone. Every rank gets the same result except for ``partial`` and its payloads.
    Raises PlanMismatch, GatherDivergence or RankFailure on all ranks; faults of peers never raise.
    """
    return run_coroutine(agather(plan, spec, store, group=group, config=config))


async def agather(
    plan: GatherPlan | None,
    spec: GradientSpec,
    store: PayloadStore,
    *,
    group: Any = None,
    config: GatherConfig | None = None,
) -> GatherResult:
    """:func:`gather` for callers with an event loop, which is never blocked."""
    config = config or GatherConfig()
    with ThreadPoolExecutor(1, thread_name_prefix="shoal-control") as pool:
        control = await asyncio.get_running_loop().run_in_executor(
            pool, lambda: Control(group, timeout_s=config.control_timeout(plan))
        )
        return await _Gather(plan, spec, store, config, control, pool).run()


def run_coroutine(coroutine: Any) -> Any:
    """Run a coroutine to completion, even from a thread that already has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="shoal-gather") as pool:
        return pool.submit(asyncio.run, coroutine).result()


class _Gather:
    """One gather on one rank. Local errors become report fields; every rank runs the same collectives."""

    def __init__(
        self,
        plan: GatherPlan | None,
        spec: GradientSpec,
        store: PayloadStore,
        config: GatherConfig,
        control: Control,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.given, self.spec, self.store, self.config, self.control = plan, spec, store, config, control
        self._pool = pool
        self.begin = time.perf_counter()
        self.fetch_s = self.report_s = 0.0
        self.repaired = 0
        self.broken_ranks: set[int] = set()

    async def _collective(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    async def run(self) -> GatherResult:
        self.plan, self.shared = await self._collective(self._agree)
        patience_s = self.control.timeout_s if self.control.world > 1 else math.inf
        self.fetcher = Fetcher(self.plan, self.spec, self.store, self.config, patience_s=patience_s)
        self.partial = PartialGatherResult(
            rank=self.control.rank,
            world_size=self.control.world,
            window=self.plan.window,
            version=self.plan.version,
            spec_hash=self.spec.hash,
            norms=torch.zeros(0, len(self.spec.params), device="cpu"),
            payloads={},
        )
        try:
            manifest = await self._fetch_all()
        finally:
            self.fetcher.close()
        if not await self._collective(self.control.agree, manifest.agreement):
            raise GatherDivergence(f"window {self.plan.window}: ranks merged the same reports into different results")
        self.partial.manifest = manifest
        decision = APPLY if len(manifest.uids) >= max(self.shared["min_peers"], 1) else SKIP
        result = GatherResult(
            manifest=manifest,
            time=max(report.elapsed for report in self.reports),
            decision=decision,
            partial=self.partial,
            payloads=self.partial.payloads,
            plan=self.plan,
            spec=self.spec,
            record=self._record(manifest),
        )
        log.info("gather %s", canonical_json(result.record))
        return result

    def _agree(self) -> tuple[GatherPlan, dict[str, Any]]:
        """Give every rank rank 0's plan and settings, and check that all have the same spec hash."""
        control, message = self.control, b""
        if control.rank == 0 and isinstance(self.given, GatherPlan):
            shared = {name: getattr(self.config, name) for name in _SHARED}
            shared |= {"plan": self.given.to_json(), "spec": self.spec.hash}
            message = canonical_json(shared).encode()
        text = control.broadcast_bytes(message)
        if not text:
            if control.rank == 0:
                raise ConfigError(f"gather: plan must be a GatherPlan on rank 0, got {type(self.given).__name__}")
            raise PlanMismatch("rank 0 must have a GatherPlan, and has none")
        shared = json.loads(text)
        plan = GatherPlan.from_json(shared["plan"])
        if not control.minimum(int(shared["spec"] == self.spec.hash)):
            raise PlanMismatch(f"window {plan.window}: ranks have different gradient specs; this one {self.spec.hash}")
        if self.config.control_timeout_s is None:
            control.timeout_s = self.config.control_timeout(plan)
        return plan, shared

    async def _fetch_all(self) -> Manifest:
        manifest = await self._round(list(self.plan.intended), tier=0)
        for _ in range(self.shared["reserve_rounds"]):
            reserves = select_reserves(self.plan, manifest.tiers, manifest.uids)
            if not reserves:
                break
            manifest = await self._round(reserves, tier=1)
        return manifest

    async def _round(self, uids: list[int], *, tier: int) -> Manifest:
        """Fetch a list, exchange reports, and fetch payloads that failed for local reasons again on other ranks."""
        control = self.control
        manifest = await self._fetch_share(assign(uids, control.world, self.shared["fetch_ranks"]), uids, tier)
        if tier == 0:
            self._warn_slow_rank()
        for _ in range(self.shared["repair_rounds"]):
            failed = sorted(
                uid for uid in uids if uid in manifest.skip_reasons and manifest.skip_reasons[uid] == "local_error"
            )
            healthy = [r for r in range(control.world) if r not in self.broken_ranks]
            if not failed or not healthy:
                break
            assert not set(failed) & set(manifest.uids)
            self.repaired += len(failed)
            manifest = await self._fetch_share(assign(failed, control.world, healthy), failed, tier)
        return manifest

    async def _fetch_share(self, shares: list[list[int]], uids: list[int], tier: int) -> Manifest:
        dealt = [uid for share in shares for uid in share]
        assert len(dealt) == len(set(dealt))
        assert set(dealt) == set(uids)
        mine = shares[self.control.rank]
        begin = time.perf_counter()
        watch = asyncio.create_task(self._attend())
        try:
            outcomes = await self.fetcher.round(mine)
        finally:
            watch.cancel()
        for outcome in outcomes:
            self._note(outcome, tier)
        self.fetch_s += time.perf_counter() - begin
        self._finish_partial(mine)
        begin = time.perf_counter()
        blobs = await self._collective(self.control.all_gather_bytes, self.partial.report().to_bytes())
        self.report_s += time.perf_counter() - begin
        self.reports = [RankReport.from_bytes(blob) for blob in blobs]
        for report in self.reports:
            if "local_error" in report.skip_reasons.values():
                self.broken_ranks.add(report.rank)
        return merge_reports(self.plan, self.reports)

    async def _attend(self) -> None:
        """Answer other ranks' roll calls during a fetch, so that a slow rank is not reported as missing."""
        while self.control.world > 1 and not await self._collective(self.control.answer):
            await asyncio.sleep(ATTEND_S)

    def _note(self, outcome: Any, tier: int) -> None:
        partial, uid = self.partial, outcome.uid
        partial.tiers[uid] = tier
        if not isinstance(outcome, Accepted):
            partial.skipped_uids.append(uid)
            partial.skip_reasons[uid] = outcome.reason
            return
        partial.uids.append(uid)
        partial.global_steps.append(outcome.info.global_step)
        partial.timestamps[uid] = outcome.mtime_us
        partial.digests[uid] = outcome.info.digest
        partial.sizes[uid] = outcome.info.download_bytes
        partial.norms = torch.cat([partial.norms, outcome.info.norms[None]])
        partial.payloads[uid] = outcome.ref  # type: ignore[index]  # pyrefly: ignore

    def _finish_partial(self, share: list[int]) -> None:
        """Put the partial in canonical order, and compute the numbers that follow from its lists."""
        partial = self.partial
        rank_of = {uid: (partial.tiers[uid], uid) for uid in partial.attempted}
        order = sorted(range(len(partial.uids)), key=lambda i: rank_of[partial.uids[i]])
        partial.norms = partial.norms[order]
        partial.global_steps = [partial.global_steps[i] for i in order]
        partial.uids = [partial.uids[i] for i in order]
        partial.skipped_uids.sort(key=rank_of.__getitem__)
        partial.assigned_uids += [uid for uid in share if uid not in partial.assigned_uids]
        partial.success_rate_part = len(partial.uids) / len(partial.assigned_uids) if partial.assigned_uids else 0.0
        partial.download_bytes = sum(partial.sizes.values())
        partial.elapsed = time.perf_counter() - self.begin

    def _warn_slow_rank(self) -> None:
        times = [report.elapsed for report in self.reports if report.assigned_uids]
        if len(times) < 2 or self.control.rank != 0:
            return
        middle = statistics.median_low(times)  # with two ranks, the other one
        for report in self.reports:
            if report.assigned_uids and report.elapsed > 2 * middle and report.elapsed > middle + 0.05:
                log.warning(
                    "window %d: rank %d fetched for %.2f s, the median rank for %.2f s; check its network",
                    self.plan.window, report.rank, report.elapsed, middle,
                )  # fmt: skip

    def _record(self, manifest: Manifest) -> dict[str, Any]:
        partial = self.partial
        return {
            "window": self.plan.window,
            "rank": self.control.rank,
            "assigned": len(partial.assigned_uids),
            "accepted": len(partial.uids),
            "skipped_by_reason": dict(Counter(partial.skip_reasons.values())),
            "bytes": partial.download_bytes,
            "fetch_s": self.fetch_s,
            "validate_s": self.fetcher.validate_s,
            "report_s": self.report_s,
            "overlap_s": 0.0,
            "exchange_s": 0.0,
            "accumulate_s": 0.0,
            "step_s": 0.0,
            "peak_bytes": 0,
            "retries": self.fetcher.retries,
            "duplicates_dropped": manifest.duplicates_dropped,
            "conflicts": manifest.conflicts,
            "repaired": self.repaired,
        }
