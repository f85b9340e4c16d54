"""`shoal predict` against a real server: rows as arguments, rows on stdin, rows that are refused."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch

from shoal.cli.main import main
from shoal.serving import Feature, ModelExporter, ModelServer, ModelServerConfig, gen_model_config
from shoal.table import reset_registry, test_hash_table
from tests.serving.helpers import Net

DEADLINE_S = 200  # torch starts slowly on a busy machine


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    table = test_hash_table(4, name_suffix="user")
    table.assign(torch.arange(10), torch.arange(40).float().reshape(10, 4))
    tool = ModelExporter(
        folder, model_name="m", net=Net(), features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)}
    )
    tool.export([{"u": table}], global_step=1, timestamp=1)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(folder / "exported_models")))
    server = ModelServer(config=config, poll_wait_seconds=0).start()
    yield server.address
    server.stop(0)
    reset_registry()


def score(user, price):
    torch.manual_seed(0)
    rows = torch.arange(40).float().reshape(10, 4)
    return Net()(user=rows[user].sum(0, keepdim=True), price=torch.tensor([price]))["score"].item()


def test_rows_are_answered_in_their_order(address, capsys, monkeypatch, tmp_path):
    row = {"user": 3, "price": [0.5, 1]}
    assert main(["predict", address, json.dumps(row), json.dumps(row | {"user": [1, 2]}), "--model", "m"]) == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert out[0]["score"] == pytest.approx(score([3], [0.5, 1.0]))
    assert out[1]["score"] == pytest.approx(score([1, 2], [0.5, 1.0]))
    lines = [json.dumps({"user": n % 10, "price": [n / 1000, 0.0]}) for n in range(1000)]
    (tmp_path / "rows").write_text("\n".join(lines) + "\n\n")
    with (tmp_path / "rows").open() as rows:
        monkeypatch.setattr("sys.stdin", rows)
        assert main(["predict", address, "--model", "m", "--output", "score", "--deadline", "200"]) == 0
    out = [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()]
    assert len(out) == 1000
    for n in (0, 7, 512, 999):
        assert out[n] == pytest.approx(score([n % 10], [n / 1000, 0.0]), abs=1e-6)


def test_a_row_that_is_refused_is_told_and_the_others_are_answered(address, capsys):
    good = json.dumps({"user": 3, "price": [0.5, 1]})
    assert main(["predict", address, good, '{"usr": 3}', "{", "[1]", good, "--model", "m"]) == 1
    got = capsys.readouterr()
    assert len(got.out.splitlines()) == 2
    told = got.err.splitlines()
    assert [line.split(":")[1].strip() for line in told] == ["row 2", "row 3", "row 4"]
    assert "unexpected ['usr']" in told[0]
    assert main(["predict", address, '{"usr": 3}', good, "--model", "m", "--json"]) == 1
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert out[0]["code"] == 3
    assert "score" in out[1]


def test_lines_are_answered_while_stdin_stays_open_and_ctrl_c_ends_the_command(address):
    command = [sys.executable, "-m", "shoal", "predict", address, "--model", "m"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        killer = threading.Timer(DEADLINE_S, process.kill)
        killer.start()
        for row in (b'{"user": "\xff"}', b"[" * 100_000, b'{"user": 3, "price": [0.5, 1]}'):
            process.stdin.write(row + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["score"] == pytest.approx(score([3], [0.5, 1.0]))
        process.send_signal(signal.SIGINT)
        told = process.stderr.read().decode()
        assert process.wait() == 130
        killer.cancel()
    assert [line.partition(": a row must")[0] for line in told.splitlines()[:2]] == [
        "shoal predict: line 1", "shoal predict: line 2",
    ]  # fmt: skip
    assert "Traceback" not in told


def test_an_unknown_model_is_told(address, capsys):
    assert main(["predict", address, "{}", "--model", "other"]) == 1
    assert "there is no model 'other'; this server has ['m']" in capsys.readouterr().err


def test_help_teaches(capsys):
    assert main(["predict", "--help"]) == 0
    assert "shoal predict 127.0.0.1:8500 --model ctr" in capsys.readouterr().out
