"""`shoal launch` and `shoal bench comm`, as a user runs them."""

import json
import os
import signal
import subprocess
import sys

import pytest

from shoal.cli import bench
from shoal.cli.bench_comm import parse_size
from shoal.cli.main import main
from shoal.comm.horovod.bench import sizes
from shoal.errors import ConfigError

pytestmark = pytest.mark.timeout(1200)

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")


def shoal(*args, timeout=300):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-m", "shoal", *args], env=env, capture_output=True, text=True, timeout=timeout
    )


SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
print("hello from", rank, *sys.argv[1:])
if "fail" in sys.argv and rank == "1":
    raise KeyError("the reason")
if "fail" in sys.argv or "sleep" in sys.argv:
    time.sleep(3600)  # until it is ended
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_sizes_are_read_and_spread():
    assert [parse_size(t) for t in ("17", "1KiB", "2 MiB", "1g")] == [17, 1024, 2 << 20, 1 << 30]
    assert sizes(1024, 70_000) == [1024, 4096, 16384, 65536, 70_000]
    for bad in ("", "ten", "-1", "1TiB"):
        with pytest.raises(ConfigError):
            parse_size(bad)
    with pytest.raises(ConfigError):
        sizes(10, 5)


def test_wrong_usage_is_exit_code_two(capsys):
    assert bench.main([]) == 2
    assert bench.main(["nothing"]) == 2
    assert bench.main(["--help"]) == 0
    assert main(["launch", "no_such_file.py"]) == 2
    assert main(["launch", "-n", "0", __file__]) == 2
    assert main(["launch", "--help"]) == 0
    assert "examples" in capsys.readouterr().out


def test_launch_prefixes_lines_with_ranks(script):
    done = shoal("launch", "-n", "2", script, "--flag")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["[rank 0] hello from 0 --flag", "[rank 1] hello from 1 --flag"]


def test_launch_shows_the_first_failure_last(script):
    done = shoal("launch", "-n", "2", "--json", script, "fail")
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'the reason'")
    said = json.loads(done.stdout.strip().split("\n")[-1])
    assert said["first_failure"]["rank"] == 1


def test_interrupting_launch_ends_the_ranks(script):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "launch", "-n", "2", script, "sleep"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "hello" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "all ranks stopped" in stderr or "interrupted" in stderr


def test_bench_comm_writes_a_table_a_picture_and_json(tmp_path):
    picture, data = tmp_path / "c.png", tmp_path / "c.json"
    done = shoal(
        "launch", "-n", "2", "-m", "shoal", "bench", "comm",
        "--largest", "4KiB", "--seconds", "0.02", "--out", str(picture), "--json", str(data),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all_to_all" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(data.read_text())
    assert found["world_size"] == 2
    assert {p["operation"] for p in found["points"]} == {"send_recv", "all_reduce", "all_to_all"}
    assert all(p["latency_us"] > 0 for p in found["points"])


def test_bench_comm_in_one_process_prints_json(tmp_path):
    done = shoal("bench", "comm", "--largest", "1KiB", "--seconds", "0.01", "--out", "-", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world_size"] == 1
    assert shoal("bench", "comm", "--largest", "lots").returncode == 2
    nowhere = shoal("bench", "comm", "--out", str(tmp_path / "no" / "c.png"))
    assert nowhere.returncode == 2
    assert "there is no folder" in nowhere.stderr


RESTARTED = """
import os, signal, sys, time
import torch
from shoal.comm import start_ranks
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
ranks = start_ranks()
total = ranks.sum(torch.ones(1)).item()
print("attempt", attempt, "sum", total)
if attempt < 2 and ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL if attempt == 0 else signal.SIGSTOP)
if attempt < 2:
    ranks.sum(torch.ones(1))  # until it is noticed that rank 1 is dead, or frozen
ranks.close()
"""


def test_ranks_that_die_or_freeze_are_replaced_and_it_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_RANK_LOST_S", "3")
    file = tmp_path / "train.py"
    file.write_text(RESTARTED)
    done = shoal("launch", "-n", "2", "--max-restarts", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "shoal launch: rank 1 ended by SIGKILL; all ranks start again (restart 1 of at most 2)" in done.stderr
    assert "rank(s) [1] have not been heard from for 3 s" in done.stderr
    assert "[rank 0] attempt 2 sum 2.0" in done.stdout
    said = json.loads(done.stdout.strip().split("\n")[-1])
    assert said["restarts"][0] == "rank 1 ended by SIGKILL"
    assert said["restarts"][1].startswith("rank 0 ended")


def test_a_wrong_usage_of_the_script_is_not_tried_again(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("raise SystemExit(2)")
    done = shoal("launch", "-n", "1", "--max-restarts", "5", str(file))
    assert done.returncode == 2
    assert "usage or configuration is wrong, so it is not restarted" in done.stderr


def test_hosts_need_a_place_to_meet(script):
    done = shoal("launch", "--nnodes", "1:2", script)
    assert done.returncode == 2
    assert "--nnodes needs --rdzv-endpoint HOST:PORT" in done.stderr
