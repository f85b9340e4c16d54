"""A replica that answers a million requests while it gets pushes: its memory must not grow."""

from __future__ import annotations

import os
import random
import time
import urllib.request
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.flow import Process
from benchmarks.harness import Report
from benchmarks.reliability.group import tell
from shoal import _core
from shoal.serving.predict import PREDICT, encode_request, model_spec
from shoal.serving.tensors import encode_tensor

WORDS, BATCH, BURST_S, SETTLED = 20_000, 8, 5.0, 200_000
CONFIG = """
[data]
train = ["log.csv"]
format = "csv"
label = "click"
shuffle_rows = 0
dense = ["age"]
[features.user]
[features.item]
[table]
dim = 16
optimizer = "adagrad"
lr = 0.05
[model]
name = "deepfm"
hidden = [32]
[train]
batch_size = 512
epochs = 100000
threads = 1
[out]
dir = "checkpoints"
every_s = 30
[serve]
dir = "exports/soak"
push_every_s = 0.5
registry = "dir:registry"
"""


def soak(report: Report, options: Namespace, folder: Path) -> None:
    rng = np.random.default_rng(options.seed)
    with open(folder / "log.csv", "w") as file:
        file.write("click,age,user,item\n")
        for click, age, user, item in zip(*rng.integers(0, (2, 90, WORDS, WORDS), (200_000, 4)).T, strict=True):
            file.write(f"{click},{age},u{user},i{item}\n")
    (folder / "soak.toml").write_text(CONFIG)
    with ExitStack() as stack:
        first = Process("train", folder / "soak.toml", "--json", "--max-steps", 200, log=folder / "first.log")
        first.process.communicate(timeout=300)
        replica = Process("serve", folder / "exports" / "soak", "--name", "soak", "--port", 0, "--json", "--registry",
                          f"dir:{folder / 'registry'}", "--threads", 1, log=folder / "replica.log")  # fmt: skip
        stack.callback(replica.stop)
        told = replica.ready()
        port = int(told["grpc"].rpartition(":")[2])
        trainer = Process("train", folder / "soak.toml", "--json", log=folder / "train.log")
        stack.callback(trainer.stop)
        trainer.ready()
        messages = [_message(random.Random(options.seed + number)) for number in range(32)]
        done, failed, seen, number = 0, 0, [], 0
        end = time.monotonic() + options.share("soak")
        while not done or (done < options.requests and time.monotonic() < end):
            times, statuses, lost, _ = _core.http2_load(
                "127.0.0.1", port, PREDICT, messages[number % len(messages)], 4, 8, BURST_S, 0.0, 0
            )
            number += 1
            done += len(times)
            failed += lost + sum(count for status, count in statuses.items() if status)
            seen.append((done, _resident(replica.process.pid)))
            if number % 10 == 0:
                print(
                    f"  {done:,} requests, {seen[-1][1] >> 20} MB, {_pushed_rows(told['rest']):,} rows pushed",
                    flush=True,
                )
        pushed = _pushed_rows(told["rest"])
    after = min(SETTLED, done // 5)
    settled = next(memory for count, memory in seen if count >= after)
    grown = seen[-1][1] / settled - 1
    tell(report, f"of {done:,} requests failed, {pushed:,} rows pushed meanwhile", failed, at_most=0)
    what = f"memory at the end against that after {after:,} requests"
    report.add(what, f"{seen[-1][1] >> 20} MB", f"{settled >> 20} MB", abs(grown), 0.02, at_most=True)


def _message(rng: random.Random) -> bytes:
    users = np.array([f"u{rng.randrange(WORDS)}".encode() for _ in range(BATCH)], object)
    items = np.array([f"i{rng.randrange(WORDS)}".encode() for _ in range(BATCH)], object)
    inputs = {"user": users, "item": items, "age": np.full(BATCH, 33.0, np.float32)}
    spec = model_spec("soak", "", None)
    return encode_request(spec, {name: encode_tensor(column) for name, column in inputs.items()}, ())


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _pushed_rows(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("shoal_serving_pushed_rows_total")))
