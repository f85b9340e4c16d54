"""One complete window: gather, overlap, update, artifact."""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.gather.artifact.writer import write_artifact
from shoal.gather.errors import AlreadyApplied, GatherError, PayloadsUnreadable, StoreError
from shoal.gather.metrics import Sink, emit
from shoal.gather.payload.overlap import OverlapReport, index_overlap
from shoal.gather.payload.spec import GradientSpec, canonical_json
from shoal.gather.protocol.control import Control
from shoal.gather.protocol.gather import gather
from shoal.gather.protocol.merge import APPLY, SKIP, GatherResult
from shoal.gather.protocol.plan import GatherConfig, GatherPlan
from shoal.gather.stores.base import Folder, PayloadStore, artifact_name
from shoal.gather.update.outer import UpdateReport, outer_update
from shoal.gather.update.tiles import UpdateLedger

log = logging.getLogger("shoal.gather")

UPLOAD_TRIES = 3
UPLOAD_WAIT_S = 2.0  # a quick upload ends before run_window returns; a slow one continues in the background


@dataclass(kw_only=True)
class Upload:
    """The background upload of an artifact; failures are counted, never raised."""

    failures: int = 0
    ok: bool = False
    thread: threading.Thread | None = field(default=None, repr=False)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the upload; return whether the artifact is in the store."""
        if self.thread is not None:
            self.thread.join(timeout_s)
        return self.ok

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"thread": None}  # a report can cross processes; its thread cannot


@dataclass(kw_only=True)
class WindowReport:
    """The outcome of a window on this rank."""

    decision: str = SKIP
    result: GatherResult | None = None
    overlap: OverlapReport | None = None
    update: UpdateReport | None = None
    artifact_sha256: str | None = None
    unready: dict[int, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    """The structured log record of this window and rank; rank 0's also has the global numbers."""
    upload: Upload | None = None


def run_window(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: GatherPlan | None,
    *,
    spec: GradientSpec,
    store: PayloadStore,
    group: Any = None,
    config: GatherConfig | None = None,
    ledger: UpdateLedger | None = None,
    overlap_threshold: float | None = 0.4,
    budget_bytes: int = 1 << 30,
    wave_peers: int = 4,
    prefetch: int = 2,
    clip: str = "median",
    reduction: str = "count_mean",
    verify: bool = False,
    emit_artifact: bool = True,
    snapshot: str | None = None,
    scores: Mapping[int, float] | None = None,
    sink: Sink | None = None,
) -> WindowReport:
    """Gather a window, check overlap, apply the outer update and publish the artifact.

    SKIP is decided before any parameter changes and leaves model, optimizer and ledger unchanged. Raises on all ranks:
    AlreadyApplied (before any fetch), PlanMismatch, GatherDivergence, RankFailure, BudgetTooSmall, and
    UpdateInterrupted once parameters have changed. A failure to write the artifact is logged; the update is kept.
    """
    config = config or GatherConfig()
    _refuse_replay(plan, ledger, group, config)
    result = gather(plan, spec, store, group=group, config=config)
    timeout_s = config.control_timeout(result.plan)  # rank 0's, on every rank
    report = WindowReport(result=result, record=dict(result.record))
    if overlap_threshold is not None:
        begin = time.perf_counter()
        try:
            report.overlap = index_overlap(
                result, spec=spec, threshold=overlap_threshold, group=group, control_timeout_s=timeout_s
            )
        except PayloadsUnreadable as error:  # the update would fail in the same way
            log.warning("window %d: not applied: %s", result.window, error)
            report.unready = error.unready
            report.update = UpdateReport(window=result.window, unready=error.unready)
            _observe(report, sink, scores)
            return report
        report.record["overlap_s"] = time.perf_counter() - begin
    update = outer_update(
        model, optimizer, result, spec=spec, group=group, budget_bytes=budget_bytes, wave_peers=wave_peers,
        prefetch=prefetch, clip=clip, reduction=reduction, ledger=ledger, verify=verify, snapshot=snapshot,
        control_timeout_s=timeout_s,
    )  # fmt: skip
    report.update, report.decision, report.unready = update, update.decision, update.unready
    report.record |= update.seconds | {"peak_bytes": update.peak_bytes}
    if update.decision == APPLY and emit_artifact:
        _publish(report, spec, store, group, budget_bytes, timeout_s)
    _observe(report, sink, scores)
    return report


def _refuse_replay(plan: GatherPlan | None, ledger: UpdateLedger | None, group: Any, config: GatherConfig) -> None:
    """Check rank 0's window against every rank's ledger, before any fetch."""
    control = Control(group, timeout_s=config.control_timeout(plan))
    window = plan.window if control.rank == 0 and isinstance(plan, GatherPlan) else -1
    if control.world > 1:
        window = control.reduce_ints([window], "max")[0]
    applied = ledger is not None and window >= 0 and ledger.applied(window)
    if control.minimum(int(not applied)):
        return
    if ledger is not None:
        ledger.check(window)
    raise AlreadyApplied(f"window {window} was applied on another rank")


def _publish(
    report: WindowReport, spec: GradientSpec, store: PayloadStore, group: Any, budget_bytes: int, timeout_s: float
) -> None:
    result = report.result
    assert result is not None
    folder = Folder("shoal-artifact-")
    path = folder.path / artifact_name(result.window, result.version)
    try:
        report.artifact_sha256 = write_artifact(
            result, path, spec=spec, group=group, budget_bytes=budget_bytes, control_timeout_s=timeout_s
        )
    except GatherError:  # including a rank that died now: the next gather reports it
        log.exception("window %d: the artifact was not written; the update is kept", result.window)
    if report.artifact_sha256 is None:
        folder.remove()
        return
    upload = report.upload = Upload()
    upload.thread = threading.Thread(
        target=_upload, args=(upload, store, result, path, folder), name="shoal-upload", daemon=True
    )
    upload.thread.start()
    upload.wait(UPLOAD_WAIT_S)


def _upload(upload: Upload, store: PayloadStore, result: GatherResult, path: Path, folder: Any) -> None:
    try:
        for attempt in range(UPLOAD_TRIES):
            try:
                asyncio.run(store.put_artifact(result.window, result.version, path))
                upload.ok = True
                return
            except Exception as error:  # the update is kept, whatever a store does
                upload.failures += 1
                log.warning("window %d: artifact upload failed (%s)", result.window, error)
                if isinstance(error, StoreError) and error.permanent:
                    return
                time.sleep(0.2 * 2**attempt)
    finally:
        folder.remove()


def _observe(report: WindowReport, sink: Sink | None, scores: Mapping[int, float] | None) -> None:
    result = report.result
    assert result is not None
    if report.record["rank"] == 0 and result.plan is not None:
        update, overlap = report.update, report.overlap
        report.record["global"] = {
            "decision": report.decision,
            "uids": len(result.uids),
            "skipped": result.skip_reasons,
            "success_rate": result.success_rate,
            "manifest": result.hash,
            "overlap": None if overlap is None else {"mean": overlap.mean_overlap, "over": overlap.pairs_over_thresh},
            "update": None if update is None else {"hash": update.update_hash, "l2": update.global_l2_norm},
            "artifact_sha256": report.artifact_sha256,
        }
        emit(
            sink, result.window, result=result, plan=result.plan, overlap=report.overlap, update=report.update,
            scores=scores,
        )  # fmt: skip
    log.info("window %s", canonical_json(report.record))
