"""The command line as a user types it, and the example as a user copies it."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from shoal.cli.gather import open_store, parse_uids
from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.gather import GradientSpec, LocalDirStore, dump_payload, load_payload
from tests.gather.helpers import WINDOW, payload, small_spec

TIME_MAX = 10**15  # in 2001, so that it does not wait for missing peers
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def peers(tmp_path):
    spec = small_spec()
    store = LocalDirStore(tmp_path / "peers")
    for uid in (1, 2, 3):
        path = store.put(WINDOW, uid, dump_payload(payload(spec, uid)))
        os.utime(path, ns=(10**17, 10**17))
    (tmp_path / "spec.json").write_text(spec.to_json())
    return tmp_path


def run_arguments(folder, *more):
    return [
        "gather", "run", "--store", str(folder / "peers"), "--window", str(WINDOW), "--timeout-s", "100",
        "--time-max", str(TIME_MAX),
        "--model", str(folder / "spec.json"), *more,
    ]  # fmt: skip


def test_lists_of_peers():
    assert parse_uids("1, 5,8-10") == [1, 5, 8, 9, 10]
    assert parse_uids("") == []
    for bad in ("a", "1-", "-3", "1..2", "9-3"):
        with pytest.raises(ConfigError):
            parse_uids(bad)


def test_buckets_of_peers(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    store = open_store("s3://peer-{uid}/some/prefix?endpoint=http://h:1&region=eu&artifacts=all", [4])
    assert store.peers[4].bucket == "peer-4"
    assert (store.peers[4].endpoint, store.peers[4].prefix, store.artifacts.bucket) == (
        "http://h:1",
        "some/prefix",
        "all",
    )
    assert "hidden" not in repr(store.peers)
    for bad in ("s3://bucket", "s3://p-{uid}?color=red", "/not/there"):
        with pytest.raises(ConfigError):
            open_store(bad, [1])


def test_a_window_is_run_inspected_and_replayed(peers, capsys):
    assert main(run_arguments(peers, "--peers", "1-4", "--save", str(peers / "new.safetensors"), "--json")) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["accepted"] == [1, 2, 3]
    assert summary["skipped"] == {"4": "not_found"}
    spec = GradientSpec.from_json((peers / "spec.json").read_text())
    assert load_payload(peers / "new.safetensors", spec)["state_dict"]["p0"].shape == (64, 48)
    artifact = peers / "peers" / f"aggregator-{WINDOW}-v0.pga"
    assert main(["gather", "inspect", str(artifact), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accepted"] == [1, 2, 3]
    assert main(["gather", "replay", str(artifact), "--expect", summary["update hash"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["update hash"] == summary["update hash"]
    assert main(["gather", "replay", str(artifact), "--expect", "00"]) == 1
    assert main(run_arguments(peers, "--peers", "8", "--no-artifact")) == 3  # no peer came


def test_a_payload_is_inspected(peers, capsys):
    path = peers / "peers" / "1" / str(WINDOW) / f"gradient-{WINDOW}-1-v0.safetensors"
    assert main(["gather", "inspect", str(path), "--model", str(peers / "spec.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    path.write_bytes(path.read_bytes()[:50])
    assert main(["gather", "inspect", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "corrupt_container"


def test_mistakes_are_one_line_and_a_code(peers, capsys):
    assert main(["gather", "inspect", str(peers / "absent")]) == 2
    assert main(run_arguments(peers, "--peers", "x")) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["gather", "run", "--window", "1"]) == 2
    assert main(["gather", "--help"]) == 0
    assert "simulate" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_simulation_is_equal_for_every_world(tmp_path, capsys):
    plot = tmp_path / "curves.png"
    arguments = "gather simulate --peers 8 --worlds 1 2 --memory-peers 4 --rows 128 --columns 128 --latency-s 0.01"
    assert main([*arguments.split(), "--plot", str(plot), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["equal for every world"] is True
    assert out["scaling"][0]["summary"]["flagged"]
    assert [row["peers"] for row in out["projection"]][-1] == 1000
    assert plot.stat().st_size > 1000


def test_the_example_learns_flags_the_copy_and_skips_the_poison(capsys):
    spec = importlib.util.spec_from_file_location("diloco", ROOT / "examples" / "diloco.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    threads = torch.get_num_threads()
    try:
        out = example.main()
    finally:
        torch.set_num_threads(threads)
    assert out["losses"][-1] < 0.25 * out["losses"][0]
    assert out["losses"][-1] < 1.3 * out["alone"][-1]
    assert set(out["flagged"]) == {4}
    assert out["skipped"] == {5: "bad_quant_params"}
    assert out["step"] == 12
