"""Ranks that are repeatedly killed and frozen while they train, and the cost of that.

A run under ``shoal launch --max-restarts`` is compared with an undisturbed run: rows, optimizer state and weights must
be bit-identical. The longest pause is the longest time without a step: after a kill, the other ranks must notice it,
and all ranks must restart, load the last checkpoint and make a step.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from benchmarks.reliability.group import shoal, tell, until
from shoal.data import CriteoLike, write_criteo

RANKS, LINES = 3, 120_000
CONFIG = """
[data]
format = "criteo"
train = ["train-*.tsv"]
shuffle_rows = 8192
[table]
dim = 8
optimizer = "adagrad"
lr = 0.02
[model]
name = "deepfm"
hidden = [32]
[train]
epochs = 1000
batch_size = 256
threads = 1
{max_steps}
hooks = ["benchmarks.reliability.elastic:write_steps"]
[out]
dir = "{out}"
every_steps = 20
log_steps = 1000000
"""


def write_steps(trainer: Any) -> Any:
    """A hook that writes the time of every step of rank 0 to a file, and keeps steps from being too short."""
    from shoal.train import SessionRunHook

    least = float(os.environ.get("ELASTIC_STEP_S", "0"))
    file = open(os.environ["ELASTIC_STEPS"], "a", buffering=1) if trainer.ranks.first else None  # noqa: SIM115

    class Writes(SessionRunHook):
        last = 0.0

        def after_run(self, run_context: Any, run_values: Any) -> None:
            time.sleep(max(0.0, self.last + least - time.monotonic()))
            self.last = time.monotonic()
            if file is not None:
                file.write(f"{self.last:.3f} {trainer.at.step}\n")

    return Writes()


class Run:
    """One training run of three ranks."""

    def __init__(self, folder: Path, name: str, step_s: float, steps: int | None = None) -> None:
        self.folder, self.out, self.config = folder, folder / name, folder / f"{name}.toml"
        self._steps, self._log = folder / f"{name}.steps", folder / f"{name}.log"
        limit = "" if steps is None else f"max_steps = {steps}"
        self.config.write_text(CONFIG.format(out=name, max_steps=limit))
        env = os.environ | {"ELASTIC_STEPS": str(self._steps), "ELASTIC_STEP_S": str(step_s)}
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                shoal("launch", "-n", RANKS, "--max-restarts", 1000, "-m", "shoal", "train", self.config), env=env,
                cwd=folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> list[tuple[float, int]]:
        """The time and the number of each step."""
        lines = self._steps.read_text().splitlines() if self._steps.exists() else []
        return [(float(at), int(step)) for at, step in (line.split() for line in lines if line.count(" ") == 1)]

    def alive(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the run ended with {self.process.returncode}:\n{self._log.read_text()[-3000:]}")
        return True

    def ranks(self) -> list[int]:
        """The pids of its ranks."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if b"-u" in words and b"train" in words and str(self.config).encode() in words:
                found.append(int(entry.name))
        return found

    def stop(self) -> None:
        """Stops the run, which writes a checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def content(self) -> tuple[int, dict[Any, Any], dict[str, bytes]]:
        """The step, rows and weights of its last checkpoint."""
        from safetensors.numpy import load_file

        from shoal.table.offline.source import open_source

        last = max(self.out.glob("ckpt-*"))
        rows = {
            (table, int(batch.ids[i])): (batch.weights[i].tobytes(), batch.state(i))
            for table, batch in open_source(last).scan()
            for i in range(len(batch))
        }
        dense = {name: value.tobytes() for name, value in load_file(last / "dense.safetensors").items()}
        return int(last.name.rpartition("-")[2]), rows, dense


def elastic(report: Report, options: Namespace, folder: Path) -> None:
    rng, kills = random.Random(options.seed), []
    for part in range(6):
        lines = CriteoLike(rows=LINES // 6, seed=1, first_row=part * LINES // 6, scale=0.02)
        write_criteo(folder / f"train-{part}.tsv", lines)
    run = Run(folder, "killed", 0.05)
    try:
        until(lambda: run.alive() and run.steps(), "the first step", 300)
        end = time.monotonic() + min(options.share("elastic"), options.elastic_seconds)
        due = time.monotonic() + rng.uniform(2, 6)
        while (not kills or time.monotonic() < end) and run.alive():
            running = run.ranks()
            if time.monotonic() >= due and len(running) == RANKS:
                freeze = options.freeze and len(kills) % 3 == 2
                os.kill(rng.choice(running), signal.SIGSTOP if freeze else signal.SIGKILL)
                kills.append(time.monotonic())
                due += options.every
                print(f"  a rank {'frozen' if freeze else 'killed'} at step {run.steps()[-1][1]}", flush=True)
            time.sleep(0.05)
        until(lambda: run.alive() and run.steps()[-1][0] > kills[-1] + 1, "steps after the last kill", 120)
        run.stop()
    finally:
        run.end()
    told = run.steps()
    step, rows, weights = run.content()
    plain = Run(folder, "plain", 0.0, step)
    try:
        plain.process.wait(1200)
        plain_step, plain_rows, plain_weights = plain.content()
    finally:
        plain.end()
    assert plain_step == step, (plain_step, step)
    other = sum(plain_rows.get(key) != value for key, value in rows.items()) + abs(len(rows) - len(plain_rows))
    again = sum(two <= one for (_, one), (_, two) in pairwise(told))
    tell(report, f"of {len(rows)} rows other ones, {step} steps, {len(kills)} kills", other, at_most=0)
    tell(report, "weights that are others", sum(plain_weights[name] != weights[name] for name in weights), at_most=0)
    print(f"  resumed {again} times from a checkpoint behind the last step")
    tell(report, "longest pause between two steps", max(two - one for (one, _), (two, _) in pairwise(told)), "s", 20)
