"""`shoal up` with a joiner between two Redis streams and the trainer, in real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.data.live import open_reader, open_writer
from shoal.errors import ConfigError
from shoal.serving import Client
from shoal.train.loop.toml import load_config
from shoal.up.config import load_online
from shoal.up.plan import check
from shoal.up.write import compose
from tests.brokers import redis_server  # noqa: F401
from tests.up.test_up import DEADLINE_S, Up

CONFIG = """
[join]
window = "5s"
close = "action"
keep_negatives = 0.5
out = "{redis}/samples?maxlen=100000"
checkpoint_s = 0.5
idle = "1s"
[join.impressions]
from = "{redis}/impressions"
key = "request"
lateness = "1s"
[join.actions]
from = "{redis}/actions"
key = "request"
kind = "kind"
lateness = "1s"
[join.labels.click]
kinds = ["click"]
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
[out]
every_s = 1
[replicas]
count = 1
options = ["--threads", "1"]
[serve]
push_every_s = 0.1
"""
IMPRESSIONS = 3000


def write_config(tmp_path, redis, more="", config=CONFIG):
    (tmp_path / "online.toml").write_text(f"{config}{more}".replace("{redis}", redis))
    return str(tmp_path / "online.toml")


def test_the_trainer_learns_what_the_joiner_writes(tmp_path):
    file = write_config(tmp_path, "redis://broker:6379")
    data = load_config(file, {"serve.registry": "dir:r"}).data
    assert data.train == ("redis://broker:6379/samples?maxlen=100000",)
    assert (data.label, data.format, data.keep_negatives) == ("click", "json", 0.5)
    write_config(tmp_path, "redis://broker", '[data]\ntrain = ["days/*.json", "{redis}/samples?group=ctr"]')
    data = load_config(file, {"serve.registry": "dir:r"}).data
    assert (data.label, data.format, data.keep_negatives) == ("click", "json", 0.5)
    write_config(tmp_path, "redis://broker", "[data]\nkeep_negatives = 0.1\n")
    with pytest.raises(ConfigError, match=r"must be that of \[join\], 0.5, got 0.1"):
        load_config(file)


def test_what_is_wrong_with_a_join_is_told_before_anything_starts(tmp_path):
    for before, after, why in (
        ('window = "5s"', 'windows = "5s"', "no setting 'windows'"),
        ("out =", "# out =", r"\[join\] out"),
        ('out = "{redis}', 'out = "rdis://broker', "out: a live source must begin with redis:.*got 'rdis://"),
        ("samples", "actions", "out must differ from the inputs"),
        ('from = "{redis}/actions"', 'from = "kafka://broker"', r"\[actions\] from: .*kafka://HOST:PORT/TOPIC"),
        ('lateness = "1s"', 'lateness = "soon"', r"\[impressions\] lateness must be a time .*got 'soon'"),
    ):
        file = write_config(tmp_path, "redis://broker:6379", config=CONFIG.replace(before, after))
        with pytest.raises(ConfigError, match=why):
            check(load_online(file))


def test_the_example_without_a_broker_joins_what_its_producer_writes(tmp_path, monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    for name in ("online_folders.toml", "online_streams.toml", "produce_clicks.py"):
        shutil.copy(examples / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("online_folders", "online_streams"):
        check(load_online(f"{name}.toml"))
        data = load_config(f"{name}.toml", {"serve.registry": "dir:r"}).data
        assert (data.label, data.keep_negatives) == ("click", 0.5)
    command = [sys.executable, "produce_clicks.py", "--impressions", "dir:impressions", "--actions", "dir:actions"]
    for _ in range(2):  # a producer that is started again continues its streams
        subprocess.run([*command, "--seconds", "0.3", "--delay", "0.01"], check=True, timeout=DEADLINE_S)
    assert main(["join", "online_folders.toml", "--state", "state", "--to-end"]) == 0
    shown, samples = (
        [json.loads(line)["request"] for path in Path(folder).iterdir() for line in path.read_text().splitlines()]
        for folder in ("impressions", "samples")
    )
    assert len(set(samples)) == len(samples) > len(shown) / 4
    assert set(samples) <= set(shown)


def test_containers_keep_the_joiners_state_in_the_volume_and_reach_the_broker(tmp_path):
    file = write_config(tmp_path, "redis://broker:6379")
    (tmp_path / "online.toml").write_text((tmp_path / "online.toml").read_text() + "[servers]\ninsecure = true\n")
    text = (tmp_path / "online.toml").read_text().replace("count = 1\n", "count = 1\ninsecure = true\n", 1)
    (tmp_path / "online.toml").write_text(text)
    services = compose.document(load_online(file), "shoal:latest")["services"]
    assert "--state /data/join" in " ".join(services["joiner"]["command"])
    assert "joiner" in services["trainer"]["depends_on"]
    (tmp_path / "online.toml").write_text(text.replace("broker", "localhost"))
    with pytest.raises(ConfigError, match="is the container itself"):
        compose.document(load_online(file), "shoal:latest")


def produce(redis):
    """Impressions, and clicks of those with an odd item."""
    shown, acted, now = [], [], time.time()
    for i in range(IMPRESSIONS):
        shown.append({"request": f"r{i}", "time": now + i * 1e-4, "user": f"u{i % 50}", "item": f"i{i % 10}"})
        if i % 2:
            acted.append({"request": f"r{i}", "time": now + i * 1e-4 + 0.5, "kind": "click"})
    for name, messages in (("impressions", shown), ("actions", acted)):
        writer = open_writer(f"{redis}/{name}")
        writer.append([json.dumps(message).encode() for message in messages])
        writer.close()


def joined(redis):
    """The requests of all samples, and how many are positives."""
    reader = open_reader(f"{redis}/samples")
    found = [json.loads(record) for chunk in reader.poll(100_000, 0.2) for record in chunk.records]
    reader.close()
    return [one["request"] for one in found], sum(one["click"] for one in found)


def test_impressions_and_clicks_become_live_predictions_and_a_killed_joiner_continues(redis_server, tmp_path):  # noqa: F811
    redis = f"redis://127.0.0.1:{redis_server.port}"
    up = Up(write_config(tmp_path, redis))
    try:
        produce(redis)
        up.until("up", "")
        state = json.loads((tmp_path / "online.run/state.json").read_text())
        joiner = next(row for row in state["processes"] if row["name"] == "joiner")
        os.kill(joiner["pid"], signal.SIGKILL)
        assert "ended with SIGKILL; restart 1" in up.until("restart", "joiner")["text"]
        up.until("ready", "joiner")
        end = time.monotonic() + DEADLINE_S
        requests, positives = joined(redis)
        while positives < IMPRESSIONS // 2 or len(requests) < IMPRESSIONS * 0.7:
            assert time.monotonic() < end, (len(requests), positives)
            time.sleep(0.2)
            requests, positives = joined(redis)
        with Client(f"dir:{tmp_path}/online.run/registry", model="online") as client:
            likes = [0.0, 1.0]
            while not likes[1] < 0.2 < 0.8 < likes[0]:
                assert time.monotonic() < end, likes
                time.sleep(0.2)
                answer = client.predict({"user": ["u1", "u2"], "item": ["i1", "i2"]}, deadline=DEADLINE_S)
                likes = answer["probability"].tolist()
        assert len(set(requests)) == len(requests)
        assert positives == IMPRESSIONS // 2
        assert 0.4 < (len(requests) - positives) / (IMPRESSIONS // 2) < 0.6
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(DEADLINE_S) == 0
    finally:
        up.close()
