"""Ranks that are killed or frozen again and again while they train, and what that costs.

    python -m benchmarks.elastic                       # three ranks, one killed every 30 s for five minutes
    python -m benchmarks.elastic --every 10 --seconds 40

A run under ``shoal launch --max-restarts`` (``--launcher torchrun`` for torch's own) is compared with one that nobody
kills: rows and weights must be the same bits. The longest pause is the longest time without a step: the kill, until the
others have noticed, all ranks have started again, have loaded the last checkpoint and have made their first step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, parser
from shoal.data import CriteoLike, write_criteo

CONFIG = """
[data]
format = "criteo"
train = ["train-*.tsv"]
shuffle_rows = 16384
[table]
dim = 16
optimizer = "adagrad"
lr = 0.02
[model]
name = "deepfm"
hidden = [64, 32]
[train]
epochs = {epochs}
batch_size = 512
hooks = ["benchmarks.elastic:Steps"]
[out]
dir = "{out}"
every_steps = {every_steps}
log_steps = 1000000
"""


def Steps(trainer: Any) -> Any:  # noqa: N802 (named as a hook is in a configuration)
    """A hook that writes the time of every step of rank 0 to a file, and keeps a step from being too short."""
    from shoal.train import SessionRunHook

    least = float(os.environ["ELASTIC_STEP_S"])

    class Writes(SessionRunHook):
        def __init__(self) -> None:
            self.file = open(os.environ["ELASTIC_STEPS"], "a") if trainer.ranks.first else None  # noqa: SIM115
            self.last = 0.0

        def after_run(self, run_context: Any, run_values: Any) -> None:
            time.sleep(max(0.0, self.last + least - time.monotonic()))
            self.last = time.monotonic()
            if self.file is not None:
                self.file.write(f"{time.monotonic():.3f} {trainer.at.step}\n")
                self.file.flush()

    return Writes()


def launched(options: argparse.Namespace, folder: Path, name: str, epochs: int) -> tuple[subprocess.Popen[str], Path]:
    config, steps = folder / f"{name}.toml", folder / f"{name}.steps"
    config.write_text(CONFIG.format(out=name, epochs=epochs, every_steps=options.checkpoint_steps))
    command = {
        "shoal": [sys.executable, "-m", "shoal", "launch", "-n", str(options.ranks), "--max-restarts", "1000"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
                     "--max-restarts", "1000", "--monitor-interval", "0.1"],
    }[options.launcher]  # fmt: skip
    # Beginnings of rows do not depend on the clock, stamps do: both runs must have the same.
    env = os.environ | {"ELASTIC_STEPS": str(steps), "ELASTIC_STEP_S": str(options.step_s)}
    log = open(folder / f"{name}.log", "w")  # noqa: SIM115
    process = subprocess.Popen([*command, "-m", "shoal", "train", str(config)], env=env, cwd=folder, stdout=log,
                               stderr=log, text=True, start_new_session=True)  # fmt: skip
    return process, steps


def times(path: Path) -> list[tuple[float, int]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [(float(at), int(step)) for at, step in (line.split() for line in lines if line.count(" ") == 1)]


def ranks_of(config: str) -> list[int]:
    """The processes of the ranks of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"train" in words and config.encode() in words and b"-u" in words and b"launch" not in words:
                found.append(int(entry.name))
    return found


def content(folder: Path) -> dict[str, Any]:
    """Rows and weights of the last checkpoint of a run, and how many samples it learnt."""
    import torch
    from safetensors.torch import load_file

    from shoal.table import HashTable, restore_table

    last = max(folder.glob("ckpt-*"))
    manifest = json.loads((last / "manifest.json").read_text())
    described = manifest.get("content", manifest)["tables"][0]
    table = HashTable(described["dim"], optimizer="adagrad", name=described["name"])
    restore_table(table, last / described["file"])
    ids = torch.sort(table.ids()).values if hasattr(table, "ids") else None
    rows = table.lookup(ids) if ids is not None else None
    return {"last": last.name, "ids": ids, "rows": rows, "dense": load_file(last / "dense.safetensors"),
            "samples": manifest.get("content", manifest)["progress"]["samples"]}  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=300.0, help="how long ranks are killed")
    arguments.add_argument("--every", type=float, default=30.0, help="seconds between kills")
    arguments.add_argument("--freeze", action="store_true", help="freeze every second rank instead of killing it")
    arguments.add_argument("--launcher", choices=("shoal", "torchrun"), default="shoal")
    arguments.add_argument("--rows", type=int, default=300_000, help="samples of an epoch")
    arguments.add_argument("--checkpoint-steps", type=int, default=20)
    arguments.add_argument("--step-s", type=float, default=0.05, help="the least that a step takes")
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    options = arguments.parse_args()
    report = Report("elastic")
    report.start()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="shoal-elastic-") as name:
        run(report, options, Path(name))
    if options.json:
        report.save(options.json)
    report.close() if hasattr(report, "close") else None


def run(report: Report, options: argparse.Namespace, folder: Path) -> None:
    rng = random.Random(options.seed)
    for part in range(6):
        rows = options.rows // 6
        write_criteo(folder / f"train-{part}.tsv", CriteoLike(rows=rows, seed=1, first_row=part * rows, scale=0.05))
    killed, steps = launched(options, folder, "killed", 1000)
    kills = []
    try:
        _wait(lambda: times(steps), killed, "the first step")
        end, due = time.monotonic() + options.seconds, time.monotonic() + options.every / 2
        while time.monotonic() < end:
            if killed.poll() is not None:
                raise SystemExit(f"the run ended: {(folder / 'killed.log').read_text()[-3000:]}")
            if time.monotonic() >= due:
                due += options.every
                running = ranks_of(str(folder / "killed.toml"))
                if len(running) == options.ranks:
                    victim = rng.choice(running)
                    freeze = options.freeze and len(kills) % 2 == 1
                    kills.append(time.monotonic())
                    os.kill(victim, signal.SIGSTOP if freeze else signal.SIGKILL)
            time.sleep(0.05)
        last = max(step for _, step in times(steps))
        _wait(lambda: times(steps)[-1][1] > last and times(steps)[-1][0] > kills[-1] + 1, killed, "steps after it")
        os.killpg(killed.pid, signal.SIGTERM)
        killed.wait(120)
    finally:
        _end(killed)
    told = times(steps)
    pauses = [after - before for (before, _), (after, _) in zip(told, told[1:], strict=False)]
    final = content(folder / "killed")
    again = sum(1 for (_, one), (_, two) in zip(told, told[1:], strict=False) if two <= one)
    plain, whole = launched(options, folder, "plain", 1000)
    want = int(final["last"].rpartition("-")[2])
    try:
        _wait(lambda: whole.exists() and times(whole)[-1][1] >= want, plain, "the run without kills", 900)
        os.killpg(plain.pid, signal.SIGTERM)
        plain.wait(120)
    finally:
        _end(plain)
    print(final["last"], content(folder / "plain")["last"], again, len(kills))
    report.add(f"{len(kills)} kills, {want} steps: longest pause", f"{max(pauses):.1f} s", ratio=max(pauses), goal=20,
               at_most=True)  # fmt: skip


def _wait(check: Any, process: subprocess.Popen[str], what: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        if process.poll() is not None:
            raise SystemExit(f"the run ended while waiting for {what}")
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


if __name__ == "__main__":
    main()
