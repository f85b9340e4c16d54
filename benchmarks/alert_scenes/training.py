"""Trainers with bad data, no data or a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

from benchmarks.alert_scenes.common import clicks, make_larger, small_disk, train


def bad_data(stage: Any) -> None:
    clicks(stage.folder / "log.csv", 30_000, noise_after=15_000)
    guard = "[serve.guard]\nmin_auc = 0.7\nwindow = 2000\nmin_samples = 8000\n"
    stage.watch(
        stage.ready(train(stage, f'[out]\ndir = "run"\nlog_steps = 5\n[serve]\ndir = "exports"\nevery_s = 1\n{guard}'))[
            "metrics"
        ]
    )
    stage.fires("ShoalGuardTripped")


def no_data(stage: Any) -> None:
    trainer = train(stage, source='"-"', format="json", stdin=subprocess.PIPE)
    stage.watch(stage.ready(trainer)["metrics"])
    stage.fires("ShoalTrainerStalled")
    lines = "".join(json.dumps({"click": n % 2, "user": f"u{n}", "item": f"i{n}"}) + "\n" for n in range(100))

    def feed() -> None:
        trainer.stdin.write(lines)
        trainer.stdin.flush()

    stage.ends("ShoalTrainerStalled", meanwhile=feed)


def old_data(stage: Any) -> None:
    folder = stage.folder / "grows"
    folder.mkdir()
    lines = "".join(json.dumps({"click": n % 2, "user": f"u{n % 50}", "item": f"i{n % 7}"}) + "\n" for n in range(5000))
    for number in range(400):  # more than can be learnt quickly, and an hour old
        (folder / f"{number:04d}.json").write_text(lines)
        os.utime(folder / f"{number:04d}.json", (time.time() - 3600,) * 2)
    stage.watch(stage.ready(train(stage, "[out]\nlog_s = 1\n", source='"dir:grows"', format="json"))["metrics"])
    stage.fires("ShoalTrainerBehind")


def bad_rows(stage: Any) -> None:
    clicks(stage.folder / "log.csv", 50_000, bad=0.05)
    stage.watch(stage.ready(train(stage, "[out]\nlog_steps = 5\n"))["metrics"])
    stage.fires("ShoalTrainerBadRows")


def full_trainer(stage: Any) -> None:
    disk = small_disk(stage, 1)
    (disk / "filler").write_bytes(b"x" * 1_000_000)
    clicks(stage.folder / "log.csv", 5000)
    more = f'[out]\ndir = "{disk}/run"\nevery_s = 1\n[serve]\ndir = "{disk}/exports"\nevery_s = 1\n'
    stage.watch(stage.ready(train(stage, more))["metrics"])
    stage.fires("ShoalTrainerCheckpointsFail")
    stage.fires("ShoalExportsFail")
    make_larger(disk, 300)
    stage.ends("ShoalTrainerCheckpointsFail")
    stage.ends("ShoalExportsFail")
