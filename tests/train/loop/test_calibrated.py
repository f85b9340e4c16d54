"""Down-sampled negatives, from two streams to a replica: its scores are those over all impressions."""

import json
import random
import subprocess

import pytest

from shoal.serving import Client
from shoal.testing.commands import Command
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config

START_S = 300
IMPRESSIONS = 6000
RATES = {"cold": 0.05, "warm": 0.3}
CONFIG = """
[data]
idle_s = 0.5
[data.join]
window = 30
state = "state"
idle = "100ms"
keep_negatives = 0.1
[data.join.impressions]
from = "dir:shown"
key = "id"
lateness = 5
[data.join.actions]
from = "dir:acts"
key = "id"
kind = "kind"
lateness = 5
[data.join.labels.click]
kinds = ["click"]
[features.item]
[table]
dim = 4
optimizer = "adagrad"
lr = 0.1
[model]
name = "deepfm"
hidden = [4]
[train]
batch_size = 32
threads = 1
[out]
dir = "run"
[serve]
dir = "exports/m"
model = "m"
push_every_s = 0.05
registry = "dir:registry"
"""


def write_events(folder):
    """Impressions of two items, and clicks at the rates of these."""
    chance, clicks = random.Random(1), dict.fromkeys(RATES, 0)
    shown, acts = [], []
    for i in range(IMPRESSIONS):
        item = ("cold", "warm")[i % 2]
        shown.append({"id": f"r{i}", "time": 1_790_000_000 + i // 10, "item": item})
        if chance.random() < RATES[item]:
            clicks[item] += 1
            acts.append({"id": f"r{i}", "time": 1_790_000_000 + i // 10 + 1, "kind": "click"})
    for name, events in (("shown", shown), ("acts", acts)):
        (folder / name).mkdir()
        (folder / name / "1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return {item: 2 * count / IMPRESSIONS for item, count in clicks.items()}


@pytest.mark.timeout(600)
def test_a_replica_that_follows_a_run_on_down_sampled_streams_is_calibrated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rates = write_events(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    with trainer(load_config("run.toml", {"train.max_steps": 1, "serve.push_every_s": 0.0})) as one:
        one.run()  # the replica's first version
    command = ["serve", "exports/m", "--name", "m", "--registry", "dir:registry", "--port", 0, "--json"]
    replica = Command(*command, stdout=subprocess.PIPE)
    try:
        address = json.loads(replica.stdout.readline())["grpc"]
        with Client(address, model="m") as client:
            rows = {"item": list(rates)}
            before = client.predict(rows)["probability"].tolist()
            with trainer(load_config("run.toml", {"serve.dir": None, "serve.every_s": 0.0})) as one:
                done = one.run()
            answer = client.predict(rows)
    finally:
        replica.terminate()
        replica.wait(START_S)
        replica.stdout.close()
    assert done["samples"] < IMPRESSIONS / 2  # most negatives were left out
    assert done["calibration"] == pytest.approx(1.0, abs=0.2)  # over the samples of the run
    assert before[1] != answer["probability"][1]  # pushed, not exported
    for item, score in zip(rates, answer["probability"].tolist(), strict=True):
        assert score == pytest.approx(rates[item], rel=0.35), (item, rates)
