"""Hooks that write a run's settings and metrics to MLflow or Weights & Biases: ``[train] hooks = ["mlflow"]``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

from shoal.comm.horovod.hooks import SessionRunHook
from shoal.errors import missing_extra

_MAX_LENGTH = 500  # of a setting's value in MLflow


class Tracker(SessionRunHook):
    """Base of trackers: the first rank records settings as ``train.lr``, metrics as ``train/auc`` and ``eval/auc``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._on = trainer.ranks.first

    def settings(self) -> dict[str, Any]:
        """The configuration as one flat dict."""
        return dict(_flat(asdict(self._trainer.config)))

    def name(self) -> str | None:
        """The name of the run: that of its checkpoint folder."""
        out = self._trainer.config.out.dir
        return os.path.basename(os.path.abspath(out)) if out else None

    def log(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def on_progress(self, ctx: Any, values: Mapping[str, Any]) -> None:
        if self._on:
            self.log(_numbers("train", values), ctx.global_step)

    def on_evaluated(self, ctx: Any, values: Mapping[str, Any]) -> None:
        if self._on:
            self.log(_numbers("eval", values), ctx.global_step)


class MlflowHook(Tracker):
    """An MLflow run at ``MLFLOW_TRACKING_URI``; ``MLFLOW_RUN_ID`` continues an existing one."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        try:
            mlflow = import_module("mlflow")
        except ImportError:
            raise missing_extra("mlflow", "mlflow") from None
        self._mlflow = mlflow

    def after_create_session(self, ctx: Any) -> None:
        if not self._on:
            return
        known = os.environ.get("MLFLOW_RUN_ID")
        self._mlflow.start_run(run_id=known, run_name=None if known else self.name())
        if not known:  # a run's settings are written once
            self._mlflow.log_params({key: str(value)[:_MAX_LENGTH] for key, value in self.settings().items()})

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def end(self, ctx: Any) -> None:
        if self._on:
            self._mlflow.end_run()


class WandbHook(Tracker):
    """A run of Weights & Biases; ``WANDB_PROJECT``, ``WANDB_MODE`` and ``WANDB_DIR`` have their usual meaning."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        try:
            wandb = import_module("wandb")
        except ImportError:
            raise missing_extra("wandb", "wandb") from None
        self._wandb, self._run = wandb, None

    def after_create_session(self, ctx: Any) -> None:
        if self._on:
            self._run = self._wandb.init(name=self.name(), config=self.settings())

    def log(self, values: dict[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log(values, step=step)

    def end(self, ctx: Any) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


TRACKERS = {"mlflow": MlflowHook, "wandb": WandbHook}
"""Short names for ``[train] hooks``."""


def _numbers(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a report."""
    return {
        f"{prefix}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step" and math.isfinite(value)
    }


def _flat(value: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        here = f"{name}.{key}" if name else str(key)
        if isinstance(inner, Mapping):
            yield from _flat(inner, here)
        elif inner is not None:
            yield here, list(inner) if isinstance(inner, tuple) else inner
