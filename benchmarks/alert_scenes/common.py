"""Helpers for several scenes: data, exports, trainers, replicas, disks."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRAIN = """
[data]
train = [{train}]
format = "{format}"
label = "click"
shuffle_rows = 0
[features.user]
[features.item]
[table]
dim = 4
lr = 0.5
[model]
name = "deepfm"
hidden = [8]
[train]
batch_size = 100
threads = 1
epochs = 1000000
"""


def clicks(path: Path, rows: int, bad: float = 0.0, noise_after: int = 1 << 60) -> None:
    """Writes a log in which users with even numbers click; after some rows clicks are random."""
    rng = np.random.default_rng(0)
    lines = ["click,user,item"]
    for row in range(rows):
        user = rng.integers(50)
        click = int(user % 2 == 0) if row < noise_after else rng.integers(2)
        lines.append(f"{'yes' if rng.random() < bad else click},u{user},i{rng.integers(50)}")
    path.write_text("\n".join(lines) + "\n")


EXPORT = """
import sys, torch
from shoal.serving import ExportMode, Feature, ModelExporter
from shoal.table import test_hash_table
path, version, work = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(900) * 0.5)
    def forward(self, user):
        x = self.weight
        for _ in range(work):
            x = x @ self.weight
        return {"score": user.sum(1) + x.sum() * 0}
table = test_hash_table(1, name_suffix="t")
table.assign(torch.arange(10), torch.ones(10, 1))
tool = ModelExporter(path, model_name="m", net=Net(), features={"user": Feature(slot="u")})
tool.export([{"u": table}], global_step=version, mode=ExportMode.STANDALONE, timestamp=version)
"""


def export(stage: Any, version: int = 1, work: int = 0) -> Path:
    folder = stage.folder / "model"
    assert stage.python("-c", EXPORT, folder, version, work).wait(120) == 0
    return folder


def serve(stage: Any, model: Path, *flags: object) -> dict[str, Any]:
    return stage.ready(stage.shoal("serve", model, "--port", 0, "--rest-port", 0, "--threads", 1, "--json", *flags))


def predict(rest: str, body: Any = None, token: str = "") -> int:
    data = json.dumps(body if body is not None else {"instances": [{"user": [1]}]}).encode()
    request = urllib.request.Request(f"http://{rest}/v1/models/m:predict", data)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def many(call: Callable[[], Any], threads: int) -> Callable[[], None]:
    """Calls it repeatedly from several threads; returns a function that stops them."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            call()

    for _ in range(threads):
        threading.Thread(target=run, daemon=True).start()
    return stop.set


def train(stage: Any, more: str = "", source: str = '"log.csv"', format: str = "csv", **options: Any) -> Any:
    (stage.folder / "run.toml").write_text(TRAIN.format(train=source, format=format) + more)
    return stage.shoal("train", "run.toml", "--metrics", "127.0.0.1:0", "--json", **options)


def small_disk(stage: Any, megabytes: int) -> Path:
    """Mounts a disk of a few megabytes."""
    place = stage.folder / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place], check=True)
    stage.cleanups.append(lambda: subprocess.run(["umount", "-l", place], check=True))
    return place


def make_larger(disk: Path, megabytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", disk], check=True)
