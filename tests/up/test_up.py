"""`shoal up` with real processes: bad data, the guard, a roll-back, and no process is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.serving import Client

pytest.importorskip("zmq")

DEADLINE_S = 500
GOOD, ALL = 150, 250  # steps
CONFIG = """
[data]
train = ["log.csv"]
format = "csv"
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
[out]
every_steps = 50
keep = 9
[servers]
threads = 1
[replicas]
count = 1
options = ["--threads", "1"]
[serve]
push_every_s = 0.05
[serve.guard]
min_auc = 0.7
window = 2000
min_samples = 8000
"""


class Up:
    """A running `shoal up --json`."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "shoal", "up", *arguments, "--json"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self._late = threading.Timer(DEADLINE_S, self.process.kill)
        self._late.start()
        self.seen = []

    def until(self, event, name, text=""):
        """The first event of this kind from here on."""
        for line in self.process.stdout:
            told = json.loads(line) if line.startswith("{") else {"event": "?", "name": "", "text": line}
            self.seen.append(told)
            if (told["event"], told["name"]) == (event, name) and text in told["text"]:
                return told
        raise AssertionError(f"no {event} of {name}: {self.seen[-20:]}")

    def close(self):
        self._late.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = np.random.default_rng(1)
    users, items, chance = made.integers(0, 60, ALL * 100), made.integers(0, 10, ALL * 100), made.random(ALL * 100)
    click = np.where(np.arange(ALL * 100) < GOOD * 100, (users + items) % 2 == 1, chance < 0.5)
    lines = [f"{int(c)},u{u},i{i}" for c, u, i in zip(click, users, items, strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(["click,user,item", *lines, ""]))
    (tmp_path / "ctr.toml").write_text(CONFIG)
    return tmp_path


def state():
    with open("ctr.run/state.json") as file:
        return {row["name"]: row for row in json.load(file)["processes"]}


def separation():
    """The mean answer for what is liked, less that for what is not."""
    users, items = [f"u{u}" for u in range(60)], [f"i{u % 7}" for u in range(60)]
    liked = np.array([(u + u % 7) % 2 == 1 for u in range(60)])
    with Client("dir:ctr.run/registry", model="ctr") as client:
        answer = client.predict({"user": users, "item": items}, deadline=DEADLINE_S)["probability"].numpy().ravel()
    return answer[liked].mean() - answer[~liked].mean()


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(check):
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.timeout(600)
def test_bad_data_trips_the_guard_and_a_roll_back_restores_the_answers(folder, capsys):
    up = Up("ctr.toml")
    try:
        up.until("up", "")
        if not any((one["event"], one["name"]) == ("ended", "trainer") for one in up.seen):
            up.until("ended", "trainer", "it has finished")
        assert main(["up", "status", "ctr.toml", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert "the AUC of the last 2,000 samples is" in told["guard"]["reason"]
        assert {row["name"]: row["phase"] for row in told["processes"]} == {
            "server-0": "ready", "trainer": "done", "replica-0": "ready"
        }  # fmt: skip

        os.kill(state()["replica-0"]["pid"], signal.SIGKILL)  # it restarts with only the export of step 0
        restart = up.until("restart", "replica-0", "ended with SIGKILL; restart 1 of at most 5 in 0.5 s")
        assert restart["tail"]
        assert "serving ctr" in Path("ctr.run/logs/replica-0.log").read_text()
        up.until("ready", "replica-0")
        assert abs(separation()) < 0.2

        assert main(["rollback", "ctr.toml", "--to", "100"]) == 0
        assert "rolled back to step 100" in capsys.readouterr().out
        up.until("ended", "trainer", "it has finished")
        assert separation() > 0.6
        assert main(["up", "status", "ctr.toml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["guard"] is None
        once = ["--once", "--json", "--interval", "0.1", "--timeout", "60"]
        assert main(["top", "--up", "ctr.toml", *once]) == 1  # the trainer is done
        top = {one["notes"]["process"]: one for one in json.loads(capsys.readouterr().out)}
        assert top["replica-0"]["notes"]["restarts"] == 1
        assert (top["server-0"]["up"], top["trainer"]["why"]) == (True, "trainer done: it has finished")

        assert main(["up", "ctr.toml"]) == 2
        assert "already running in ctr.run" in capsys.readouterr().err
        assert main(["up", "logs", "ctr.toml", "trainer"]) == 0
        assert "rolled back to step 100" in capsys.readouterr().out
        assert main(["up", "stop", "ctr.toml"]) == 0
        assert up.process.wait(DEADLINE_S) == 0
        up.until("ended", "server-0")
        order = [one["name"] for one in up.seen if one["event"] == "stopping"]
        assert order == ["replica-0", "server-0"]
    finally:
        up.close()


@pytest.mark.timeout(600)
def test_a_supervisor_that_is_killed_leaves_nothing_behind_and_can_be_started_again(folder, capsys):
    (folder / "ctr.toml").write_text(CONFIG.replace("count = 1", "count = 0"))
    up = Up("ctr.toml")
    try:
        pid = up.until("start", "server-0")["pid"]
        up.process.kill()
        wait_until(lambda: gone(pid))
    finally:
        up.close()
    assert main(["up", "status", "ctr.toml"]) == 1
    assert "not running" in capsys.readouterr().out
    (folder / "ctr.toml").write_text(CONFIG.replace("count = 1", "count = 0").replace("[servers]\nthreads = 1", "")
                                     .replace("dim = 4", "dimm = 4"))  # fmt: skip
    up = Up("ctr.toml")
    try:
        failed = up.until("failed", "trainer", "ended with exit code 2: its configuration is wrong")
        assert any("[table] has no setting 'dimm'" in line for line in failed["tail"])
        up.until("stop", "", "trainer failed before everything was ready")
        assert up.process.wait(DEADLINE_S) == 2
    finally:
        up.close()


@pytest.mark.timeout(600)
def test_detach_returns_when_everything_is_ready_and_leaves_it_running(folder, capsys):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "shoal", "up", "ctr.toml", "--detach", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        pid = json.loads(done.stdout)["pid"]
        assert main(["up", "status", "ctr.toml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["pid"] == pid
    finally:
        assert main(["up", "stop", "ctr.toml"]) == 0
    wait_until(lambda: gone(pid))
