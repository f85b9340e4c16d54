"""`shoal up --on ray` on a local Ray: the command runs in an actor, its log is returned, it is restarted."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

pytest.importorskip("ray")

CONFIG = """
[data]
train = ["log.csv"]
format = "csv"
label = "click"
[features.user]
[table]
dim = 4
[model]
name = "deepfm"
hidden = [8]
[train]
batch_size = 10
epochs = 1000000000
threads = 1
[replicas]
count = 0
[up]
cpus = 0
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_processes_run_on_ray_and_end_with_the_supervisor(tmp_path):
    (tmp_path / "log.csv").write_text("click,user\n" + "".join(f"{i % 2},u{i % 7}\n" for i in range(1000)))
    (tmp_path / "ctr.toml").write_text(CONFIG)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_ADDRESS": "local"}
    command = [sys.executable, "-m", "shoal", "up", "ctr.toml", "--on", "ray", "--json"]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    late = threading.Timer(300, up.kill)
    late.start()
    try:
        events = (json.loads(line) for line in up.stdout if line.startswith("{"))

        def until(event):
            found = next((one for one in events if one["event"] == event), None)
            assert found is not None, up.stderr.read()
            return found

        pid = until("start")["pid"]
        until("ready")
        os.kill(pid, signal.SIGKILL)
        restart = until("restart")
        assert restart["exit"] == "SIGKILL"
        assert any("deepfm" in line for line in restart["tail"])
        assert until("start")["pid"] != pid
        until("ready")
        up.send_signal(signal.SIGTERM)
        assert until("ended")["exit"] == "exit code 143"
        assert up.wait(120) == 0
    finally:
        late.cancel()
        up.kill()
        up.communicate(timeout=60)
    assert list((tmp_path / "ctr.run" / "checkpoints").glob("ckpt-*"))
