"""Norms and quality metrics of a gather, and their sink: a function of (name, value, step), by default the log."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from shoal.errors import ConfigError
from shoal.gather.payload.overlap import OverlapReport
from shoal.gather.payload.spec import GradientSpec
from shoal.gather.protocol.merge import GatherResult, Source, merge
from shoal.gather.protocol.plan import GatherPlan
from shoal.gather.update.outer import UpdateReport
from shoal.gather.update.tiles import clip_factors

log = logging.getLogger("shoal.gather")

Sink = Callable[[str, float, int], None]


def log_sink(name: str, value: float, step: int) -> None:
    """Write a metric to the log; the default sink."""
    log.info("%s=%s step=%d", name, value, step)


def param_norms(source: Source, *, spec: GradientSpec, per_uid: bool = False) -> Any:
    """``{N + "vals": lower median norm over the peers}``, float32; with ``per_uid`` also ``{uid: {N + "vals": norm}}``.

    Uses only the norms in the reports, so it accepts any rank's result. Empty sources give empty results.
    """
    manifest = merge(source).manifest
    medians: dict[str, Tensor] = {}
    by_uid: dict[int, dict[str, Tensor]] = {uid: {} for uid in manifest.uids}
    if manifest.uids:
        if manifest.norms.shape[1] != len(spec.params):
            raise ConfigError(
                f"param_norms: the source must have norms of the spec's {len(spec.params)} parameters, got "
                f"{manifest.norms.shape[1]}"
            )
        for index, param in enumerate(spec.params):
            medians[param.name + "vals"] = clip_factors(manifest.norms[:, index])[0]
            for row, uid in enumerate(manifest.uids):
                by_uid[uid][param.name + "vals"] = manifest.norms[row, index]
    return (medians, by_uid) if per_uid else medians


def _mean(scores: Mapping[int, float] | None, uids: Iterable[int]) -> float:
    chosen = sorted(uids)
    if not chosen or scores is None:
        return 0.0
    total = 0.0
    for uid in chosen:
        total += float(scores.get(uid, 0.0))
    return total / len(chosen)


def quality_metrics(source: Source, plan: GatherPlan, scores: Mapping[int, float] | None = None) -> dict[str, Any]:
    """Return success rates, counts by reason, and the mean scores of the intended and the accepted peers."""
    manifest = merge(source).manifest
    intended, skipped = set(plan.intended), set(manifest.skipped_uids)
    return {
        "success_rate": len(manifest.uids) / len(intended) if intended else 0.0,
        "n_intended": len(intended),
        "n_actual": len(manifest.uids),
        "n_skipped": len(skipped),
        "n_reserve_used": len(manifest.reserve_used_uids),
        "skipped_by_reason": dict(Counter(manifest.skip_reasons.values())),
        "successful_peers": sorted(intended - skipped),
        "skipped_peers": sorted(skipped),
        "intended_mean_final": _mean(scores, intended),
        "actual_mean_final": _mean(scores, manifest.uids),
    }


def emit(
    sink: Sink | None,
    step: int,
    *,
    result: GatherResult,
    plan: GatherPlan,
    overlap: OverlapReport | None = None,
    update: UpdateReport | None = None,
    scores: Mapping[int, float] | None = None,
) -> None:
    """Send a window's metrics to a sink, under their fixed names."""
    sink = sink or log_sink
    quality = quality_metrics(result, plan, scores)
    values: dict[str, float] = {
        "gather/success_rate": quality["success_rate"],
        "gather/reserve_used": quality["n_reserve_used"],
        **{f"gather/skipped/{reason}": n for reason, n in quality["skipped_by_reason"].items()},
    }
    if scores is not None:
        values |= {f"gather/{name}": quality[name] for name in ("intended_mean_final", "actual_mean_final")}
    if overlap is not None:
        values |= {
            "overlap/pairs_checked": overlap.pairs_checked,
            "overlap/mean": overlap.mean_overlap,
            "overlap/min": overlap.min_overlap,
            "overlap/max": overlap.max_overlap,
            "overlap/pairs_over": overlap.pairs_high_ovlap,
        }
    if update is not None:
        for name in ("min_median_norm", "max_median_norm", "global_l2_norm", "peak_bytes"):
            values[f"update/{name}"] = getattr(update, name)
    for name, value in values.items():
        sink(name, value, step)
