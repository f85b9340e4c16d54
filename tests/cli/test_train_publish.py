"""`shoal train` and `shoal serve` as processes: a replica in the registry follows the run, even after a kill."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from shoal.proto.serving.tf_serving_pb2 import ModelServerConfig
from shoal.serving import Client, ModelServer
from shoal.serving.cluster.agent_utils import gen_model_config
from shoal.testing.commands import Command
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.cli.train_helpers import kill_after

pytest.importorskip("zmq")

from shoal.sharded.placement.local import LocalServers

START_S = 300
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
dim = 4
optimizer = "adagrad"
lr = 0.1
[model]
name = "deepfm"
hidden = [8]
[train]
batch_size = 32
threads = 1
{ps}
[out]
dir = "run"
every_steps = 20
log_steps = 1
[serve]
{dir}
model = "m"
push_every_s = 0.05
registry = "dir:registry"
"""
ROWS = {
    "age": [float(20 + i) for i in range(40)],
    "user": [f"u{i}" for i in range(40)],
    "item": [f"i{i % 13}" for i in range(40)],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = torch.Generator().manual_seed(3)
    users, items, ages = (torch.randint(0, n, (6000,), generator=random).tolist() for n in (50, 15, 60))
    lines = [f"{(u + i) % 2},u{u},i{i},{a}" for u, i, a in zip(users, items, ages, strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(["click,user,item,age", *lines, ""]))
    return tmp_path


def write_config(folder, name, *, exports, ps=()):
    given = CONFIG.format(dir='dir = "exports/m"' if exports else "", ps=f"ps = {json.dumps(list(ps))}" if ps else "")
    (folder / name).write_text(given)
    return name


def train(config, steps, *launch):
    more = ["train", config, "--json", "--set", f"train.max_steps={steps}", "train.epochs=9"]
    done = Command(*launch, *more, stdout=subprocess.PIPE)
    out, _ = done.communicate(START_S)
    assert done.returncode == 0
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@contextmanager
def replica(folder):
    command = ["serve", "exports/m", "--name", "m", "--registry", "dir:registry", "--port", 0, "--json"]
    process = Command(*command, stdout=subprocess.PIPE)
    try:
        yield json.loads(process.stdout.readline())["grpc"]
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def answers(address):
    with Client(address, model="m") as client:
        return next(iter(client.predict(ROWS).values())).flatten()


def exported_answers(config, folder):
    """What a replica answers that starts from an export of the newest checkpoint."""
    where = str(folder / "compare")
    with trainer(load_config(config, {"serve.push_every_s": 0.0})) as one:
        one.export(where, model="m")
    models = ModelServerConfig()
    models.model_config_list.config.append(gen_model_config("m", where))
    server = ModelServer("127.0.0.1:0", config=models).start()
    try:
        return answers(server.address)
    finally:
        server.stop(0)


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("servers", [0, 2])
def test_a_replica_follows_a_run_that_is_killed_and_taken_up_again(folder, servers):
    flags = ["--durability", "log", "--dir", str(folder / "ps"), "--threads", "1"]
    with LocalServers(max(1, servers), flags, env={"OMP_NUM_THREADS": "1"}) as ps:
        given = ps.addresses if servers else ()
        first = write_config(folder, "first.toml", exports=True, ps=given)
        train(first, 10)
        config = write_config(folder, "later.toml", exports=False, ps=given)  # only pushes from here on
        with replica(folder) as address:
            before = answers(address)
            train(config, 50)
            after = answers(address)
            assert not torch.allclose(before, after, rtol=1e-3)
            torch.testing.assert_close(after, exported_answers(config, folder), rtol=1e-5, atol=1e-6)
            shell = [sys.executable, "-m", "shoal", "train", config, "--json", "--set", "train.max_steps=100",
                     "train.epochs=9"]  # fmt: skip
            kill_after(shell, "progress", 75, pause_s=0.3)  # after the checkpoint of step 60, and already pushed
            train(config, 80)
            torch.testing.assert_close(answers(address), exported_answers(config, folder), rtol=1e-5, atol=1e-6)


@pytest.mark.timeout(600)
def test_every_rank_sends_its_own_rows(folder):
    two = ("launch", "-n", "2", "-m", "shoal")
    train(write_config(folder, "first.toml", exports=True), 10, *two)
    config = write_config(folder, "later.toml", exports=False)
    with replica(folder) as address:
        before = answers(address)
        train(config, 40, *two)
        after = answers(address)
    assert not torch.allclose(before, after, rtol=1e-3)
    torch.testing.assert_close(after, exported_answers(config, folder), rtol=1e-5, atol=1e-6)
