"""The contents of a run's reports: metrics, sizes, memory, time left, and results of evaluations."""

from __future__ import annotations

from typing import Any

import torch

from shoal.comm.ranks.ranks import Ranks
from shoal.train.loop.config import EvalConfig
from shoal.train.loop.machine import resident_bytes
from shoal.train.loop.measure.metrics import Metrics, merged
from shoal.train.loop.progress import Progress
from shoal.train.loop.rows.rows import Rows


class Report:
    """Collects the values of reports from all ranks."""

    def __init__(self, metrics: Metrics, rows: Rows, ranks: Ranks, max_steps: int | None) -> None:
        self._metrics, self._rows, self._ranks, self._max_steps = metrics, rows, ranks, max_steps

    def values(self, at: Progress, bad: int) -> dict[str, Any]:
        """The values of a report; ``bad`` is this rank's number of bad rows. All ranks must call it together."""
        values = merged(self._metrics, self._ranks)
        values.pop("samples")
        sizes, used = self._rows.sizes(), self._rows.bytes()
        sums = torch.tensor([float(bad), resident_bytes(), *used.values()], dtype=torch.float64, device="cpu")
        bad_rows, resident, *used_by_all = map(int, self._ranks.sum(sums).tolist())
        known = [size for size in sizes.values() if size is not None]
        return {
            "step": at.step, "epoch": at.epoch, "samples": at.samples, **values,
            "window_auc": self._metrics.window_auc(), "rows": sum(known) if len(known) == len(sizes) else None,
            "table_bytes": sum(used_by_all), "resident_bytes": resident, "bad_rows": bad_rows,
            "tables": {
                name: {"rows": rows, "bytes": size}
                for (name, rows), size in zip(sizes.items(), used_by_all, strict=True)
            },
        }  # fmt: skip

    def eta_s(self, at: Progress, rate: float, total_rows: float | None) -> float | None:
        """Seconds to the end at ``rate`` samples per second; None if the number of samples is unknown."""
        ends = [] if total_rows is None else [total_rows * self._ranks.world_size]
        if self._max_steps is not None and at.step:
            ends.append(at.samples * self._max_steps / at.step)
        return max(0.0, min(ends) - at.samples) / rate if ends and rate else None


def verdict(config: EvalConfig, at: Progress) -> dict[str, Any]:
    """A summary of the evaluations: the best value, and the step of the model that the run ends with."""
    return {
        "metric": config.metric, "best": None if at.best is None else config.sign * at.best,
        "kept_step": at.kept_step, "kept_value": None if at.kept_value is None else config.sign * at.kept_value,
        "model_step": at.kept_step if at.restored else at.step,
    }  # fmt: skip
